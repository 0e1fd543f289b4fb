"""Tree attention by the equations of `treenet.paper`, tree after tree and head after head: `model.tree.implementation=reference`.

It computes at least in float32. Dropout of attention weights draws other masks than the fast layers do.

Shapes: B batch, T queries, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from treenet.layers.backend import uncompiled, without_autocast
from treenet.layers.scaled_dot_product import merge_heads, split_heads, widen
from treenet.paper import equations
from treenet.paper.equations import Tables, Tree
from treenet.structure import TreeStructure


def _trees(structure: TreeStructure, rule: str = "paper") -> Iterator[tuple[int, slice, slice, Tree]]:
    """Yield row, positions of nodes, positions of leaves, and tree, of each tree of a batch."""
    for row, (num_leaves, spans) in enumerate(zip(*structure.unpadded(), strict=True)):
        subtree_ends = spans[:, 2].tolist()
        nodes = range(len(subtree_ends))
        parents = [max((above for above in range(node) if subtree_ends[above] > node), default=-1) for node in nodes]
        with structure.device:
            tree = Tree(num_leaves, spans[:, :2].tolist(), parents, rule)
        yield row, slice(structure.num_leaves, structure.num_leaves + len(nodes)), slice(num_leaves), tree


@uncompiled
def accumulate(vectors: Tensor, w: Tensor, tables: Tables | None, structure: TreeStructure, num_heads: int, rule: str) -> Tensor:
    """Replace node rows of `vectors` [B, S, D] by N-bar' (equation 10), with leaf weights w [B, S, 1 or H]; leaf rows stay."""
    out = vectors.clone()
    for row, nodes, leaves, tree in _trees(structure, rule):
        heads = zip(vectors[row].chunk(num_heads, dim=1), w[row, leaves].expand(-1, num_heads).unbind(1), strict=True)
        out[row, nodes] = torch.cat([equations.accumulate(x[leaves], x[nodes], own, tree, tables) for x, own in heads], dim=1)
    return out


@uncompiled
def attend_within(
    queries: Tensor, keys: Tensor, values: Tensor, structure: TreeStructure, num_heads: int, dropout_p: float, masked: bool
) -> Tensor:
    """Let leaves and nodes attend (equations 11 to 18): queries, keys, values [B, S, D] -> [B, S, D], 0 at padding.

    Without `masked`, all attend to all.
    """
    heads = [split_heads(widen(x), num_heads) for x in (queries, keys, values)]
    out = split_heads(torch.zeros_like(queries), num_heads)
    with without_autocast(queries.device):
        for row, nodes, leaves, tree in _trees(structure):
            for head in range(num_heads):
                parts = [x[row, head, part] for x in heads for part in (nodes, leaves)]
                attended = equations.attend_within(*parts, tree=tree if masked else None, p=dropout_p)
                out[row, head, nodes], out[row, head, leaves] = attended
    return merge_heads(out)


@uncompiled
def attend_across(
    queries: Tensor, keys: Tensor, values: Tensor, attend_mask: Tensor, num_leaves: int, dropout_p: float
) -> Tensor:
    """Let a decoder attend (equations 21, 22, 24): queries [B, H, T, K]; keys, values [B, H, S, K] -> [B, H, T, K].

    `attend_mask` [B, 1, 1, S] is True at real positions, and the first `num_leaves` positions are leaves. Raises ValueError for
    a mask of another shape.
    """
    if attend_mask.dim() != 4 or attend_mask.shape[1:3] != (1, 1):
        raise ValueError(f"attend_mask must be [B, 1, 1, S], equal for all heads and queries, but is {list(attend_mask.shape)}")
    out, is_leaf = torch.zeros_like(queries), torch.arange(keys.shape[2], device=keys.device) < num_leaves
    with without_autocast(queries.device):
        for row, real in enumerate(attend_mask[:, 0, 0]):
            for head, query in enumerate(widen(queries[row])):
                parts = [widen(x[row, head, part]) for x in (keys, values) for part in (real & ~is_leaf, real & is_leaf)]
                out[row, head] = equations.attend_across(query, *parts, p=dropout_p)
    return out
