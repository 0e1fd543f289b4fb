"""Masks and matrices of compact trees, which layers read. They are made once per batch, on the device of the spans.

No index lists, no wait: every tensor follows from comparisons of positions with spans, in a few kernels that `torch.compile`
fuses.

Shapes: B batch, L leaves, N nodes, S = L + N positions, V levels, R rows of a table of embeddings.
"""

from dataclasses import replace

import torch
from torch import Tensor

from treenet.config import TreeAttentionConfig
from treenet.structure.attention_maps import OneCall, SubtreeIntervals, build_blocks
from treenet.structure.branches import BranchMaps, BranchMatrices, Depths
from treenet.structure.maps import TreeStructure


def prepare(
    structure: TreeStructure,
    config: TreeAttentionConfig,
    dtype: torch.dtype,
    score_dtype: torch.dtype,
    blocks: bool = False,
) -> TreeStructure:
    """Return the structure with its maps, for vectors of `dtype` and scores of attention of `score_dtype`.

    With `blocks`, long trees get their attention as blocks of FlexAttention. A structure that already has all maps is returned
    unchanged.
    """
    branches, attention = structure.branches, structure.attention
    if isinstance(branches, Depths):
        branches = build_matrices(structure, branches, config, torch.promote_types(dtype, torch.float32))
    if attention is None and config.subtree_mask:
        intervals, is_long = find_intervals(structure), isinstance(branches, BranchMaps)
        attention = build_blocks(intervals) if blocks and is_long else OneCall(build_bias(intervals, score_dtype))
    if branches is structure.branches and attention is structure.attention:
        return structure
    return replace(structure, branches=branches, attention=attention)


def build_matrices(structure: TreeStructure, depths: Depths, config: TreeAttentionConfig, dtype: torch.dtype) -> BranchMatrices:
    """Build the matrices of a batch."""
    start, end = structure.start[..., None], structure.end[..., None]
    leaf = torch.arange(structure.num_leaves, device=start.device, dtype=start.dtype)
    level = torch.arange(depths.levels, device=start.device, dtype=start.dtype)
    in_span = (start <= leaf) & (leaf < end)
    height = depths.leaf[:, None] - depths.node[..., None]
    count = height + 1 if config.accumulation_rule == "paper" else height
    cells = torch.where(in_span, count * (end - start), 1)
    span = in_span.to(dtype)
    take_vertical = _take_rows_up_to if config.accumulation_rule == "paper" else _take_rows
    return BranchMatrices(
        scale=(span / cells)[:, None],
        span=span[:, None],
        subtree=_in_subtree(structure).to(dtype)[:, None],
        height_row=torch.where(in_span, height - 1, 0).long()[:, None],
        node_level=(depths.node[..., None] == level).to(dtype)[:, None],
        from_start=(start + leaf).clamp(max=structure.num_leaves - 1).long()[:, None, None],
        in_length=(leaf < end - start)[:, None, None],
        rank_row=(leaf - start).clamp(min=0).long()[:, None, None],
        in_span=in_span[:, None, None],
        vertical_use=take_vertical(depths.levels, config.vertical_rows, start).to(dtype),
        horizontal_use=_take_rows(structure.num_leaves, config.horizontal_rows, start).to(dtype),
        rule=config.accumulation_rule,
    )


def build_bias(intervals: SubtreeIntervals, dtype: torch.dtype) -> Tensor:
    """Return [B, 1, S, S] to add to scores, equation 11: 0 = may attend, else -inf. A padding query attends only to itself."""
    positions, first = intervals.first_leaf.shape[1], intervals.first_leaf
    position = torch.arange(positions, device=first.device, dtype=first.dtype)
    row = position[:, None]
    seen = (first[..., None] <= position) & (position < intervals.last_leaf[..., None])
    seen |= (row <= position) & (position < intervals.last_position[..., None])
    return torch.where(seen | (row == position), 0.0, -torch.inf).to(dtype)[:, None]


def find_intervals(structure: TreeStructure) -> SubtreeIntervals:
    """Find the keys of positions: for leaves the real leaves of the sentence, for nodes span and subtree, for padding itself."""
    real = (~structure.leaf_pad_mask).sum(1, keepdim=True, dtype=torch.int32)  # [B, 1]
    on_leaves = torch.where(structure.leaf_pad_mask, 0, real)
    zeros = torch.zeros_like(on_leaves)
    return SubtreeIntervals(
        torch.cat([zeros, structure.start], 1),
        torch.cat([on_leaves, structure.end], 1),
        torch.cat([zeros, structure.subtree_end + structure.num_leaves], 1),
    )


def _in_subtree(structure: TreeStructure) -> Tensor:
    """Return [B, N, N] bool, True if the second node is in the subtree of the first."""
    node = torch.arange(structure.num_nodes, device=structure.start.device, dtype=structure.start.dtype)
    return (node[:, None] <= node) & (node < structure.subtree_end[..., None])


def _take_rows(count: int, rows: int, like: Tensor) -> Tensor:
    """Return [count, rows], True at the row that each number from 0 takes. Numbers past the table take its last row."""
    number, row = torch.arange(count, device=like.device), torch.arange(rows, device=like.device)
    return number.clamp(max=rows - 1)[:, None] == row


def _take_rows_up_to(count: int, rows: int, like: Tensor) -> Tensor:
    """Return [count, rows]: how often the numbers up to each one take each row, the running sums of `_take_rows`."""
    number, row = torch.arange(count, device=like.device), torch.arange(rows, device=like.device)
    times = (number[:, None] - row + 1).clamp(min=0)
    return torch.where(row < rows - 1, times.clamp(max=1), times)
