"""Treebanks in bracketed files and in CoNLL-U."""

import re
from collections.abc import Iterator, Sequence

from treeproc.common.settings import UserError
from treeproc.readers.line_forms import join_with_blanks
from treeproc.shards.schema import UNANALYSED, line_end_in
from treeproc.trees.conllu import Leaves, read_leaves
from treeproc.trees.dependency_trees import READ_TAGS
from treeproc.trees.spans import EMPTY_TAG, SpanTree, flat_tree, keep_leaves, read_brackets, write_brackets

_BRACKET = re.compile(r"[()]")
_CLASSES = frozenset("01234")


def tree_texts(lines: Iterator[str], name: str) -> Iterator[tuple[str, int]]:
    """Return (text, first line) of every tree of a file. A tree may take several lines, and a line may hold several trees.

    Raises UserError if a bracket closes nothing, if text stands outside, or if the file ends inside a tree.
    """
    depth, first = 0, 0
    parts: list[str] = []
    for number, line in enumerate(lines, start=1):
        begin = 0
        for match in _BRACKET.finditer(line):
            if match[0] == "(":
                if depth == 0:
                    _nothing(line[begin : match.start()], name, number)
                    begin, first = match.start(), number
                depth += 1
            elif depth == 0:
                raise UserError(f"{name}, line {number}: unbalanced ')' at character {match.start() + 1}")
            else:
                depth -= 1
                if depth == 0:
                    yield "\n".join([*parts, line[begin : match.end()]]), first
                    begin, parts = match.end(), []
        if depth:
            parts.append(line[begin:])
        else:
            _nothing(line[begin:], name, number)
    if depth:
        raise UserError(f"{name}, line {first}: {depth} bracket(s) of this tree are not closed")


def _nothing(text: str, name: str, number: int) -> None:
    if text.strip():
        raise UserError(f"{name}, line {number}: text outside of brackets: {text.strip()[:40]!r}")


def parse_tree(text: str, name: str, line: int) -> tuple[list[str], list[str], SpanTree]:
    """Parse one tree: words without escapes, tags and nonterminals. Raises UserError with file and line."""
    try:
        words, tags, tree = read_brackets(text)
    except ValueError as error:
        raise UserError(f"{name}, line {line}: {error} of the tree") from None
    if wrong := line_end_in({*tree.labels, *tags}):
        raise UserError(f"{name}, line {line}: the tree has the label {wrong}; remove that character")
    return words, tags, tree


def read_trees(lines: Iterator[str], name: str) -> Iterator[dict]:
    """Return rows of Penn Treebank trees: source (words and blanks), words and the tree. Empty nodes (-NONE-) are left out."""
    for text, line in tree_texts(lines, name):
        words, tags, tree = parse_tree(text, name, line)
        kept = [tag != EMPTY_TAG for tag in tags]
        if not all(kept):
            tree = keep_leaves(tree, kept)
            words, tags = ([x for x, keep in zip(side, kept, strict=True) if keep] for side in (words, tags))
        source, spans = join_with_blanks(words)
        yield {"source": source, "words": spans, "trees": [write_brackets(tree, words, tags)] if words else []}


def read_sentiment(lines: Iterator[str], name: str) -> Iterator[dict]:
    """Return rows of sentiment trees: the root's class, that of every node and word, and the tree with labels X.

    A sentence of one word gets a node above it, so that a node has its class.
    """
    for text, line in tree_texts(lines, name):
        words, classes, tree = parse_tree(text, name, line)
        if len(tree) == 0:
            tree = SpanTree(classes, [0], [1])
        if unknown := sorted({*classes, *tree.labels} - _CLASSES):
            raise UserError(f"{name}, line {line}: every bracket must have a class from 0 to 4, but one has {unknown[0]!r}")
        source, spans = join_with_blanks(words)
        yield {
            "source": source,
            "words": spans,
            "trees": [_unnamed(words, tree)],
            "label": int(tree.labels[0]),
            "node_labels": list(map(int, tree.labels)),
            "leaf_labels": list(map(int, classes)),
        }


def without_names(tree: str) -> str:
    """Return a tree in brackets with X for every label and tag, and at least one node."""
    words, _, spans = read_brackets(tree)
    return _unnamed(words, spans if len(spans) else SpanTree([UNANALYSED], [0], [1]))


def _unnamed(words: Sequence[str], tree: SpanTree) -> str:
    plain = SpanTree([UNANALYSED] * len(tree), tree.starts, tree.ends)
    return write_brackets(plain, words, [UNANALYSED] * len(words))


def read_sentences(lines: Iterator[str], name: str) -> Iterator[dict]:
    """Return rows: source, words, arcs, and one flat tree with the tags. Raises UserError with file and line."""
    return map(_row, read_leaves(lines, name))


def _row(leaves: Leaves) -> dict:
    # Readers of brackets drop words with the tag of empty elements.
    specific = ["" if xpos == EMPTY_TAG else xpos for xpos in leaves.xpos]
    # Phrases of arcs follow from tags, so language-specific tags of other sets than Penn's give way to universal ones.
    order = (specific, leaves.upos) if READ_TAGS.issuperset(filter(None, specific)) else (leaves.upos, specific)
    tags = [first or second or UNANALYSED for first, second in zip(*order, strict=True)]
    return {
        "source": leaves.text,
        "words": {"text": leaves.words, "start_char": leaves.starts, "end_char": leaves.ends},
        "trees": [write_brackets(flat_tree(len(tags)), leaves.words, tags)],
        "arcs": {"governor": leaves.governors, "deprel": leaves.deprels},
    }
