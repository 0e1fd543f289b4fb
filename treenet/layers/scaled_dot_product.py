"""Scaled dot-product attention, and its paths over subtrees: see `treenet.structure.attention_maps`. They equal `treenet.paper`.

On CPUs, two calls or windows are one operator. The same attention composed of PyTorch's own operators copies under autograd. It
splits queries, keys and values, gathers all windows at once, keeps them, and pads and adds the gradients of parts. The operator
works on views, one window after the other, and adds gradients of keys and values in place. So it keeps what plain attention
keeps, and its cost is that of its products. It calls the CPU kernels behind `scaled_dot_product_attention`, which have no dropout
of attention weights. As a registered operator it does not break the graphs of `torch.compile`.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, C chunks, G wide nodes. Of the operator: R
trees of a call, T queries of a call.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from treenet.layers.backend import (
    compiled,
    flash_attention,
    flash_attention_backward,
    has_flash_attention,
)
from treenet.structure import TreeStructure
from treenet.structure.attention_maps import Blocks, OneCall, TwoCalls, Windows

Range = tuple[slice, slice]  # of [B, S, ...]: trees, positions
Place = Tensor | Range | list[Range]  # flat positions, a range, or ranges side by side


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Map [B, S, D] -> [B, H, S, K]."""
    return torch.unflatten(x, 2, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Map [B, H, S, K] -> [B, S, D]."""
    return x.transpose(1, 2).flatten(2)


def as_bias(attend_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to the scores of attention: 0 where `attend_mask` is True, else -inf."""
    return torch.zeros(attend_mask.shape, dtype=dtype, device=attend_mask.device).masked_fill_(~attend_mask, -torch.inf)


def fused_attention(queries: Tensor, keys: Tensor, values: Tensor, maps: TwoCalls | Windows, num_heads: int) -> Tensor:
    """Map queries, keys, values [B, S, D] on the CPU to [B, S, D]."""
    if isinstance(maps, TwoCalls):
        node_maps = [maps.node_mask]
    else:
        node_maps = [maps.ranges, maps.bias, maps.wide_query, maps.wide_count, maps.wide_mask]
    attended = _attend(*map(widen, (queries, keys, values)), num_heads, maps.num_leaves, maps.leaf_mask, node_maps)[0]
    return attended.to(queries.dtype)


def widen(x: Tensor) -> Tensor:
    """Convert half precision to float32: in bf16, the gradient of the CPU's kernel takes fifteen times as long."""
    return x.float() if x.dtype.itemsize < 4 else x


@dataclass
class _Call:
    """Queries that attend over keys in one call."""

    queries: Tensor | Range
    keys: Range | list[Range]
    bias: Tensor | None  # [R, 1, T, keys], added to scores


def _calls(num_leaves: int, leaf_mask: Tensor | None, node_maps: Sequence[Tensor], dtype: torch.dtype) -> Iterator[_Call]:
    """Return the calls of a path. The first call is the one over most keys.

    Path "two": all nodes at once, and leaves over leaves. Path "window": leaves, then chunks of nodes, then the wide nodes of
    each tree.
    """
    trees, leaves, nodes, everything = slice(None), slice(0, num_leaves), slice(num_leaves, None), slice(None)
    on_leaves = _Call((trees, leaves), (trees, leaves), None if leaf_mask is None else as_bias(leaf_mask, dtype))
    if len(node_maps) == 1:
        yield _Call((trees, nodes), (trees, everything), as_bias(node_maps[0], dtype))
        yield on_leaves
        return
    yield on_leaves
    chunks, bias, wide_query, wide_count, wide_mask = node_maps
    ranges = chunks.tolist()
    shapes = [(1, 1, last - first, sum(keys[1::2]) - sum(keys[::2])) for _, first, last, *keys in ranges]
    parts = bias.to(dtype).split([queries * keys for *_, queries, keys in shapes])
    for (b, *bounds), shape, part in zip(ranges, shapes, parts, strict=True):
        if len(part):
            tree = slice(b, b + 1)
            queries, leaf_keys, node_keys = (slice(*bounds[i : i + 2]) for i in (0, 2, 4))
            yield _Call((tree, queries), [(tree, leaf_keys), (tree, node_keys)], part.view(shape))
    for b, count in enumerate(wide_count.tolist()):
        if count:
            mask = wide_mask[b, None, :, :count]
            yield _Call(wide_query[b, :count], (slice(b, b + 1), everything), as_bias(mask, dtype))


def _read(x: Tensor, place: Place) -> Tensor:
    """Read positions of [B, S, C] as [R, T, C], a view if possible."""
    if isinstance(place, Tensor):
        return x.flatten(0, 1).index_select(0, place)[None]
    return torch.cat([x[part] for part in place], dim=1) if isinstance(place, list) else x[place]


def _write(x: Tensor, place: Tensor | Range | list[Range], part: Tensor) -> None:
    if isinstance(place, Tensor):
        x.flatten(0, 1).index_copy_(0, place, part[0])
    else:
        x[place] = part


def _add(x: Tensor, place: Range | list[Range], part: Tensor) -> None:
    ranges = place if isinstance(place, list) else [place]
    views = [x[trees, positions] for trees, positions in ranges]
    for view, piece in zip(views, part.split([view.shape[1] for view in views], dim=1), strict=True):
        view += piece


def _with_zero_nodes(x: Tensor, num_leaves: int) -> Tensor:
    """Allocate a result like `x` [B, S, D]. Its nodes are 0, as padding and sums need."""
    out = torch.empty(x.shape, dtype=x.dtype)
    out[:, num_leaves:] = 0
    return out


@torch.library.custom_op("treenet::subtree_attention", mutates_args=(), device_types="cpu")
def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    num_leaves: int,
    leaf_mask: Tensor | None,
    node_maps: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return attention [B, S, D], and the logarithms of its normalisers [B, S, H]."""
    out = _with_zero_nodes(queries, num_leaves)
    log_sums = torch.empty(*queries.shape[:2], num_heads, dtype=torch.promote_types(queries.dtype, torch.float32))
    for call in _calls(num_leaves, leaf_mask, node_maps, queries.dtype):
        q, k, v = (split_heads(_read(*x), num_heads) for x in ((queries, call.queries), (keys, call.keys), (values, call.keys)))
        attended, log_sum = flash_attention(q, k, v, 0.0, False, attn_mask=call.bias)
        _write(out, call.queries, merge_heads(attended))
        _write(log_sums, call.queries, log_sum.transpose(1, 2))
    return out, log_sums


@_attend.register_fake
def _(
    queries: Tensor, keys: Tensor, values: Tensor, num_heads: int, num_leaves: int, leaf_mask: Tensor | None,
    node_maps: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    log_sums = queries.new_empty(*queries.shape[:2], num_heads, dtype=torch.promote_types(queries.dtype, torch.float32))
    return queries.new_empty(queries.shape), log_sums


@torch.library.custom_op("treenet::subtree_attention_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor,
    num_heads: int,
    num_leaves: int,
    leaf_mask: Tensor | None,
    node_maps: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values."""
    query_grad = _with_zero_nodes(queries, num_leaves)
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None
    for call in _calls(num_leaves, leaf_mask, node_maps, queries.dtype):
        grad_part, q, out_part = (split_heads(_read(x, call.queries), num_heads) for x in (grad, queries, out))
        k, v = (split_heads(_read(x, call.keys), num_heads) for x in (keys, values))
        log_sum = _read(log_sums, call.queries).transpose(1, 2)
        parts = flash_attention_backward(grad_part, q, k, v, out_part, log_sum, 0.0, False, attn_mask=call.bias)
        query_part, key_part, value_part = map(merge_heads, parts)
        _write(query_grad, call.queries, query_part)
        if key_grad is None and key_part.shape == keys.shape:  # the first call was over all keys, so its memory is used
            key_grad, value_grad = key_part, value_part
            continue
        if key_grad is None or value_grad is None:
            key_grad, value_grad = _with_zero_nodes(keys, num_leaves), _with_zero_nodes(values, num_leaves)
            _write(key_grad, call.keys, key_part)
            _write(value_grad, call.keys, value_part)
        else:
            _add(key_grad, call.keys, key_part)
            _add(value_grad, call.keys, value_part)
    assert key_grad is not None and value_grad is not None  # there is at least one call
    return query_grad, key_grad, value_grad


@_attend_backward.register_fake
def _(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (queries, keys, values))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    queries, keys, values, num_heads, num_leaves, leaf_mask, node_maps = inputs
    ctx.save_for_backward(queries, keys, values, *output, leaf_mask, *node_maps)
    ctx.num_heads, ctx.num_leaves = num_heads, num_leaves
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    *saved, leaf_mask = ctx.saved_tensors[:6]
    node_maps = ctx.saved_tensors[6:]
    grads = _attend_backward(grad, *saved, ctx.num_heads, ctx.num_leaves, leaf_mask, node_maps)
    return *grads, None, None, None, [None] * len(node_maps)


_attend.register_autograd(_backward, setup_context=_setup_context)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attend_mask: Tensor | None,
    dropout_p: float,
    causal: bool = False,
    prior: Tensor | None = None,
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) V (equation 1): [B, H, T, K] and keys, values [B, H, S, K] -> [B, H, T, K].

    `attend_mask` is bool, or a bias of the scores. A `prior` [B, T, S] multiplies the weights of every head, which are not
    normalised again. On CPUs all runs in float32 at least, autocast or not, as `fused_attention` does.
    """
    if queries.device.type == "cpu" and (queries.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu")):
        with torch.autocast("cpu", enabled=False):
            q, k, v = map(widen, (queries, keys, values))
            return attend(q, k, v, attend_mask, dropout_p, causal, prior).to(queries.dtype)
    if attend_mask is not None and attend_mask.is_floating_point():
        attend_mask = attend_mask.to(queries.dtype)
    if prior is None:
        attended = F.scaled_dot_product_attention(queries, keys, values, attend_mask, dropout_p=dropout_p, is_causal=causal)
    else:
        attended = _attend_with_prior(queries, keys, values, attend_mask, dropout_p, prior)
    return attended.to(queries.dtype)


def attention_weights(queries: Tensor, keys: Tensor, attend_mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) by an explicit softmax, float32 at least: [B, H, T, K], [B, H, S, K] -> [B, H, T, S].

    `attend_mask` is bool, or a bias of the scores. The kernels that layers attend by return no weights.
    """
    scores = _hide(queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3]), attend_mask)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=3)


def _attend_with_prior(
    queries: Tensor, keys: Tensor, values: Tensor, attend_mask: Tensor | None, dropout_p: float, prior: Tensor
) -> Tensor:
    """Multiply the weights by the prior. A bias of `scaled_dot_product_attention` cannot: it normalises weights after it."""
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(2, 3)
    assert attend_mask is not None  # it comes with the prior
    weights = _hide(scores, attend_mask).softmax(-1) * prior[:, None]
    return F.dropout(weights, dropout_p).to(values.dtype) @ values


def _hide(scores: Tensor, attend_mask: Tensor | None) -> Tensor:
    """Return the scores with -inf where a bool mask is False, or plus a bias."""
    if attend_mask is None:
        return scores
    return scores + attend_mask if attend_mask.is_floating_point() else scores.masked_fill(~attend_mask, -torch.inf)


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
        q, k, v = (split_heads(x, num_heads) for x in (q, k, v))
        return merge_heads(attend(q, k, v, mask, dropout_p))

    if isinstance(maps, Blocks):
        # As it is, FlexAttention stores all scores: on GPUs it is compiled even where the model is not.
        alone = queries.device.type == "cuda" and not torch.compiler.is_compiling()
        attend_blocks: Callable[..., Tensor] = flex_attention
        if alone:
            attend_blocks = compiled(flex_attention)
        heads = (split_heads(x, num_heads) for x in (queries, keys, values))
        attended = merge_heads(attend_blocks(*heads, block_mask=maps.mask))
        return attended if on_leaves is None else torch.cat([on_leaves, attended[:, num_leaves:]], dim=1)
    if isinstance(maps, OneCall):
        if on_leaves is None:
            return call(queries, keys, values, maps.bias)
        return torch.cat([on_leaves, call(queries[:, num_leaves:], keys, values, maps.bias[:, :, num_leaves:])], dim=1)
    assert maps is not None  # `prepare` makes those of spans
    if fused:
        return fused_attention(queries, keys, values, maps, num_heads)
    sizes = num_leaves, structure.num_nodes
    leaf_queries, node_queries = queries.split(sizes, dim=1)
    if on_leaves is None:
        leaf_keys, leaf_values = keys.split(sizes, dim=1)[0], values.split(sizes, dim=1)[0]
        on_leaves = call(leaf_queries, leaf_keys, leaf_values, maps.leaf_mask)
    if isinstance(maps, TwoCalls):
        return torch.cat([on_leaves, call(node_queries, keys, values, maps.node_mask)], dim=1)
    in_chunks = call(_take(queries, maps.query), _take(keys, maps.key), _take(values, maps.key), maps.mask)
    wide = call(_take(queries, maps.wide_query), keys, values, maps.wide_mask)
    rows = torch.cat([in_chunks.flatten(0, 1), wide.flatten(0, 1)])
    return torch.cat([on_leaves, rows.index_select(0, maps.place.flatten()).unflatten(0, maps.place.shape)], dim=1)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """Take flat positions [R, M] of x [B, S, D] -> [R, M, D]."""
    return x.reshape(-1, x.shape[2]).index_select(0, positions.flatten()).unflatten(0, positions.shape)
