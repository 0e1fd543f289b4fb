"""Files, folders and archives as numbered lines, and files that plainly hold something else than lines of text.

Only `\n` ends a line: another Unicode separator must not shift a pair.
"""

import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import IO, Literal, TypeVar

from treeproc.common.errors import UserError, quoted
from treeproc.common.files import cannot_read
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.readers.packed_files import is_archive, is_hidden, members, open_input, say_left_out, warn_once

# How a file is read: as lines (of `parallel` and `text`, of something else, of a new text, or as bytes), or by a reader with
# rules of its own.
Reading = Literal["parallel", "lines", "texts", "texts_of_trees", "bytes", "iwslt_xml", "brackets", "any"]

_SHOWN = 40
_LOOKED_AT = 1 << 16
_MOST_NULS = 0.3  # of the bytes: UTF-16 of Latin letters has half of them

_UNPACK = "unpack it, and give its files"
_EXTRACT = "write its text to a file, one sentence a line"
_BYTES = (
    (rb"\x1f\x8b", "a gzip file", "rename it so that its name ends in .gz"),
    (rb"BZh[1-9]1AY&SY", "a bzip2 file", "rename it so that its name ends in .bz2"),
    (rb"\xfd7zXZ\0", "an xz file", "rename it so that its name ends in .xz"),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", _UNPACK),
    (rb"PK\x03\x04", "a zip archive or a document of an office program", _UNPACK),
    (rb"(?s:.){257}ustar", "a tar archive", _UNPACK),
    (rb"%PDF-1", "a PDF", _EXTRACT),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program", _EXTRACT),
    (rb"SQLite format 3\0", "a database of SQLite", _EXTRACT),
    (rb"ARROW1\0\0", "an Arrow file", _EXTRACT),
    (rb"PAR1[\x15\x00]", "a Parquet file", _EXTRACT),
    (rb"\xff\xfe|\xfe\xff", "in UTF-16", "convert the file to UTF-8"),
)

_LINES: tuple[Reading, ...] = ("parallel", "lines")
_ALL_LINES: tuple[Reading, ...] = (*_LINES, "texts", "texts_of_trees", "bytes")
_MARKUP = re.compile(r"<(?:\?xml\b|!doctype\b|(?:tmx|xliff|html|mteval|srcset|refset|tstset)\b[^<>]*>)", re.IGNORECASE)
_OTHER_XML = re.compile(r"<(?:!doctype\s+)?(?:tmx|xliff|html)\b", re.IGNORECASE)
_SEGMENT = re.compile(r"<seg\b[^<>]*>", re.IGNORECASE)
_IWSLT = re.compile(r"<(url|keywords|speaker|talkid|title|description)>.*</\1>", re.IGNORECASE)
_CONLLU = re.compile(r"[0-9]+(?:[-.][0-9]+)?(?:\t[^\t]*){9}")
_LEAF = re.compile(r"\([^\s()]+ [^\s()]+\)")
_NESTED = re.compile(r"\([^\s()]* ?\(")
_LABELS = re.compile(r"\(([^\s()]*)")
UTF8_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 16
MOST_LINE_BYTES = 64 << 20  # a line is held in memory, and a small compressed file may unpack to a very long one

Item = TypeVar("Item")
Other = TypeVar("Other")


def _is_other_xml(lines: Sequence[str]) -> bool:
    return bool(_MARKUP.match(lines[0])) and any(map(_OTHER_XML.match, lines[:20]))


def _has_segments(lines: Sequence[str]) -> bool:
    tagged = sum(line.startswith("<") for line in lines)
    return bool(_MARKUP.match(lines[0])) or (2 * tagged > len(lines) and any(map(_SEGMENT.match, lines)))


def _has_talks(lines: Sequence[str]) -> bool:
    return len({match[1].lower() for match in map(_IWSLT.fullmatch, lines) if match}) > 1


def _is_conllu(lines: Sequence[str]) -> bool:
    words = [line for line in lines if not line.startswith("#")]
    return bool(words) and all(map(_CONLLU.fullmatch, words))


def _is_sentiment(lines: Sequence[str]) -> bool:
    labels = {label for line in lines for label in _LABELS.findall(line)}
    return bool(labels) and labels <= set("01234")


def _are_trees(lines: Sequence[str]) -> bool:
    leaves = sum(bool(_LEAF.search(line)) for line in lines)
    return all(line.startswith("(") for line in lines) and 2 * leaves > len(lines) and any(map(_NESTED.search, lines))


def _are_objects(lines: Sequence[str]) -> bool:
    try:
        return all(line.startswith("{") and isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class _Evidence:
    """A format, the readings that it is not, and the setting `format` that reads it. `seen` gets the lines that are not empty."""

    what: str
    readings: tuple[Reading, ...]
    seen: Callable[[Sequence[str]], bool]
    format: str | None = None
    is_certain: bool = True


_TEXT = (
    _Evidence("TMX, XLIFF or HTML", (*_ALL_LINES, "iwslt_xml"), _is_other_xml),
    _Evidence("a file of segments in XML", _ALL_LINES, _has_segments, "sgm or format=iwslt_xml"),
    _Evidence("IWSLT's text with metadata", _ALL_LINES, _has_talks, "iwslt_xml"),
    _Evidence("a treebank in CoNLL-U", (*_ALL_LINES, "iwslt_xml"), _is_conllu, "conllu"),
    _Evidence("sentiment trees", ("brackets",), _is_sentiment, "sst", is_certain=False),
    _Evidence("trees in brackets", (*_LINES, "texts", "texts_of_trees", "iwslt_xml"), _are_trees, "brackets", is_certain=False),
    _Evidence("JSON", (*_LINES, "iwslt_xml"), _are_objects, is_certain=False),
)


def check_text(block: bytes, name: str, reading: Reading) -> None:
    """Raise UserError if the first block of a file shows that it is not text, or not what this reader reads.

    Warn if it may be something else.
    """
    for magic, what, remedy in _BYTES:
        if re.match(magic, block):
            raise UserError(f"{name} is {what}, but must be text; {remedy}")
    if block.count(0) > _MOST_NULS * len(block):
        raise UserError(f"{name} has bytes that are 0, so it is in UTF-16 or not text; convert the file to UTF-8")
    evidence = [one for one in _TEXT if reading in one.readings]
    lines = _lines(block) if evidence else []
    for one in evidence if lines else ():
        if one.seen(lines):
            of_job = one.format and reading not in ("lines", "texts", "texts_of_trees", "bytes")
            remedy = f"set format={one.format}" if of_job else _EXTRACT
            if reading == "texts_of_trees" and one.format == "brackets":
                remedy = "give the trees as trees=FILE"
            if one.is_certain:
                expected = "IWSLT's files" if reading == "iwslt_xml" else "lines of text"
                raise UserError(f"{name}: expected {expected}, but found {one.what}: {quoted(lines[0][:_SHOWN])}; {remedy}")
            meant = "trees whose labels are numbers" if reading == "brackets" else "plain text"
            warn_once(f"{name} looks like {one.what}: {quoted(lines[0][:_SHOWN])}; the command reads {meant}, or {remedy}")
            return


def _lines(block: bytes) -> list[str]:
    """Return the lines at the beginning of a block that are not empty; a last one that is cut off only if it is alone."""
    lines = block[:_LOOKED_AT].decode("utf-8-sig", "replace").split("\n")
    if len(lines) > 1 and len(block) > _LOOKED_AT:
        lines.pop()
    return [line for line in map(str.strip, lines) if line]


def refuse_pipes(paths: Iterable[AnyPath]) -> None:
    """Raise UserError for an input that can be read only once."""
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(
                f"{path} is a pipe or device, but the command reads its input more than once; write it to a file first"
            )


def _open(path: AnyPath) -> IO[bytes]:
    try:
        return open_input(path)
    except OSError as error:
        raise cannot_read(path, error) from None


def text_blocks(path: AnyPath, reading: Reading = "any") -> Generator[bytes, None, None]:
    """Read a file in blocks of whole lines; a compressed one is unpacked. `reading` is how the caller reads the text.

    Raises UserError if the file cannot be read, and if it is plainly something else.
    """
    with _open(path) as file:
        yield from checked(whole_lines(file, str(path)), str(path), reading)


def whole_lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Read the rest of an open file in blocks that end at a line end. Decoding many lines at once is far faster.

    Raises UserError if the reading fails, and for a line of more than 64 MiB.
    """
    try:
        while block := file.read(_BLOCK_BYTES):
            block += file.readline(MOST_LINE_BYTES + 1)
            # Only the last line of a block can be long.
            if len(block) > MOST_LINE_BYTES and len(block) - (last := block.rfind(b"\n", 0, -1) + 1) > MOST_LINE_BYTES:
                yield block[:last]
                raise UserError(f"{name} has a line of more than {MOST_LINE_BYTES >> 20} MiB; split the text into lines")
            yield block
    except OSError as error:
        raise cannot_read(name, error) from None


def checked(blocks: Iterator[bytes], name: str, reading: Reading) -> Iterator[bytes]:
    """Return the blocks of a file. Raises UserError if the first one shows that the file is plainly something else."""
    if (first := next(blocks, None)) is not None:
        check_text(first, name, reading)
        yield first
        yield from blocks


def decoded_lines(blocks: Iterable[bytes], name: str, number: int = 1, *, stripped: bool = True) -> Iterator[str]:
    """Return the lines of blocks of whole lines, without line ends or outer white space. `number` is that of the first line.

    Lines that are not `stripped` keep their outer white space.

    Raises UserError with file and line number on invalid UTF-8, after the lines before it.
    """
    for block in blocks:
        if number == 1:
            block = block.removeprefix(UTF8_BOM)
        bad: UnicodeDecodeError | None = None
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            bad, begin = error, block.rfind(b"\n", 0, error.start) + 1
            text = block[:begin].decode("utf-8")
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        yield from map(str.strip, lines) if stripped else (line.removesuffix("\r") for line in lines)
        number += len(lines)
        if bad is not None:
            raise UserError(
                f"{name}, line {number}: not valid UTF-8 (byte {block[bad.start]:#04x} at column {bad.start - begin + 1}); "
                "convert the file to UTF-8"
            )


def read_lines(paths: Sequence[AnyPath], reading: Reading = "lines") -> Iterator[str]:
    """Read lines of several files one after the other, without line ends or outer white space.

    Compressed files are unpacked. Raises UserError with file and line number on invalid UTF-8, and for a file that plainly holds
    something else than lines of text.
    """
    for path in paths:
        yield from decoded_lines(text_blocks(path, reading), str(path))


def has_markup(path: AnyPath) -> bool:
    """Return whether a file, not a pipe, has segments in XML, or IWSLT's text with metadata."""
    if not path.is_file():
        return False
    with _open(path) as file:
        lines = _lines(next(whole_lines(file, str(path)), b""))
    return bool(lines) and (_has_segments(lines) or _has_talks(lines))


def read_byte_lines(path: AnyPath, reading: Reading = "bytes") -> Iterator[bytes]:
    """Read lines of one file as bytes without line ends. The caller handles lines that are not UTF-8.

    A compressed file is unpacked. Raises UserError if the file cannot be read.
    """
    first = True
    for block in text_blocks(path, reading):
        lines = (block.removeprefix(UTF8_BOM) if first else block).split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield from lines
        first = False


def read_texts(
    paths: Sequence[AnyPath], reading: Reading = "any", *, stripped: bool = True
) -> Iterator[tuple[str, Iterator[str]]]:
    """Return (name, lines as `decoded_lines` gives them) of every text.

    A path is a file, a folder, an archive, or a folder in one (`a.tar.gz/wsj/02`).

    The files below a folder or in an archive are sorted by name, without hidden ones. The requested part of an archive is held in
    memory, because an archive can only be read from front to back.
    """
    for path in paths:
        archive = next((p for p in (path, *(path.parents if isinstance(path, Path) else ())) if is_archive(p)), None)
        if archive is not None:
            for name, content in members(archive, path.relative_to(str(archive)).as_posix() if isinstance(path, Path) else "."):
                blocks = whole_lines(io.BytesIO(content), name)
                yield name, decoded_lines(checked(blocks, name, reading), name, stripped=stripped)
        elif path.is_dir():
            if isinstance(path, RemotePath):
                raise UserError(f"{path} is a folder of an object store; pack it as one .tar.gz, or name its files")
            for file in files_below(path):
                yield str(file), decoded_lines(text_blocks(file, reading), str(file), stripped=stripped)
        else:
            _open(path).close()  # a caller may stop before the end
            yield str(path), decoded_lines(text_blocks(path, reading), str(path), stripped=stripped)


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted by name. A warning counts what is left out."""

    def refuse(error: OSError) -> None:
        raise cannot_read(error.filename, error)

    left_out: Counter[str] = Counter()
    files = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        left_out["links to folders"] += sum(Path(place, name).is_symlink() for name in folders)
        for path in (Path(place, name) for name in names):
            if not path.is_file():
                left_out["links to nothing" if path.is_symlink() else "devices or pipes"] += 1
            elif is_hidden(path.relative_to(folder)):
                left_out["hidden files"] += 1
            else:
                files.append(path)
    if not files:
        raise UserError(f"{folder} holds no files")
    say_left_out(folder, left_out)
    return sorted(files)


def join_names(paths: Sequence[AnyPath]) -> str:
    return " + ".join(map(str, paths))


def pair_up(
    left: Iterator[Item], right: Iterator[Other], left_name: str, right_name: str, unit: str = "lines"
) -> Iterator[tuple[Item, Other]]:
    """Yield items of both sides together; neither side yields None. Raises UserError with both counts if one ends early."""
    for number, (a, b) in enumerate(zip_longest(left, right)):
        if a is None or b is None:
            longer = number + 1 + sum(1 for _ in (right if a is None else left))
            counts = (number, longer) if a is None else (longer, number)
            raise unequal(left_name, counts[0], right_name, counts[1], unit)
        yield a, b


def pair_up_files(
    read_left: Callable[[Sequence[AnyPath]], Iterator[Item]],
    left: Sequence[AnyPath],
    read_right: Callable[[Sequence[AnyPath]], Iterator[Other]],
    right: Sequence[AnyPath],
    unit: str = "lines",
) -> Iterator[tuple[Item, Other]]:
    """Yield the pairs of the items of several files a side, as `pair_up` does.

    Warn at the end if both sides have as many files, but these do not end together.
    """
    if not 1 < len(left) == len(right):
        yield from pair_up(read_left(left), read_right(right), join_names(left), join_names(right), unit)
        return
    number = 0
    ends: tuple[list[int], list[int]] = [], []

    def noted(read: Callable[[Sequence[AnyPath]], Iterator], paths: Sequence[AnyPath], ends: list[int]) -> Iterator:
        for path in paths:
            yield from read([path])
            ends.append(number)

    sides = noted(read_left, left, ends[0]), noted(read_right, right, ends[1])
    for pair in pair_up(*sides, join_names(left), join_names(right), unit):
        number += 1
        yield pair
    lines = [[end - begin for begin, end in pairwise([0, *one])] for one in ends]
    warn_of_file_ends(list(zip(map(str, left), lines[0], strict=True)), list(zip(map(str, right), lines[1], strict=True)), unit)


def warn_of_file_ends(left: Sequence[tuple[str, int]], right: Sequence[tuple[str, int]], unit: str = "lines") -> None:
    """Warn if both sides have as many files, but one is longer than the file beside it. Files are given by name and length."""
    for (name, count), (other, other_count) in zip(left, right, strict=True) if len(left) == len(right) else ():
        if count != other_count:
            warn_once(f"{name} has {count} {unit}, but {other} has {other_count}; their pairs go over the ends of files")
            return


def unequal(left_name: str, left: int, right_name: str, right: int, unit: str = "lines") -> UserError:
    """Return the error for two sides of different lengths."""
    return UserError(f"{left_name} has {left} {unit}, but {right_name} has {right}; parallel files must have the same number")
