"""The index tensors of subtree attention (equation 11). There are four paths, which compute the same.

Shapes: B batch, L leaves, N nodes, S = L + N positions, C chunks, G wide nodes.

- "one": one call of all queries over all positions, with a mask [B, S, S].
- "two": leaves over leaves, with a mask of padding or none; nodes over all positions, with a mask [B, N, S].
- "window": leaves over leaves; nodes over windows. A node's subtree is an interval of leaves and one of nodes.
  Up to CHUNK neighbours in pre-order with small subtrees attend over WINDOW leaves and WINDOW nodes that hold their subtrees.
  The few nodes with larger subtrees are wide: they attend over all positions. Node queries then cost O(N * WINDOW + G * S).
- "blocks", on accelerators: a kernel of FlexAttention computes the mask from the spans, and stores none. It skips blocks without
  a True entry, which are most blocks of a document.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from treenet.structure.base import SpanTable
from treeproc.common.errors import check_choice

AttentionPath = Literal["one", "two", "window"]

CHUNK = 64
WINDOW = 64
# A path is fastest for forward and backward from this number of positions of a tree (one CPU thread, D = 512, 8 heads).
TWO_FROM_POSITIONS = 320
WINDOW_FROM_POSITIONS = 480


def choose_attention_path(num_leaves: int, num_nodes: int) -> AttentionPath:
    """Return the path of a batch that is padded to `num_leaves` and `num_nodes`."""
    positions = num_leaves + num_nodes
    if positions < TWO_FROM_POSITIONS:
        return "one"
    return "two" if positions < WINDOW_FROM_POSITIONS else "window"


@dataclass
class OneCall:
    """Path "one"."""

    bias: Tensor  # [B, 1, S, S] to add: 0 = may attend, else the least float32, or -inf if a device made it; padding sees itself


@dataclass
class TwoCalls:
    """Path "two"."""

    num_leaves: int
    leaf_mask: Tensor | None  # [B, 1, 1, L] bool, True = may be attended; None without padding
    node_mask: Tensor  # [B, 1, N, S] bool, True = may attend; a padding query attends only to itself


@dataclass
class Windows:
    """Path "window". Flat positions count through [B, S]. Unused places of a chunk repeat position 0."""

    num_leaves: int
    leaf_mask: Tensor | None  # [B, 1, 1, L], as in `TwoCalls`
    query: Tensor  # [C, CHUNK] flat position
    ranges: Tensor  # [C, 7] int64: tree, then first and one past the last position of queries, leaf keys and node keys
    key: Tensor  # [C, 2 * WINDOW] flat position
    mask: Tensor  # [C, 1, CHUNK, 2 * WINDOW] bool, True = may attend; unused queries attend to the first key
    bias: Tensor  # [cells] float32, for each of `ranges` in turn: its queries times its keys, as in `OneCall`
    wide_query: Tensor  # [B, G] flat position
    wide_count: Tensor  # [B] used queries of each tree
    wide_mask: Tensor  # [B, 1, G, S] bool, True = may attend; unused queries attend to the first key
    place: Tensor  # [B, N] row of each node in the results of chunks and then wide nodes; padding has any row


AttentionMaps = OneCall | TwoCalls | Windows


def build_attention_maps(table: SpanTable, path: AttentionPath) -> AttentionMaps:
    """Build the maps of one path. Raises UserError for an unknown one."""
    check_choice("attention_path", path, AttentionPath)
    if path == "one":
        return OneCall(torch.from_numpy(_bias(build_attend_mask(table)[:, None])))
    leaf_mask = None
    if table.leaf_pad_mask.any():
        attended = ~table.leaf_pad_mask
        attended[:, 0] = True  # a softmax over no key at all would be NaN
        leaf_mask = torch.from_numpy(attended[:, None, None])
    if path == "two":
        return TwoCalls(table.num_leaves, leaf_mask, torch.from_numpy(_node_rows(table)[:, None]))
    return Windows(table.num_leaves, leaf_mask, **{name: torch.from_numpy(x) for name, x in _build_windows(table).items()})


def build_attend_mask(table: SpanTable) -> np.ndarray:
    """Return [B, S, S] bool, equation 11, True = may attend. A padding query attends only to itself."""
    leaves, positions = table.num_leaves, table.num_leaves + table.num_nodes
    attend = np.zeros((len(table.start), positions, positions), dtype=bool)
    attend[:, :leaves, :leaves] = ~table.leaf_pad_mask[:, None, :] & ~table.leaf_pad_mask[:, :, None]
    attend[:, leaves:] = _node_rows(table)
    tree, leaf = np.nonzero(table.leaf_pad_mask)
    attend[tree, leaf, leaf] = True
    return attend


def _bias(attend: np.ndarray) -> np.ndarray:
    """Return the bias that attention adds to scores, made once per batch.

    PyTorch would make it from a bool mask at every call.
    """
    bias = attend.astype(np.float32)
    bias -= 1
    bias *= np.finfo(np.float32).max
    return bias


def _node_rows(table: SpanTable) -> np.ndarray:
    """Return the rows of the nodes in the attend mask, [B, N, S]."""
    leaf, node = np.arange(table.num_leaves), np.arange(table.num_nodes)
    span = (table.start[..., None] <= leaf) & (leaf < table.end[..., None])
    subtree = (node[:, None] <= node) & (node < table.subtree_end[..., None])
    tree, padding = np.nonzero(table.node_pad_mask)
    subtree[tree, padding, padding] = True
    return np.concatenate([span, subtree], axis=2)


def _build_windows(table: SpanTable) -> dict[str, np.ndarray]:
    """Return the fields of `Windows` from `query` on."""
    leaves, nodes, batch = table.num_leaves, table.num_nodes, len(table.start)
    positions = leaves + nodes
    real = ~table.node_pad_mask
    small = real & (table.length <= WINDOW) & (table.subtree_size <= WINDOW)
    chunks = [chunk for b in range(batch) for chunk in _cut_chunks(table, b, np.flatnonzero(small[b]))]
    tree = np.array([b for b, _ in chunks] or [0])[:, None]
    used = np.zeros((len(tree), CHUNK), dtype=bool)
    node = np.zeros((len(tree), CHUNK), dtype=np.int64)
    for row, (_, members) in enumerate(chunks):
        used[row, : len(members)] = True
        node[row, : len(members)] = members

    first_leaf, first_node = table.start[tree, node[:, :1]], node[:, :1]
    leaf_key, node_key = first_leaf + np.arange(WINDOW), first_node + np.arange(WINDOW)  # [C, WINDOW]
    key = np.concatenate([np.where(leaf_key < leaves, leaf_key, 0), leaves + np.where(node_key < nodes, node_key, 0)], axis=1)
    start, end, subtree_end = (x[tree, node] for x in (table.start, table.end, table.subtree_end))
    last_leaf, last_node = (np.where(used, x, 0).max(axis=1, keepdims=True) for x in (end, subtree_end))
    last_query = first_node + used.sum(axis=1, keepdims=True)
    ranges = np.concatenate([first_node, last_query, first_leaf, last_leaf, first_node, last_node], axis=1)
    ranges[:, [0, 1, 4, 5]] += leaves
    ranges = np.concatenate([tree, ranges], axis=1)
    in_span = (start[..., None] <= leaf_key[:, None]) & (leaf_key[:, None] < end[..., None])
    in_subtree = (node[..., None] <= node_key[:, None]) & (node_key[:, None] < subtree_end[..., None])
    mask = np.concatenate([in_span, in_subtree], axis=2) & used[..., None]
    mask[..., 0] |= ~used
    sizes = zip(*(ranges[:, i + 1] - ranges[:, i] for i in (1, 3, 5)), strict=True)
    cells = [
        np.concatenate([seen[:q, :leaf], seen[:q, WINDOW : WINDOW + last]], axis=1).ravel()
        for seen, (q, leaf, last) in zip(mask, sizes, strict=True)
    ]

    wide = [np.flatnonzero(row) for row in real & ~small]
    wide_query = np.zeros((batch, max(1, *map(len, wide))), dtype=np.int64)
    wide_mask = np.zeros((*wide_query.shape, positions), dtype=bool)
    wide_mask[..., 0] = True
    place = np.zeros((batch, nodes), dtype=np.int64)
    chunk, column = np.nonzero(used)
    place[tree[chunk, 0], node[chunk, column]] = chunk * CHUNK + column
    for b, members in enumerate(wide):
        wide_query[b, : len(members)] = leaves + members
        place[b, members] = used.size + b * wide_query.shape[1] + np.arange(len(members))
        for index, i in enumerate(members):
            wide_mask[b, index] = False
            wide_mask[b, index, table.start[b, i] : table.end[b, i]] = True
            wide_mask[b, index, leaves + i : leaves + table.subtree_end[b, i]] = True
    query = tree * positions + leaves + node
    wide_query += np.arange(batch)[:, None] * positions
    return {
        "query": query,
        "ranges": ranges,
        "key": tree * positions + key,
        "mask": mask[:, None],
        "bias": _bias(np.concatenate(cells)),
        "wide_query": wide_query,
        "wide_count": np.array([len(members) for members in wide]),
        "wide_mask": wide_mask[:, None],
        "place": place,
    }


def _cut_chunks(table: SpanTable, tree: int, small: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Cut `small` nodes into runs of neighbours in pre-order, each with all subtrees in one window.

    The window begins at the first node of the run, because starts never fall in pre-order.
    """
    chunks = []
    while len(small):
        run = small[:CHUNK]
        last_leaf = np.maximum.accumulate(table.end[tree, run])
        last_node = np.maximum.accumulate(table.subtree_end[tree, run])
        fits = run - run[0] == np.arange(len(run))
        fits &= (last_leaf - table.start[tree, run[0]] <= WINDOW) & (last_node - run[0] <= WINDOW)
        count = int(fits.argmin()) if not fits.all() else len(run)
        chunks.append((tree, run[:count]))
        small = small[count:]
    return chunks


@dataclass
class SubtreeIntervals:
    """The keys of a position: an interval of leaves, an interval of nodes that starts with the position, and itself."""

    first_leaf: Tensor  # [B, S] int32, as the next two
    last_leaf: Tensor  # one past the last leaf
    last_position: Tensor  # one past the last node of the subtree, counted from the first leaf; 0 for leaves

    def sees(self, tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query attends to a key, for indices of broadcastable shapes."""
        leaves = (self.first_leaf[tree, query] <= key) & (key < self.last_leaf[tree, query])
        nodes = (query <= key) & (key < self.last_position[tree, query])
        return leaves | nodes | (query == key)


@dataclass
class Blocks:
    """Path "blocks": attention by FlexAttention."""

    mask: BlockMask


def build_blocks(intervals: SubtreeIntervals) -> Blocks:
    """Build the blocks of a batch. All heads share them."""

    # PyTorch would count the `self` of a bound method as a fifth argument, and refuse the mask.
    def sees(tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return intervals.sees(tree, head, query, key)

    batch, positions = intervals.first_leaf.shape
    device = intervals.first_leaf.device
    # The model's graph takes the mask unchanged. To declare this would load the compiler, which loader processes do not need.
    make = torch.compiler.disable(create_block_mask)
    return Blocks(make(sees, batch, None, positions, positions, device=device))
