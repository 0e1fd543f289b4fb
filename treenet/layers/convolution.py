"""Convolutions instead of self-attention: lightweight and dynamic (Wu et al., 2019), and gated (Gehring et al., 2017).

The weights of a lightweight or dynamic kernel are a softmax over its taps, shared by the channels of a head. A convolution is a
product with a band matrix. Row t of the matrix is the kernel of position t. This takes at most as long as attention's product of
weights and values. It is much faster than one pass per tap over the states or over windows of them. Long sequences are cut into
chunks, so that time and memory grow with S * W and not with S * S. Beyond a sentence and at padding, inputs are 0. The released
code can divide the weights of these taps among the others, and its dropout differs between devices.

Shapes: B batch, S positions, T target positions, D model, H heads, K = D / H channels, W kernel size, C positions of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from treenet.layers.attention import BeamLayout, KeysValues
from treenet.layers.core import Dropout, build_linear
from treenet.layers.scaled_dot_product import attend, merge_heads, split_heads

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


Kernels = LightweightKernels | DynamicKernels


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


EMBEDDING_STD = 0.1  # section 3.5
HALF = math.sqrt(0.5)  # the sum of two values keeps the variance of one


def build_normalised_linear(d_in: int, d_out: int, dropout: float, gain: float = 1.0) -> nn.Linear:
    """Build a linear layer with weight normalisation. Its outputs have `gain` times the variance of its inputs after dropout."""
    linear = nn.Linear(d_in, d_out)
    nn.init.normal_(linear.weight, std=math.sqrt(gain * (1 - dropout) / d_in))
    nn.init.zeros_(linear.bias)
    return weight_norm(linear)


class GatedConvolution(nn.Module):
    """Convolution to twice the width and a GLU (section 3.2), of inputs with dropout.

    A centred one has equal numbers of taps before and after a position; an even size has one more after. In a causal one, the
    last tap is the position itself.
    """

    def __init__(self, d_model: int, kernel_size: int, dropout: float, causal: bool = False):
        super().__init__()
        self.before = kernel_size - 1 if causal else (kernel_size - 1) // 2
        self.after = kernel_size - 1 - self.before
        self.dropout = Dropout(dropout)
        # A GLU removes three quarters of the variance, and the gain restores it (section 3.5).
        self.windows = build_normalised_linear(kernel_size * d_model, 2 * d_model, dropout, gain=4.0)

    def start(self, like: Tensor) -> Tensor:
        """Return the `past` of a causal one before the first position, for `like` [B, S, D]: zeros [B, W - 1, D]."""
        return like.new_zeros(len(like), self.before, like.shape[2])

    def forward(self, x: Tensor, past: Tensor | None = None, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x [B, T, D] -> [B, T, D]. Also returns the last W - 1 inputs of a causal one, the `past` of the next position.

        `weight` is that of `windows`, if it is already computed.
        """
        num_positions = x.shape[1]
        weight = self.windows.weight if weight is None else weight
        x = self.dropout(x)
        x = F.pad(x, (0, 0, self.before, self.after)) if past is None else torch.cat([past, x], dim=1)
        taps = range(self.before + self.after + 1)
        windows = torch.cat([x[:, tap : tap + num_positions] for tap in taps], dim=2)
        return F.glu(F.linear(windows, weight, self.windows.bias), dim=2), x[:, num_positions:]


class ConvolutionEncoderLayer(nn.Module):
    """A gated convolution and its residual."""

    def __init__(self, d_model: int, kernel_size: int, dropout: float):
        super().__init__()
        self.convolution = GatedConvolution(d_model, kernel_size, dropout)

    def forward(self, x: Tensor, pad_mask: Tensor) -> Tensor:
        """Map x [B, L, D] -> [B, L, D]; padding counts as 0."""
        x = x.masked_fill(pad_mask[..., None], 0)
        return HALF * (self.convolution(x)[0] + x)


class MultiStepAttentionLayer(nn.Module):
    """A decoder layer: causal gated convolution, then the layer's own attention to the source (section 3.3).

    With `rule: released`, attention reads the output of the convolution before the residual is added, and its result is
    projected. Every sum of two is multiplied by sqrt(0.5), also z + e and W h + g. The gradient of the encoder is divided by
    twice the number of attentions.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        d_model, settings = config.d_model, config.convs2s
        self.released = settings.rule == "released"
        self.attention_dropout = config.attention_dropout
        self.convolution = GatedConvolution(d_model, settings.decoder_kernel, config.dropout, causal=True)
        self.queries = build_normalised_linear(d_model, d_model, 0.0)
        if self.released:
            self.output = build_normalised_linear(d_model, d_model, 0.0)

    def weights(self) -> tuple[Tensor, ...]:
        """Return its normalised weights, for many steps. Normalising them costs as much as a step that uses them."""
        linears = [self.convolution.windows, self.queries, *([self.output] if self.released else [])]
        return tuple(linear.weight for linear in linears)

    def forward(
        self,
        x: Tensor,
        embedded: Tensor,
        memory: KeysValues,
        memory_attend_mask: Tensor,
        past: Tensor | None = None,
        layout: BeamLayout | None = None,
        weights: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map x and the embedded target pieces [B, T, D], with memory [B, 1, S, D], to [B, T, D] and the `past` of the next step.

        With a `layout` (beam search), x is one position of several hypotheses per sentence, which share a memory. `weights` are
        its own, if they are already computed.
        """
        windows, query_weight, *rest = self.weights() if weights is None else weights
        convolved, past = self.convolution(x, past, windows)
        if not self.released:
            x = HALF * (convolved + x)
            queries = F.linear(x, query_weight, self.queries.bias) + embedded
            return x + self.attend(queries, memory, memory_attend_mask, layout), past
        queries = HALF * (F.linear(convolved, query_weight, self.queries.bias) + embedded)
        attended = F.linear(self.attend(queries, memory, memory_attend_mask, layout), rest[0], self.output.bias)
        return HALF * (HALF * (attended + convolved) + x), past

    def attend(self, queries: Tensor, memory: KeysValues, attend_mask: Tensor, layout: BeamLayout | None) -> Tensor:
        """Attend with one head and scores without a divisor (equations 1 and 2): queries [B, T, D] -> [B, T, D]."""
        if layout is not None:
            queries = layout.pad(queries)
        queries = split_heads(queries * math.sqrt(queries.shape[2]), 1)  # `attend` divides by it
        attended = merge_heads(attend(queries, *memory, attend_mask, self.attention_dropout if self.training else 0.0))
        return attended if layout is None else layout.unpad(attended)
