"""Trees of other lines, for `tree_source: shuffled` and `other_shape`.

`shuffled`: a line gets the tree of another line of its split that has as many words, so that a split keeps its trees, their
labels and their depths. A tree of the shape of the line's own tree is passed over, if a line of that length has a tree of another
shape. So some trees of short lines are taken twice, and others not at all. A line that is the only one of its length keeps its
own tree.

`other_shape`: a tree of a line gets the shape of a tree of its split that has as many words and nodes, but another shape. If
there is none, it gets that of a tree with as many words and the fewest nodes more, which loses the surplus ones.

Splits of large data are cut into windows of shards, and the other line is one of the same window. So a process that encodes a
shard reads one window, and no process holds all lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

import numpy as np
import pyarrow as pa

from treeproc.common.storage import AnyPath
from treeproc.shards.gather import MOST_OPEN
from treeproc.shards.rows import edges_of, hash_ids, pick, ranges, window_bounds
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH, WINDOW_ROWS
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, read_index
from treeproc.trees.controls import hash_examples, hash_parts
from treeproc.trees.flat_trees import FlatTrees, normal_form, read_flat_trees

# Rows of a window, of data that do not fit WINDOW_ROWS: a second of work, and about 40 MB.
ROWS_OF_WINDOW = 1 << 20
# The same for shapes. There, a process reads all trees of its window, which takes some seconds.
ROWS_OF_SHAPES = 1 << 17
# The rule by which trees are passed over, for fingerprints.
OTHER_SHAPES = "other shapes"
# Trees that are read at once.
_TREES_AT_ONCE = 10_000
# Trees of lines in brackets: line r has trees [edges[r], edges[r + 1]).
Donated = tuple[np.ndarray, pa.Array]


def donor_windows(
    parsed: Sequence[ShardRecord], one_window: int = WINDOW_ROWS, rows_of_window: int = ROWS_OF_WINDOW
) -> list[tuple[int, int]]:
    """Return the window of every shard of the parsed stage: the number of its first shard, and of the one behind its last.

    Data of up to `one_window` rows are one window, with all of their splits. `parsed` is in the order of the index.
    """
    rows = np.array([record.rows for record in parsed], dtype=np.int64)
    if rows.sum() <= one_window:
        return [(0, len(rows))] * len(rows)
    found: list[tuple[int, int]] = []
    for first, last in _splits(parsed):
        for window in pairwise((first + window_bounds(rows[first:last], rows_of_window)).tolist()):
            found += [window] * (window[1] - window[0])
    return found


def _splits(records: Sequence[ShardRecord]) -> list[tuple[int, int]]:
    """Return the number of the first record of each split, and of the one behind its last."""
    ends = list(accumulate(sum(1 for _ in of_split) for _, of_split in groupby(records, key=lambda record: record.split)))
    return list(pairwise([0, *ends]))


def find_donors(ids: np.ndarray, lengths: np.ndarray, seed: int) -> np.ndarray:
    """Return the donor [n] of every line of one split, by its place; `lengths` [n] are numbers of words, and `ids` ascend.

    The lines of one length stand in an order that a hash of seed and id decides. Each gets the tree of the next one, the last
    that of the first.
    """
    donor = np.zeros(len(ids), np.int32)
    if not len(ids):
        return donor
    order = np.argsort(hash_examples(ids, seed), kind="stable")
    order = order[np.argsort(lengths[order], kind="stable")].astype(donor.dtype)
    first = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    following = np.roll(order, -1)
    following[np.append(first[1:], len(order)) - 1] = order[first]
    donor[order] = following
    return donor


def next_other(codes: np.ndarray) -> np.ndarray:
    """Find the place [n] of the next line of a ring with another code, for every line; that of the next line if all are equal."""
    last = np.flatnonzero(codes != np.roll(codes, -1))  # of runs of equal codes
    places = np.arange(len(codes))
    if len(last):
        places = last[np.searchsorted(last, places) % len(last)]
    return (places + 1) % len(codes)


class _WindowTrees(ABC):
    """Donors' trees of the lines of parsed shards. It holds the donors of one window, and the shards that it has opened there.

    `words` and `trees` are columns of the parsed stage in `folder`. With `collapse_unary`, the shape of a tree is that of the
    setting of that name.
    """

    counted: str  # the name of a count of lines

    def __init__(self, folder: AnyPath, words: str, trees: str, seed: int, *, collapse_unary: bool = True):
        self._folder, self._words, self._trees, self._seed = folder, words, trees, seed
        self._collapse_unary = collapse_unary
        self._window = (0, 0)
        self._records: list[ShardRecord] = []
        self._edges = np.zeros(1, np.int64)  # of the lines of the shards
        self._open: dict[int, list[Donated]] = {}  # by the number of the shard in the window, its record batches

    def read(self, begin: int, end: int) -> None:
        """Find the donors of the window of these shards."""
        self._open, self._window = {}, (0, 0)
        # Without counts, a record takes half a kB.
        found = read_index(self._folder).records_between(begin, end)
        self._records = [replace(record, counts={}, longest={}) for record in found]
        self._edges = edges_of(np.array([record.rows for record in self._records], dtype=np.int64))
        self._find_donors()
        self._window = begin, end

    def of_shard(self, place: int, window: Sequence[int]) -> tuple[Donated, np.ndarray]:
        """Return the trees for all lines of the shard `place` of the index, and whether a line counts as one of `counted`.

        `window` is that of the shard, as `donor_windows` gives it.
        """
        begin, end = window
        if (begin, end) != self._window:
            self.read(begin, end)
        return self._donated(*self._edges[place - begin : place - begin + 2].tolist())

    @abstractmethod
    def _find_donors(self) -> None:
        """Find the donors of the window."""

    @abstractmethod
    def _donated(self, first: int, last: int) -> tuple[Donated, np.ndarray]:
        """Return what `of_shard` does, for the lines from `first` to before `last` of the window."""

    def _read_trees(self, lines: np.ndarray) -> list[list[str]]:
        """Return the trees of lines of the window."""
        shard = np.searchsorted(self._edges, lines, side="right") - 1
        row = lines - self._edges[shard]
        found: list[list[str]] = [[]] * len(lines)
        for number in np.unique(shard).tolist():
            batches = self._batches(number)
            for place in np.flatnonzero(shard == number).tolist():
                batch, offset = divmod(int(row[place]), ROWS_PER_RECORD_BATCH)
                found[place] = pick(batches[batch], offset)
        return found

    def _batches(self, number: int) -> list[Donated]:
        """Return the trees of a shard, by record batch."""
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.clear()
            self._open[number] = [batch[self._trees] for batch in Shard(self._folder, self._records[number]).columns]
        return self._open[number]


class DonorTrees(_WindowTrees):
    """Trees of other lines. A donor has a tree of another shape than the line's own, if there is one."""

    counted = "lines_without_partner"

    def _donated(self, first: int, last: int) -> tuple[Donated, np.ndarray]:
        """Return the trees of the donors of all lines, and whether a line keeps its own tree."""
        lines = np.arange(first, last)
        codes: dict[bytes, int] = {}
        same = self._shapes(lines, codes) == self._shapes(self._donors[lines], codes)
        for line in np.flatnonzero(same) + first:
            self._choose_other_shapes(int(line))
        donors = self._donors[lines]
        return _joined(self._read_trees(donors)), donors == lines

    def _choose_other_shapes(self, line: int) -> None:
        """Choose donors of other shapes for all lines of a line's length, unless that was done. It reads all their trees."""
        if self._chosen[line]:
            return
        ring = [line]
        while (following := int(self._donors[ring[-1]])) != line:
            ring.append(following)
        lines, codes = np.array(ring), dict[bytes, int]()
        self._donors[lines] = lines[next_other(self._shapes(lines, codes))]
        self._chosen[lines] = True

    def _shapes(self, lines: np.ndarray, codes: dict[bytes, int]) -> np.ndarray:
        """Return a number [n] for the shape of the tree of each line of the window, as `codes` gives it and goes on."""
        out: list[int] = []
        for first in range(0, len(lines), _TREES_AT_ONCE):
            edges, texts = _joined(self._read_trees(lines[first : first + _TREES_AT_ONCE]))
            brackets = read_flat_trees(texts)
            trees = normal_form(brackets, collapse_unary=self._collapse_unary)
            leaf_edges = brackets.leaf_edges[edges]
            spans, node_edges = np.stack([trees.starts, trees.ends], axis=1), trees.node_edges(leaf_edges).tolist()
            for leaf, (begin, end) in zip(leaf_edges.tolist(), pairwise(node_edges), strict=False):
                out.append(codes.setdefault((spans[begin:end] - leaf).tobytes(), len(codes)))
        return np.array(out, dtype=np.int64)

    def _find_donors(self) -> None:
        """Find the donors of all lines."""
        ids, lengths = np.zeros(self._edges[-1], np.int64), np.zeros(self._edges[-1], np.int32)
        for first, record in zip(self._edges.tolist(), self._records, strict=False):
            for batch in Shard(self._folder, record).columns:
                last = first + len(batch["example_id"])
                ids[first:last], lengths[first:last] = batch["example_id"], np.diff(batch[self._words][0])
                first = last
        self._donors = np.zeros(len(ids), np.int32)
        self._chosen = np.zeros(len(ids), bool)  # whether the donor of a line was chosen by the shapes of all lines of its length
        for first, last in (self._edges[list(ends)].tolist() for ends in _splits(self._records)):
            self._donors[first:last] = first + find_donors(ids[first:last], lengths[first:last], self._seed)


class ShapeDonors(_WindowTrees):
    """Trees whose shapes the trees of parsed shards get."""

    counted = "lines_with_surplus"

    def _donated(self, first: int, last: int) -> tuple[Donated, np.ndarray]:
        """Return the donor of every tree of the lines, and whether a donor of a line has surplus nodes."""
        edges = self._tree_edges[first : last + 1]
        own = np.arange(edges[0], edges[-1])
        donors = self._donors[own]
        lines = np.searchsorted(self._tree_edges, donors, side="right") - 1
        found = self._read_trees(lines)
        numbers = (donors - self._tree_edges[lines]).tolist()
        texts = pa.array([of_line[number] for of_line, number in zip(found, numbers, strict=True)], pa.string())
        thinned = np.zeros(last - first, dtype=bool)
        thinned[np.searchsorted(edges, own[self._nodes[donors] > self._nodes[own]], side="right") - 1] = True
        return (edges - edges[0], texts), thinned

    def _find_donors(self) -> None:
        """Find the donors of all trees."""
        counts, columns = [np.zeros(0, np.int64)], [np.zeros((4, 0), np.uint64)]
        for record in self._records:
            for batch in Shard(self._folder, record).columns:
                tree_edges, texts = batch[self._trees]
                brackets = read_flat_trees(texts)
                trees = normal_form(brackets, collapse_unary=self._collapse_unary)
                keys = hash_parts(batch["example_id"], tree_edges, self._seed)
                counts.append(np.diff(tree_edges))
                columns.append(np.stack([*_sizes_and_codes(trees, brackets.leaf_edges), keys]))
        self._tree_edges = edges_of(np.concatenate(counts))
        words, nodes, codes, keys = np.concatenate(columns, axis=1)
        self._nodes, self._donors = nodes.astype(np.int32), np.zeros(len(nodes), np.int32)
        for first, last in (self._tree_edges[self._edges[list(ends)]].tolist() for ends in _splits(self._records)):
            own = slice(first, last)
            self._donors[own] = first + find_shapes(words[own], nodes[own], codes[own], keys[own])


def _joined(found: Sequence[Sequence[str]]) -> Donated:
    """Return the trees of lines side by side."""
    edges = edges_of(np.fromiter(map(len, found), dtype=np.int64, count=len(found)))
    return edges, pa.array([tree for of_line in found for tree in of_line], pa.string())


def _sizes_and_codes(trees: FlatTrees, leaf_edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of words and of nodes of every tree, and a number for its shape: equal only for equal shapes [T]."""
    node_edges = trees.node_edges(leaf_edges)
    words, nodes = np.diff(leaf_edges), np.diff(node_edges)
    first = np.repeat(leaf_edges[:-1], nodes)
    sums = np.zeros(len(trees) + 1, np.uint64)
    np.cumsum(hash_ids((trees.starts - first << 32) + trees.ends - first), out=sums[1:])
    return words.astype(np.uint64), nodes.astype(np.uint64), sums[node_edges[1:]] - sums[node_edges[:-1]]


def find_shapes(words: np.ndarray, nodes: np.ndarray, codes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the place [n] of the tree whose shape every tree of a split gets. Trees of equal `codes` have one shape.

    Trees of as many words and nodes stand in a ring, in the order of their `keys`. Each gets the shape of the next one with
    another shape. If all have the same, it gets that of a tree with as many words and the fewest nodes more, by its key; if there
    is none, its own.
    """
    donors = np.arange(len(words))
    order = np.lexsort((keys, nodes, words))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (words[order[1:]] != words[order[:-1]]) | (nodes[order[1:]] != nodes[order[:-1]])
    rings = np.split(order, np.flatnonzero(is_first)[1:])
    for ring, following in zip(rings, [*rings[1:], None], strict=True):
        others = ring[next_other(codes[ring])]
        if len(ring) and codes[others[0]] != codes[ring[0]]:
            donors[ring] = others
        elif following is not None and words[following[0]] == words[ring[0]]:
            donors[ring] = following[(keys[ring] % np.uint64(len(following))).astype(np.int64)]
    return donors


def cut(donated: Donated, first: int, count: int) -> Donated:
    """Return the part for `count` lines from line `first` on."""
    edges, texts = donated
    own = edges[first : first + count + 1]
    return own - own[0], texts.slice(own[0], own[-1] - own[0])


def keep(donated: Donated, rows: np.ndarray) -> Donated:
    """Return the part for some of the lines."""
    edges, texts = donated
    lengths = np.diff(edges)[rows]
    return edges_of(lengths), texts.take(pa.array(ranges(edges[rows], lengths)))
