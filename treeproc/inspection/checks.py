"""The invariants of the rows of a data set, checked for a record batch at once.

A check yields (row of the batch, what is wrong). Columns come as `treeproc.shards.rows.column_views` gives them: lists as
(offsets, flat values). Letters: R rows, M list items of all rows together.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treeproc.common.cache import KnownHashes, stamps
from treeproc.common.errors import UserError
from treeproc.common.files import file_sha256
from treeproc.common.storage import AnyPath, inside
from treeproc.parsers import read_trees
from treeproc.shards.lengths import StoredCounts, open_lengths
from treeproc.shards.store import ShardRecord
from treeproc.trees.arcs import depths
from treeproc.trees.flat_trees import node_depths

Problems = Iterator[tuple[int, str]]


def _owners(offsets: np.ndarray) -> np.ndarray:
    """Return the row of every list item [M]."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _rows(bad: np.ndarray, owners: np.ndarray, what: str) -> Problems:
    return ((int(row), what) for row in np.unique(owners[bad]))


def id_problems(ids: np.ndarray, previous: int) -> Problems:
    """Check that ids rise within a split; `previous` is the last one of the shards before."""
    bad = np.flatnonzero(np.diff(ids, prepend=previous) <= 0)
    return ((int(row), "example_id does not rise") for row in bad)


def encoded_problems(views: dict, sizes: Mapping[str, int]) -> Problems:
    """Check that ids are below their `sizes` (of `pieces`, `labels`, `pos_tags` and `classes`), and that trees are trees."""
    leaf_offsets, leaves = views["leaves"]
    node_offsets, nodes = views["nodes"]
    span_offsets, spans = views["spans"]
    owners, num_leaves = _owners(leaf_offsets), np.diff(leaf_offsets)
    limits = [("leaves.piece", leaves["piece"], owners, "pieces"), ("leaves.pos_tag", leaves["pos_tag"], owners, "pos_tags")]
    limits.append(("nodes.label", nodes["label"], _owners(node_offsets), "labels"))
    if "tgt_pieces" in views:
        limits.append(("tgt_pieces", views["tgt_pieces"][1], _owners(views["tgt_pieces"][0]), "pieces"))
    if "label" in views and "classes" in sizes:
        limits.append(("label", views["label"], np.arange(len(num_leaves)), "classes"))
    for name, values, rows, kind in limits:
        yield from _rows((values < 0) | (values >= sizes[kind]), rows, f"{name} is not below {sizes[kind]}")
    words = leaves["word_index"]
    steps = np.diff(words, prepend=0)
    starts = leaf_offsets[:-1][num_leaves > 0] - leaf_offsets[0]
    steps[starts] = words[starts]
    bad = (steps < 0) | (steps > 1)
    bad[starts] = words[starts] != 0
    yield from _rows(bad, owners, "leaves.word_index does not count the words from 0")
    if not np.array_equal(np.diff(node_offsets), np.diff(span_offsets)):
        for row in np.flatnonzero(np.diff(node_offsets) != np.diff(span_offsets)):
            yield int(row), "nodes and spans differ in number"
        return
    yield from tree_problems(node_offsets - node_offsets[0], spans, nodes["parent"], num_leaves)
    if "arcs" in views:
        arc_offsets, arcs = views["arcs"]
        num_words = np.zeros(len(num_leaves), int)
        num_words[num_leaves > 0] = words[(leaf_offsets[1:] - leaf_offsets[0])[num_leaves > 0] - 1] + 1
        yield from arc_problems(arc_offsets, arcs["governor"], num_words)


def tree_problems(offsets: np.ndarray, spans: dict, parents: np.ndarray, num_leaves: np.ndarray) -> Problems:
    """Check that spans are nested, in pre-order and over every leaf, and have the parents and subtree ends of Proposition 1."""
    starts, ends, subtree_ends = (spans[name].astype(np.int64) for name in ("start", "end", "subtree_end"))
    owners, sizes = _owners(offsets), np.diff(offsets)
    inside = (starts >= 0) & (starts < ends) & (ends <= num_leaves[owners])
    yield from _rows(~inside, owners, "a span is empty or leaves the sentence")
    follows = np.diff(owners, prepend=-1) == 0
    ordered = ~follows | (np.diff(starts, prepend=0) > 0) | ((np.diff(starts, prepend=0) == 0) & (np.diff(ends, prepend=0) <= 0))
    yield from _rows(~ordered, owners, "nodes are not in pre-order")
    # The rest reads the rows that are sound so far: their nodes lie sorted by (row, start).
    sound = np.ones(len(sizes), bool)
    sound[owners[~(inside & ordered)]] = False
    kept = sound[owners]
    starts, ends, subtree_ends, parents, owners = (a[kept] for a in (starts, ends, subtree_ends, parents, owners))
    offsets = np.concatenate([[0], np.cumsum(np.where(sound, sizes, 0))])
    first, places = offsets[owners], np.arange(len(owners))
    stride = int(num_leaves.max(initial=0)) + 1
    rebuilt = np.searchsorted(owners * stride + starts, owners * stride + ends) - first
    yield from _rows(rebuilt != subtree_ends, owners, "subtree_end does not follow from the spans (Proposition 1)")
    depths = node_depths(first + rebuilt)
    above = np.clip(parents + first, 0, max(0, len(owners) - 1))
    has_parent = parents >= 0
    right = (above < places) & (first + rebuilt[above] > places) & (depths[above] == depths - 1) & (owners[above] == owners)
    yield from _rows(np.where(has_parent, ~right, (depths != 0) | (parents != -1)), owners,
                     "parent does not follow from the spans (Proposition 1)")  # fmt: skip
    yield from _rows(has_parent & right & (ends > ends[above]), owners, "spans cross")
    roots = depths == 0
    root_rows, root_starts, root_ends = owners[roots], starts[roots], ends[roots]
    begins = np.diff(root_rows, prepend=-1) != 0
    last = np.diff(root_rows, append=len(sizes)) != 0
    gap = root_starts != np.where(begins, 0, np.concatenate([[0], root_ends[:-1]])[: len(root_ends)])
    yield from _rows(gap | (last & (root_ends != num_leaves[root_rows])), root_rows, "the roots do not cover the leaves")
    for row in np.flatnonzero((sizes == 0) & (num_leaves > 0)):
        yield int(row), "leaves without a node"


def arc_problems(offsets: np.ndarray, governors: np.ndarray, num_words: np.ndarray) -> Problems:
    """Check for one governor a word, -1 for a root, and no cycle."""
    owners, sizes = _owners(offsets), np.diff(offsets)
    for row in np.flatnonzero(sizes != num_words):
        yield int(row), "arcs and words differ in number"
    outside = (governors < -1) | (governors >= sizes[owners])
    yield from _rows(outside, owners, "a governor is not a word of the sentence")
    above = np.where((governors < 0) | outside, -1, governors + offsets[owners] - offsets[0])
    yield from _rows(depths(above) < 0, owners, "arcs form a cycle")


def parsed_problems(row: dict, source: str | None) -> Iterator[str]:
    """Check one parsed row against its source line, where the text is at hand."""
    words = row["words"]
    starts, ends = words["start_char"], words["end_char"]
    if (ends <= starts).any() or (starts[1:] < ends[:-1]).any():
        yield "words overlap or are empty"
    if source is not None and [source[s:e] for s, e in zip(starts, ends, strict=True)] != list(words["text"]):
        yield "words differ from the characters of their line"
    if not row["parse_status"]:
        yield "parse_status is empty"
    try:
        trees = read_trees(row)
    except ValueError as error:
        yield f"trees: {error}"
        return
    if sum(len(tags) for tags, _ in trees) != len(starts):
        yield "trees and words differ in their number of words"


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
        where = "" if self.row is None or self.example_id is None else f", row {self.row + 1}, line {self.example_id + 1}"
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
