"""Inputs to text shards, in two passes that hold no example: check, count and find duplicates; then filter and write."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from treeproc.common.settings import Settings, UserError
from treeproc.common.storage import AnyPath, DataPath
from treeproc.readers import FORMATS, read_rows
from treeproc.readers.numbered_lines import refuse_pipes
from treeproc.shards.schema import FULL_TEXT_SCHEMA, select, shard_name
from treeproc.shards.store import ShardRecord, finished_shard, write_shard
from treeproc.stages.filters import FilterConfig, drop_reason
from treeproc.stages.leaks import NearCopies, normalised
from treeproc.stages.line_lists import LineList
from treeproc.stages.notices import TextNotices

logger = logging.getLogger(__name__)

UNLABELLED = -1
_EMPTY_KEY = hashlib.blake2b(digest_size=16)
_REPORT_EVERY = 1_000_000


class SplitFiles(Settings):
    """One split: files of a side are read one after the other."""

    source: list[DataPath] = Field([], description="files of the source side, plain or .gz; some formats: folders, .tar.gz")
    target: list[DataPath] = Field([], description="files of the target side, for formats that have one")
    hold_out: int | None = Field(None, ge=2, description="instead of files: every n-th example of train, which train then lacks")

    @model_validator(mode="after")
    def _one_origin(self):
        if bool(self.source) == (self.hold_out is not None) or (self.target and not self.source):
            raise ValueError("must have either source files or hold_out")
        return self


@dataclass(frozen=True)
class Inputs:
    """The inputs of the text stage: the files of all splits, and their format."""

    splits: Mapping[str, SplitFiles]
    format: str
    tokenized: str
    labels: Mapping[int, int] | None  # class in the file -> class of the data set; examples of others are dropped

    def columns(self) -> tuple[str, ...]:
        """Columns of the text shards beside `example_id`."""
        form, tokenized = FORMATS[self.format], ("words",) if self.tokenized == "moses" else ()
        target = ("target",) if any(files.target for files in self.splits.values()) else ()
        names = {"source", *form.columns, *tokenized, *target}
        return tuple(name for name in FULL_TEXT_SCHEMA.names if name in names)

    def rows(self, split: str) -> Iterator[dict]:
        """The examples of a split in order, without `example_id`. Raises UserError on bad input."""
        stride = next((files.hold_out for files in self.splits.values() if files.hold_out), None)
        files = self.splits[split if self.splits[split].source else "train"]
        rows = read_rows(self.format, files.source, files.target, self.tokenized)
        if stride and self.splits[split].hold_out:
            return islice(rows, stride - 1, None, stride)
        if stride and split == "train":
            return (row for number, row in enumerate(rows, start=1) if number % stride)
        return rows

    def line(self, split: str, example_id: int) -> int:
        """The number, from 1, of an example over the files that its split is read from; of line by line formats, of its line."""
        stride = next((files.hold_out for files in self.splits.values() if files.hold_out), None)
        if stride is None or split not in ("train", "valid"):
            return example_id + 1
        return (example_id + 1) * stride if split == "valid" else example_id + example_id // (stride - 1) + 1


@dataclass
class Scan:
    """The result of the first pass over a split."""

    count: int
    digest: str
    duplicates: np.ndarray | None = None  # one bool per example: equal to an earlier one
    sources: set[bytes] = field(default_factory=set)  # keys that training examples may not have
    near: NearCopies = field(default_factory=NearCopies)  # of the sources of valid and test


def _key(text: str) -> bytes:
    state = _EMPTY_KEY.copy()  # far cheaper than a new one
    state.update(text.encode())
    return state.digest()


def _example_key(row: dict) -> bytes:
    """The key of what a model sees and answers: both sides, or text and label."""
    return _key(f"{row['source']}\n{row.get('target', '')}\n{row.get('label', '')}")


def scan(inputs: Inputs, filters: FilterConfig) -> dict[str, Scan]:
    """The first pass over every split: number of examples, hash of their content, duplicates, keys of valid and test.

    It holds 16 bytes per training example when duplicates are dropped, and keys of valid and test.
    Raises UserError on bad input and for a split without examples.
    """
    refuse_pipes(path for files in inputs.splits.values() for path in (*files.source, *files.target))
    return {split: _scan_split(inputs, split, filters) for split in inputs.splits}


def _scan_split(inputs: Inputs, split: str, filters: FilterConfig) -> Scan:
    keep = filters.drop_duplicates and split == "train"
    collect = filters.drop_overlap if split != "train" else "none"
    # Moses words follow from the source, all other columns from the file alone.
    known_by_key = {"source", "target", "label", *(("words",) if inputs.tokenized == "moses" else ())}
    beyond_key = [name for name in inputs.columns() if name not in known_by_key]
    digest, keys, known, near, count = hashlib.sha256(), bytearray(), set(), NearCopies(), 0
    for count, row in enumerate(inputs.rows(split), start=1):
        key = _example_key(row)
        keys += key
        if beyond_key:
            digest.update(json.dumps([row[name] for name in beyond_key], separators=(",", ":")).encode())
        if collect != "none":
            known.add(key if collect == "example" else _key(row["source"]))
        if split != "train":
            near.add(row["source"])
        if not keep and len(keys) >= 1 << 20:
            digest.update(keys)
            keys.clear()
        if count % _REPORT_EVERY == 0:
            logger.info("checked %s examples of %s", f"{count:,}", split)
    if not count:
        files = inputs.splits[split]
        names = " and ".join(" + ".join(map(str, side)) for side in (files.source, files.target) if side)
        what = f"no example of format {inputs.format} in {names}" if names else f"splits.{split}: hold_out leaves nothing"
        raise UserError(f"{what}; at least one is needed")
    digest.update(keys)
    return Scan(count, digest.hexdigest(), later_duplicates(keys) if keep else None, known, near)


def later_duplicates(keys: bytes | bytearray) -> np.ndarray:
    """Whether an earlier key is equal, for every key of 16 bytes. 10 million take about half a GB for a moment."""
    halves = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in the order of the input
    duplicate = np.zeros(len(order), dtype=bool)
    equal = (halves[order[1:], 0] == halves[order[:-1], 0]) & (halves[order[1:], 1] == halves[order[:-1], 1])
    duplicate[order[1:][equal]] = True
    return duplicate


@dataclass(frozen=True)
class TextWriter:
    """The second pass: examples that stay, as text shards. A shard covers a fixed range of examples of the input."""

    folder: AnyPath
    inputs: Inputs
    filters: FilterConfig
    scans: Mapping[str, Scan]
    rows_per_shard: PositiveInt
    fingerprint: str
    notices: TextNotices = field(default_factory=TextNotices)
    dropped: LineList | None = None

    def write(self, split: str) -> Iterator[ShardRecord]:
        """The records of all shards of a split; those that are finished are not written again."""
        schema = select(FULL_TEXT_SCHEMA, self.inputs.columns())
        count = self.scans[split].count
        num_shards = -(-count // self.rows_per_shard)
        examples = enumerate(self.inputs.rows(split))
        for index in range(num_shards):
            name = shard_name(split, index, num_shards)
            size = min(self.rows_per_shard, count - index * self.rows_per_shard)
            rows, counts, dropped = self._filter(islice(examples, size), split)
            if len(rows) + len(dropped) != size:
                raise UserError(f"splits.{split}: the files changed while they were read; run the same command again")
            # Of finished shards too: the notices about all lines are not in the shards.
            self._tell(split, rows, dropped)
            yield finished_shard(self.folder, name, self.fingerprint) or write_shard(
                self.folder, name, rows, schema, split=split, index=index, fingerprint=self.fingerprint, counts=counts
            )

    def _filter(self, examples: Iterable[tuple[int, dict]], split: str) -> tuple[list[dict], Counter, list[tuple[int, str]]]:
        """Rows that stay, counts, and (example_id, reason) of those that do not."""
        rows: list[dict] = []
        dropped: list[tuple[int, str]] = []
        for example_id, row in examples:
            if reason := self._reason(example_id, row, split):
                dropped.append((example_id, reason))
                continue
            row["example_id"] = example_id
            rows.append(row)
        if self.filters.drop_leaks and (leaks := set(self._leaks(split, rows))):
            dropped = sorted([*dropped, *((rows[place]["example_id"], "leak") for place in leaks)])
            rows = [row for place, row in enumerate(rows) if place not in leaks]
        counts = Counter(f"dropped.{reason}" for _, reason in dropped)
        for row in rows if rows and "label" in rows[0] else ():
            self._relabel(row)
            counts[f"class.{row['label']}"] += 1
        return rows, counts, dropped

    def _leaks(self, split: str, rows: Sequence[dict]) -> list[int]:
        """Places of training examples whose source is nearly that of an example of valid or test."""
        others = [scan.near for name, scan in self.scans.items() if name != "train"]
        if split != "train" or not others:
            return []
        lines = normalised([row["source"] for row in rows])
        return sorted({place for near in others for place in near.find(lines)})

    def _tell(self, split: str, rows: Sequence[dict], dropped: Iterable[tuple[int, str]]) -> None:
        """Note what stands in the lines that stay, and list those that do not."""
        for side in self.notices.wanted if rows else ():
            self.notices.add(split, side, rows)
        if not self.filters.drop_leaks:
            self.notices.add_leaks(split, [rows[place] for place in self._leaks(split, rows)])
        if self.dropped is not None:
            self.dropped.write((split, self.inputs.line(split, example_id), reason) for example_id, reason in dropped)

    def _reason(self, example_id: int, row: dict, split: str) -> str | None:
        if reason := drop_reason(row["source"], row.get("target"), split, self.filters):
            return reason
        if self.inputs.labels is not None and row["label"] not in self.inputs.labels:
            return f"label_{row['label']}"
        if split != "train":
            return None
        if self.filters.drop_overlap != "none":
            key = _example_key(row) if self.filters.drop_overlap == "example" else _key(row["source"])
            if any(key in scan.sources for scan in self.scans.values()):
                return "overlap"
        duplicates = self.scans[split].duplicates
        return "duplicate" if duplicates is not None and duplicates[example_id] else None

    def _relabel(self, row: dict) -> None:
        labels = self.inputs.labels
        if labels is not None:
            row["label"] = labels[row["label"]]
            for name in ("node_labels", "leaf_labels"):
                if name in row:
                    row[name] = [labels.get(value, UNLABELLED) for value in row[name]]
