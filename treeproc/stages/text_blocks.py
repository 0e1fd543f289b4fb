"""Parts of the text stage: they check blocks of lines, gather keys and write shards, in this process or in tasks of Ray.

Parts leave their results in a work folder, on disk or in an object store. Each is a function of the inputs and settings alone. So
a killed part runs again, and a finished part does not.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from treeproc.common.cache import local_copy
from treeproc.common.files import MADE_AGAIN, atomic_output, atomic_write, create, json_bytes, read_json, temporary_beside
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath, open_seekable
from treeproc.common.store_requests import StoreRefuses, in_parallel
from treeproc.readers.line_ranges import FilesChanged
from treeproc.shards.schema import FULL_TEXT_SCHEMA, select
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, finished_shard, write_shard
from treeproc.stages.cut_inputs import ReadRange, mark_of, range_of
from treeproc.stages.filters import FilterConfig, drop_reason
from treeproc.stages.inputs import Inputs
from treeproc.stages.job_report import tab_separated
from treeproc.stages.keys import (
    BEYOND,
    KEY_BYTES,
    KEY_TYPE,
    BeyondKeys,
    duplicates_of,
    example_key,
    key_of,
    keys_file,
    normalised,
    number_of_partitions,
    places_in,
    read_part,
    write_parts,
)
from treeproc.stages.text_warnings import TextNotices, Wanted

logger = logging.getLogger(__name__)

# Sets of keys of all splits but train, as files of the work folder.
OVERLAP, NEAR = "overlap", "near"
_ROWS_AT_ONCE = 10_000
_REPORT_EVERY = 1_000_000
_UNLABELLED = -1


class CheckBlock:
    """Checks the lines of a block, and leaves the keys of its examples, and their columns that no key covers.

    Returns the number of examples, or the message about the first bad line. It leaves the keys of train by partition too where
    duplicates are looked for, and of other splits the keys that examples of train may not have. `partitions` is None if a block
    is a whole split.
    """

    def __init__(self, work: AnyPath, inputs: Inputs, filters: FilterConfig, partitions: int | None):
        self._work, self._inputs, self._filters, self._partitions = work, inputs, filters, partitions
        self._read = ReadRange(inputs)

    def __call__(self, range: Mapping) -> dict:
        part = range_of(range)
        keys, known, near = bytearray(), bytearray(), bytearray()
        collect = self._filters.drop_overlap if part.split != "train" else "none"
        names = self._inputs.columns_beyond_key()
        with atomic_output(keys_file(self._work, part.number, BEYOND)) if names else nullcontext() as file:
            beyond = None if file is None else BeyondKeys(file, names, part.first_id)
            try:
                rows = self._read(part)
                while some := list(islice(rows, _ROWS_AT_ONCE)):
                    found = [example_key(row) for row in some]
                    keys += b"".join(found)
                    if beyond:
                        beyond.write(some)
                    if collect != "none":
                        known += b"".join(found if collect == "example" else (key_of(row["source"]) for row in some))
                    if part.split != "train":
                        near += b"".join(key_of(text) for text in normalised([row["source"] for row in some]) if text)
                    if not part.source and len(keys) % (KEY_BYTES * _REPORT_EVERY) == 0:
                        logger.info("checked %s examples of %s", f"{len(keys) // KEY_BYTES:,}", part.split)
                if not part.source and not keys:
                    raise self._inputs.no_example(part.split)
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
                write_parts(file, keys, self._partitions or number_of_partitions(len(keys) // KEY_BYTES))
        result = {"examples": len(keys) // KEY_BYTES} | ({"marks": beyond.marks} if beyond else {})
        atomic_write(keys_file(self._work, part.number, "json"), json_bytes(result))
        return result


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
            found = np.unique(np.frombuffer(b"".join(in_parallel(lambda file: file.read_bytes(), files)), KEY_TYPE))
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
    local = local_copy(path, read_json(mark_of(path), MADE_AGAIN, needed=["sha256"])["sha256"])
    return np.asarray(np.memmap(local, dtype, mode="r")) if local.stat().st_size else np.zeros(0, dtype)


class SeenKeys:
    """The gathered keys, memory-mapped. Every answer is the places of the rows that it holds for."""

    def __init__(self, work: AnyPath, splits: Collection[str], filters: FilterConfig, partitions: int):
        self._by_example = filters.drop_overlap == "example"
        has_train = "train" in splits
        kinds = (OVERLAP, NEAR) if has_train and len(splits) > 1 else ()
        self._sets = {kind: _mapped(gathered_file(work, kind), KEY_TYPE) for kind in kinds}
        count = partitions if has_train and filters.drop_duplicates else 0
        files = [gathered_file(work, "duplicates", number) for number in range(count)]
        self._duplicates = list(in_parallel(lambda path: _mapped(path, "int64"), files))

    def overlaps(self, rows: Sequence[dict]) -> list[int]:
        """Find the rows whose source, or all of it, stands in another split, as `drop_overlap` says."""
        known = self._sets.get(OVERLAP, np.empty(0))
        keys = [example_key(row) if self._by_example else key_of(row["source"]) for row in rows] if len(known) else []
        return places_in(keys, known)

    def duplicates(self, rows: Sequence[dict]) -> list[int]:
        """Find the rows that an earlier example of train equals."""
        if not rows:
            return []
        ids = np.fromiter((row["example_id"] for row in rows), np.int64, len(rows))
        parts = [found[slice(*np.searchsorted(found, [ids[0], ids[-1] + 1]))] for found in self._duplicates]
        return np.flatnonzero(np.isin(ids, np.concatenate(parts))).tolist()

    def near_copies(self, rows: Sequence[dict]) -> list[int]:
        """Find the rows whose source is nearly that of an example of another split."""
        known = self._sets.get(NEAR, np.empty(0))
        if not len(known) or not rows:
            return []
        # A line without letters and digits is like every other such, and is no copy.
        lines = [(place, line) for place, line in enumerate(normalised([row["source"] for row in rows])) if line]
        return [lines[at][0] for at in places_in([key_of(line) for _, line in lines], known)]


class Filtered(NamedTuple):
    """Rows that stay, counts, (example_id, reason) of dropped rows, places of rows that are leaks but stay."""

    rows: list[dict]
    counts: Counter
    dropped: list[tuple[int, str]]
    leaks: Sequence[int]


@dataclass(frozen=True)
class ShardFilter:
    """Filters and classes of the examples of a shard. With `has_pairs`, a sentence is dropped with the other one of its pair."""

    filters: FilterConfig
    tags: Collection[str]  # of lines
    labels: Mapping[int, int] | None
    seen: SeenKeys
    has_pairs: bool

    def __call__(self, examples: Iterable[dict], split: str) -> Filtered:
        rows: list[dict] = []
        dropped: list[tuple[int, str]] = []
        for row in examples:
            if reason := self._reason(row, split):
                dropped.append((row["example_id"], reason))
            else:
                rows.append(row)
        if self.has_pairs and (others := {number ^ 1: reason for number, reason in dropped}):
            dropped += [(number, others[number]) for row in rows if (number := row["example_id"]) in others]
            rows = [row for row in rows if row["example_id"] not in others]
        leaks: Sequence[int] = ()
        if split == "train":
            if self.filters.drop_overlap != "none":
                rows = _without(rows, self.seen.overlaps(rows), "overlap", dropped)
            if self.filters.drop_duplicates:
                rows = _without(rows, self.seen.duplicates(rows), "duplicate", dropped)
            leaks = self.seen.near_copies(rows)
            if self.filters.drop_leaks:
                rows, leaks = _without(rows, leaks, "leak", dropped), ()
        dropped.sort()
        counts = Counter(f"dropped.{reason}" for _, reason in dropped)
        for row in rows if rows and "label" in rows[0] else ():
            self._relabel(row)
            counts[f"class.{row['label']}"] += 1
        return Filtered(rows, counts, dropped, leaks)

    def _reason(self, row: dict, split: str) -> str | None:
        if reason := drop_reason(row["source"], row.get("target"), split, self.filters, self.tags):
            return reason
        return f"label_{row['label']}" if self.labels is not None and row["label"] not in self.labels else None

    def _relabel(self, row: dict) -> None:
        if self.labels is not None:
            row["label"] = self.labels[row["label"]]
            for name in ("node_labels", "leaf_labels"):
                if name in row:
                    row[name] = [self.labels.get(value, _UNLABELLED) for value in row[name]]


def _without(rows: list[dict], places: Sequence[int], reason: str, dropped: list[tuple[int, str]]) -> list[dict]:
    """Return the rows at other places; those at these are added to `dropped`."""
    if not len(places):
        return rows
    gone = set(places)
    dropped += [(rows[place]["example_id"], reason) for place in gone]
    return [row for place, row in enumerate(rows) if place not in gone]


def _write_notes(path: AnyPath, notices: dict, dropped: bytes) -> None:
    """Write the notes about a shard: what `TextNotices.parts` gives, and its part of the list of dropped lines.

    The file is complete or not there. It is not synced. If a crash of the machine damages it, its shard is read again.
    Raises UserError when the disk refuses.
    """
    content = json.dumps({"notices": notices, "sha256": hashlib.sha256(dropped).hexdigest()}).encode() + b"\n" + dropped
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    try:
        with create(temporary := temporary_beside(path)) as file:
            file.write(content)
            file.flush()
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free space, then run the same command again") from None


def read_notes(path: AnyPath) -> tuple[dict, bytes] | None:
    """Read what `_write_notes` wrote; None if there are no notes, or damaged ones."""
    try:
        head, _, dropped = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        return (facts["notices"], dropped) if facts["sha256"] == hashlib.sha256(dropped).hexdigest() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class WriteText:
    """Ranges of lines to text shards; the notes of a shard are left in the folder `parts` before it."""

    def __init__(
        self, folder: AnyPath, parts: AnyPath, work: AnyPath, inputs: Inputs, filters: FilterConfig, partitions: int,
        wanted: Mapping[str, Wanted], fingerprint: str, tags: Collection[str],
    ):  # fmt: skip
        self._folder, self._parts, self._inputs, self._fingerprint = folder, parts, inputs, fingerprint
        self._read = ReadRange(inputs)
        seen = SeenKeys(work, inputs.splits, filters, partitions)
        self._choose = ShardFilter(filters, tags, inputs.labels, seen, inputs.form.has_pairs)
        # Languages are looked at in a sample of all lines, which no shard knows.
        self._wanted = {side: one._replace(language=None) for side, one in wanted.items()}
        self._schema = select(FULL_TEXT_SCHEMA, inputs.columns())

    def __call__(self, shards: Sequence[dict]) -> list[ShardRecord]:
        """Write the shards, each given by name, index and range. Returns their records."""
        return [self._write(**shard) for shard in shards]

    def _write(self, name: str, index: int, range: Mapping) -> ShardRecord:
        part = range_of(range)
        chosen = self._choose(self._read(part), part.split)
        if part.examples not in (None, len(chosen.rows) + len(chosen.dropped)):
            raise FilesChanged(f"splits.{part.split}: the files changed while they were read; run the same command again")
        notices = TextNotices(self._wanted, self._inputs.line)
        notices.tell(part.split, chosen.rows, chosen.leaks)
        dropped = ((part.split, self._inputs.line(part.split, number), reason) for number, reason in chosen.dropped)
        _write_notes(self._parts / name, notices.parts(part.split), tab_separated(dropped))
        return finished_shard(self._folder, name, self._fingerprint) or write_shard(
            self._folder, name, chosen.rows, self._schema,
            split=part.split, index=index, fingerprint=self._fingerprint, counts=chosen.counts,
        )  # fmt: skip


class ReadLines:
    """Reads lines of text shards: their `example_id`, and the lines of each side."""

    def __init__(self, folder: AnyPath, sides: Sequence[str]):
        self._folder, self._sides = folder, sides

    def __call__(self, shards: Sequence[tuple[ShardRecord, Sequence[int]]]) -> list[dict]:
        """Read the lines at the places of each shard, which is given by its record."""
        opened = ((Shard(self._folder, record), places) for record, places in shards)
        rows = (shard.row(place) for shard, places in opened for place in places)
        return [{name: row[name] for name in ("example_id", *self._sides)} for row in rows]
