"""Dependency treebanks in CoNLL-U: words with their positions in the text, arcs, tags.

If the syntactic words of a multiword token spell the token (do + n't), each word is a leaf. Otherwise the token is one leaf (im =
in + dem), with the tag of its first word. Empty nodes (8.1) are left out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treeproc.common.errors import UserError
from treeproc.shards.schema import line_end_in
from treeproc.trees.arcs import contract

_TEXT = re.compile(r"#\s*text\s*=\s?(.*)")
_ID = re.compile(r"(\d{1,9})(?:(-|\.)(\d{1,9}))?", re.ASCII)
_GOVERNOR = re.compile(r"[0-9]{1,9}")


@dataclass
class Leaves:
    """A sentence of a treebank, one item per leaf. If the file has no tag, it is empty.

    `starts` are character offsets in `text`; governors are 0-based, -1 is the root.
    """

    text: str
    words: list[str]
    starts: list[int]
    upos: list[str]
    xpos: list[str]
    governors: list[int]
    deprels: list[str]
    where: str

    @property
    def ends(self) -> list[int]:
        return [start + len(word) for start, word in zip(self.starts, self.words, strict=True)]

    @property
    def space_after(self) -> list[bool]:
        """Return whether a blank, or the end of the text, follows each word."""
        return [end != start for end, start in zip(self.ends, [*self.starts[1:], -1], strict=True)]


@dataclass
class _Word:
    form: str
    upos: str
    xpos: str
    governor: int
    deprel: str
    line: int
    space_after: bool


@dataclass
class _Token:
    """A surface token: words [first, first + count) of the sentence, 0-based."""

    form: str
    first: int
    count: int
    space_after: bool


def read_leaves(lines: Iterator[str], name: str) -> Iterator[Leaves]:
    """Return the sentences of one file. Raises UserError with file and line."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if line:
            block.append((number, line))
        elif block:
            yield _sentence(block, name)
            block = []
    if block:
        yield _sentence(block, name)


def _sentence(block: list[tuple[int, str]], name: str) -> Leaves:
    words: list[_Word] = []
    tokens: list[_Token] = []
    text, covered = None, 0
    for number, line in block:
        where = f"{name}, line {number}"
        if line.startswith("#"):
            if match := _TEXT.match(line):
                text = match[1].strip()
            continue
        columns = line.split("\t")
        match = _ID.fullmatch(columns[0])
        if len(columns) != 10 or match is None:
            raise UserError(f"{where}: expected 10 columns after a number, but found {len(columns)}: {line[:40]!r}")
        if match[2] == ".":
            continue
        first, form, space_after = int(match[1]), columns[1].strip(), "SpaceAfter=No" not in columns[9].split("|")
        if not form:
            raise UserError(f"{where}: the word is empty")
        if first != len(words) + 1:
            raise UserError(f"{where}: word {len(words) + 1} must come next, but {columns[0]} does")
        if match[2] == "-":
            if first <= covered or int(match[3]) < first:
                raise UserError(f"{where}: the range {columns[0]} is empty or overlaps another one")
            covered = int(match[3])
            tokens.append(_Token(form, first - 1, covered - first + 1, space_after))
            continue
        if not _GOVERNOR.fullmatch(columns[6]):
            raise UserError(f"{where}: column 7 must be the number of the governor, but is {columns[6]!r}")
        if wrong := line_end_in((*columns[3:5], columns[7])):
            raise UserError(f"{where}: the word has the tag or relation {wrong}; remove that character")
        upos, xpos = ("" if tag == "_" else tag for tag in columns[3:5])
        words.append(_Word(form, upos, xpos, int(columns[6]) - 1, columns[7], number, space_after))
        if first > covered:
            tokens.append(_Token(form, first - 1, 1, space_after))
    if not words:
        raise UserError(f"{name}, line {block[0][0]}: a sentence without words")
    if covered > len(words):
        raise UserError(f"{name}, line {block[-1][0]}: the sentence ends inside the range up to word {covered}")
    _check_arcs(words, name)
    return _leaves(words, tokens, text, f"{name}, line {block[0][0]}")


def _check_arcs(words: Sequence[_Word], name: str) -> None:
    """Raise UserError, with the line at fault, unless the arcs are a tree with one root.

    A sentence of only roots, which no parser has analysed, counts as a tree.
    """
    path_of = [-1] * len(words)  # the word from which a path up came here first
    for start in range(len(words)):
        last, word = -1, start
        while word >= 0 and path_of[word] == -1:
            path_of[word] = start
            last, word = word, words[word].governor
            if word >= len(words):
                raise UserError(f"{name}, line {words[last].line}: governor {word + 1}, but there are {len(words)} words")
            if word == last:
                raise UserError(f"{name}, line {words[word].line}: the word is its own governor; the root has governor 0")
        if last >= 0 and word >= 0 and path_of[word] == start:
            raise UserError(f"{name}, line {words[last].line}: the arcs form a cycle")
    roots = [word for word in words if word.governor < 0]
    if 1 < len(roots) < len(words):
        raise UserError(f"{name}, line {roots[1].line}: expected one word with governor 0, but this is one of {len(roots)}")


def _leaves(words: list[_Word], tokens: list[_Token], text: str | None, where: str) -> Leaves:
    starts = _places(tokens, text, where)
    if text is None:
        text = "".join(token.form + " " * token.space_after for token in tokens).strip()
    leaves = Leaves(text, [], [], [], [], [], [], where)
    leaf_of: list[int] = []
    for token, start in zip(tokens, starts, strict=True):
        members = range(token.first, token.first + token.count)
        spelled = "".join(words[i].form for i in members) == token.form
        for leaf in [[i] for i in members] if spelled else [members]:
            form = words[leaf[0]].form if spelled else token.form
            leaf_of += [len(leaves.words)] * len(leaf)
            leaves.upos.append(words[leaf[0]].upos)
            leaves.xpos.append(words[leaf[0]].xpos)
            leaves.words.append(form)
            leaves.starts.append(start)
            start += len(form)
    leaves.governors, topmost = contract([word.governor for word in words], leaf_of)
    leaves.deprels += [words[i].deprel for i in topmost]
    return leaves


def _places(tokens: Sequence[_Token], text: str | None, where: str) -> list[int]:
    """Return the first character of every token in the text: after the blanks, or by SpaceAfter without a `# text` line."""
    starts, position = [], 0
    for number, token in enumerate(tokens, start=1):
        if text is not None:
            while position < len(text) and text[position].isspace():
                position += 1
            if not text.startswith(token.form, position):
                raise UserError(
                    f"{where}: expected token {number}, {token.form[:40]!r}, at character {position + 1} of '# text', but found "
                    "other text"
                )
        starts.append(position)
        position += len(token.form) + (text is None and token.space_after)
    if text is not None and text[position:].strip():
        raise UserError(f"{where}: '# text' has more text than the tokens, from character {position + 1}")
    return starts
