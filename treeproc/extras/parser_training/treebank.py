"""Treebanks in one normal form, ready to train and score parsers.

Trees have no function tags, co-indices and traces, and no phrases that are empty without them. One ROOT is on top. One of two
nodes with one label over the same leaves stays (a trace leaves these in adjunction). If treebanks write the same thing in two
ways, a `Notation` unifies them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydantic import Field, field_validator

from treeproc.common.settings import Settings
from treeproc.readers.treebanks import parse_tree, tree_texts
from treeproc.trees.conllu import Leaves, read_leaves
from treeproc.trees.spans import EMPTY_TAG, ROOT_LABELS, SpanTree, keep_leaves, plain_label, write_brackets

ROOT = "ROOT"

Texts = Iterable[tuple[str, Iterator[str]]]  # names and lines of files


class Retag(Settings):
    """A rule that gives some words another tag."""

    tag: str = Field(description="tag of the treebank")
    words: str = Field(default=".*", description="regular expression of the whole word")
    below: str = Field(default="", description="label of the phrase right above the word; empty: any. CoNLL-U has no phrases")
    to: str = Field(description="the new tag; an empty one removes the word from a tree")

    @field_validator("words")
    @classmethod
    def _expression(cls, words: str) -> str:
        try:
            re.compile(words)
        except re.error as error:
            raise ValueError(f"must be a regular expression, but {words!r} is none: {error}") from None
        return words

    @cached_property
    def pattern(self) -> re.Pattern:
        return re.compile(self.words)


class Notation(Settings):
    """The notation of a treebank, if it differs from the others in the same training."""

    labels: dict[str, str] = Field(
        default={}, description="new names of labels, without function tags; an empty name removes the node"
    )
    tags: list[Retag] = Field(
        default=[], description="rules for new tags by tag, word and phrase; the first rule that fits counts"
    )

    def tag(self, tag: str, word: str, phrase: str = "") -> str:
        """Return the tag in the common notation; `phrase` is the label of the phrase right above the word."""
        fits = (r.to for r in self.tags if r.tag == tag and r.below in ("", phrase) and r.pattern.fullmatch(word))
        return next(fits, tag)


PLAIN = Notation()


def lowered(text: str) -> str:
    """Return the text in lower case, character by character, so that all characters keep their places."""
    return "".join(low if len(low := character.lower()) == 1 else character for character in text)


@dataclass(frozen=True)
class Tree:
    """A sentence with its constituents; the first nonterminal is ROOT, over all words."""

    words: list[str]
    tags: list[str]
    spans: SpanTree

    def __str__(self) -> str:
        """Return Penn Treebank brackets on one line."""
        return write_brackets(self.spans, self.words, self.tags)


Sentence = Leaves


class Tagged(NamedTuple):
    """A sentence with its tags. A column is empty if the treebank lacks it."""

    words: Sequence[str]
    upos: Sequence[str]
    xpos: Sequence[str]


def trees_in(texts: Texts, notation: Notation = PLAIN) -> list[Tree]:
    """Return the trees of texts, in order. A sentence without words is left out.

    Raises UserError with file and line if brackets do not form a tree.
    """
    return [tree for name, lines in texts for tree in _trees(lines, name, notation)]


def _trees(lines: Iterator[str], name: str, notation: Notation) -> Iterator[Tree]:
    for text, line in tree_texts(lines, name):
        words, tags, spans = parse_tree(text, name, line)
        words = [word.strip() or word for word in words]
        phrases = _phrases(spans, len(words))
        tags = [
            tag if tag == EMPTY_TAG else notation.tag(plain_label(tag), word, phrase)
            for tag, word, phrase in zip(tags, words, phrases, strict=True)
        ]
        kept = [tag not in (EMPTY_TAG, "") for tag in tags]
        if any(kept):
            words, tags = ([item for item, keep in zip(items, kept, strict=True) if keep] for items in (words, tags))
            yield Tree(words, tags, plain_tree(keep_leaves(spans, kept), len(words), notation.labels))


def _phrases(spans: SpanTree, num_words: int) -> list[str]:
    """Return the plain label of the phrase right above every word; empty if there is none."""
    out = [""] * num_words
    for label, start, end in zip(spans.labels, spans.starts, spans.ends, strict=True):  # outer phrases come first
        out[start:end] = [plain_label(label)] * (end - start)
    return out


def plain_tree(spans: SpanTree, num_words: int, labels: Mapping[str, str] = PLAIN.labels) -> SpanTree:
    """Return plain labels under one ROOT, renamed by `labels`. No node is right above one with the same label and span."""
    nodes = [(ROOT, 0, num_words)]
    above: list[tuple[str, int, int]] = nodes[:]  # the open nodes, outermost first
    for label, start, end in zip(map(plain_label, spans.labels), spans.starts, spans.ends, strict=True):
        label = labels.get(label, label)
        node = (label, start, end)
        while above[-1][2] <= start:
            above.pop()
        if label in ROOT_LABELS or above[-1] == node:
            continue
        above.append(node)
        nodes.append(node)
    return SpanTree([n[0] for n in nodes], [n[1] for n in nodes], [n[2] for n in nodes])


def sentences_in(texts: Texts, notation: Notation = PLAIN) -> list[Sentence]:
    """Return the sentences of texts in CoNLL-U, in order.

    If the syntactic words of a multiword token spell it, each is a word; otherwise the token is one word. Raises UserError with
    file and line for a missing column, a missing governor, a cycle, and a second root.
    """
    sentences = [leaves for name, lines in texts for leaves in read_leaves(lines, name)]
    for sentence in sentences:
        sentence.xpos[:] = [notation.tag(tag, word) for tag, word in zip(sentence.xpos, sentence.words, strict=True)]
    return sentences


def trees_of(trees: Sequence[Tree]) -> str:
    """Return the content of a file of brackets: one tree per line."""
    return "".join(f"{tree}\n" for tree in trees)


def conllu_of(sentences: Sequence[Sentence]) -> str:
    """Return the content of a CoNLL-U file with the columns that are read. Words that `sentences_in` joined stay joined."""
    return "".join(map(_conllu, sentences))


def _conllu(sentence: Sentence) -> str:
    columns = (sentence.words, sentence.upos, sentence.xpos, sentence.governors, sentence.deprels, sentence.space_after)
    lines = [f"# text = {sentence.text}"]
    for i, (word, upos, xpos, governor, deprel, space) in enumerate(zip(*columns, strict=True), start=1):
        misc = "_" if space else "SpaceAfter=No"
        lines.append("\t".join((str(i), word, "_", upos or "_", xpos or "_", "_", str(governor + 1), deprel, "_", misc)))
    return "\n".join(lines) + "\n\n"
