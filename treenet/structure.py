"""Trees of a batch as integer maps: built once per batch, shared by every layer, head and attention.

Shapes: B batch, L leaves, N nonterminals, S = L + N positions (leaves, then nodes in pre-order).
Names of the paper: leaf j, node i, |V_j^i| the height of node i above leaf j (nodes of the branch from j up to
i, both ends counted but not the leaf), |H_j^i| the rank of leaf j in the span of node i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeproc.settings import UserError

AccumulationRule = Literal["paper", "released"]


class BranchOperators(NamedTuple):
    """Constants of hierarchical accumulation, floating-point but for `level`."""

    average: Tensor  # [B, N, L] weight 1 / (span length * |C_j^i|) of each branch, 0 off the span
    leaf_in_node: Tensor  # [B, L, N] 1 where leaf j is in the span of node t
    node_in_subtree: Tensor  # [B, N, N] 1 where node t is in the subtree of node i
    level: Tensor  # [B, N, L] int64, |V_j^i| - 1, the last row of a branch in the vertical table; 0 off the span


@dataclass
class TreeStructure:
    """Trees of a batch. Padding nodes cover nothing, so nothing of a padding position reaches a real one."""

    span: Tensor  # [B, N, L] bool, leaf j is in the span of node i
    subtree: Tensor  # [B, N, N] bool, node t is in R(i), i included
    height: Tensor  # [B, N, L] int64, |V_j^i| on the span, 0 off it
    depth: Tensor  # [B, N] int64, proper ancestors of a node, 0 for a root (and for padding)
    horizontal_branch: Tensor  # [E] int64, see `build`: flat (b, i, j) of a branch
    horizontal_target: Tensor  # [E] int64, flat (b, i, rank - 1) that this branch adds to
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    attend_mask: Tensor  # [B, S, S] bool, equation 11, True = may attend; a padding query sees itself alone
    max_height: int  # largest |V_j^i| of the batch, at least 1
    max_depth: int  # largest depth of the batch
    _operators: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def build(cls, num_leaves: Sequence[int], spans: Sequence[np.ndarray]) -> "TreeStructure":
        """Maps of a padded batch, L = max(num_leaves) and N = max nodes, both at least 1.

        `spans[b]` is [N_b, 3]: start, end, subtree_end of each node in pre-order; several roots and N_b = 0 are
        legal. Raises UserError when a span leaves its sentence or its pre-order.

        The horizontal entries list every (branch (i, j), node t of that branch): the branch adds its weight to row
        |H_j^t| of the horizontal table. There are sum |V_j^i| of them, a few hundred a sentence; a right-branching
        chain of n leaves has about n^3 / 6.
        """
        batch, max_leaves, max_nodes = len(num_leaves), max(1, *num_leaves), max(1, *map(len, spans))
        leaf_counts, node_counts = np.asarray(num_leaves), np.array([len(rows) for rows in spans])
        table = np.zeros((batch, max_nodes, 3), dtype=np.int64)
        for b, rows in enumerate(spans):
            table[b, : len(rows)] = rows
        start, end, subtree_end = table[..., 0], table[..., 1], table[..., 2]
        leaf, node = np.arange(max_leaves), np.arange(max_nodes)
        leaf_pad_mask, node_pad_mask = leaf >= leaf_counts[:, None], node >= node_counts[:, None]
        _check_spans(start, end, subtree_end, leaf_counts, node_counts, node_pad_mask)

        span = (start[..., None] <= leaf) & (leaf < end[..., None])
        subtree = (node[:, None] <= node) & (node < subtree_end[..., None])
        depth = np.maximum(subtree.sum(axis=1) - 1, 0)
        height = np.where(span, span.sum(axis=1)[:, None, :] - depth[..., None], 0)

        # Branches ordered by leaf, from the root down: the nodes below i on its branch to j are the next height - 1.
        b, j, i = np.nonzero(span.transpose(0, 2, 1))
        nodes_on_branch = height[b, i, j]
        rank = j - start[b, i]
        row = (b * max_nodes + i) * max_leaves
        upper = np.repeat(np.arange(len(b)), nodes_on_branch)
        first_entry = np.cumsum(nodes_on_branch) - nodes_on_branch
        lower = np.arange(len(upper)) - np.repeat(first_entry - np.arange(len(b)), nodes_on_branch)

        attend = np.zeros((batch, max_leaves + max_nodes, max_leaves + max_nodes), dtype=bool)
        attend[:, :max_leaves, :max_leaves] = ~leaf_pad_mask[:, None, :] & ~leaf_pad_mask[:, :, None]
        attend[:, max_leaves:, :max_leaves] = span
        attend[:, max_leaves:, max_leaves:] = subtree
        pad_b, pad_position = np.nonzero(np.concatenate([leaf_pad_mask, node_pad_mask], axis=1))
        attend[pad_b, pad_position, pad_position] = True  # a softmax over no key at all would be NaN
        return cls(
            span=torch.from_numpy(span),
            subtree=torch.from_numpy(subtree),
            height=torch.from_numpy(height),
            depth=torch.from_numpy(depth),
            horizontal_branch=torch.from_numpy((row + j)[upper]),
            horizontal_target=torch.from_numpy(row[upper] + rank[lower]),
            leaf_pad_mask=torch.from_numpy(leaf_pad_mask),
            node_pad_mask=torch.from_numpy(node_pad_mask),
            attend_mask=torch.from_numpy(attend),
            max_height=max(1, int(height.max())),
            max_depth=int(depth.max()),
        )

    @property
    def num_leaves(self) -> int:
        """L, padding included."""
        return self.span.shape[2]

    def operators(self, rule: AccumulationRule, dtype: torch.dtype) -> BranchOperators:
        """The constants of equations 6, 7 and 9 in `dtype`, made on first use and then shared.

        'paper' divides a branch by its nodes and the leaf, 'released' by its nodes alone.
        """
        if (rule, dtype) not in self._operators:
            with torch.inference_mode(False):  # made while evaluating, they must still serve a training step
                span = self.span.to(dtype)
                length = span.sum(dim=2, keepdim=True).clamp(min=1)
                divisor = (self.height + 1 if rule == "paper" else self.height.clamp(min=1)).to(dtype)
                self._operators[rule, dtype] = BranchOperators(
                    average=span / (length * divisor),
                    leaf_in_node=span.transpose(1, 2).contiguous(),
                    node_in_subtree=self.subtree.to(dtype),
                    level=(self.height - 1).clamp(min=0),
                )
        return self._operators[rule, dtype]

    def to(self, device: torch.device | str) -> "TreeStructure":
        """A copy whose tensors are on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return TreeStructure(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})


def _check_spans(
    start: np.ndarray,
    end: np.ndarray,
    subtree_end: np.ndarray,
    leaf_counts: np.ndarray,
    node_counts: np.ndarray,
    node_pad_mask: np.ndarray,
) -> None:
    node = np.arange(start.shape[1])
    legal = (start >= 0) & (start < end) & (end <= leaf_counts[:, None])
    legal &= (node < subtree_end) & (subtree_end <= node_counts[:, None])
    wrong = np.argwhere(~legal & ~node_pad_mask)
    if len(wrong):
        b, i = wrong[0]
        raise UserError(
            f"tree {b} of the batch, node {i}: 0 <= start < end <= {leaf_counts[b]} leaves and {i} < subtree_end <= "
            f"{node_counts[b]} nodes must hold, but start, end, subtree_end are {start[b, i]}, {end[b, i]}, "
            f"{subtree_end[b, i]}; encode the data again"
        )
