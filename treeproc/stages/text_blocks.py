"""The text stage in independent parts: they check blocks of lines, gather keys and write shards.

Parts leave their results in a work folder, on disk or in an object store. Each is a function of the inputs and settings alone. So
a killed part runs again, and a finished part does not.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from treeproc.common.cache import local_copy
from treeproc.common.files import atomic_output, atomic_write, json_bytes, read_json
from treeproc.common.parallel import in_parallel
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, open_seekable
from treeproc.common.store_requests import StoreRefuses
from treeproc.readers import FORMATS, convert_rows
from treeproc.readers.line_ranges import FilesChanged, Piece, read_examples, read_range
from treeproc.shards.schema import FULL_TEXT_SCHEMA, select
from treeproc.shards.store import ShardRecord, finished_shard, write_shard
from treeproc.stages.duplicates import duplicates_of, read_part, write_parts
from treeproc.stages.example_keys import KEY_BYTES, KEY_TYPE, example_key, key_of, places_in, sorted_keys
from treeproc.stages.example_offsets import mark_of
from treeproc.stages.filters import FilterConfig
from treeproc.stages.leaks import normalised
from treeproc.stages.line_lists import tab_separated
from treeproc.stages.shard_warnings import ShardNotes
from treeproc.stages.split_hash import BEYOND, BeyondKeys, keys_file
from treeproc.stages.text import Inputs, dropped_lines, numbered
from treeproc.stages.text_filter import ShardFilter
from treeproc.stages.text_warnings import TextNotices, Wanted

# Sets of keys of all splits but train, as files of the work folder.
OVERLAP, NEAR = "overlap", "near"
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class TextRange:
    """The examples in a range of the lines of a split; its number is unique among the ranges of one step."""

    split: str
    number: int
    start: int  # the first line, from 0, over the files of the split
    first_id: int
    source: Sequence[Piece]
    target: Sequence[Piece]

    def job(self) -> dict:
        """Return the range as JSON, for `range_of`."""
        return {"range": [*asdict(self).values()]}


def range_of(values: Sequence) -> TextRange:
    """Return the range of a `job`."""
    *rest, source, target = values
    return TextRange(*rest, *([Piece(**piece) for piece in side] for side in (source, target)))


def read_rows(inputs: Inputs, part: TextRange) -> Iterator[dict]:
    """Return the examples of a range, as `Inputs.rows` has them, with `example_id`. Raises UserError on bad input."""
    ranges = FORMATS[inputs.format].ranges
    assert ranges is not None  # other formats are not cut
    rows = read_examples(part.source, ranges.read)
    if part.target:
        # As in `pair_up`, the source comes first: of two bad lines the first one is named.
        rows = _with_targets(rows, read_range(part.target))
    rows = convert_rows(rows, inputs.tokenized, inputs.normalization)
    stride = inputs.stride
    if stride is not None and part.split in ("train", "valid"):
        held = part.split == "valid"
        rows = (row for number, row in enumerate(rows, start=part.start + 1) if (number % stride == 0) == held)
    return numbered(rows, part.first_id)


def _with_targets(rows: Iterator[dict], lines: Iterator[str]) -> Iterator[dict]:
    for row, line in zip(rows, lines, strict=True):
        row["target"] = line
        yield row


class CheckBlock:
    """Checks the lines of a block, and leaves the keys of its examples, and their columns that no key covers.

    Returns the number of examples, or the message about the first bad line. It leaves the keys of train by partition too where
    duplicates are looked for, and of other splits the keys that examples of train may not have.
    """

    def __init__(self, work: AnyPath, inputs: Inputs, filters: FilterConfig, partitions: int):
        self._work, self._inputs, self._filters, self._partitions = work, inputs, filters, partitions

    def __call__(self, range: Sequence) -> dict:
        part = range_of(range)
        keys, known, near = bytearray(), bytearray(), bytearray()
        collect = self._filters.drop_overlap if part.split != "train" else "none"
        with self._beyond_keys(part) as beyond:
            try:
                rows = read_rows(self._inputs, part)
                while some := list(islice(rows, _ROWS_AT_ONCE)):
                    found = [example_key(row) for row in some]
                    keys += b"".join(found)
                    if beyond:
                        beyond.write(some)
                    if collect != "none":
                        known += b"".join(found if collect == "example" else (key_of(row["source"]) for row in some))
                    if part.split != "train":
                        near += b"".join(key_of(text) for text in normalised([row["source"] for row in some]) if text)
            except (FilesChanged, StoreRefuses):  # which say nothing about the lines
                raise
            except UserError as error:
                return {"error": str(error)}
        atomic_write(keys_file(self._work, part.number), keys)
        if part.split != "train":
            atomic_write(keys_file(self._work, part.number, OVERLAP), known)
            atomic_write(keys_file(self._work, part.number, NEAR), near)
        elif self._filters.drop_duplicates:
            with atomic_output(keys_file(self._work, part.number, "parts")) as file:
                write_parts(file, keys, self._partitions)
        result = {"examples": len(keys) // KEY_BYTES} | ({"marks": beyond.marks} if beyond else {})
        atomic_write(keys_file(self._work, part.number, "json"), json_bytes(result))
        return result

    @contextmanager
    def _beyond_keys(self, part: TextRange) -> Iterator[BeyondKeys | None]:
        """Yield where the columns go that no key covers, if there are any."""
        if not (names := self._inputs.columns_beyond_key()):
            yield None
            return
        with atomic_output(keys_file(self._work, part.number, BEYOND)) as file:
            yield BeyondKeys(file, names, part.first_id)


class GatherKeys:
    """Brings together the keys of blocks: duplicates of one partition, or a sorted set of keys of all splits but train.

    `blocks` are the ranges of train, `others` the numbers of the other blocks.
    """

    def __init__(self, work: AnyPath, blocks: Sequence[tuple[int, int]], others: Sequence[int], partitions: int):
        self._work, self._blocks, self._others, self._partitions = work, blocks, others, partitions

    def __call__(self, kind: str, partition: int = 0) -> dict:
        if kind == "duplicates":
            parts = list(in_parallel(lambda block: self._read_part(block[0], partition), self._blocks))
            found = duplicates_of(parts, [first for _, first in self._blocks])
        else:
            files = [keys_file(self._work, number, kind) for number in self._others]
            found = sorted_keys(b"".join(in_parallel(lambda file: file.read_bytes(), files)))
        content, path = found.tobytes(), gathered_file(self._work, kind, partition)
        atomic_write(path, content)
        atomic_write(mark_of(path), json_bytes({"sha256": hashlib.sha256(content).hexdigest()}))
        return {}

    def _read_part(self, block: int, partition: int) -> tuple[np.ndarray, np.ndarray]:
        with open_seekable(keys_file(self._work, block, "parts")) as file:
            return read_part(file, partition, self._partitions)


def gathered_file(work: AnyPath, kind: str, partition: int = 0) -> AnyPath:
    """Return a file of gathered keys in the work folder; `mark_of` it has its hash and is written last."""
    return work / f"{kind}-{partition:06d}.gathered"


def _mapped(path: AnyPath, dtype: str) -> np.ndarray:
    """Return the array in a file, which may be empty, or in the copy of an object that the processes of a node share."""
    local = local_copy(path, read_json(mark_of(path))["sha256"])
    return np.asarray(np.memmap(local, dtype, mode="r")) if local.stat().st_size else np.zeros(0, dtype)


class SeenOnDisk:
    """Answers of `Seen` from the gathered keys, which are memory-mapped."""

    def __init__(self, work: AnyPath, splits: Collection[str], filters: FilterConfig, partitions: int):
        self._by_example = filters.drop_overlap == "example"
        has_train = "train" in splits
        kinds = (OVERLAP, NEAR) if has_train and len(splits) > 1 else ()
        self._sets = {kind: _mapped(gathered_file(work, kind), KEY_TYPE) for kind in kinds}
        count = partitions if has_train and filters.drop_duplicates else 0
        files = [gathered_file(work, "duplicates", number) for number in range(count)]
        self._duplicates = list(in_parallel(lambda path: _mapped(path, "int64"), files))

    def overlaps(self, rows: Sequence[dict]) -> list[int]:
        known = self._sets.get(OVERLAP, ())
        keys = [example_key(row) if self._by_example else key_of(row["source"]) for row in rows] if len(known) else []
        return places_in(keys, known) if keys else []

    def duplicates(self, rows: Sequence[dict]) -> list[int]:
        if not rows:
            return []
        ids = np.fromiter((row["example_id"] for row in rows), np.int64, len(rows))
        parts = [found[slice(*np.searchsorted(found, [ids[0], ids[-1] + 1]))] for found in self._duplicates]
        return np.flatnonzero(np.isin(ids, np.concatenate(parts))).tolist()

    def near_copies(self, rows: Sequence[dict]) -> list[int]:
        known = self._sets.get(NEAR, ())
        if not len(known) or not rows:
            return []
        # A line without letters and digits is like every other such, and is no copy.
        lines = [(place, line) for place, line in enumerate(normalised([row["source"] for row in rows])) if line]
        return [lines[at][0] for at in places_in([key_of(line) for _, line in lines], known)]


class WriteText:
    """Ranges of lines to text shards; the notes of a shard are left in the folder `parts` before it."""

    def __init__(
        self, folder: AnyPath, parts: AnyPath, work: AnyPath, inputs: Inputs, filters: FilterConfig, partitions: int,
        wanted: Mapping[str, Wanted], fingerprint: str,
    ):  # fmt: skip
        self._folder, self._parts, self._inputs, self._fingerprint = folder, parts, inputs, fingerprint
        seen = SeenOnDisk(work, inputs.splits, filters, partitions)
        self._choose = ShardFilter(filters, inputs.labels, seen)
        # Languages are looked at in a sample of all lines, which no shard knows.
        self._wanted = {side: Wanted(kinds) for side, (kinds, _) in wanted.items()}
        self._schema = select(FULL_TEXT_SCHEMA, inputs.columns())

    def __call__(self, shards: Sequence[dict]) -> list[dict]:
        """Write the shards, each given by name, index and range. Returns their records."""
        return [asdict(self._write(**shard)) for shard in shards]

    def _write(self, name: str, index: int, range: Sequence) -> ShardRecord:
        part = range_of(range)
        chosen = self._choose(read_rows(self._inputs, part), part.split)
        notices = TextNotices(self._wanted, self._inputs.line)
        notices.tell(part.split, chosen)
        ShardNotes(notices.parts(part.split), tab_separated(dropped_lines(self._inputs, part.split, chosen))).write(
            self._parts, name
        )
        return finished_shard(self._folder, name, self._fingerprint) or write_shard(
            self._folder, name, chosen.rows, self._schema,
            split=part.split, index=index, fingerprint=self._fingerprint, counts=chosen.counts,
        )  # fmt: skip
