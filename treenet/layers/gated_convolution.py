"""Gated convolutions and multi-step attention (Gehring et al., 2017).

Shapes: B batch, T positions, S source positions, D model, W kernel size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from treenet.layers.attention import BeamLayout, KeysValues
from treenet.layers.dropout import Dropout
from treenet.layers.scaled_dot_product import attend, merge_heads, split_heads

if TYPE_CHECKING:
    from treenet.config import ModelConfig

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
    """A decoder layer: causal gated convolution, then the layer's own attention to the source (section 3.3)."""

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
