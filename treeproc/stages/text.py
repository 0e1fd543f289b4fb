"""Inputs to text shards, in two passes that hold no example: check, count and find duplicates; then filter and write."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from treeproc.common.settings import Settings, UserError
from treeproc.common.storage import AnyPath, DataPath
from treeproc.readers import Format, find_format, read_rows
from treeproc.readers.numbered_lines import refuse_pipes
from treeproc.readers.own_labels import LabelledConfig, find_classes
from treeproc.readers.unicode_form import Normalization
from treeproc.shards.schema import FULL_TEXT_SCHEMA, select, shard_name
from treeproc.shards.store import ShardRecord, finished_shard, write_shard
from treeproc.stages.duplicates import later_duplicates
from treeproc.stages.example_keys import example_key, key_of
from treeproc.stages.filters import FilterConfig
from treeproc.stages.leaks import NearCopies, normalised
from treeproc.stages.line_lists import LineList
from treeproc.stages.text_filter import Filtered, ShardFilter
from treeproc.stages.text_warnings import TextNotices

logger = logging.getLogger(__name__)

_REPORT_EVERY = 1_000_000
# Bytes of keys that enter the hash of a split at once, unless duplicates are looked for: then all keys enter it at the end.
KEYS_AT_ONCE = 1 << 20


class SplitFiles(Settings):
    """One split: files of a side are read one after the other."""

    source: list[DataPath] = Field(
        [], description="files of the source side, plain or compressed; some formats: folders, archives"
    )
    target: list[DataPath] = Field([], description="files of the target side, for formats that have one")
    hold_out: int | None = Field(None, ge=2, description="instead of files: take every n-th example out of train")

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
    normalization: Normalization = "none"
    labelled: LabelledConfig = field(default_factory=LabelledConfig)

    @property
    def form(self) -> Format:
        """Return the format of the files."""
        return find_format(self.format, self.labelled)

    def classes_of_train(self) -> list[str]:
        """Return the names of the classes in the files of train, for format `labelled`. Raises UserError on bad input."""
        refuse_pipes(self.splits["train"].source)
        return find_classes(self.splits["train"].source, self.labelled)

    def with_absolute_paths(self) -> "Inputs":
        """Return the same files for a process with another working folder."""
        splits = {
            split: files.model_copy(
                update={side: [path.absolute() for path in getattr(files, side)] for side in ("source", "target")}
            )
            for split, files in self.splits.items()
        }
        return replace(self, splits=splits)

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the text shards beside `example_id`."""
        form, tokenized = self.form, ("words",) if self.tokenized == "moses" else ()
        target = ("target",) if any(files.target for files in self.splits.values()) else ()
        names = {"source", *form.columns, *tokenized, *target}
        return tuple(name for name in FULL_TEXT_SCHEMA.names if name in names)

    def columns_beyond_key(self) -> list[str]:
        """Return the columns that the key of an example does not cover."""
        # Moses words follow from the source, all other columns from the file alone.
        known_by_key = {"source", "target", "label", *(("words",) if self.tokenized == "moses" else ())}
        return [name for name in self.columns() if name not in known_by_key]

    def rows(self, split: str) -> Iterator[dict]:
        """Return the examples of a split in order, without `example_id`. Raises UserError on bad input."""
        stride, files = self.stride, self.files(split)
        rows = read_rows(self.format, files.source, files.target, self.tokenized, self.normalization, self.labelled)
        if stride and self.splits[split].hold_out:
            return islice(rows, stride - 1, None, stride)
        if stride and split == "train":
            return (row for number, row in enumerate(rows, start=1) if number % stride)
        return rows

    @property
    def stride(self) -> int | None:
        """Return the n of `hold_out`: every n-th example of the files of train belongs to valid."""
        return next((files.hold_out for files in self.splits.values() if files.hold_out), None)

    def files(self, split: str) -> SplitFiles:
        """Return the files that a split is read from."""
        return self.splits[split if self.splits[split].source else "train"]

    def examples_before(self, split: str, line: int) -> int:
        """Count the split's examples among the first `line` lines of its files, if examples are lines."""
        if self.stride is None or split not in ("train", "valid"):
            return line
        return line // self.stride if split == "valid" else line - line // self.stride

    def count_train_files(self) -> list[int]:
        """Read the source files of train, and return the number of examples of each, before `hold_out`."""
        has_two_sides = self.form.target == "required"

        def count(file: SplitFiles) -> int:
            try:
                return sum(1 for _ in self.form.read(file.source, file.target))
            except UserError:  # all files together were read before, so this one has no example
                return 0

        # A file beside itself is a pair of sides that fit.
        files = [SplitFiles(source=[path], target=[path] * has_two_sides) for path in self.splits["train"].source]
        return [count(file) for file in files]

    def line(self, split: str, example_id: int) -> int:
        """Return the number, from 1, of an example over the files of its split; that of its line if examples are lines."""
        stride = self.stride
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


def scan(inputs: Inputs, filters: FilterConfig) -> dict[str, Scan]:
    """Make the first pass over every split: number of examples, hash of their content, duplicates, keys of valid and test.

    It holds 16 bytes per training example when duplicates are dropped, and keys of valid and test.
    Raises UserError on bad input and for a split without examples.
    """
    refuse_pipes(path for files in inputs.splits.values() for path in (*files.source, *files.target))
    return {split: _scan_split(inputs, split, filters) for split in inputs.splits}


def _scan_split(inputs: Inputs, split: str, filters: FilterConfig) -> Scan:
    keep = filters.drop_duplicates and split == "train"
    collect = filters.drop_overlap if split != "train" else "none"
    beyond_key = inputs.columns_beyond_key()
    digest, keys, known, near, count = hashlib.sha256(), bytearray(), set(), NearCopies(), 0
    for count, row in enumerate(inputs.rows(split), start=1):
        key = example_key(row)
        keys += key
        if beyond_key:
            digest.update(text_beyond_key(row, beyond_key))
        if collect != "none":
            known.add(key if collect == "example" else key_of(row["source"]))
        if split != "train":
            near.add(row["source"])
        if not keep and len(keys) >= KEYS_AT_ONCE:
            digest.update(keys)
            keys.clear()
        if count % _REPORT_EVERY == 0:
            logger.info("checked %s examples of %s", f"{count:,}", split)
    if not count:
        raise no_example(inputs, split)
    digest.update(keys)
    return Scan(count, digest.hexdigest(), later_duplicates(keys) if keep else None, known, near)


def text_beyond_key(row: Mapping, names: Sequence[str]) -> bytes:
    """Return these columns of a row, as they enter the hash of a split."""
    return json.dumps([row[name] for name in names], separators=(",", ":")).encode()


def no_example(inputs: Inputs, split: str) -> UserError:
    """Return the error of a split whose files hold no example."""
    files = inputs.splits[split]
    names = " and ".join(" + ".join(map(str, side)) for side in (files.source, files.target) if side)
    what = f"no example of format {inputs.format} in {names}" if names else f"splits.{split}: hold_out takes no example"
    return UserError(f"{what}; at least one is needed")


@dataclass(frozen=True)
class SeenInScans:
    """Answers of `Seen` from the scans of all splits."""

    scans: Mapping[str, Scan]
    drop_overlap: str

    def overlaps(self, rows: Sequence[dict]) -> list[int]:
        known = [scan.sources for scan in self.scans.values() if scan.sources]
        keys = (example_key(row) if self.drop_overlap == "example" else key_of(row["source"]) for row in rows if known)
        return [place for place, key in enumerate(keys) if any(key in sources for sources in known)]

    def duplicates(self, rows: Sequence[dict]) -> list[int]:
        found = self.scans["train"].duplicates
        return [] if found is None else [place for place, row in enumerate(rows) if found[row["example_id"]]]

    def near_copies(self, rows: Sequence[dict]) -> list[int]:
        others = [scan.near for name, scan in self.scans.items() if name != "train"]
        lines = normalised([row["source"] for row in rows]) if others else []
        return sorted({place for near in others for place in near.find(lines)})


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
        """Yield the records of all shards of a split; those that are finished are not written again."""
        schema = select(FULL_TEXT_SCHEMA, self.inputs.columns())
        choose = ShardFilter(self.filters, self.inputs.labels, SeenInScans(self.scans, self.filters.drop_overlap))
        count = self.scans[split].count
        num_shards = -(-count // self.rows_per_shard)
        examples = numbered(self.inputs.rows(split))
        for index in range(num_shards):
            name = shard_name(split, index, num_shards)
            size = min(self.rows_per_shard, count - index * self.rows_per_shard)
            chosen = choose(islice(examples, size), split)
            if len(chosen.rows) + len(chosen.dropped) != size:
                raise UserError(f"splits.{split}: the files changed while they were read; run the same command again")
            # Finished shards count too: the notices about all lines are not in the shards.
            self.notices.tell(split, chosen)
            if self.dropped is not None:
                self.dropped.write(dropped_lines(self.inputs, split, chosen))
            yield finished_shard(self.folder, name, self.fingerprint) or write_shard(
                self.folder, name, chosen.rows, schema,
                split=split, index=index, fingerprint=self.fingerprint, counts=chosen.counts,
            )  # fmt: skip


def numbered(rows: Iterator[dict], first: int = 0) -> Iterator[dict]:
    """Yield the rows with their `example_id`, which counts from `first`."""
    for example_id, row in enumerate(rows, start=first):
        row["example_id"] = example_id
        yield row


def dropped_lines(inputs: Inputs, split: str, chosen: Filtered) -> Iterator[tuple[str, int, str]]:
    """Return the rows of the list of dropped lines for a shard: split, line, reason."""
    return ((split, inputs.line(split, example_id), reason) for example_id, reason in chosen.dropped)
