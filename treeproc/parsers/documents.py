"""Stanza's own processors, the slow path for models that the fast path does not support. They run on Stanza's documents."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from treeproc.parsers.tokens import Token
from treeproc.trees.spans import SpanTree

Tags = list[tuple[str, str]]  # (UPOS, XPOS) of every word of a sentence
Arcs = list[tuple[int, str]]  # (governor, relation) of every word; governors are 0-based, -1 a root


def batches(sizes: Sequence[int], budget: int) -> Iterator[range]:
    """Group neighbours whose sizes add up to at most `budget`. A larger item is a batch by itself."""
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and total + sizes[stop] <= budget:
            total += sizes[stop]
            stop += 1
        yield range(start, stop)
        start = stop


class DocumentTokenizer:
    """The processors `tokenize` and `mwt` on lines that are joined to one text."""

    def __init__(self, processors: Sequence):
        self._processors = processors

    def tokenize(self, lines: Sequence[str], batch_chars: int) -> list[list[list[Token]]]:
        """Return sentences of tokens of every line. One document has at most `batch_chars` characters."""
        out: list[list[list[Token]]] = []
        for batch in batches([len(line) for line in lines], batch_chars):
            out += self._tokenize([lines[i] for i in batch])
        return out

    def _tokenize(self, lines: Sequence[str]) -> list[list[list[Token]]]:
        document: Any = list(lines)
        for processor in self._processors:
            document = processor.process(document)
        # The tokeniser joins the lines with a blank line between them. Its offsets count over all lines.
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line) + 2)
        out: list[list[list[Token]]] = [[] for _ in lines]
        for sentence in document.sentences:
            number = bisect.bisect_right(offsets, sentence.tokens[0].start_char) - 1
            first = offsets[number]
            out[number].append(
                [Token(t.start_char - first, t.end_char - first, tuple(word.text for word in t.words)) for t in sentence.tokens]
            )
        return out


class DocumentTagger:
    """The processor `pos`; with `lemma` and `depparse` also the arcs."""

    def __init__(self, processors: Sequence, dependencies: bool):
        self._processors, self._dependencies = processors, dependencies

    def tag(self, sentences: Sequence[Sequence[str]], batch_words: int) -> tuple[list[Tags], list[Arcs] | None]:
        """Return tags of every word, and arcs if requested. One document has at most `batch_words` words."""
        documents = [self._run([sentences[i] for i in batch]) for batch in batches([len(s) for s in sentences], batch_words)]
        parsed = [sentence for document in documents for sentence in document.sentences]
        tags = [[(word.upos, word.xpos) for word in sentence.words] for sentence in parsed]
        if not self._dependencies:
            return tags, None
        return tags, [[(word.head - 1, word.deprel) for word in sentence.words] for sentence in parsed]

    def _run(self, sentences: Sequence[Sequence[str]]):
        from stanza.models.common.doc import Document

        document = Document([[{"id": (i + 1,), "text": word} for i, word in enumerate(sentence)] for sentence in sentences])
        for processor in self._processors:
            document = processor.process(document)
        return document


class ObjectParser:
    """Calls `parse_tagged_words` of a constituency model."""

    def __init__(self, model):
        self._model = model

    def parse(self, sentences: Sequence[Sequence[tuple[str, str]]], batch_words: int) -> list[SpanTree | None]:
        """Return one tree per sentence. Raises RuntimeError if Stanza finds no tree for one of them."""
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        trees = self._model.parse_tagged_words([list(sentences[i]) for i in order], max(1, batch_words // 32))
        if len(trees) != len(sentences):
            raise RuntimeError("the parser found no end of a sentence")
        out: list[SpanTree | None] = [None] * len(sentences)
        for i, tree in zip(order, trees, strict=True):
            out[i] = span_tree(tree)
        return out


def span_tree(root) -> SpanTree:
    """Convert Stanza's tree of objects to spans, without recursion."""
    tree = SpanTree([], [], [])
    position = 0
    stack: list = [(root, None)]
    while stack:
        node, opened = stack.pop()
        if opened is not None:
            tree.ends[opened] = position
        elif node.is_leaf():
            position += 1
        else:
            if not node.is_preterminal():
                stack.append((node, len(tree)))
                tree.labels.append(node.label)
                tree.starts.append(position)
                tree.ends.append(-1)
            stack.extend((child, None) for child in reversed(node.children))
    return tree
