"""Slow implementations of tree attention, as baselines: the paper's tensor S as written, and the released code's.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H. Both take the parameters of `SelfAttention`
and return its results. The released one does so for the released code's accumulation rule.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import SelfAttention
from treenet.structure import TreeStructure


class DenseMaps:
    """The complete maps of equations 5 to 11, made once per batch."""

    def __init__(self, structure: TreeStructure):
        start, end, subtree_end = structure.start[..., None], structure.end[..., None], structure.subtree_end[..., None]
        leaf = torch.arange(structure.num_leaves, device=start.device)
        node = torch.arange(structure.num_nodes, device=start.device)
        self.span = (start <= leaf) & (leaf < end)  # [B, N, L]
        self.subtree = (node[:, None] <= node) & (node < subtree_end)  # [B, N, N]
        self.depth = (self.subtree.sum(1) - 1).clamp(min=0)  # [B, N]
        self.height = (self.span.sum(1)[:, None] - self.depth[..., None]) * self.span  # [B, N, L]
        self.rank = (leaf - start) * self.span  # [B, N, L], from 0
        self.length = self.span.sum(2).clamp(min=1)  # [B, N]
        pad_mask = torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
        leaves = ~structure.leaf_pad_mask
        top = torch.cat([leaves[:, None] & leaves[..., None], torch.zeros_like(self.span).transpose(1, 2)], dim=2)
        self.attend = torch.cat([top, torch.cat([self.span, self.subtree], dim=2)], dim=1) | torch.diag_embed(pad_mask)


def naive_accumulation(attention: SelfAttention, x: Tensor, values: Tensor, maps: DenseMaps) -> Tensor:
    """Compute equations 5 to 10 with S + E, U and V as tensors [B, N, L, D]."""
    accumulation, heads = attention.accumulation, attention.num_heads
    num_leaves = maps.span.shape[2]
    leaves, nodes = values.split((num_leaves, maps.span.shape[1]), dim=1)
    vertical, horizontal = accumulation.vertical, accumulation.horizontal
    embeddings = torch.cat(
        [
            vertical[(maps.height - 1).clamp(0, len(vertical) - 1)],
            horizontal[maps.rank.clamp(max=len(horizontal) - 1)],
        ],
        dim=3,
    )
    s = (nodes[:, :, None] + embeddings.repeat(1, 1, 1, heads)) * maps.span[..., None]
    branch_sums = leaves[:, None] + (maps.subtree.to(s.dtype) @ s.flatten(2)).view_as(s)
    u = branch_sums / (1 + maps.height)[..., None]
    w = x[:, :num_leaves] @ accumulation.leaf_weight  # [B, L, 1 or H]
    w = w.repeat_interleave(values.shape[2] // w.shape[2], dim=2)
    v = w[:, None] * u * maps.span[..., None]
    return torch.cat([leaves, v.sum(2) / maps.length[..., None]], dim=1)


def released_accumulation(attention: SelfAttention, x: Tensor, values: Tensor, maps: DenseMaps) -> Tensor:
    """Compute per head, [B * H, N, L, K]: spread nodes over their leaves, sum up the tree, average, weight, average.

    It has the released code's order of work and its tensors, but not its code. Its rules are those of `accumulation_rule:
    released`.
    """
    accumulation, heads = attention.accumulation, attention.num_heads
    batch, num_nodes, num_leaves = maps.span.shape
    per_head = values.unflatten(2, (heads, -1)).transpose(1, 2)  # [B, H, S, K]
    leaves, nodes = per_head[:, :, :num_leaves], per_head[:, :, num_leaves:]
    span = maps.span[:, None, :, :, None].to(values.dtype)
    spread = nodes[:, :, :, None] * span  # [B, H, N, L, K]
    vertical, horizontal = accumulation.vertical, accumulation.horizontal
    rows = torch.cat(
        [
            vertical[maps.depth.clamp(max=len(vertical) - 1)][:, :, None].expand(-1, -1, num_leaves, -1),
            horizontal[maps.rank.clamp(max=len(horizontal) - 1)],
        ],
        dim=3,
    )
    spread = (spread + rows[:, None]) * span
    summed = torch.einsum("bit,bhtlk->bhilk", maps.subtree.to(values.dtype), spread) + leaves[:, :, None]
    averaged = summed * span / maps.height.clamp(min=1)[:, None, :, :, None]
    w = (x[:, :num_leaves] @ accumulation.leaf_weight).expand(-1, -1, heads).transpose(1, 2)  # [B, H, L]
    weighted = averaged * w[:, :, None, :, None]
    out = weighted.sum(3) / maps.length[:, None, :, None]
    return torch.cat([leaves, out], dim=2).transpose(1, 2).flatten(2)


class SlowTreeAttention(nn.Module):
    """Replaces the given `SelfAttention`: slow accumulation, all scores in memory."""

    def __init__(self, attention: SelfAttention, structure: TreeStructure, accumulate=naive_accumulation):
        super().__init__()
        self.attention, self.maps, self.accumulate = attention, DenseMaps(structure), accumulate

    def forward(self, x: Tensor, attend_mask: Tensor | None = None, structure: TreeStructure | None = None) -> Tensor:
        queries, keys, values = self.attention.queries_keys_values(x).chunk(3, dim=2)
        values = self.accumulate(self.attention, x, values, self.maps)
        queries, keys, values = map(self.attention.split_heads, (queries, keys, values))
        scores = queries @ keys.transpose(2, 3) * queries.shape[3] ** -0.5
        weights = F.softmax(scores.masked_fill(~self.maps.attend[:, None], -torch.inf), dim=3)
        return self.attention.output((weights @ values).transpose(1, 2).flatten(2))


def slow_bytes(structure: TreeStructure, d_model: int) -> int:
    """Return about the bytes that one slow layer holds in float32 for forward and backward: eight tensors [B, N, L, D]."""
    batch, num_nodes = structure.node_pad_mask.shape
    return 8 * 4 * batch * num_nodes * structure.num_leaves * d_model
