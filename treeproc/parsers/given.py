"""Trees and words that the input itself gives: treebanks, sentiment trees, tokenised text; and tags in front of lines.

Such a tag is <2de> for the language to write, or <bt> for translated text. No parser reads it. The tag of a line is a word by
itself. It stands under a new root with the line's first tree: (TAGGED (TAG <2de>) (S ...)). The root of that sentence governs it.
"""

from collections.abc import Sequence
from dataclasses import replace

from treeproc.common.settings import UserError
from treeproc.parsers.config import ARCS_FAILED, NO_PARSER, PARSED, Given, ParsedLine, Parser, ParserConfig, fallback
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.spans import SpanTree, escape, read_brackets, write_brackets

PHRASE = "PHRASE"
TAG, TAGGED = "TAG", "TAGGED"


class WordsOnly(Parser):
    """Given or blank-separated words under flat trees. This is enough for control trees, in any language."""

    def __init__(self, config: ParserConfig):
        """Take any settings: none changes the results."""

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Return flat trees. It never fails."""
        return [fallback(line, NO_PARSER, g.words) for line, g in zip(lines, given or [Given()] * len(lines), strict=True)]


class GivenTrees(Parser):
    """The trees of the input over its words. `given_labels` chooses their labels."""

    def __init__(self, config: ParserConfig):
        self._config = config
        self._labeller = None
        if config.given_labels == "parsed":
            from treeproc.parsers.stanza_parser import StanzaParser

            self._labeller = StanzaParser(config)

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Return the given trees. Raises UserError if the input gives no trees, or if they do not fit its words."""
        complete = [(g, g.words, g.trees) for g in given or () if g.words is not None and g.trees is not None]
        if given is None or len(complete) < len(given):
            raise UserError("parser.name: is given, but the input has no trees with words; choose another parser or format")
        if self._config.dependencies and not self._labeller and any(g.arcs is None for g in given):
            raise UserError("parser.dependencies: the input gives no arcs; set it to false, or choose another parser or format")
        parsed = self._labeller.parse(lines, given) if self._labeller else [None] * len(lines)
        return [self._line(line, *g, p) for line, g, p in zip(lines, complete, parsed, strict=True)]

    def _line(self, line: str, given: Given, words: dict[str, list], trees: list[str], parsed: ParsedLine | None) -> ParsedLine:
        try:
            read = [read_brackets(text) for text in trees]
        except ValueError as error:
            raise UserError(f"cannot read a given tree: {error}, in {line[:60]!r}") from None
        texts = list(words["text"])
        tags = [tag for _, tags, _ in read for tag in tags]
        if len(tags) != len(texts):
            raise UserError(f"the given trees have {len(tags)} leaves, but {len(texts)} words, in {line[:60]!r}")
        status, labels = PARSED, None
        if parsed is not None:
            tags, labels = parsed.words["pos_tag"], _labels_by_span(parsed)
            status = parsed.parse_status if parsed.parse_status in (PARSED, ARCS_FAILED) else f"labels_{parsed.parse_status}"
            if status == ARCS_FAILED and given.arcs is not None:  # which count instead
                status = PARSED
        out, first = [], 0
        for _, own, tree in read:
            stop = first + len(own)
            out.append(write_brackets(self._relabel(tree, labels, first), texts[first:stop], tags[first:stop]))
            first = stop
        own_words = {"text": texts, "start_char": list(words["start_char"]), "end_char": list(words["end_char"])}
        arcs = parsed.arcs if parsed is not None and given.arcs is None else given.arcs
        return ParsedLine(own_words | {"pos_tag": tags}, out, status, arcs if self._config.dependencies else None)

    def _relabel(self, tree: SpanTree, parsed: dict[tuple[int, int], str] | None, first: int) -> SpanTree:
        kind = self._config.given_labels
        if kind == "keep":
            return tree
        if parsed is not None:
            spans = zip(tree.starts, tree.ends, strict=True)
            return SpanTree([parsed.get((first + s, first + e), UNANALYSED) for s, e in spans], tree.starts, tree.ends)
        return SpanTree([PHRASE if kind == "phrase" else UNANALYSED] * len(tree), tree.starts, tree.ends)


def _labels_by_span(parsed: ParsedLine) -> dict[tuple[int, int], str]:
    """Return the label of every span of a parse: the lowest label of a unary chain."""
    out, first = {}, 0
    for text in parsed.trees:
        words, _, tree = read_brackets(text)
        for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True):
            out[first + start, first + end] = label
        first += len(words)
    return out


def split_tag(line: str, tags: Sequence[str]) -> tuple[str, str]:
    """Return the tag of a line, and the text after it. The tag is empty if the line has none, or nothing after it."""
    first, _, text = line.partition(" ")
    text = text.lstrip()
    return (first, text) if first in tags and text else ("", line)


class TagReader:
    """A parser that reads lines without their tags, and puts the tags into the results."""

    def __init__(self, parser: Parser, tags: Sequence[str]):
        self._parser, self._tags = parser, tags

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Return one result per non-empty line, in order. The settings make sure that tagged lines have no given words."""
        split = [split_tag(line, self._tags) for line in lines]
        parsed = self._parser.parse([text for _, text in split], given)
        results = zip(lines, split, parsed, strict=True)
        return [_with_tag(tag, len(line) - len(text), result) if tag else result for line, (tag, text), result in results]

    def knows(self, word: str) -> bool:
        """Return whether the parser learned the word."""
        return self._parser.knows(word)


def _with_tag(tag: str, before: int, parsed: ParsedLine) -> ParsedLine:
    """Return the result of a text that stands `before` characters from the start of its line, with the tag of the line."""
    words = {
        "text": [tag, *parsed.words["text"]],
        "start_char": [0, *(start + before for start in parsed.words["start_char"])],
        "end_char": [len(tag), *(end + before for end in parsed.words["end_char"])],
        "pos_tag": [TAG, *parsed.words["pos_tag"]],
    }
    first, *others = parsed.trees
    return replace(parsed, words=words, trees=[f"({TAGGED} ({TAG} {escape(tag)}) {first})", *others], arcs=_arcs_with_tag(parsed))


def _arcs_with_tag(parsed: ParsedLine) -> dict[str, list] | None:
    """Return the arcs with one for the tag, which the root of the first sentence governs. None if there are no arcs."""
    if parsed.arcs is None:
        return None
    governors = [governor + 1 if governor >= 0 else -1 for governor in parsed.arcs["governor"]]
    sentence = governors[: len(read_brackets(parsed.trees[0])[0])]
    is_unparsed = len(sentence) > 1 and set(sentence) == {-1}  # then every word is a root
    return {"governor": [-1 if is_unparsed else sentence.index(-1) + 1, *governors], "deprel": ["tag", *parsed.arcs["deprel"]]}
