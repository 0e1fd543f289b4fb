"""Lists of lines beside the shards, in tab-separated files: dropped lines, and lines that were not parsed in full."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from treeproc.common.files import atomic_output, file_sha256
from treeproc.common.storage import AnyPath
from treeproc.parsers.config import is_fallback
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord

DROPPED = "dropped.tsv"
FALLBACKS = "fallbacks.tsv"
_STATUS_COLUMNS = {"source": "parse_status", "target": "target_parse_status"}
_STATUS_COUNTS = ("status.", "target_status.")


class LineList:
    """A list that is being written."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, rows: Iterable[tuple]) -> None:
        """Write one line a row."""
        self._file.write(tab_separated(rows))

    def extend(self, content: bytes) -> None:
        """Write rows as `tab_separated` gives them."""
        self._file.write(content)


def tab_separated(rows: Iterable[tuple]) -> bytes:
    """Return one line a row."""
    return "".join("\t".join(map(str, row)) + "\n" for row in rows).encode()


@contextmanager
def line_list(path: AnyPath, *columns: str) -> Iterator[LineList]:
    """Open a list with a header, complete or not at all. Raises UserError when the disk refuses."""
    with atomic_output(path) as file:
        lines = LineList(file)
        lines.write([columns])
        yield lines


def has_files(folder: AnyPath, index: dict) -> bool:
    """Return whether the lists that an index names are there and complete. An index of an earlier version names none."""
    return all(
        (path := folder / name).exists() and file_sha256(path) == sha256 for name, sha256 in index.get("files", {}).items()
    )


def write_fallbacks(folder: AnyPath, records: Sequence[ShardRecord], line: Callable[[str, int], int]) -> dict[str, str]:
    """List the lines of a parsed stage that no parser could analyse, with side and `parse_status`; returns name and hash.

    `line(split, example_id)` is the number of a line. Lines for which no parser was asked are not listed. Only shards that
    have something to list are read, one at a time.
    """
    with line_list(folder / FALLBACKS, "split", "line", "side", "parse_status") as lines:
        for record in records:
            if any(is_fallback(name.partition("status.")[2]) for name in record.counts if name.startswith(_STATUS_COUNTS)):
                lines.write((record.split, line(record.split, number), *rest) for number, *rest in _fallbacks(folder, record))
    return {FALLBACKS: file_sha256(folder / FALLBACKS)}


def _fallbacks(folder: AnyPath, record: ShardRecord) -> Iterator[tuple[int, str, str]]:
    """Yield (example_id, side, parse_status) of every line of a shard that has a fallback."""
    for views in Shard(folder, record).columns:
        sides = {side: views[name].to_pylist() for side, name in _STATUS_COLUMNS.items() if name in views}
        for row, number in enumerate(views["example_id"].tolist()):
            for side, statuses in sides.items():
                if is_fallback(statuses[row]):
                    yield number, side, statuses[row]
