"""Notices about lines that a parser will misread: escapes, tokens, several sentences, placeholders. Lines are not changed.

Rules and thresholds were measured; docs/preprocessing.md has the table. Shares of lines in tokenised and in plain text:

- Marks of tokens: 94 to 100 % in tokenised text, at most 0.7 % in plain text.
- Escapes: 0.8 to 40 % in tokenised text (SST has none), at most 0.06 % in plain text.
- The last mark is attached: 0 to 3 % in tokenised text, 75 to 100 % in plain text.
- Placeholders: 0 % in both.
- Marks of subwords, ▁ and ##: 0 % in both. In text cut into subwords, they stand in almost every line.
- Quotation marks around a line, and two doubled ones inside: 0 % in both.

The tokenised text is IWSLT'14, WMT'14, Multi30k lc.norm.tok and SST. The plain text is Tatoeba, Multi30k, Europarl, news, and UD
treebanks of English, German, French and Spanish. In the UD treebanks, at most 0.4 % of the single sentences look like several.
Two sentences that are joined look like several in 84 to 98 % of the cases.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from treeproc.readers.line_forms import is_composed
from treeproc.shards.schema import without_tag
from treeproc.stages.filters import NOTICED_SHARE, foreign_lines, known

# Shares of lines from which on a user is warned; in between lies a factor of seven at least to what was measured on either side.
ESCAPED_SHARE = 0.005
TOKENIZED_SHARE = 0.05
ATTACHED_SHARE = 0.25
SUBWORD_SHARE = 0.05

_SHOWN = 70

_ESCAPE = re.compile(rb"&(?:amp|lt|gt|quot|apos|#91|#93|#124|bar|bra|ket);|(?<![^ \n])@-@(?![^ \n])")
_CLITIC = re.compile(rb" (?:'s|n't) ")
_PLACEHOLDER = re.compile(
    rb"<(?:/?s|unk|pad|mask|url|num|number|email|user|name|[A-Z][A-Z0-9_]*|[A-Za-z]+_?\d+)>|__[A-Za-z]\w*__|(?<=[^\s@])@@ "
    rb"|\[(?:UNK|MASK|CLS|SEP|PAD)\]|\{\{[^{}\n]+\}\}|%(?:\d\$)?[sd](?!\w)|%\(\w+\)[sd]"
)
_SUBWORD = re.compile("▁".encode() + rb"|(?<![^ \n])##[^\s#]")
_OPEN = r"""["“„‘'«(\[¿¡-]* ?"""
_CLOSE = r"""["”’'»)\]]*"""
# After the mark that ends a sentence, in plain text: another one begins. In tokens: any word follows.
_NEXT_SENTENCE = re.compile(rf"[.?!]{_CLOSE} +{_OPEN}[A-ZÀ-ÖØ-Þ]")
_NEXT_TOKENS = re.compile(
    r"""(?<=[\w"”’'»)\];] )[.?!](?: (?:["”’'»)\]]|&quot;|&apos;|''))* (?:(?:["“„‘'«(\[¿¡]|&quot;|``) )?\w"""
)
# Short words before a full stop that ends no sentence.
_SHORT = (
    "vs|ca|bzw|usw|etc|cf|vol|nos?|pp|al|inc|ltd|cos?|st|dr|mr|ms|mrs|jr|sr|sra|fig|eq|eds?|est|gen|col|sgt|lt|op|art|nr|hl|ggf"
    "|sog|vgl|resp|min|max|mio|mrd|sec|hrs?|av|eg|ie"
)
_LAST_WORD = re.compile(rf"""(?:(?:^|[^\w.'’-])(?!(?:{_SHORT})$)[a-zß-ÿ]{{2,3}}|[^\W\d_]{{4}}|\d{{3}}|[)"”’'»])$""")
_LAST_WORD_CHARS = 5


@dataclass
class Found:
    """Lines that have something in common: how many, and the first, shortened."""

    count: int = 0
    line: int = 0  # from 1
    text: str = ""

    def add(self, count: int, line: int, text: str) -> None:
        if not self.count:
            self.line, self.text = line, shortened(text)
        self.count += count

    def facts(self) -> dict:
        """Return the facts for the index."""
        return {"count": self.count, "line": self.line, "text": self.text}


def shortened(text: str) -> str:
    """Return a line as messages show it."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class _Chunk:
    """Lines as one array of UTF-8 codes [N], each line with its end: most questions are answered without a loop over lines."""

    def __init__(self, lines: Sequence[str]):
        self.lines = lines
        self.content = "\n".join([*lines, ""]).encode()
        self.codes = np.frombuffer(self.content, np.uint8)
        self.ends = np.flatnonzero(self.codes == ord("\n"))
        self.blank = self.codes == ord(" ")

    def among(self, characters: str) -> np.ndarray:
        """Return whether each code is one of these ASCII characters [N]."""
        return np.logical_or.reduce([self.codes == ord(character) for character in characters])

    def lines_at(self, places: np.ndarray | list[int]) -> list[int]:
        """Return the numbers in the chunk of the lines that hold these places."""
        return np.unique(np.searchsorted(self.ends, places)).tolist()

    def matching(self, pattern: re.Pattern, begins: np.ndarray) -> list[int]:
        """Return the numbers of the lines in which the pattern matches at one of the places for which `begins` is true."""
        return self.lines_at([at for at in np.flatnonzero(begins).tolist() if pattern.match(self.content, at)])


def _escapes(chunk: _Chunk) -> list[int]:
    return chunk.matching(_ESCAPE, chunk.among("&@")) if b"&" in chunk.content or b"@-@" in chunk.content else []


def _tokens(chunk: _Chunk) -> list[int]:
    after = chunk.blank | (chunk.codes == ord("\n"))
    alone = np.flatnonzero(chunk.blank[:-2] & chunk.among(",.")[1:-1] & after[2:])
    clitics = np.flatnonzero(chunk.blank[:-3] & ((chunk.codes[1:-2] == ord("'")) | (chunk.codes[2:-1] == ord("'"))))
    return chunk.lines_at([*alone.tolist(), *(at for at in clitics.tolist() if _CLITIC.match(chunk.content, at))])


def _attached(chunk: _Chunk) -> list[int]:
    """Return the lines whose last mark has no blank before it."""
    ends = chunk.ends[np.diff(chunk.ends, prepend=-1) > 2]
    return chunk.lines_at(ends[chunk.among(".?!")[ends - 1] & ~chunk.blank[ends - 2]])


def _placeholders(chunk: _Chunk) -> list[int]:
    begins = chunk.among("<[{%")
    for double in "_@":
        begins[:-1] |= (chunk.codes[:-1] == ord(double)) & (chunk.codes[1:] == ord(double))
    return chunk.matching(_PLACEHOLDER, begins)


def _subwords(chunk: _Chunk) -> list[int]:
    begins = np.zeros(len(chunk.codes), bool)
    for mark in ("▁".encode(), b"##"):
        if mark in chunk.content:
            begins |= np.logical_and.reduce([np.roll(chunk.codes == code, -place) for place, code in enumerate(mark)])
    return chunk.matching(_SUBWORD, begins)


def _quoted(chunk: _Chunk) -> list[int]:
    """Return the lines with the quotation marks of CSV: around the text, and two doubled ones, or more, inside it."""
    marks = chunk.among('"')
    inner = ((place, chunk.lines[place][1:-1]) for place in chunk.lines_at(np.flatnonzero(marks[:-1] & marks[1:])))
    return [
        place
        for place, text in inner
        if chunk.lines[place] == f'"{text}"' and text.count('""') > 1 and '"' not in text.replace('""', "")
    ]


def _decomposed(chunk: _Chunk) -> list[int]:
    return [] if chunk.content.isascii() else [place for place, line in enumerate(chunk.lines) if not is_composed(line)]


def _sentences(chunk: _Chunk) -> list[int]:
    marks = chunk.among(".?!")
    inner = marks[:-2] & (chunk.blank[1:-1] | (chunk.among("\"'")[1:-1] & chunk.blank[2:]))
    return [place for place in chunk.lines_at(np.flatnonzero(inner)) if has_several_sentences(chunk.lines[place])]


def has_several_sentences(line: str) -> bool:
    """Return whether a mark that ends a sentence stands before the end of the line."""
    return any(_ends_sentence(line, match) for match in _NEXT_SENTENCE.finditer(line)) or _NEXT_TOKENS.search(line) is not None


def _ends_sentence(line: str, match: re.Match) -> bool:
    at = match.start()
    if line[at] != "." and line[at - 1 : at].isalnum():
        return True
    return _LAST_WORD.search(line[max(0, at - _LAST_WORD_CHARS) : at]) is not None


_RULES: dict[str, Callable[[_Chunk], list[int]]] = {
    "escapes": _escapes,
    "tokens": _tokens,
    "attached": _attached,
    "placeholders": _placeholders,
    "subwords": _subwords,
    "quoted": _quoted,
    "decomposed": _decomposed,
    "sentences": _sentences,
}


class Wanted(NamedTuple):
    """The kinds of notices that are collected about the lines of a side."""

    kinds: tuple[str, ...]
    language: str | None = None  # of the parser of this side; None if no parser reads its lines
    tags: Collection[str] = ()  # in front of lines, which no parser reads


def wanted(
    tokenized: str,
    columns: Collection[str],
    languages: Mapping[str, str | None],
    normalization: str = "none",
    tags: Collection[str] = (),
) -> dict[str, Wanted]:
    """Name the kinds of notices for each side. `columns` belong to the input format, and `languages` to the sides' parsers.

    The language of a side without a parser is None. A target side without a parser is checked for subwords, quotation
    marks and its form of Unicode alone. If the input gives words, its lines are tokens and single sentences.
    """
    out = {}
    for side, language in languages.items():
        kinds, given = [], side == "source" and "words" in columns
        if side == "source" or language is not None:
            if tokenized == "moses":
                kinds = ["tokens", "attached"]
            elif not columns or (side == "source" and not given):
                kinds = ["escapes", "tokens"]
            if language is not None:
                kinds += ["placeholders"] if given else ["placeholders", "sentences"]
        kinds += [] if given else ["subwords", "quoted"]
        kinds += ["decomposed"] if normalization == "none" else []
        out[side] = Wanted(tuple(kinds), known(language), tags)
    return out


@dataclass
class SideNotices:
    """The notices about the lines of one side of a split."""

    wanted: Wanted
    lines: int = 0
    found: dict[str, Found] = field(default_factory=dict)
    sample: list[tuple[int, str]] = field(default_factory=list)  # numbers and lines whose language is checked

    def add(self, lines: Sequence[str], number: Callable[[int], int]) -> None:
        """Add more lines, in order; `number` gives the number, from 1, of the line at a place among them."""
        self.lines += len(lines)
        tags = self.wanted.tags
        chunk = _Chunk([without_tag(line, tags) for line in lines] if tags else lines)
        for kind in self.wanted.kinds:
            if places := _RULES[kind](chunk):
                self.found.setdefault(kind, Found()).add(len(places), number(places[0]), lines[places[0]])

    def counts(self) -> dict[str, dict]:
        """Return what was found, by kind."""
        return {kind: asdict(found) for kind, found in self.found.items()}

    def merge(self, lines: int, counts: Mapping[str, dict]) -> None:
        """Take up the `counts` of the next lines, without a sample of them."""
        self.lines += lines
        for kind, one in counts.items():
            self.found.setdefault(kind, Found()).add(**one)

    def facts(self) -> dict:
        """Return the facts for the index: kinds of notices, their counts and examples, and the number of lines."""
        out: dict = {"lines": self.lines} | {kind: self.found.get(kind, Found()).facts() for kind in self.wanted.kinds}
        if self.wanted.language is not None:
            sample = [(number, without_tag(line, self.wanted.tags)) for number, line in self.sample]
            looked_at, foreign, name = foreign_lines(sample, self.wanted.language)
            example = Found()
            if foreign:
                example.add(len(foreign), *foreign[0])
            out["language"] = example.facts() | {"looked_at": looked_at, "seems": name}
        return out


@dataclass
class TextNotices:
    """The notices about all lines that pass the filters, by split and side.

    `wanted` has the kinds to look for by side. `line(split, example_id)` gives the number of a line.
    """

    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    line: Callable[[str, int], int] = lambda split, example_id: example_id + 1
    sides: dict[tuple[str, str], SideNotices] = field(default_factory=dict)
    leaks: dict[str, Found] = field(default_factory=dict)

    def add(self, split: str, side: str, rows: Sequence[dict]) -> None:
        """Add more rows of a split, in order."""
        lines = [row[side] for row in rows]
        self._side(split, side).add(lines, lambda place: self.line(split, rows[place]["example_id"]))

    def tell(self, split: str, rows: Sequence[dict], leaks: Sequence[int]) -> None:
        """Note what stands in the next rows of a split. Those at the places `leaks` are in another split too."""
        for side in self.wanted if rows else ():
            self.add(split, side, rows)
        if len(leaks):
            first = rows[leaks[0]]
            self._add_leaks(split, Found(len(leaks), self.line(split, first["example_id"]), first["source"]))

    def parts(self, split: str) -> dict:
        """Return what was noted of a split, for `merge`; without the samples of languages."""
        return {
            "sides": {side: [found.lines, found.counts()] for (of, side), found in self.sides.items() if of == split},
            "leaks": asdict(self.leaks[split]) if split in self.leaks else None,
        }

    def merge(self, split: str, parts: dict) -> None:
        """Take up the `parts` of the next shards of a split."""
        for side, (lines, counts) in parts["sides"].items():
            self._side(split, side).merge(lines, counts)
        if parts["leaks"]:
            self._add_leaks(split, Found(**parts["leaks"]))

    def add_sample(self, split: str, side: str, example_ids: Sequence[int], lines: Sequence[str]) -> None:
        """Add more lines of the sample that tells the language of a side, in order."""
        self._side(split, side).sample += [(self.line(split, i), line) for i, line in zip(example_ids, lines, strict=True)]

    def _side(self, split: str, side: str) -> SideNotices:
        return self.sides.setdefault((split, side), SideNotices(self.wanted[side]))

    def _add_leaks(self, split: str, found: Found) -> None:
        self.leaks.setdefault(split, Found()).add(found.count, found.line, found.text)

    def facts(self) -> dict:
        """Return the facts for the index: split -> side -> number of lines, and the notices by kind."""
        out: dict = {}
        for (split, side), found in self.sides.items():
            out.setdefault(split, {})[side] = found.facts()
        for split, found in self.leaks.items():
            out.setdefault(split, {}).setdefault("source", {})["leaks"] = found.facts()
        return out


def is_noticed(kind: str, facts: dict) -> bool:
    """Return whether what was found of a kind on one side is worth a line; `facts` are those of the side."""
    if not facts.get(kind, {}).get("count"):
        return False
    count, lines = facts[kind]["count"], max(1, facts["lines"])
    if kind == "escapes":
        return count >= ESCAPED_SHARE * lines
    if kind == "tokens":
        return "attached" not in facts and count >= TOKENIZED_SHARE * lines
    if kind == "attached":
        return count >= ATTACHED_SHARE * lines and count > facts["tokens"]["count"]
    if kind == "subwords":
        return count >= SUBWORD_SHARE * lines
    if kind == "language":
        return count >= NOTICED_SHARE * facts[kind]["looked_at"]
    return True
