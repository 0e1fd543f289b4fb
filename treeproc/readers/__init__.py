"""Files of many formats to rows of the text stage. Each format has a reader, an iterator of dicts without `example_id`.

A reader raises UserError with file and line on bad input. It runs twice: first to check and count, then to write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from treeproc.common.errors import check_choice
from treeproc.common.storage import AnyPath
from treeproc.readers.labelled import LabelledConfig, read_labelled
from treeproc.readers.labelled_corpora import read_imdb, read_linzen, read_prefixes, read_sick
from treeproc.readers.line_forms import Normalization, compose_row, is_blank, undo_moses
from treeproc.readers.numbered_lines import Reading, pair_up_files, read_lines, read_texts
from treeproc.readers.segments import read_iwslt, read_iwslt_side, read_sgm, read_sgm_side
from treeproc.readers.treebanks import read_sentences, read_sentiment, read_trees

FormatName = Literal[
    "parallel", "text", "documents", "sgm", "iwslt_xml", "brackets", "sst", "imdb", "agreement", "linzen", "labelled", "sick",
    "conllu",
]  # fmt: skip

Rows = Iterator[dict]
Reader = Callable[[Sequence[AnyPath], Sequence[AnyPath]], Rows]


@dataclass(frozen=True)
class Ranges:
    """How a range of the source examples of one file is read.

    `ends` is a key of `example_ends.ENDS`. `read` makes rows of lines and the name of their file. `reading` is how
    its lines are read.
    """

    ends: Literal["lines", "trees", "sentences"]
    read: Callable[[Iterator[str], str], Rows]
    reading: Reading = "any"


@dataclass(frozen=True)
class Format:
    """A reader, the columns of its rows beside `source` and `target`, and whether there is a target side.

    A format without `ranges` is read from front to back. `classes` are the names of its classes, if its files do not say them.
    `has_pairs` means that every two rows are the sentences of a pair, which must stay together. `read_side` reads the texts of
    one side, if they stand in markup.
    """

    read: Reader
    target: Literal["required", "optional", "none"]
    columns: tuple[str, ...] = ()
    ranges: Ranges | None = None
    classes: tuple[str, ...] = ()
    has_pairs: bool = False
    read_side: Callable[[Sequence[AnyPath]], Iterator[str]] | None = None

    @property
    def gives_constituents(self) -> bool:
        """Return whether the files have trees of constituents. Those of CoNLL-U are flat."""
        return "trees" in self.columns and "arcs" not in self.columns


def _read_parallel(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Rows:
    read = partial(read_lines, reading="parallel")
    for left, right in pair_up_files(read, source, read, target):
        yield {"source": left, "target": right}


def _plain(lines: Iterator[str], name: str) -> Rows:
    return ({"source": line} for line in lines)


def _read_documents(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Rows:
    """Read lines that are not blank, with the number of their document: a blank line or the end of a file ends one."""
    number = -1
    for _, lines in read_texts(source, "parallel"):
        inside = False
        for line in lines:
            number += not (inside or is_blank(line))
            if inside := not is_blank(line):
                yield {"source": line, "document": number}


def _of_texts(
    ranges: Ranges, target: Literal["optional", "none"], columns: tuple[str, ...], classes: tuple[str, ...] = ()
) -> Format:
    """Return a format of files, folders and archives. If there is a target side, a row has its line of the same number."""

    def read_source(paths: Sequence[AnyPath]) -> Rows:
        return (row for name, lines in read_texts(paths, ranges.reading) for row in ranges.read(lines, name))

    def read(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Rows:
        if not target:
            return read_source(source)
        pairs = pair_up_files(read_source, source, read_lines, target, "sentences")
        return ({**row, "target": line} for row, line in pairs)

    return Format(read, target, columns, ranges, classes)


def _labelled(settings: LabelledConfig) -> Format:
    """Return the format `labelled` with these columns and classes."""
    columns = ("label", "words", "trees") if settings.brackets else ("label",)
    classes, has_pairs = tuple(settings.classes or ()), settings.second_text is not None
    return Format(lambda source, target: read_labelled(source, settings), "none", columns, classes=classes, has_pairs=has_pairs)


FORMATS: dict[str, Format] = {
    "parallel": Format(_read_parallel, "required", (), Ranges("lines", _plain, "parallel")),
    "text": _of_texts(Ranges("lines", _plain, "parallel"), "none", ()),
    "documents": Format(_read_documents, "none", ("document",)),
    "sgm": Format(read_sgm, "required", read_side=read_sgm_side),
    "iwslt_xml": Format(read_iwslt, "required", read_side=read_iwslt_side),
    "brackets": _of_texts(Ranges("trees", read_trees, "brackets"), "optional", ("words", "trees")),
    "sst": _of_texts(Ranges("trees", read_sentiment), "none", ("label", "words", "trees", "node_labels", "leaf_labels")),
    "imdb": Format(read_imdb, "none", ("label",), classes=("neg", "pos")),
    "agreement": _of_texts(Ranges("lines", read_prefixes), "none", ("label", "words"), classes=("VBZ", "VBP")),
    "linzen": Format(read_linzen, "none", ("label", "words"), classes=("VBZ", "VBP")),
    "labelled": _labelled(LabelledConfig()),
    "sick": Format(read_sick, "none", ("score",), has_pairs=True),
    "conllu": _of_texts(Ranges("sentences", read_sentences), "optional", ("words", "trees", "arcs")),
}


def find_format(format_name: str, labelled: LabelledConfig | None) -> Format:
    """Return a format by its name. `labelled` are the settings of the format of that name."""
    check_choice("format_name", format_name, FORMATS)
    return _labelled(labelled) if format_name == "labelled" and labelled else FORMATS[format_name]


def read_rows(
    format_name: str,
    source: Sequence[AnyPath],
    target: Sequence[AnyPath],
    tokenized: str = "none",
    normalization: Normalization = "none",
    labelled: LabelledConfig | None = None,
) -> Rows:
    """Return the rows of one split. Raises UserError as its reader does."""
    check_choice("tokenized", tokenized, ("none", "moses"))
    check_choice("normalization", normalization, ("none", "nfc"))
    return convert_rows(find_format(format_name, labelled).read(source, target), tokenized, normalization)


def convert_rows(rows: Rows, tokenized: str, normalization: Normalization) -> Rows:
    """Return the rows of a reader with its lines as these settings want them."""
    if normalization == "nfc":
        rows = map(compose_row, rows)
    return map(undo_moses, rows) if tokenized == "moses" else rows
