"""The span tables of a batch, padded and checked. All maps are made from them.

Shapes: B batch, L leaves, N nodes, S = L + N positions (leaves, then nodes in pre-order).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treenet.structure.ragged import Ragged
from treeproc.common.errors import UserError


@dataclass
class SpanTable:
    """Node i of tree b covers leaves [start, end) and nodes [i, subtree_end). For a padding node, all three are 0."""

    leaf_counts: np.ndarray  # [B]
    node_counts: np.ndarray  # [B]
    start: np.ndarray  # [B, N] int64, as the other two
    end: np.ndarray
    subtree_end: np.ndarray
    num_leaves: int  # L, with padding

    @classmethod
    def build(cls, num_leaves: Sequence[int] | np.ndarray, spans: Sequence[np.ndarray], multiple: int = 1) -> "SpanTable":
        """Pad `spans` [N_b, 3] to L = max(num_leaves) and N = max nodes. Both are at least 1, rounded up to a `multiple`.

        Raises UserError if they are not trees.
        """
        rows, leaf_counts = Ragged.of(spans), np.asarray(num_leaves)
        table = np.zeros((3, len(rows), round_up(int(rows.lengths.max()), multiple)), dtype=np.int64)
        place = rows.places(table.shape[2])
        for column, values in zip(table, rows.flat.T, strict=True):
            column.ravel()[place] = values
        start, end, subtree_end = table
        out = cls(leaf_counts, rows.lengths, start, end, subtree_end, round_up(int(leaf_counts.max()), multiple))
        out._check()
        return out

    @property
    def num_nodes(self) -> int:
        """Return N, with padding."""
        return self.start.shape[1]

    @cached_property
    def leaf_pad_mask(self) -> np.ndarray:
        """Return the padding of leaves [B, L], True = padding."""
        return np.arange(self.num_leaves) >= self.leaf_counts[:, None]

    @cached_property
    def node_pad_mask(self) -> np.ndarray:
        """Return the padding of nodes [B, N], True = padding."""
        return np.arange(self.num_nodes) >= self.node_counts[:, None]

    @property
    def length(self) -> np.ndarray:
        """Return the number of leaves of each node [B, N]."""
        return self.end - self.start

    @property
    def subtree_size(self) -> np.ndarray:
        """Return the number of nodes of each subtree with its root [B, N]; 0 for padding."""
        return np.where(self.node_pad_mask, 0, self.subtree_end - np.arange(self.num_nodes))

    def depth(self) -> np.ndarray:
        """Return the number of proper ancestors of each node [B, N]."""
        return self._depth

    @cached_property
    def _depth(self) -> np.ndarray:
        first = np.broadcast_to(np.arange(self.num_nodes), self.start.shape)
        return self._count_open(first, self.subtree_end, self.num_nodes) - ~self.node_pad_mask

    def count_until(self, edge: np.ndarray) -> np.ndarray:
        """Return [B, L + 1]: how many real nodes have an `edge` [B, N] at each leaf or before it."""
        tree, node = np.nonzero(~self.node_pad_mask)
        counts = np.zeros((len(edge), self.num_leaves + 1), dtype=np.int64)
        np.add.at(counts, (tree, edge[tree, node]), 1)
        return counts.cumsum(axis=1)

    def leaf_depth(self) -> np.ndarray:
        """Return the number of ancestors of each leaf [B, L]."""
        return self._count_open(self.start, self.end, self.num_leaves)

    def check_nested(self) -> None:
        """Raise UserError if leaves and nodes of a subtree are not within those of the parent, in time n log n.

        The parent is the last earlier node that is one level higher. If all nodes are within their parents, the chain of parents
        has as many nodes as `depth` has. So every subtree that holds a node is on its chain, and no two subtrees cross.
        """
        tree, node = np.nonzero(~self.node_pad_mask)
        depth = self.depth()[tree, node]
        levels = int(depth.max(initial=0)) + 1
        key = (tree * levels + depth) * self.num_nodes + node
        order = np.sort(key)
        below = depth > 0
        parent = order[np.searchsorted(order, key[below] - self.num_nodes) - 1] % self.num_nodes
        tree, node = tree[below], node[below]
        flat = tree * self.num_nodes
        self.check_within(flat + parent, flat + node)

    def check_within(self, upper: np.ndarray, lower: np.ndarray) -> None:
        """Raise UserError if a flat node of `lower` is not inside the node of `upper` whose subtree it belongs to."""
        start, end, subtree_end = self.start.ravel(), self.end.ravel(), self.subtree_end.ravel()
        outside = (start[lower] < start[upper]) | (end[lower] > end[upper]) | (subtree_end[lower] > subtree_end[upper])
        if outside.any():
            first = outside.argmax()
            b, i = divmod(int(upper[first]), self.num_nodes)
            raise UserError(
                f"tree {b} of the batch, node {i}: leaves and nodes of its subtree must lie within its own, but those of node "
                f"{lower[first] % self.num_nodes} do not; encode the data again"
            )

    def _count_open(self, first: np.ndarray, last: np.ndarray, width: int) -> np.ndarray:
        """Return [B, width]: how many of the intervals [first, last) of real nodes hold each index, in time linear in both."""
        real = ~self.node_pad_mask
        row = np.broadcast_to(np.arange(len(first))[:, None] * (width + 1), first.shape)[real]
        cells = len(first) * (width + 1)
        change = np.bincount(row + first[real], minlength=cells) - np.bincount(row + last[real], minlength=cells)
        return change.reshape(len(first), width + 1).cumsum(axis=1)[:, :width]

    def _check(self) -> None:
        node = np.arange(self.num_nodes)
        legal = (self.start >= 0) & (self.start < self.end) & (self.end <= self.leaf_counts[:, None])
        legal &= (node < self.subtree_end) & (self.subtree_end <= self.node_counts[:, None])
        wrong = np.argwhere(~legal & ~self.node_pad_mask)
        if len(wrong):
            b, i = wrong[0]
            raise UserError(
                f"tree {b} of the batch, node {i}: 0 <= start < end <= {self.leaf_counts[b]} leaves and {i} < subtree_end <= "
                f"{self.node_counts[b]} nodes must hold, but start, end, subtree_end are {self.start[b, i]}, {self.end[b, i]}, "
                f"{self.subtree_end[b, i]}; encode the data again"
            )


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for rows of `counts` [R] items: (row of each item, its index in the row, first item of each row)."""
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - first[row], first


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below `size`, at least one multiple."""
    return max(1, -(-size // multiple)) * multiple
