"""Problems of a data set, gathered by stage. Their order does not depend on the order in which shards are verified."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treeproc.common.errors import UserError
from treeproc.common.files import file_sha256
from treeproc.common.hash_cache import KnownHashes, stamps
from treeproc.common.storage import AnyPath, inside
from treeproc.inspection.checks import id_problems
from treeproc.shards.lengths import open_lengths
from treeproc.shards.size_counts import StoredCounts
from treeproc.shards.store import ShardRecord

# Columns of the files of sizes, by the names of the files.
SIZES = {
    "lengths": ("leaves", "nodes", "tgt_pieces", "example_id", "shard", "row"),
    "size_counts": ("leaves", "tgt_pieces", "rows", "nodes"),
}


@dataclass(frozen=True)
class Problem:
    """`row` counts within the shard, from 0; messages count rows and lines from 1.

    `mendable`: the job writes the file anew when it runs again.
    """

    path: AnyPath
    what: str
    row: int | None = None
    example_id: int | None = None
    mendable: bool = True

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row + 1}, line {self.example_id + 1}"
        return f"{self.path}{where}: {self.what}"


class StageFindings:
    """The shards of one stage, and what a `ShardVerifier` found about them."""

    def __init__(self, folder: AnyPath, records: Sequence[ShardRecord]):
        self.folder, self.records = folder, records
        self.places: dict[str, int] = {}  # of the shards in the index, by name
        self.starts: list[int] = []  # first row of every shard within its split
        self._rows: Counter = Counter()  # by split
        for place, record in enumerate(records):
            self.places[record.name] = place
            self.starts.append(self._rows[record.split])
            self._rows[record.split] += record.rows
        self.rows = self._rows.total()
        self._stamps = stamps(folder, self.places)  # from before the files are read
        self._sound_files: dict[str, str] = {}  # hashes of files beside the shards
        self._found: dict[str, list[tuple[int, Problem]]] = {kind: [] for kind in ("file", "opening", "rows", "order")}
        self._ids: dict[int, tuple[str, list[int]]] = {}  # split, first and last example_id of a sound shard
        # Columns that are not those of the shards, by split; None where a shard cannot be opened.
        self._unlike: dict[str, dict[str, set[str] | None]] = {kind: {split: set() for split in self._rows} for kind in SIZES}

    def add(self, name: str, facts: Mapping) -> tuple[int, int]:
        """Keep what was found about a shard; returns its rows and the number of its problems."""
        place = self.places[name]
        record, path = self.records[place], self.folder / name
        for kind in ("file", "opening"):
            if facts[kind]:
                self._found[kind].append((place, Problem(path, facts[kind], mendable=kind == "file")))
        for kind in ("rows", "order"):
            self._found[kind] += [(place, Problem(path, what, row, line, mendable=False)) for row, line, what in facts[kind]]
        if facts["ids"]:
            self._ids[place] = record.split, facts["ids"]
        for kind, unlike in self._unlike.items():
            before, found = unlike[record.split], facts[kind]
            unlike[record.split] = None if before is None or found is None else before | set(found)
        return record.rows, sum(bool(facts[kind]) for kind in ("file", "opening")) + len(facts["rows"]) + len(facts["order"])

    def problems(self, files: Mapping[str, str]) -> Iterator[Problem]:
        """Yield all problems of the stage but those of `lengths.arrow`; the index names `files` beside the shards."""
        if len(self.places) < len(self.records):
            yield Problem(self.folder / "index.json", "names a shard twice")
        yield from self._of("file")
        paths = {name: inside(self.folder, name) for name in files}
        self._stamps |= stamps(self.folder, files)
        for name, path in paths.items():
            if not path.exists() or file_sha256(path) != files[name]:
                yield Problem(path, "its hash is not the one in index.json" if path.exists() else "is missing")
            else:
                self._sound_files[name] = files[name]
        yield from self._of("opening")
        yield from self._of("rows")
        self._compare_neighbours()
        yield from self._of("order")

    def note_hashes(self) -> None:
        """Note the files whose hashes are right, after `problems` has read them: the next command does not hash them again."""
        damaged, known = {place for place, _ in self._found["file"]}, KnownHashes(self.folder)
        sound = {name: self.records[place].sha256 for name, place in self.places.items() if place not in damaged}
        for name, sha256 in (sound | self._sound_files).items():
            if name in self._stamps:
                known.add(name, sha256, self._stamps[name])
        known.save()

    def sizes_problems(self, has_counts: bool) -> Iterator[Problem]:
        """Yield the problems of `lengths.arrow`, and of `size_counts.arrow` where there is one, against the rows of the shards.

        If a shard cannot be opened, its split is not compared.
        """
        for split in self._rows:
            yield from self._compared("lengths", split, self._other_lengths)
            if has_counts:
                yield from self._compared("size_counts", split, self._other_counts)

    def _compared(self, kind: str, split: str, others: Callable[[str], set[str]]) -> Iterator[Problem]:
        path = self.folder / f"{kind}.arrow"
        try:
            wrong = others(split)
        except UserError as error:
            yield Problem(path, str(error).removeprefix(f"{path} "))
            return
        unlike = self._unlike[kind][split]
        if names := [name for name in SIZES[kind] if unlike is not None and name in unlike | wrong]:
            yield Problem(path, f"{', '.join(names)} of {split} differ from those of the shards")

    def _other_lengths(self, split: str) -> set[str]:
        """Return the columns of another length. Raises UserError if the file cannot be read."""
        return {name for name, column in open_lengths(self.folder, split).items() if len(column) != self._rows[split]}

    def _other_counts(self, split: str) -> set[str]:
        """Return no column. Raises UserError if the file cannot be read or has other shards."""
        StoredCounts(self.folder, split, np.array(self.shard_rows()[split], np.int64))
        return set()

    def shard_rows(self) -> dict[str, list[int]]:
        """Return the rows of every shard, by split."""
        found: dict[str, list[int]] = {split: [] for split in self._rows}
        for record in self.records:
            found[record.split].append(record.rows)
        return found

    def _of(self, kind: str) -> Iterator[Problem]:
        found = sorted(self._found[kind], key=lambda one: one[0])  # stable: rows of a shard stay in their order
        return (problem for _, problem in found)

    def _compare_neighbours(self) -> None:
        """Check that ids rise from one shard of a split to the next one."""
        last: dict[str, int] = {}
        for place, (split, (first, end)) in sorted(self._ids.items()):
            for _, what in id_problems(np.array([first]), last.get(split, -1)):
                path = self.folder / self.records[place].name
                self._found["order"].insert(0, (place, Problem(path, what, 0, first, mendable=False)))
            last[split] = end
