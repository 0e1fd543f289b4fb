"""Raw lines of text, encoded one by one. A line that cannot be encoded is reported, and the others continue."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.inspection.drawing import draw_row
from treeproc.online.line_encoder import CONSTRAINTS, Constraints, LineEncoder
from treeproc.parsers import Given, ParsedLine
from treeproc.parsers.config import ARCS_FAILED, PARTLY, TAG_FORM, is_fallback
from treeproc.readers.labelled import TableForm
from treeproc.readers.line_forms import is_blank, join_with_blanks
from treeproc.readers.treebanks import read_trees, without_names
from treeproc.shards.schema import UNK_ID, UNKNOWN_LABEL_ID, without_tag
from treeproc.shards.store import read_index
from treeproc.stages.filters import CONTROL, is_doubtful, known, stride_of
from treeproc.stages.text_warnings import SideNotices, Wanted, is_noticed

# Treebanks write quotation marks in a special way.
_SPELLINGS = {"``": ('"', "“", "”"), "''": ('"', "”", "“"), "`": ("'", "‘"), "'": ("’",)}
# A line has at most this many characters per allowed piece; sentencepiece's own limit of a piece is 16.
_CHARS_PER_PIECE = 16
_SHOWN = 40
_UNDO = "undo the tokens first"


@dataclass(frozen=True)
class TableRow:
    """A row of a table as it stands in its file, but with `\\n` for every line end, and before the first one the header."""

    form: TableForm | None
    text: str
    header: str = ""

    def with_columns(self, values: Mapping[str, str | float | None]) -> str:
        """Return the row with more columns at its end, and a line end. None is empty, or null in JSON."""
        if self.form == "jsonl":
            more = "".join(f", {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in values.items())
            return f"{self.text.rstrip().removesuffix('}')}{more}}}\n"
        return "".join(
            "".join([text, *(self._field(one) for one in more)]) + "\n"
            for text, more in ((self.header, values), (self.text, values.values()))
            if text
        )

    def _field(self, value: str | float | None) -> str:
        text = f"{value:.6f}" if isinstance(value, float) else value or ""
        if self.form == "tsv":
            return f"\t{text}"
        return ',"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else f",{text}"


@dataclass(frozen=True)
class RawLine:
    """One line of the input files, not yet decoded."""

    text: bytes | None  # None if the words of its trees are the line
    trees: bytes | None = None  # Penn Treebank brackets
    target: bytes | None = None
    prefix: bytes | None = None  # the beginning of the translation
    must_appear: bytes | None = None  # phrases, separated by tabs
    must_not_appear: bytes | None = None  # strings, separated by tabs
    row: TableRow | None = None  # of a table; the two texts of a pair then have a line end between them


@dataclass(frozen=True)
class EncodedLine:
    """A line as a model reads it, or the reason why it cannot be read."""

    source: str
    target: str = ""
    row: dict | None = None  # as in an encoded shard; None if there is a `problem`
    problem: str = ""
    note: str = ""  # a problem that did not prevent the translation


class RawLineEncoder:
    """Encodes raw lines for a model, with the parser and vocabulary of the data set in folder `data`.

    `max_pieces` is the length limit of a line, in pieces of the vocabulary. Labels that the training data
    lacks give a notice only if the model `reads_labels`. Raises UserError as `LineEncoder` does.
    """

    def __init__(self, data: AnyPath, *, given_trees: bool, max_pieces: int, reads_labels: bool = True):
        self._encoder, self._given_trees, self._max_pieces = LineEncoder(data, given_trees=given_trees), given_trees, max_pieces
        self._vocab = data / "encoded" / "vocab"
        self._checks_labels = given_trees and reads_labels
        index = read_index(data / "encoded")
        # Labels of sentiment trees are classes, which the model did not read.
        of_classes = (
            "node_labels" in index.get("columns", ()) and index.get("parser_settings", {}).get("given_labels") != "parsed"
        )
        self._of_classes = given_trees and of_classes

    @property
    def gives_arcs(self) -> bool:
        """Return whether rows have arcs between their words."""
        return self._encoder.gives_arcs

    def text_of(self, pieces: Sequence[int]) -> str:
        """Return the text of some pieces of a row, without outer blanks."""
        return self._encoder.subwords.decode([pieces])[0].strip()

    def draw(self, row: dict) -> str:
        """Return the tree of an encoded row as text, and its arcs if there are any."""
        return "\n".join(draw_row(row, self._vocab))

    def encode(self, lines: Sequence[RawLine], first_id: int = 0) -> list[EncodedLine]:
        """Return one result per line, in order. `first_id` is the number of the first line. No line makes another one fail."""
        drafts = [self._read(line, number) for number, line in enumerate(lines, start=first_id)]
        self._parse([draft for draft in drafts if not draft.problem])
        with_target = [draft for draft in drafts if draft.target and not draft.problem]
        for draft, pieces in zip(with_target, self._encoder.encode_targets([d.target for d in with_target]), strict=True):
            draft.add_target(pieces, self._max_pieces)
        self._add_constraints([draft for draft in drafts if draft.constraints and not draft.problem])
        return [draft.result() for draft in drafts]

    def encode_pairs(self, lines: Sequence[RawLine], first_id: int = 0) -> list[EncodedLine]:
        """Return two results per line, for the texts of a pair, which stand in its two columns with a tab between them.

        Both have a problem if a line, or the line of its trees, has not two columns.
        """
        sides, problems = [], {}
        for number, line in enumerate(lines):
            between = b"\t" if line.row is None else b"\n"
            columns = {name: value.split(between) for name in ("text", "trees") if (value := getattr(line, name)) is not None}
            if wrong := [f"{len(c)} of {name}" for name, c in columns.items() if len(c) != 2]:
                problems[number] = f"expected two columns with a tab between them, but found {' and '.join(wrong)}"
                columns = {"text": [b"", b""]}
            sides += [RawLine(**{"text": None, **{name: c[side] for name, c in columns.items()}}) for side in (0, 1)]
        encoded = self.encode(sides, 2 * first_id)
        for number, problem in problems.items():
            source = decode_all(lines[number].text or b"")
            encoded[2 * number : 2 * number + 2] = [EncodedLine(source, problem=problem)] * 2
        return encoded

    def _add_constraints(self, drafts: Sequence["_Draft"]) -> None:
        """Add the constraints of lines to their rows, phrases as pieces."""
        texts = [text for draft in drafts for text in draft.constraints.pieces_of]
        pieces = iter(self._encoder.encode_targets(texts))
        for draft in drafts:
            draft.add_constraints([next(pieces) for _ in draft.constraints.pieces_of], self._max_pieces)

    def notices(self, lines: Sequence[EncodedLine], first_id: int = 0, unit: str = "line") -> dict[str, str]:
        """Return the notices about the complete input, by kind: escapes, tokens, plain text, another language, other labels.

        Those about given targets are among them. `unit` names a line.
        """
        read = [(place, line) for place, line in enumerate(lines, start=first_id + 1) if line.source and not line.problem]
        if not read:
            return {}
        # No parser reads escapes as words where trees are given.
        kinds = tuple(kind for kind in self._encoder.notice_kinds if not self._given_trees or kind != "escapes")
        numbered = [(place, line.source) for place, line in read]
        sample = numbered[:: stride_of(len(numbered))]
        tags = self._encoder.tags
        doubtful = any(is_doubtful(without_tag(text, tags), self._encoder.knows) for _, text in sample)
        language = known(self._encoder.language) if doubtful else None
        undo = "give the plain text as input" if self._given_trees else _UNDO
        found = self._notice(numbered, Wanted(kinds, language, tags), unit, undo, sample)
        targets = [(place, line.target) for place, line in read if line.target]
        of_targets = self._notice(targets, Wanted(self._encoder.target_notice_kinds), unit)
        return found | {f"target {kind}": f"target: {one}" for kind, one in of_targets.items()} | self._notice_labels(lines)

    def _notice(
        self,
        numbered: Sequence[tuple[int, str]],
        wanted: Wanted,
        unit: str,
        undo: str = _UNDO,
        sample: Sequence[tuple[int, str]] = (),
    ) -> dict[str, str]:
        """Return the notices about texts of one side and their numbers, by kind. `undo` is the remedy for tokens."""
        side = SideNotices(wanted)
        side.add([text for _, text in numbered], lambda place: numbered[place][0])
        side.sample = list(sample)
        facts = side.facts()
        noticed = [kind for kind in facts if kind != "lines" and is_noticed(kind, facts)]
        if "tokens" in noticed and "escapes" in noticed:
            noticed.remove("escapes")  # one thing to undo, reported once
        return {kind: self._message(kind, facts, unit, undo) for kind in noticed}

    def _notice_labels(self, lines: Sequence[EncodedLine]) -> dict[str, str]:
        """Return a notice if the training data lacks the labels of half of the nodes of the given trees."""
        rows = [line.row for line in lines if line.row is not None] if self._checks_labels else ()
        labels = np.concatenate([np.asarray(row["nodes"]["label"]) for row in rows]) if rows else np.array([])
        if not len(labels) or 2 * (unknown := int((labels == UNKNOWN_LABEL_ID).sum())) < len(labels):
            return {}
        lacks = f"{unknown:,} of {len(labels):,} nodes have labels that the training data lacks"
        return {"labels": f"labels: {lacks}; are these trees of the data set's parser?"}

    def _message(self, kind: str, facts: dict, unit: str, undo: str) -> str:
        found = facts[kind]
        total = found.get("looked_at", facts["lines"])
        where = f"{found['count']:,} of {total:,} {unit}s ({found['count'] / total:.1%}), for example {unit} {found['line']:,}"
        escapes = ", with escapes such as &apos; or @-@" if facts.get("escapes", {}).get("count") else ""
        what, do = {
            "escapes": ("has escapes such as &apos; or @-@, which the parser reads as words", "undo them first"),
            "tokens": (f"looks tokenised{escapes}, but the model learned from plain text", undo),
            "attached": (
                "looks like plain text, but the model learned from tokens with blanks between them",
                "write the lines as those of its data set",
            ),
            "language": (
                f"seems to be in another language ({found.get('seems')}) than the parser's ({self._encoder.language})",
                "is it the right file?",
            ),
        }[kind]
        return f"{what}: {where}: {found['text']!r}; {do}"

    def _read(self, line: RawLine, number: int) -> "_Draft":
        draft, normalize = _Draft(number), self._encoder.normalize
        try:
            if line.text is not None:
                draft.source = normalize(decode(line.text))
            if line.target is not None:
                draft.target = normalize(decode(line.target, "target: ", control=True))
            given = {name: value.removesuffix(b"\r") for name in CONSTRAINTS if (value := getattr(line, name)) is not None}
            texts = {name: normalize(decode(value, f"{name}: ", strip=False)) for name, value in given.items()}
            draft.constraints = Constraints.read(**texts)
            if line.trees is not None:
                own = None if line.text is None else draft.source
                draft.source, draft.given = place_trees(own, normalize(decode(line.trees, "tree: ")), of_classes=self._of_classes)
            if is_blank(without_tag(draft.source, self._encoder.tags)):
                draft.source, draft.given = "", Given()
            if is_blank(draft.target):
                draft.target = ""
            self._check_length(draft.source)
            draft.note = self._unknown_tag(draft.source)
        except ValueError as error:
            draft.problem = str(error)
            if line.text is not None and not draft.source:
                draft.source = decode_all(line.text)
        return draft

    def _check_length(self, source: str) -> None:
        """Check the length before a parser reads the line. So many words or characters give too many pieces in any vocabulary."""
        for count, most, unit in (
            (len(source.split()), self._max_pieces, "words"),
            (len(source), _CHARS_PER_PIECE * self._max_pieces, "characters"),
        ):
            if count > most:
                raise ValueError(f"{count:,} {unit} are more than {most:,}; split the line into sentences, or raise max_leaves")

    def _unknown_tag(self, line: str) -> str:
        """Return a note if the data set has tags, and the line begins with another one; empty if not."""
        tags, first = self._encoder.tags, line.partition(" ")[0]
        if not tags or first in tags or not re.match(TAG_FORM, first):
            return ""
        return f"begins with {first}, which is not a tag of the data set ({', '.join(tags)}); it is read as text"

    def _parse(self, drafts: Sequence["_Draft"]) -> None:
        """Return rows of drafts. If parsing or encoding fails, it tries halves again, until it finds the faulty line."""
        lines = [draft.source for draft in drafts]
        try:
            parsed = self._encoder.parse(lines, [d.given for d in drafts] if self._given_trees else None)
            rows = self._encoder.encode_parsed(lines, parsed, [draft.number for draft in drafts])
        except ValueError as error:
            if len(drafts) == 1:
                drafts[0].problem = f"cannot be parsed: {error}"
                return
            self._parse(drafts[: len(drafts) // 2])
            self._parse(drafts[len(drafts) // 2 :])
            return
        for draft, line, row in zip(drafts, parsed, rows, strict=True):
            draft.add_row(row, line, self._max_pieces)


@dataclass
class _Draft:
    """A line during its encoding."""

    number: int
    source: str = ""
    target: str = ""
    constraints: Constraints = field(default_factory=Constraints)
    given: Given = field(default_factory=Given)
    row: dict | None = None
    problem: str = ""
    note: str = ""

    def add_row(self, row: dict, parsed: ParsedLine, max_pieces: int) -> None:
        count = len(row["leaves"]["piece"])
        if count > max_pieces:
            self.problem = f"{count:,} pieces are more than {max_pieces:,}; split the line into sentences, or raise max_leaves"
            return
        self.row = row
        if parsed.parse_status.endswith(ARCS_FAILED):
            self._add_note(f"has arcs of the parser that form no tree ({parsed.parse_status}); these words have no governors")
        elif parsed.parse_status.startswith(PARTLY):
            self._add_note(f"has a sentence that was not parsed ({parsed.parse_status}); this sentence gets a flat tree")
        elif is_fallback(parsed.parse_status):
            self._add_note(f"was not parsed ({parsed.parse_status}); it gets a flat tree")

    def _add_note(self, note: str) -> None:
        self.note = f"{self.note}; {note}" if self.note else note

    def add_target(self, pieces: np.ndarray, max_pieces: int) -> None:
        if len(pieces) > max_pieces:
            self.problem = f"target: {len(pieces):,} pieces are more than {max_pieces:,}; raise max_leaves"
        elif not self.row or not len(self.row["leaves"]["piece"]):
            self.problem = "the line is empty, but its target has text"
        else:
            self.row["tgt_pieces"] = pieces

    def add_constraints(self, pieces: list[np.ndarray], max_pieces: int) -> None:
        """Add constraints; `pieces` are those of the prefix, if there is one, and of the phrases."""
        if not self.row or not len(self.row["leaves"]["piece"]):
            self.problem = "the line is empty, but it has constraints"
        elif any(UNK_ID in one for one in pieces):
            self.problem = "prefix or must_appear: has characters that the vocabulary lacks"
        elif sum(map(len, pieces)) > max_pieces:
            self.problem = f"prefix and must_appear: {sum(map(len, pieces)):,} pieces are more than {max_pieces:,}"
        else:
            self.row |= self.constraints.columns(pieces)

    def result(self) -> EncodedLine:
        return EncodedLine(self.source, self.target, None if self.problem else self.row, self.problem, self.note)


def decode_all(line: bytes) -> str:
    """Decode a line of text without outer white space, with U+FFFD for what is not UTF-8."""
    return line.decode("utf-8", errors="replace").strip()


def decode(line: bytes, what: str = "", *, control: bool = False, strip: bool = True) -> str:
    """Decode a line of text, by default without outer white space. Raises ValueError if it is not UTF-8.

    Unless `control`, it also raises ValueError for control characters.
    """
    try:
        text = line.decode("utf-8")
        text = text.strip() if strip else text
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}not valid UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1})") from None
    return text if control else _without_control(text, what)


def _without_control(text: str, what: str) -> str:
    """Return the text. Raises ValueError if it has a control character."""
    if found := CONTROL.search(text):
        raise ValueError(f"{what}control character U+{ord(found[0]):04X} at character {found.start() + 1}; remove it")
    return text


def place_trees(line: str | None, trees: str, *, of_classes: bool = False) -> tuple[str, Given]:
    """Return the line, its words and its trees. Without a line, it joins the words with blanks.

    Labels and tags `of_classes` are left out, as `read_sentiment` does.

    Raises ValueError if the trees cannot be read, or if their leaves are not the words of the line.
    """
    try:
        rows = list(read_trees(iter([trees]), "tree"))
    except UserError as error:
        raise ValueError(f"tree: {str(error).partition(': ')[2]}") from None
    texts = [text for row in rows for text in row["words"]["text"]]
    brackets = [without_names(text) if of_classes else text for row in rows for text in row["trees"]]
    if line is None:
        line, words = join_with_blanks(texts)
        _without_control(line, "words of the tree: ")  # which escapes may stand for
    else:
        words = _place_words(line, texts)
    return line, Given(words, brackets)


def _place_words(line: str, texts: Sequence[str]) -> dict[str, list]:
    """Return the positions of the leaves in the line. Only white space may stand between them."""
    starts, ends = [], []
    position = 0
    for number, text in enumerate(texts, start=1):
        while line[position : position + 1].isspace():
            position += 1
        spelling = next((s for s in (text, *_SPELLINGS.get(text, ())) if line.startswith(s, position)), None)
        if spelling is None:
            rest = line[position : position + _SHOWN]
            raise ValueError(f"leaf {number} of its tree is {text[:_SHOWN]!r}, but the line goes on with {rest!r}")
        starts.append(position)
        position += len(spelling)
        ends.append(position)
    if rest := line[position:].strip():
        raise ValueError(f"its tree ends after {len(texts)} leaves, but the line goes on with {rest[:_SHOWN]!r}")
    return {"text": [line[s:e] for s, e in zip(starts, ends, strict=True)], "start_char": starts, "end_char": ends}
