"""Notices about lines that a parser will misread, or that were damaged on their way. Lines are not changed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple

from treeproc.shards.schema import without_tag
from treeproc.stages.filters import NOTICED_SHARE, foreign_lines, has_control, known
from treeproc.stages.line_rules import DAMAGE, RULES, Chunk, breaks_sentence
from treeproc.stages.pair_notices import MOST_CHARACTERS, pair_problems

# Shares of lines from which on a user is warned; of other kinds, one line is enough. A factor of seven at least lies between
# them and what was measured on either side; of wrapped lines, a factor of two.
SHARES = {
    "escapes": 0.005, "tokens": 0.05, "attached": 0.25, "subwords": 0.05,
    "miscoded": 0.005, "entities": 0.005, "markup": 0.07, "codes": 0.005, "percent": 0.01, "base64": 0.05, "columns": 0.05,
    "lost": 0.03, "scripts": 0.01, "wrapped": 0.05,
}  # fmt: skip

_SHOWN = 70
_EXAMPLES = 3


@dataclass
class Found:
    """Lines that have something in common: how many, and the first three of them: their numbers, from 1, and texts, shortened."""

    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, count: int, examples: Iterable[tuple[int, str]]) -> None:
        self.examples = [*self.examples, *((line, shortened(text)) for line, text in examples)][:_EXAMPLES]
        self.count += count

    def facts(self) -> dict:
        """Return the facts for the index."""
        (line, text), *more = self.examples or [(0, "")]
        return {"count": self.count, "line": line, "text": text} | ({"more": more} if more else {})


def found_at(places: Sequence, example: Callable[..., tuple[int, str]]) -> Found:
    """Return what was found at these places; `example` gives the number and the text of one."""
    found = Found()
    found.add(len(places), map(example, places[:_EXAMPLES]))
    return found


def shortened(text: str, characters: int = _SHOWN) -> str:
    """Return a line as messages show it."""
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def _half(text: str) -> str:
    return shortened(text, (_SHOWN - len(" | ")) // 2)


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
    marks, its form of Unicode and damage alone. If the input gives words, its lines are tokens and single sentences.
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
        kinds += [] if given else DAMAGE
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
        chunk = Chunk([without_tag(line, tags) for line in lines] if tags else lines)
        for kind in self.wanted.kinds:
            if places := RULES[kind](chunk):
                self.take(kind, found_at(places, lambda place: (number(place), lines[place])))

    def counts(self) -> dict[str, dict]:
        """Return what was found, by kind."""
        return {kind: asdict(found) for kind, found in self.found.items()}

    def merge(self, lines: int, counts: Mapping[str, dict]) -> None:
        """Take up the `counts` of the next lines, without a sample of them."""
        self.lines += lines
        for kind, one in counts.items():
            self.take(kind, Found(**one))

    def take(self, kind: str, found: Found) -> None:
        """Take up what was found of a kind in more lines."""
        self.found.setdefault(kind, Found()).add(found.count, found.examples)

    def facts(self) -> dict:
        """Return the facts for the index: kinds of notices, their counts and examples, and the number of lines."""
        out: dict = {"lines": self.lines} | {kind: self.found.get(kind, Found()).facts() for kind in self.wanted.kinds}
        if self.wanted.language is not None:
            sample = [(number, without_tag(line, self.wanted.tags)) for number, line in self.sample]
            looked_at, foreign, name = foreign_lines(sample, self.wanted.language)
            out["language"] = found_at(foreign, tuple).facts() | {"looked_at": looked_at, "seems": name}
        return out | {kind: found.facts() for kind, found in self.found.items() if kind not in out}


@dataclass
class TextNotices:
    """The notices about all lines that pass the filters, by split and side.

    `wanted` has the kinds to look for by side. `line(split, example_id)` gives the number of a line.
    """

    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    line: Callable[[str, int], int] = lambda split, example_id: example_id + 1
    sides: dict[tuple[str, str], SideNotices] = field(default_factory=dict)
    pairs: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)  # number of a line, source, target

    def add(self, split: str, side: str, rows: Sequence[dict]) -> None:
        """Add more rows of a split, in order."""
        lines = [row[side] for row in rows]
        self._side(split, side).add(lines, lambda place: self.line(split, rows[place]["example_id"]))

    def tell(self, split: str, rows: Sequence[dict], leaks: Sequence[int]) -> None:
        """Note what stands in the next rows of a split. Those at the places `leaks` are in another split too."""
        for side in self.wanted if rows else ():
            self.add(split, side, rows)
        # In train, a filter drops lines with control characters. An index has these kinds only if there are such lines.
        found = {
            "leaks": [rows[place] for place in leaks],
            "wrapped": _wrapped(rows) if rows and "document" in rows[0] else [],
            "control": [row for row in rows if has_control(row["source"])] if split != "train" else [],
        }
        for kind, some in found.items():
            if some:
                what = found_at(some, lambda row: (self.line(split, row["example_id"]), row["source"]))
                self._side(split, "source").take(kind, what)

    def parts(self, split: str) -> dict:
        """Return what was noted of a split, for `merge`; without the samples of languages."""
        return {side: [found.lines, found.counts()] for (of, side), found in self.sides.items() if of == split}

    def merge(self, split: str, parts: dict) -> None:
        """Take up the `parts` of the next shards of a split."""
        for side, (lines, counts) in parts.items():
            self._side(split, side).merge(lines, counts)

    def add_sample(self, split: str, side: str, example_ids: Sequence[int], lines: Sequence[str]) -> None:
        """Add more lines of the sample that tells the language of a side, in order."""
        self._side(split, side).sample += [(self.line(split, i), line) for i, line in zip(example_ids, lines, strict=True)]

    def add_pairs(self, split: str, pairs: Sequence[tuple[int, str, str]]) -> None:
        """Give the pairs of a split whose sides are compared: example_id, source, target."""
        tags = self.wanted["source"].tags
        cut = slice(MOST_CHARACTERS)
        self.pairs[split] = [
            (self.line(split, i), without_tag(source, tags)[cut], without_tag(target, tags)[cut]) for i, source, target in pairs
        ]

    def add_classes(self, split: str, names: Sequence[str]) -> None:
        """Give the names of the classes, which are checked for damage as lines are."""
        self.sides.setdefault((split, "class"), SideNotices(Wanted(DAMAGE))).add(names, lambda place: place + 1)

    def _side(self, split: str, side: str) -> SideNotices:
        return self.sides.setdefault((split, side), SideNotices(self.wanted.get(side, Wanted(()))))

    def facts(self) -> dict:
        """Return the facts for the index: split -> side -> number of lines, and the notices by kind."""
        out: dict = {}
        for (split, side), found in self.sides.items():
            out.setdefault(split, {})[side] = found.facts()
        for split, pairs in self.pairs.items():
            sides = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
            for side, kind, places, more in pair_problems(*sides):
                shown = sides[side == "target"] if kind == "constant" else [" | ".join(map(_half, pair[1:])) for pair in pairs]
                lines = dict(enumerate((pair[0], text) for pair, text in zip(pairs, shown, strict=True)))
                out[split][side][kind] = found_at(places, lines.__getitem__).facts() | {"looked_at": len(pairs)} | more
        return out


def _wrapped(rows: Sequence[dict]) -> list[dict]:
    """Return the rows whose sentence seems to go on in the next row of the document."""
    neighbours = ((one, other) for one, other in pairwise(rows) if other["example_id"] == one["example_id"] + 1)
    return [
        one
        for one, other in neighbours
        if one["document"] == other["document"] and breaks_sentence(one["source"], other["source"])
    ]


def is_noticed(kind: str, facts: dict) -> bool:
    """Return whether what was found of a kind on one side is worth a line; `facts` are those of the side."""
    if not facts.get(kind, {}).get("count"):
        return False
    count, lines = facts[kind]["count"], max(1, facts["lines"])
    if kind == "tokens" and "attached" in facts:
        return False
    if kind == "attached" and count <= facts["tokens"]["count"]:
        return False
    if kind == "language":
        return count >= NOTICED_SHARE * facts[kind]["looked_at"]
    return count >= SHARES.get(kind, 0) * facts[kind].get("looked_at", lines)
