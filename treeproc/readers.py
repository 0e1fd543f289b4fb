"""Files to sentences. Lines end at `\\n` alone: no other Unicode line separator may shift a pair."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from treeproc.settings import UserError

_UTF8_BOM = b"\xef\xbb\xbf"


def _open(path: Path) -> IO[bytes]:
    try:
        return gzip.open(path.open("rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _raw_lines(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        try:
            # Binary files iterate over b"\n" alone.
            yield from file
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read {path}: {error}") from None


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Lines of several files one after the other, without line ends or outer white space.

    `.gz` files are decompressed. Raises UserError with file and line number on invalid UTF-8.
    """
    for path in paths:
        for number, raw in enumerate(_raw_lines(path), start=1):
            if number == 1:
                raw = raw.removeprefix(_UTF8_BOM)
            try:
                yield raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: not valid UTF-8 (byte {raw[error.start]:#04x} at column {error.start + 1}); "
                    "convert the file to UTF-8"
                ) from None


def count_lines(paths: Sequence[Path]) -> tuple[int, str]:
    """Number of lines and a hash of them. Raises UserError as `read_lines` does."""
    count, digest = 0, hashlib.sha256()
    for line in read_lines(paths):
        digest.update(line.encode())
        digest.update(b"\n")
        count += 1
    return count, digest.hexdigest()


def check_parallel(source: Sequence[Path], target: Sequence[Path]) -> tuple[int, str]:
    """Number of pairs and a hash of their text.

    Raises UserError when the sides differ in length, are empty, pipes, or not readable UTF-8.
    """
    for path in (*source, *target):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is a pipe or device, but input is read more than once; write it to a file first")
    (num_source, source_hash), (num_target, target_hash) = count_lines(source), count_lines(target)
    names = [" + ".join(str(path) for path in paths) for paths in (source, target)]
    if num_source != num_target:
        raise UserError(f"{names[0]} has {num_source} lines, but {names[1]} has {num_target}; parallel files must have as many")
    if not num_source:
        raise UserError(f"{names[0]} and {names[1]} are empty; at least one pair is needed")
    return num_source, hashlib.sha256(f"{source_hash}{target_hash}".encode()).hexdigest()


def read_pairs(source: Sequence[Path], target: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Pairs of parallel text, checked before by `check_parallel`."""
    return zip(read_lines(source), read_lines(target), strict=True)
