"""Scaled dot-product attention, and its three paths over subtrees (equation 11): see `treenet.structure.attention_maps`.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, C chunks, G wide nodes.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from treenet.layers.compiled import compiled
from treenet.layers.fused_attention import fused_attention, widen
from treenet.layers.torch_internals import has_flash_attention
from treenet.structure import TreeStructure
from treenet.structure.attention_maps import Blocks, OneCall, TwoCalls


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Map [B, S, D] -> [B, H, S, K]."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Map [B, H, S, K] -> [B, S, D]."""
    return x.transpose(1, 2).flatten(2)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attend_mask: Tensor | None,
    dropout_p: float,
    causal: bool = False,
    prior: Tensor | None = None,
):
    """Compute softmax(Q K^T / sqrt(K)) V (equation 1): [B, H, T, K] and keys, values [B, H, S, K] -> [B, H, T, K].

    A `prior` [B, T, S] multiplies the weights of every head, which are not normalised again. On CPUs all runs in float32 at
    least, autocast or not, as `fused_attention` does.
    """
    given, on_cpu = queries.dtype, queries.device.type == "cpu"
    if on_cpu:
        queries, keys, values = map(widen, (queries, keys, values))
    if attend_mask is not None and attend_mask.is_floating_point():
        attend_mask = attend_mask.to(queries.dtype)
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        if prior is None:
            attended = F.scaled_dot_product_attention(queries, keys, values, attend_mask, dropout_p=dropout_p, is_causal=causal)
        else:
            attended = _attend_with_prior(queries, keys, values, attend_mask, dropout_p, prior)
    return attended.to(given)


def attention_weights(queries: Tensor, keys: Tensor, attend_mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) by an explicit softmax, float32 at least: [B, H, T, K], [B, H, S, K] -> [B, H, T, S].

    The kernels that layers attend by return no weights.
    """
    scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
    if attend_mask is not None:
        scores = scores.masked_fill(~attend_mask, -torch.inf)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=3)


def _attend_with_prior(
    queries: Tensor, keys: Tensor, values: Tensor, attend_mask: Tensor, dropout_p: float, prior: Tensor
) -> Tensor:
    """Multiply the weights by the prior. A bias of `scaled_dot_product_attention` cannot: it normalises weights after it."""
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(2, 3)
    weights = scores.masked_fill(~attend_mask, -torch.inf).softmax(-1) * prior[:, None]
    return F.dropout(weights, dropout_p).to(values.dtype) @ values


def attend_subtrees(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    structure: TreeStructure,
    num_heads: int,
    dropout_p: float,
    fused: bool | None = None,
    on_leaves: Tensor | None = None,
) -> Tensor:
    """Let leaves attend to leaves, nodes to their subtrees: queries, keys, values [B, S, D] -> [B, S, D].

    `fused` overrides the choice between the CPU's operator and PyTorch's own ones. `on_leaves` [B, L, D] is the result of the
    leaves if the caller has computed it.
    """
    maps, num_leaves = structure.attention, structure.num_leaves
    if fused is None:
        fused = queries.device.type == "cpu" and not dropout_p and has_flash_attention() and on_leaves is None

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return merge_heads(attend(*(split_heads(x, num_heads) for x in (q, k, v)), mask, dropout_p))

    if isinstance(maps, Blocks):
        # As it is, FlexAttention stores all scores: on GPUs it is compiled even where the model is not.
        attend_blocks = compiled(flex_attention) if queries.device.type == "cuda" else flex_attention
        heads = (split_heads(x, num_heads) for x in (queries, keys, values))
        attended = merge_heads(attend_blocks(*heads, block_mask=maps.mask))
        return attended if on_leaves is None else torch.cat([on_leaves, attended[:, num_leaves:]], dim=1)
    if isinstance(maps, OneCall):
        if on_leaves is None:
            return call(queries, keys, values, maps.bias)
        return torch.cat([on_leaves, call(queries[:, num_leaves:], keys, values, maps.bias[:, :, num_leaves:])], dim=1)
    if fused:
        return fused_attention(queries, keys, values, maps, num_heads)
    sizes = num_leaves, structure.num_nodes
    leaf_queries, node_queries = queries.split(sizes, dim=1)
    if on_leaves is None:
        leaf_keys, leaf_values = keys.split(sizes, dim=1)[0], values.split(sizes, dim=1)[0]
        on_leaves = call(leaf_queries, leaf_keys, leaf_values, maps.leaf_mask)
    if isinstance(maps, TwoCalls):
        return torch.cat([on_leaves, call(node_queries, keys, values, maps.node_mask)], dim=1)
    in_chunks = call(*(_take(x, i) for x, i in ((queries, maps.query), (keys, maps.key), (values, maps.key))), maps.mask)
    wide = call(_take(queries, maps.wide_query), keys, values, maps.wide_mask)
    rows = torch.cat([in_chunks.flatten(0, 1), wide.flatten(0, 1)])
    return torch.cat([on_leaves, rows.index_select(0, maps.place.flatten()).unflatten(0, maps.place.shape)], dim=1)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """Take flat positions [R, M] of x [B, S, D] -> [R, M, D]."""
    return x.reshape(-1, x.shape[2]).index_select(0, positions.flatten()).unflatten(0, positions.shape)
