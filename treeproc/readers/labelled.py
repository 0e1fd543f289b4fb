"""The format `labelled`: texts or pairs of texts with classes of any names, as label and text, CSV with a header, or JSON Lines.

The suffix of a file decides.
"""

import csv
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple, Protocol, Self

from pydantic import Field, field_validator, model_validator

from treeproc.common.errors import quoted
from treeproc.common.files import repeated_key
from treeproc.common.messages import warn
from treeproc.common.settings import Settings, UserError, later_field
from treeproc.common.storage import AnyPath
from treeproc.readers.line_forms import is_blank
from treeproc.readers.numbered_lines import MOST_LINE_BYTES, join_names, read_texts
from treeproc.readers.packed_files import plain_name, warn_once
from treeproc.readers.treebanks import read_trees
from treeproc.shards.schema import line_end_in

MOST_CLASSES = 1000  # more are texts in the place of labels
_SHOWN = 40
_FORMS: dict[str, "TableForm"] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"
}  # fmt: skip
_LINE_ENDS = re.compile(r"[\r\n]+")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,15}(?:\.[0-9]{0,15})?")
_BETWEEN_CLASSES = re.compile(r"[,;|+]")
_MANY = 10  # classes, from which on they may be texts

TableForm = Literal["csv", "tsv", "jsonl"]


class Record(NamedTuple):
    """An example as it stands in a file."""

    number: int  # of its first line
    fields: Sequence[object]  # label and texts, or the texts alone
    row: str  # its lines, without the last line end
    names: Sequence[str]  # of all columns or keys; none without a header
    header: str = ""


class Columns(Protocol):
    """The columns or keys that are wanted of a table."""

    @property
    def wanted(self) -> tuple[str, ...]: ...
    @property
    def texts(self) -> tuple[str, ...]: ...  # of new rows, which may lack the others
    def setting_of(self, column: str) -> str: ...  # the setting that names it


class LabelledConfig(Settings):
    """Columns and classes of files of format `labelled`."""

    label: str = Field("label", description="name of the column with the class, or key of a JSON object")
    text: str = Field("text", description="name of the column with the text, or key of a JSON object")
    second_text: str | None = later_field(
        None,
        description="name of the column with the second text, or key of a JSON object, for pairs of texts: entailment, "
        "paraphrases. Unset: an example is one text",
    )
    brackets: bool = Field(
        False,
        description="the texts are trees in Penn Treebank brackets, one each. The job takes them as they are unless you set a "
        "parser",
    )
    classes: list[Annotated[str, Field(coerce_numbers_to_str=True)]] | None = Field(
        None,
        description="names of all classes, in the order of their numbers from 0. Unset: the names in the files of train, sorted; "
        "with vocab_from, those of its data set",
    )

    @model_validator(mode="after")
    def _columns_that_differ(self) -> Self:
        if self.text == self.label:
            raise ValueError(f"label and text must be two columns, but both are {quoted(self.label)}")
        if self.second_text in (self.label, self.text):
            raise ValueError(f"second_text must be another column than label and text, but is {quoted(self.second_text)}")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the names of the columns with texts: one, or two of pairs."""
        return (self.text,) if self.second_text is None else (self.text, self.second_text)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the names of the columns of an example: its label, then its texts."""
        return (self.label, *self.texts)

    def setting_of(self, column: str) -> str:
        """Return the setting that names a column."""
        return next(f"labelled.{name}" for name in ("label", "text", "second_text") if getattr(self, name) == column)

    @field_validator("classes")
    @classmethod
    def _names_that_differ(cls, names: list[str] | None) -> list[str] | None:
        if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
            raise ValueError("must be at least two names that differ")
        for name in names or ():
            if wrong := _wrong_label(name):
                raise ValueError(f"the name {quoted(name[:_SHOWN])} {wrong}")
        return names


def read_labelled(source: Sequence[AnyPath], columns: LabelledConfig) -> Iterator[dict]:
    """Read examples of files, folders or archives. `label` is the number of the class; its name while no classes are set.

    Yields two rows per pair, both with its class.
    Raises UserError with file and line for a line without an example, and for a class that is none of `columns.classes`.
    """
    numbers = None if columns.classes is None else {name: number for number, name in enumerate(columns.classes)}
    for name, lines in read_texts(source, stripped=False):
        for record in records_of(lines, name, columns):
            where = f"{name}, line {record.number}"
            label, *texts = (clean_field(*field, where) for field in zip(record.fields, columns.wanted, strict=True))
            if wrong := _wrong_label(label):
                raise UserError(f"{where}: the {columns.label} {quoted(label[:_SHOWN])} {wrong}")
            if numbers is not None and label not in numbers:
                some = ", ".join(map(quoted, list(numbers)[:5])) + (", ..." if len(numbers) > 5 else "")
                raise UserError(
                    f"{where}: the {columns.label} {quoted(label[:_SHOWN])} is none of the {len(numbers)} classes ({some}); "
                    "correct it, or leave it out; labelled.classes names the classes of a new data set"
                )
            for text in texts:
                row = _tree_row(text, where) if columns.brackets else {"source": text}
                yield row | {"label": label if numbers is None else numbers[label]}


def find_classes(source: Sequence[AnyPath], columns: LabelledConfig) -> list[str]:
    """Return the names of the classes in files, sorted: by value if all are whole numbers. Raises as `read_labelled`."""
    names: Counter[str] = Counter()
    sides, files = len(columns.texts), join_names(source)  # each side is a row
    texts_of_first: set[tuple[int, str]] = set()
    for place, row in enumerate(read_labelled(source, columns.model_copy(update={"classes": None}))):
        names[row["label"]] += place % sides == 0
        if len(texts_of_first) <= sides and row["label"] == next(iter(names)):
            texts_of_first.add((place % sides, row["source"]))
        if len(names) > MOST_CLASSES:
            raise UserError(
                f"{files} has more than {MOST_CLASSES:,} classes, for example {quoted(row['label'][:_SHOWN])}; is the text "
                f"in the place of the {columns.label}? labelled.label and labelled.text name the columns of a header; "
                "labelled.classes takes any number of classes"
            )
    if len(names) == 1:
        raise UserError(f"{files}: all examples have the class {quoted(*names)}; a classifier needs two")
    may_lack_header = any(table_form(path.name) in ("tsv", None) for path in source)
    count = names[first := next(iter(names), "")]
    is_rare = (count <= len(source) or len(texts_of_first) <= sides) and names.total() > 2 * max(count, len(source))
    examples = names.total()
    if are_texts := len(names) > max(_MANY, examples / 2):
        warn(
            f"warning: {files}: {examples:,} examples have {len(names):,} classes, such as {quoted(first[:_SHOWN])}; if "
            "these are texts, exchange the columns, or give them a header and set labelled.label and labelled.text"
        )
    if may_lack_header and is_rare and not are_texts:
        warn(
            f"warning: {source[0]}: the first example has the class {quoted(first[:_SHOWN])}, which only {count} of {examples:,} "
            f"examples ha{'s' if count == 1 else 've'}; if it is a header, set "
            f"{' and '.join(map(columns.setting_of, columns.wanted))} to its names"
        )
    _warn_of_names(names, files)
    if all(map(_NUMBER.fullmatch, names)):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _warn_of_names(names: Counter[str], file: str) -> None:
    """Warn of classes that look like one class in two spellings, or like several classes of one example."""
    parts = {name: [part.strip() for part in _BETWEEN_CLASSES.split(name)] for name in names}
    single = {name for name in names if len(parts[name]) == 1}
    joined = [name for name in sorted(names) if len(parts[name]) > 1 and single.issuperset(parts[name])]
    several = [name for name in names if len(parts[name]) > 1]
    if len({part for name in several for part in parts[name]}) < len(several):  # few parts make many names
        joined = joined or sorted(several)
    if joined:
        shown = quoted(joined[0][:_SHOWN])
        what = f"{len(joined):,} classes, such as {shown}, look" if len(joined) > 1 else f"the class {shown} looks"
        warn(
            f"warning: {file}: {what} like several classes of one example, and the job takes each for one class; write one class "
            "for each example"
        )
    alike: dict[str, str] = {}
    for name in sorted(names):
        folded = unicodedata.normalize("NFKC", name).casefold()
        visible = "".join(character for character in folded if character.isprintable() and character != " ")
        key = str(float(visible)) if _DECIMAL.fullmatch(visible) else visible
        if (other := alike.setdefault(key, name)) != name:
            warn(
                f"warning: {file}: the classes {quoted(other[:_SHOWN])} ({names[other]:,} examples) and "
                f"{quoted(name[:_SHOWN])} ({names[name]:,}) differ only in case, blanks, invisible characters, Unicode form or "
                "zeros of a number, and are two classes; if they are one, write one name into the files"
            )


def table_form(name: str) -> TableForm | None:
    """Return the form that the name of a file, without the suffix of a compression, says; None if it says none."""
    return _FORMS.get(PurePosixPath(plain_name(name)).suffix.lower())


def refuse_table(path: AnyPath) -> None:
    """Raise UserError if the name of a file is that of a table."""
    if form := table_form(path.name):
        raise UserError(
            f"{path} must have one text a line, but its name is that of a table ({form}); write its texts to a file, one a line"
        )


def read_new_records(path: AnyPath, columns: LabelledConfig) -> Iterator[tuple[Record, list[str]]]:
    """Yield every row of a table of new texts, and these texts, which may be empty. A label is neither needed nor read.

    Raises UserError with file and line as `read_labelled` does.
    """
    for name, lines in read_texts([path], stripped=False):
        for record in records_of(lines, name, columns, with_label=False):
            where = f"{name}, line {record.number}"
            yield record, [_text_of(*field, where) for field in zip(record.fields, columns.texts, strict=True)]


def form_of_line(line: str, columns: LabelledConfig) -> TableForm | None:
    """Return the form of a table that begins with this line: a JSON object, or a header with `columns`; None for other text."""
    if line.startswith("{"):
        try:
            return "jsonl" if isinstance(json.loads(line), dict) else None
        except (ValueError, RecursionError):
            return None
    tables: dict[TableForm, str] = {"csv": ",", "tsv": "\t"}
    for form, between in tables.items():
        fields = [field.strip().strip('"') for field in line.split(between)]
        is_header = columns.label in fields or all(map(str.isidentifier, fields))
        if len(fields) > 1 and is_header and {*columns.texts} <= {*fields}:
            return form
    return None


def records_of(
    lines: Iterator[str], name: str, columns: Columns, *, with_label: bool = True, needs_header: bool = False
) -> Iterator[Record]:
    """Yield the examples of one file, with or without their labels. A table with tabs may lack a header unless it needs one."""
    form = table_form(name)
    if form == "jsonl":
        yield from _objects(lines, name, columns, with_label)
    elif form == "csv":
        yield from _of_table(_csv_rows(lines, name), name, columns, with_label, needs_header=True, between="commas")
    else:
        rows = ((number, [f.strip() for f in line.split("\t")], line) for number, line in enumerate(lines, start=1))
        yield from _of_table(rows, name, columns, with_label, needs_header=needs_header, between="tabs")


def _of_table(
    rows: Iterator[tuple[int, list[str], str]],
    name: str,
    columns: Columns,
    with_label: bool,
    *,
    needs_header: bool,
    between: str,
) -> Iterator[Record]:
    """Yield the examples of a table. Without a header, its columns are label and texts. Rows may lack an unwanted label."""
    wanted = columns.wanted if with_label else columns.texts
    width, expected = len(wanted), ", tab, ".join(wanted)
    named = f"column{'s' * (len(wanted) > 1)} {' and '.join(wanted)}"
    places: Sequence[int] = range(len(wanted))
    header: list[str] | None = None
    header_row = ""
    for row, (number, fields, text) in enumerate(rows):
        where = f"{name}, line {number}"
        if not any(fields):
            raise UserError(f"{where}: the line is empty; remove it")
        if row == 0 and (needs_header or any(column in fields for column in columns.wanted)):
            if len(fields) == 1 and any(mark in fields[0] for mark in ";\t"):
                raise UserError(
                    f"{where}: must be a header with the {named}, separated by {between}, but is "
                    f"{quoted(fields[0][: 2 * _SHOWN])}; write {between} between the columns of all lines"
                )
            if missing := [column for column in wanted if column not in fields]:
                remedy = f"{f'set {columns.setting_of(missing[0])}, or ' if with_label else ''}rename its column"
                remedy += ", or add a header line" * (len(missing) == len(wanted))
                raise UserError(
                    f"{where}: must be a header with the {named}, separated by {between}, but {quoted(missing[0])} is missing: "
                    f"{quoted(', '.join(fields)[: 2 * _SHOWN])}; {remedy}"
                )
            if twice := [column for column in wanted if fields.count(column) > 1]:
                raise UserError(f"{where}: the header names the column {quoted(twice[0])} twice; rename one")
            width, places = len(fields), [fields.index(column) for column in wanted]
            expected, header, header_row = "as the header has", fields, text
            continue
        if row == 0 and not with_label and len(fields) == len(columns.wanted):
            width, places, expected = len(fields), range(1, len(fields)), ", tab, ".join(columns.wanted)
        if fields == header:
            warn_once(f"{where}: the line repeats the header, and is read as an example; remove it")
        if len(fields) != width:
            is_pair = isinstance(columns, LabelledConfig) and with_label and len(fields) == 3 and width == 2 and header is None
            remedy = "; for pairs of texts, set labelled.second_text=NAME" if is_pair else ""
            if between == "commas" and len(fields) > width:
                remedy = "; put a text with commas between quotation marks"
            raise UserError(
                f"{where}: expected {width} columns separated by {between} ({expected}), but found {len(fields)}: "
                f"{quoted(' | '.join(fields)[:_SHOWN])}{remedy}"
            )
        yield Record(number, [fields[place] for place in places], text, header or (), header_row)


def _csv_rows(lines: Iterator[str], name: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield the rows of a table with commas: the number of the first line of each, its fields and its text."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE_BYTES))  # of the process; Python's own is 128 KiB
    taken: list[str] = []  # of the next row; the reader takes no line more

    def take() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield f"{line}\n"

    reader = csv.reader(take(), strict=True)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{name}, line {first}: not a row of a table with commas ({error}); quote it as CSV does") from None
        if fields is None:
            return
        yield first, [field.strip() for field in fields], "\n".join(taken)
        taken.clear()


def _objects(lines: Iterator[str], name: str, columns: Columns, with_label: bool) -> Iterator[Record]:
    wanted = columns.wanted if with_label else columns.texts
    for number, line in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        if not line.strip():
            raise UserError(f"{where}: the line is empty; remove it")
        try:
            found = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}); every line must be one JSON object") from None
        if not isinstance(found, dict):
            raise UserError(f"{where}: must be a JSON object, but is {quoted(line.strip()[:_SHOWN])}")
        for key in wanted:
            if key not in found:
                keys = ", ".join(map(str, found))[: 2 * _SHOWN]
                remedy = f"set {columns.setting_of(key)}" if with_label else "rename its key"
                raise UserError(f"{where}: the object has no key {quoted(key)}, but {quoted(keys)}; {remedy}")
        yield Record(number, [found[key] for key in wanted], line, [*found])


def _object(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object. Raises ValueError for a key that it has twice."""
    if (key := repeated_key(pairs)) is not None:
        raise ValueError(f"the key {quoted(key[:_SHOWN])} occurs twice")
    return dict(pairs)


def clean_field(value: object, column: str, where: str) -> str:
    """Return a label or text on one line, without outer blanks. Raises UserError if it is none, or empty."""
    if is_blank(text := _text_of(value, column, where)):
        raise UserError(f"{where}: the {column} is empty; write one, or remove the example")
    return text


def _text_of(value: object, column: str, where: str) -> str:
    """Return a label or text on one line, without outer blanks. Raises UserError if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):  # a label
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: the {column} must be a string or a whole number, but is {quoted(json.dumps(value)[:_SHOWN])}")
    if _NO_TEXT.search(value):
        raise UserError(f"{where}: the {column} has a NUL byte or half of a character; remove it")
    return _LINE_ENDS.sub(" ", value.strip())


def _wrong_label(name: str) -> str:
    """Return what makes a text no name of a class, after the name; empty if nothing does."""
    if line_end_in([name]) or "\t" in name or "\0" in name:
        return "has a tab or a line end; write it without"
    return "is empty" if is_blank(name) else ""


def _tree_row(text: str, where: str) -> dict:
    """Return the row of a text that is one tree in brackets."""
    try:
        rows = list(read_trees(iter([text]), ""))
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(', line 1: ')}") from None
    if len(rows) != 1 or not rows[0]["source"]:
        raise UserError(f"{where}: the text must be one tree with words, but has {len(rows)} trees: {quoted(text[:_SHOWN])}")
    return rows[0]
