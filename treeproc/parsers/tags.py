"""Tags in front of lines, such as <2de> for the language to write or <bt> for translated text. No parser reads them.

The tag of a line is a word by itself. It stands under a new root with the line's first tree: (TAGGED (TAG <2de>) (S ...)). The
root of that sentence governs it.
"""

from collections.abc import Sequence
from dataclasses import replace

from treeproc.parsers.config import Given, ParsedLine, Parser
from treeproc.trees.spans import read_brackets

TAG, TAGGED = "TAG", "TAGGED"


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


def _with_tag(tag: str, before: int, parsed: ParsedLine) -> ParsedLine:
    """Return the result of a text that stands `before` characters from the start of its line, with the tag of the line."""
    words = {
        "text": [tag, *parsed.words["text"]],
        "start_char": [0, *(start + before for start in parsed.words["start_char"])],
        "end_char": [len(tag), *(end + before for end in parsed.words["end_char"])],
        "pos_tag": [TAG, *parsed.words["pos_tag"]],
    }
    first, *others = parsed.trees
    return replace(parsed, words=words, trees=[f"({TAGGED} ({TAG} {tag}) {first})", *others], arcs=_arcs_with_tag(parsed))


def _arcs_with_tag(parsed: ParsedLine) -> dict[str, list] | None:
    """Return the arcs with one for the tag, which the root of the first sentence governs. None if there are no arcs."""
    if parsed.arcs is None:
        return None
    governors = [governor + 1 if governor >= 0 else -1 for governor in parsed.arcs["governor"]]
    sentence = governors[: len(read_brackets(parsed.trees[0])[0])]
    is_unparsed = len(sentence) > 1 and set(sentence) == {-1}  # then every word is a root
    return {"governor": [-1 if is_unparsed else sentence.index(-1) + 1, *governors], "deprel": ["tag", *parsed.arcs["deprel"]]}
