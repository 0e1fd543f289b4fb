"""The base of all structures, and the span tables that they are made from: padded and checked.

Shapes: B batch, L leaves, N nodes, S = L + N positions (leaves, then nodes in pre-order).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self, overload

import numpy as np
import torch
from torch import Tensor

from treeproc.common.errors import UserError, quoted


class Structure:
    """Base of the dataclasses that one forward pass shares between all layers."""

    positions_of_node: ClassVar[int] = 0  # how many positions the encoder computes for every node, also for padding

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Return a copy whose tensors are on `device`. Raises UserError if this machine has no such device."""
        with refusing_device(device):
            return map_parts(self, Tensor, lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def cuda(self, device: torch.device | str | int = "cuda", *, non_blocking: bool = False) -> Self:
        """Return a copy whose tensors are on a GPU. Raises UserError if this machine has no such GPU."""
        return self.to(device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory, which a GPU reads while the host works on; as it is on a machine without a GPU."""
        return map_parts(self, Tensor, Tensor.pin_memory) if torch.cuda.is_available() else self


@contextmanager
def refusing_device(device: torch.device | str | int) -> Iterator[None]:
    """Raise UserError if PyTorch refuses to move something to `device` because this machine has no such device."""
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise _no_device(device)  # PyTorch would take None for the present device
    try:
        yield
    except (AssertionError, RuntimeError):
        try:
            wanted = torch.device(device)
        except RuntimeError:
            raise _no_device(device) from None
        if wanted.type == "cuda" and (wanted.index or 0) >= (count := torch.cuda.device_count()):
            raise UserError(f"device must be one of this machine, where PyTorch finds {count} GPUs, but is {wanted}") from None
        raise


def _no_device(device: object) -> UserError:
    return UserError(f"device must be a device of PyTorch, such as 'cpu' or 'cuda:1', but is {quoted(device)}")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dataclasses, lists and tuples, in the order of `map_parts`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    else:
        for name in _field_names(value.__class__):
            yield from tensors_of(getattr(value, name))


def map_parts(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a copy of dataclasses, lists and tuples, with every part of class `kind` changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [map_parts(item, kind, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if names := _field_names(value.__class__):
        return value.__class__(**{name: map_parts(getattr(value, name), kind, change) for name in names})
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass; none of anything else."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else ()


@dataclass(frozen=True)
class Ragged(Sequence[np.ndarray]):
    """A list of arrays, stored as two arrays."""

    flat: np.ndarray  # [sum of lengths, ...]
    lengths: np.ndarray  # [rows] int64

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Ragged":
        """Build from the same rows."""
        if isinstance(rows, Ragged):
            return rows
        return cls(np.concatenate(rows), np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        return list(self)[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        edges = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        return (self.flat[start:stop] for start, stop in pairwise(edges))

    def places(self, width: int) -> np.ndarray:
        """Return [sum of lengths]: the flat place of every item in rows that are padded to `width`."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.flat)) + np.repeat(np.arange(len(self)) * width - before, self.lengths)

    def padded(self, value: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of numbers as [rows, width] int64, filled up with `value`, and a mask of the padding."""
        padding = np.arange(width) >= self.lengths[:, None]
        out = np.full(padding.shape, value, dtype=np.int64)
        out[~padding] = self.flat
        return out, padding


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

        Raises UserError unless they are nodes of trees in pre-order. Several roots and leaves without a node are legal.
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

    @cached_property
    def depth(self) -> np.ndarray:
        """Return the number of proper ancestors of each node [B, N]."""
        first = np.broadcast_to(np.arange(self.num_nodes), self.start.shape)
        change = self._count_edges(first, self.num_nodes) - self._count_edges(self.subtree_end, self.num_nodes)
        return change.cumsum(axis=1)[:, :-1] - ~self.node_pad_mask

    def count_until(self, edge: np.ndarray) -> np.ndarray:
        """Return [B, L + 1]: how many real nodes have an `edge` [B, N] at each leaf or before it."""
        return self._count_edges(edge, self.num_leaves).cumsum(axis=1)

    def leaf_depth(self) -> np.ndarray:
        """Return the number of ancestors of each leaf [B, L]."""
        change = self._count_edges(self.start, self.num_leaves) - self._count_edges(self.end, self.num_leaves)
        return change.cumsum(axis=1)[:, :-1]

    def _count_edges(self, edge: np.ndarray, last: int) -> np.ndarray:
        """Return [B, last + 1]: how many real nodes have an `edge` [B, N] at each index, in time linear in both."""
        cell = (np.arange(len(edge))[:, None] * (last + 1) + edge)[~self.node_pad_mask]
        return np.bincount(cell, minlength=len(edge) * (last + 1)).reshape(len(edge), last + 1)

    def _check(self) -> None:
        """Raise UserError unless spans lie within their sentences and parents, and after the subtrees that end before them."""
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
        self._check_nested()
        self._check_order()

    def _check_nested(self) -> None:
        """Raise UserError if leaves and nodes of a subtree are not within those of the parent, in time n log n.

        The parent is the last earlier node that is one level higher. If all nodes are within their parents, the chain of parents
        has as many nodes as `depth` has. So every subtree that holds a node is on its chain, and no two subtrees cross.
        """
        tree, node = np.nonzero(~self.node_pad_mask)
        depth = self.depth[tree, node]
        levels = int(depth.max(initial=0)) + 1
        key = (tree * levels + depth) * self.num_nodes + node
        order = np.sort(key)
        below = depth > 0
        parent = order[np.searchsorted(order, key[below] - self.num_nodes) - 1] % self.num_nodes
        tree, node = tree[below], node[below]
        upper, lower = tree * self.num_nodes + parent, tree * self.num_nodes + node
        start, end, subtree_end = self.start.ravel(), self.end.ravel(), self.subtree_end.ravel()
        outside = (start[lower] < start[upper]) | (end[lower] > end[upper]) | (subtree_end[lower] > subtree_end[upper])
        if outside.any():
            first = outside.argmax()
            raise UserError(
                f"tree {tree[first]} of the batch, node {parent[first]}: leaves and nodes of its subtree must lie within its "
                f"own, but those of node {node[first]} do not; encode the data again"
            )

    def _check_order(self) -> None:
        """Raise UserError if a node starts before the end of an earlier subtree, which it is not in: siblings, or roots."""
        ended = np.zeros((len(self.start), self.num_nodes + 1), dtype=np.int64)  # leaves of the subtrees that end at a node
        np.maximum.at(ended, (np.arange(len(ended))[:, None], self.subtree_end), self.end)  # padding ends at 0 with leaf 0
        last = np.maximum.accumulate(ended, axis=1)[:, :-1]
        early = np.argwhere((self.start < last) & ~self.node_pad_mask)
        if len(early):
            b, i = early[0]
            raise UserError(
                f"tree {b} of the batch, node {i}: must start at leaf {last[b, i]} or later, where the subtrees before it end, "
                f"but starts at {self.start[b, i]}; encode the data again"
            )


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for rows of `counts` [R] items: (row of each item, its index in the row, first item of each row)."""
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - first[row], first


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below `size`, at least one multiple."""
    return max(1, -(-size // multiple)) * multiple


def pad(rows: Sequence[np.ndarray], value: int, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as [B, longest] filled up with `value`, and where they are padding; a `multiple` of columns, at least one."""
    ragged = Ragged.of(rows)
    return ragged.padded(value, round_up(int(ragged.lengths.max(initial=0)), multiple))


def pad_alike(
    rows: Sequence[np.ndarray], value: int, others: Sequence[np.ndarray], of_others: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two columns of the same items, each filled up with its value, and where both are padding.

    Raises ValueError if a row has another length in the other column.
    """
    (first, padding), (second, also) = pad(rows, value), pad(others, of_others)
    if not np.array_equal(padding, also):
        raise ValueError(f"both columns need rows of the same lengths, but have {[*map(len, rows)]} and {[*map(len, others)]}")
    return first, second, padding


class NodeLookup:
    """Finds the node of a leaf. Nodes of one depth of a tree follow each other and do not overlap."""

    def __init__(self, tree: np.ndarray, depth: np.ndarray, start: np.ndarray, num_leaves: int):
        """Prepare for the flat nodes [N]: their tree, depth and first leaf. No leaf number is above `num_leaves`."""
        self._width, self._depths = num_leaves, 1 + int(depth.max(initial=0))
        keys = self._key(tree, depth, start)
        self._order = np.append(np.argsort(keys), -1)
        self._keys = keys[self._order[:-1]]

    def __call__(self, tree: np.ndarray, depth: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        """Return the last node of that depth that starts at `leaf` or before it; -1 for depth -1."""
        place = np.searchsorted(self._keys, self._key(tree, depth, leaf), side="right") - 1
        return np.where(depth < 0, -1, self._order[place])

    def _key(self, tree: np.ndarray, depth: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        return (tree * self._depths + depth) * self._width + leaf


def find_parents(table: SpanTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the parents of all real nodes and of all real leaves, as numbers of flat nodes; -1 for no parent."""
    tree, node = np.nonzero(~table.node_pad_mask)
    start, depth = table.start[tree, node], table.depth[tree, node]
    find = NodeLookup(tree, depth, start, table.num_leaves)
    leaf_tree, leaf = np.nonzero(~table.leaf_pad_mask)
    return find(tree, depth - 1, start), find(leaf_tree, table.leaf_depth()[leaf_tree, leaf] - 1, leaf)
