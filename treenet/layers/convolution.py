"""Lightweight and dynamic convolution (Wu et al., 2019) instead of self-attention: centred for encoders, causal for decoders.

The weights of a kernel are a softmax over its taps, shared by the channels of a head. A convolution is a product with a band
matrix. Row t of the matrix is the kernel of position t. This takes at most as long as attention's product of weights and values.
It is much faster than one pass per tap over the states or over windows of them. Long sequences are cut into chunks, so that time
and memory grow with S * W and not with S * S.

Shapes: B batch, S positions, D model, H heads, K = D / H channels, W kernel size, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.layers.scaled_dot_product import merge_heads, split_heads

if TYPE_CHECKING:
    from treenet.config import ModelConfig

_AT_ONCE, _CHUNK = 128, 32  # positions; measured on CPUs


def convolve(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """Compute out[t] = sum over w of kernels[t, w] * x[t + w - left]. Beyond its ends, x is 0.

    x [B, H, S, K] and kernels [B or 1, H, S or 1, W] -> [B, H, S, K].
    """
    size, width = x.shape[2], kernels.shape[3]
    kernels = kernels.expand(-1, -1, size, -1)
    if size <= _AT_ONCE:
        first = max(0, left - size + 1)  # taps before this one, and from left + size on, never meet a position
        left -= first
        return _bands(kernels[..., first : first + left + size])[..., left : left + size] @ x
    chunks = -(-size // _CHUNK)
    rest = chunks * _CHUNK - size
    # Inputs that a chunk reads, [B, H, chunks, K, C + W - 1].
    windows = F.pad(x, (0, 0, left, width - 1 - left + rest)).unfold(2, _CHUNK + width - 1, _CHUNK)
    bands = _bands(F.pad(kernels, (0, 0, 0, rest)).unflatten(2, (chunks, _CHUNK)))
    return (bands @ windows.transpose(3, 4)).flatten(2, 3)[:, :, :size]


def _bands(kernels: Tensor) -> Tensor:
    """Move row t of rows [..., C, W] to the right by t and fill up with 0: [..., C, C + W - 1]."""
    size, width = kernels.shape[-2:]
    # Rows of C + W entries, cut every C + W - 1 entries: each begins one entry later than the one before.
    flat = F.pad(kernels, (0, size)).flatten(-2)[..., : size * (size + width - 1)]
    return flat.unflatten(-1, (size, size + width - 1))


def kernel_size(sizes: Sequence[int], number: int) -> int:
    """Return the kernel size of layer `number`, counted from 0. Layers above the last of `sizes` have the last size."""
    return sizes[min(number, len(sizes) - 1)]


class LightweightKernels(nn.Module):
    """One kernel per head for all positions. Dropout removes the same taps at all positions of an example."""

    def __init__(self, config: ModelConfig, size: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(config.num_heads, size)))
        self.dropout = Dropout(config.convolution.weight_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return kernels [B or 1, H, 1, W] of inputs x [B, S, D]."""
        weights = self.weight.softmax(dim=1).view(1, 1, -1)
        if self.training:  # examples drop different taps
            weights = self.dropout(weights.expand(len(x), -1, -1))
        return weights.unflatten(2, self.weight.shape).transpose(1, 2)


class DynamicKernels(nn.Module):
    """The kernels of a position are a linear function of its input (section 3.2 of the paper). Each has separate dropout."""

    def __init__(self, config: ModelConfig, size: int):
        super().__init__()
        self.shape = config.num_heads, size
        self.logits = nn.Linear(config.d_model, config.num_heads * size, bias=False)
        nn.init.xavier_uniform_(self.logits.weight)
        self.dropout = Dropout(config.convolution.weight_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return kernels [B, H, S, W] of inputs x [B, S, D]."""
        weights = self.logits(x).unflatten(2, self.shape).softmax(dim=3).flatten(2)
        return self.dropout(weights).unflatten(2, self.shape).transpose(1, 2)


class _Convolution(nn.Module):
    """Base class of both (figure 2 of the paper): input projection with or without GLU, kernels, output projection."""

    def __init__(self, config: ModelConfig, kernels: LightweightKernels | DynamicKernels):
        super().__init__()
        self.num_heads = config.num_heads
        self.gated = config.convolution.gated
        self.input = build_linear(config.d_model, config.d_model, num_blocks=2 if self.gated else 1)
        self.kernels = kernels
        self.output = build_linear(config.d_model, config.d_model)

    def project(self, x: Tensor) -> Tensor:
        """Project the input of the convolution: [B, S, D] -> [B, S, D]."""
        x = self.input(x)
        return F.glu(x, dim=2) if self.gated else x


class CentredConvolution(_Convolution):
    """Convolution of encoders, with equal numbers of taps before and after a position. An even kernel size has one more after."""

    def forward(self, x: Tensor, attend_mask: Tensor) -> Tensor:
        """Map x [B, S, D] -> [B, S, D]. attend_mask [B, 1, 1, S] is True at readable positions; others count as 0."""
        x = self.project(x).masked_fill(~attend_mask.view(len(x), -1, 1), 0)
        kernels = self.kernels(x)
        left = (kernels.shape[3] - 1) // 2
        return self.output(merge_heads(convolve(split_heads(x, self.num_heads), kernels, left)))


class CausalConvolution(_Convolution):
    """Causal convolution of decoders: the last tap is the position itself. Decoding keeps the last W - 1 inputs."""

    def start(self, like: Tensor) -> tuple[Tensor]:
        """Return the `past` before the first position, for `like` [B, H, S, K]."""
        return (like[:, :, :0],)

    def forward(self, x: Tensor, past: tuple[Tensor] | None = None) -> tuple[Tensor, tuple[Tensor]]:
        """Map x [B, T, D] -> [B, T, D], and return the last inputs [B, H, up to W - 1, K].

        With `past`, x is the next position.
        """
        x = self.project(x)
        kernels, inputs = self.kernels(x), split_heads(x, self.num_heads)
        width = kernels.shape[3]
        if past is None:
            convolved = convolve(inputs, kernels, width - 1)
        else:
            inputs = torch.cat([past[0], inputs], dim=2)
            convolved = kernels[..., -inputs.shape[2] :] @ inputs
        return self.output(merge_heads(convolved)), (inputs[:, :, max(0, inputs.shape[2] - width + 1) :],)
