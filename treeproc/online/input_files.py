"""Input files of commands as raw lines: lines of text, or files of the format that the data set of the run was made of.

Also the names of the files that the commands write.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import IO

from treeproc.common.errors import quoted, rewording
from treeproc.common.files import read_text
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.messages import warn
from treeproc.common.named_output import is_stream
from treeproc.common.settings import UserError, build_settings, read_yaml
from treeproc.common.storage import AnyPath
from treeproc.online.raw_lines import RawLine, TableRow, decode_all
from treeproc.readers import FORMATS, find_format
from treeproc.readers.labelled import LabelledConfig, TableForm, form_of_line, read_new_records, refuse_table, table_form
from treeproc.readers.numbered_lines import Reading, has_markup, pair_up, read_byte_lines, refuse_pipes
from treeproc.readers.packed_files import is_packed, plain_name
from treeproc.shards.store import read_index, stage_folder

ADDED = ("predicted", "probability")  # columns of a table that the output has, beside those of the input
HELD_FORM = "input_form"  # in the index of an exported run, which has no config.yaml of its data set
_SHOWN = 40


@dataclass(frozen=True)
class InputForm:
    """The format of the files that a data set was made of, with the columns of its tables."""

    format: str = "parallel"
    labelled: LabelledConfig = field(default_factory=LabelledConfig)

    def reads_table(self, path: AnyPath | None) -> bool:
        """Return whether a file is a table of this format. Raises UserError for a table if the format has none."""
        if path is None or table_form(path.name) is None:
            return False
        if self.format != "labelled":
            refuse_table(path)
        return True

    def gives_trees(self, path: AnyPath | None) -> bool:
        """Return whether a file is a table whose texts are trees."""
        return self.reads_table(path) and self.labelled.brackets

    def unit(self, path: AnyPath | None) -> str:
        """Return what a line for the command is in a file: a row of a table, a segment of markup, or a line."""
        if self.reads_table(path):
            return "row"
        is_markup = path is not None and FORMATS[self.format].read_side is not None and has_markup(path)
        return "segment" if is_markup else "line"

    def facts(self) -> dict:
        """Return what `form_of` reads."""
        return {"format": self.format, "labelled": self.labelled.model_dump(mode="json", exclude={"classes"})}


def form_of(data: AnyPath) -> InputForm:
    """Return the form of the files that a data set was made of: lines of text if it does not say. An exported run has it too."""
    where = data / "encoded" / "index.json"
    if not where.is_file():
        return InputForm()
    values: object = read_index(data / "encoded").get(HELD_FORM)
    if values is None:
        where = stage_folder(data, "text").parent / CONFIG
        values = read_yaml(read_text(where, "restore the data set"), str(where)) if where.is_file() else None
    if not isinstance(values, Mapping) or (name := str(values.get("format"))) not in FORMATS:
        return InputForm()
    return InputForm(name, build_settings(LabelledConfig, values.get("labelled") or {}, f"{where}: labelled"))


def refuse_output_name(path: AnyPath | None, form: TableForm | None) -> None:
    """Raise UserError if the name of an output promises another content than lines, or rows of `form`.

    Lines may have tabs, so a name in .tsv is one for lines. Any other name that promises nothing is one for rows, too.
    """
    if path is None or is_stream(path):
        return
    if is_packed(path.name):
        suffix = path.name.removeprefix(plain_name(path.name))
        raise UserError(f"output: {path} is written as plain text; leave out {suffix}, or write to standard output and pack that")
    if (named := table_form(path.name)) not in (None, form, *(["tsv"] if form is None else [])):
        written = "lines of text" if form is None else f"a table ({form})"
        raise UserError(f"output: {path} is named as a table ({named}), but the command writes {written}; choose another name")


def read_raw_lines(
    text: AnyPath | None,
    trees: AnyPath | None,
    targets: AnyPath | None,
    form: InputForm | None = None,
    **constraints: AnyPath | None,
) -> Iterator[RawLine]:
    """Read the lines of the given files side by side. `text` may be a file of `form`, one line for each row or segment.

    `constraints` are files for the columns of a `RawLine` after the target. Raises UserError if one of the files ends early,
    cannot be read, or has another form.
    """
    form = form or InputForm()
    if trees is not None and form.gives_trees(text):
        raise UserError(f"{text} has trees itself; leave trees out")
    if targets is not None:
        refuse_table(targets)
    sides = [] if text is None else [(text, _rows(text, form) if form.reads_table(text) else _texts(text, form))]
    paths = {"trees": trees, "target": targets, **constraints}
    sides += [
        (path, _trees(path) if name == "trees" else _column(name, path)) for name, path in paths.items() if path is not None
    ]
    (first, lines), *others = sides
    unit = form.unit(first) if others and text is not None else "line"
    for path, column in others:
        lines = (left | right for left, right in pair_up(lines, column, str(first), str(path), f"{unit}s"))
    return (RawLine(**{"text": None, **line}) for line in lines)


def count_lines(lines: Iterable[RawLine], name: AnyPath) -> int:
    """Count the lines of files. Raises UserError as their reader does, and if there are none."""
    count = sum(1 for _ in lines)
    if not count:
        raise UserError(f"{name} is empty, but must have one sentence a line")
    return count


def ask_for_lines(stream: IO[bytes], ask: Callable[[], None]) -> Iterator[RawLine]:
    """Read the lines of a terminal as they are written. It calls `ask` before each line, and ends with Ctrl-D."""
    while True:
        ask()
        if not (line := stream.readline()):
            return
        yield RawLine(line.removesuffix(b"\n"))


def _column(name: str, path: AnyPath) -> Iterator[dict]:
    return ({name: line} for line in read_byte_lines(path))


def _trees(path: AnyPath) -> Iterator[dict]:
    """Read lines of trees. Raises UserError for a tree over several lines: every line would get a part of it."""
    first = 0  # a line whose tree is not closed
    for number, line in enumerate(read_byte_lines(path), start=1):
        depth = line.count(b"(") - line.count(b")")
        if line.strip() and not line[:1].isspace() and not line.startswith(b")"):
            first = 0  # another tree begins, so the open one was damaged alone
        if depth < 0 and first:
            raise UserError(
                f"{path}, line {first}: expected one tree a line, but found a tree that ends in line {number}; write each tree, "
                "with all its brackets, on one line"
            )
        first = first or (number if depth > 0 else 0)
        yield {"trees": line}


def _texts(path: AnyPath, form: InputForm) -> Iterator[dict]:
    """Read lines of text, or the segments of a file with the markup of the format."""
    if (read_side := FORMATS[form.format].read_side) is not None and has_markup(path):
        with rewording({"choose the `format` of this file": "give a file of segments, or lines of text"}):
            yield from ({"text": line.encode()} for line in read_side([path]))
        return
    reading: Reading = "texts_of_trees" if find_format(form.format, form.labelled).gives_constituents else "texts"
    for number, line in enumerate(read_byte_lines(path, reading)):
        found = form_of_line(decode_all(line), form.labelled) if number == 0 else None
        if found == "jsonl" or (found and form.format == "labelled"):
            remedy = (
                f"give the table as input=FILE.{found}" if form.format == "labelled" else "write its texts to a file of lines"
            )
            raise UserError(
                f"{path}, line 1: expected a text, but found {'a JSON object' if found == 'jsonl' else 'the header of a table'}: "
                f"{quoted(decode_all(line)[:_SHOWN])}; {remedy}"
            )
        yield {"text": line}


@cache
def _note_columns(path: AnyPath, columns: int, texts: int) -> None:
    """Say once which columns of a table without a header are read, if it has more than the texts."""
    if columns == texts + 1:
        read = f"column {columns} as the text" if texts == 1 else f"columns {columns - 1} and {columns} as the texts"
        warn(f"note: {path} has no header, so the command reads column 1 as the class, and {read}")


def _rows(path: AnyPath, form: InputForm) -> Iterator[dict]:
    """Read the rows of a table, with their texts or trees."""
    refuse_pipes([path])
    columns, count = form.labelled, 0
    for count, (record, texts) in enumerate(read_new_records(path, columns), start=1):
        if taken := [name for name in ADDED if name in record.names]:
            raise UserError(f"{path} has the column {quoted(taken[0])}, which the output would have twice; rename it")
        row = TableRow(table_form(path.name), record.row, record.header if count == 1 else "")
        if count == 1 and not record.names:
            _note_columns(path, record.row.count("\t") + 1, len(texts))
        yield {"trees" if columns.brackets else "text": "\n".join(texts).encode(), "row": row}
    if not count:
        raise UserError(f"{path} has no row, but must have one for each text")
