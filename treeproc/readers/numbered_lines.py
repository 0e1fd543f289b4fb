"""Files, folders and archives as numbered lines. Only `\n` ends a line: another Unicode separator must not shift a pair."""

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, TypeVar, cast

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath

UTF8_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 16
MOST_LINE_BYTES = 64 << 20  # a line is held in memory, and a small .gz file may unpack to a very long one
_ARCHIVES = (".tar", ".tar.gz", ".tgz")

Item = TypeVar("Item")


def refuse_pipes(paths: Iterable[Path]) -> None:
    """Raise UserError for an input that can be read only once."""
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(
                f"{path} is a pipe or device, but the command reads its input more than once; write it to a file first"
            )


def _open(path: Path) -> IO[bytes]:
    try:
        file = path.open("rb")
        return cast(IO[bytes], gzip.open(file)) if path.suffix == ".gz" else file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _blocks(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        yield from whole_lines(file, str(path))


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
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {name}: {error}") from None


def decoded_lines(blocks: Iterable[bytes], name: str, number: int = 1) -> Iterator[str]:
    """Return the lines of blocks of whole lines, without line ends or outer white space. `number` is that of the first line.

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
        yield from map(str.strip, lines)
        number += len(lines)
        if bad is not None:
            raise UserError(
                f"{name}, line {number}: not valid UTF-8 (byte {block[bad.start]:#04x} at column {bad.start - begin + 1}); "
                "convert the file to UTF-8"
            )


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Read lines of several files one after the other, without line ends or outer white space.

    `.gz` files are decompressed. Raises UserError with file and line number on invalid UTF-8.
    """
    for path in paths:
        yield from decoded_lines(_blocks(path), str(path))


def read_byte_lines(path: AnyPath) -> Iterator[bytes]:
    """Read lines of one file as bytes without line ends. The caller handles lines that are not UTF-8.

    `.gz` files are decompressed. Raises UserError if the file cannot be read.
    """
    first = True
    for block in _blocks(path):
        lines = (block.removeprefix(UTF8_BOM) if first else block).split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield from lines
        first = False


def read_texts(paths: Sequence[Path]) -> Iterator[tuple[str, Iterator[str]]]:
    """Return (name, lines) of every text. A path is a file, a folder, a tar archive, or a folder in one (`a.tar.gz/wsj/02`).

    The files below a folder or in an archive are sorted by name, without hidden ones. The requested part of an archive is held in
    memory, because an archive can only be read from front to back.
    """
    for path in paths:
        archive = next((p for p in (path, *(path.parents if isinstance(path, Path) else ())) if is_archive(p)), None)
        if archive is not None:
            members = _members(archive, path.relative_to(archive).as_posix() if isinstance(path, Path) else ".")
            yield from ((name, decoded_lines([content], name)) for name, content in members)
        elif path.is_dir():
            if isinstance(path, RemotePath):
                raise UserError(f"{path} is a folder of an object store; pack it as one .tar.gz, or name its files")
            files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not files:
                raise UserError(f"{path} holds no files")
            yield from ((str(file), decoded_lines(_blocks(file), str(file))) for file in files)
        else:
            _open(path).close()  # a caller may stop before the end
            yield str(path), decoded_lines(_blocks(path), str(path))


def is_archive(path: AnyPath) -> bool:
    """Return whether a path is a tar archive, by its name."""
    return path.name.endswith(_ARCHIVES) and path.is_file()


def _members(archive: Path, folder: str) -> list[tuple[str, bytes]]:
    """Return names and contents of the files below `folder` of a tar archive, sorted by name. `.` is the whole archive."""
    found: dict[str, bytes] = {}
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r|*") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                inside = folder == "." or name == folder or name.startswith(f"{folder}/")
                if inside and member.isfile() and not name.rpartition("/")[2].startswith("."):
                    content = tar.extractfile(member).read()
                    found[name] = gzip.decompress(content) if name.endswith(".gz") else content
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {archive}: {error}") from None
    if not found:
        raise UserError(f"{archive} holds no files below {folder}; paths in an archive start at its top folder")
    return [(f"{archive}/{name}", found[name]) for name in sorted(found)]


def join_names(paths: Sequence[Path]) -> str:
    return " + ".join(map(str, paths))


def pair_up(
    left: Iterator[Item], right: Iterator[str], left_name: str, right_name: str, unit: str = "lines"
) -> Iterator[tuple[Item, str]]:
    """Yield items of both sides together; neither side yields None. Raises UserError with both counts if one ends early."""
    for number, (a, b) in enumerate(zip_longest(left, right)):
        if a is None or b is None:
            longer = number + 1 + sum(1 for _ in (right if a is None else left))
            counts = (number, longer) if a is None else (longer, number)
            raise unequal(left_name, counts[0], right_name, counts[1], unit)
        yield a, b


def unequal(left_name: str, left: int, right_name: str, right: int, unit: str = "lines") -> UserError:
    """Return the error for two sides of different lengths."""
    return UserError(f"{left_name} has {left} {unit}, but {right_name} has {right}; parallel files must have the same number")
