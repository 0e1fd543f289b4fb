"""Dropout by key as one kernel. Every entry computes its own hash, so no mask is stored, and backward computes it again.

The masks are those of `DropoutKeys.keep_mask`, to the bit. Shapes: B batch, S positions, D model.
"""

import torch
from torch import Tensor

from treenet.layers.compiled import CompiledOnGpu

FIRST, SECOND = 0x45D9F3B, 0x2C1B3C6D  # odd multipliers of the hash
POSITION, CALL, NODES = 0x1E3779B1, 0x5851F42D, 0x40000000  # offsets of positions, calls and nodes in a key

_CALLS = 4096  # of a forward pass; no model has as many


def mix(x: Tensor) -> Tensor:
    """Return a hash of int32 with wrap-around."""
    for _ in range(2):
        x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    return x ^ ((x >> 16) & 0xFFFF)


def call_offsets(device: torch.device) -> Tensor:
    """Return the offset of every call in a key [calls] int32. As Python numbers, each would need a separate compiled graph."""
    return torch.arange(_CALLS, dtype=torch.int32, device=device) * CALL


def drop(x: Tensor, keys: Tensor, offset: Tensor, threshold: int, num_leaves: int) -> Tensor:
    """Drop units of x [B, S, D] by keys [B] and the offset [] of the call, int32. `num_leaves` is -1 if there are only leaves."""
    index = torch.arange(x.shape[1], device=x.device)
    # In int64, and then cast: the number may be a symbol, and all values that wrap around must be int32.
    place = torch.where(index < num_leaves, index, index - num_leaves + NODES) if num_leaves >= 0 else index
    rows = mix(keys[:, None] + place.to(torch.int32) * POSITION + offset)
    dimension = torch.arange(x.shape[2], device=x.device).to(torch.int32)
    bits = rows[:, :, None] ^ mix((dimension >> 1) * POSITION)
    bits = bits * FIRST
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * SECOND
    half = torch.where(dimension & 1 == 1, bits, bits << 16) >> 16  # two dimensions share 32 bits; the shift keeps the sign
    return x * (half >= threshold - 2**15).to(x.dtype) * (2**16 / (2**16 - threshold))


_drop_on_gpu = CompiledOnGpu(drop)


@torch.library.custom_op("treenet::keyed_dropout", mutates_args=())
def _operator(x: Tensor, keys: Tensor, offset: Tensor, threshold: int, num_leaves: int) -> Tensor:
    return _drop_on_gpu(x, keys, offset, threshold, num_leaves)


@_operator.register_fake
def _(x, keys, offset, threshold, num_leaves):
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output) -> None:
    _, keys, offset, ctx.threshold, ctx.num_leaves = inputs
    ctx.save_for_backward(keys, offset)


def _backward(ctx, grad: Tensor):
    """Return the gradient: dropout is linear, so it is the same dropout."""
    return _operator(grad, *ctx.saved_tensors, ctx.threshold, ctx.num_leaves), None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def keyed_dropout(x: Tensor, keys: Tensor, offset: Tensor, threshold: int, num_leaves: int) -> Tensor:
    """Apply `drop`, differentiably. In a compiled model it is plain operations, which fuse with their neighbours."""
    if torch.compiler.is_compiling():
        return drop(x, keys, offset, threshold, num_leaves)
    return _operator(x, keys, offset, threshold, num_leaves)
