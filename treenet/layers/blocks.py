"""Post-norm Transformer layers (equation 3). Leaves and nodes share layer norms and feed-forward weights.

Shapes: B batch, T target positions, S source positions, D model.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import BeamLayout, CrossAttention, KeysValues
from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.layers.static_past import StaticPast
from treenet.structure import TreeStructure


class FeedForward(nn.Module):
    """ReLU feed-forward sub-layer."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.inner = build_linear(d_model, d_ff)
        self.outer = build_linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] -> [..., D]."""
        return self.outer(F.relu(self.inner(x)))


class EncoderLayer(nn.Module):
    """A self-attention, or its replacement, and a feed-forward sub-layer (over trees equations 19, 20)."""

    def __init__(self, self_attention: nn.Module, feed_forward: nn.Module, d_model: int, dropout: float):
        super().__init__()
        self.self_attention = self_attention
        self.feed_forward = feed_forward
        self.self_attention_norm = nn.LayerNorm(d_model)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, *inputs: Any, num_leaves: int | None = None, **named_inputs: Any) -> Tensor:
        """Map x [B, S, D] -> [B, S, D]. The self-attention reads `inputs` beside the states.

        With `num_leaves`, positions from there on are nodes.
        """
        return self.finish(x, self.self_attention(x, *inputs, **named_inputs), num_leaves)

    def finish(self, x: Tensor, attended: Tensor, num_leaves: int | None = None) -> Tensor:
        """Compute the rest of the layer after self-attention, both [B, S, D] -> [B, S, D]."""
        x = self.self_attention_norm(x + self.dropout(attended, num_leaves))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x), num_leaves))


class DecoderLayer(nn.Module):
    """A causal self-attention, or its replacement, a cross-attention and a feed-forward sub-layer."""

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: CrossAttention,
        feed_forward: nn.Module,
        d_model: int,
        dropout: float,
    ):
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.self_attention_norm = nn.LayerNorm(d_model)
        self.cross_attention_norm = nn.LayerNorm(d_model)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: KeysValues | Tensor,
        memory_attend_mask: Tensor | None,
        past: KeysValues | StaticPast | None = None,
        layout: BeamLayout | None = None,
        structure: TreeStructure | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Map x [B, T, D] -> [B, T, D]. Also returns the self-attention keys and values, the `past` of the next step.

        The memory is given as states [B, S, D], with their trees in `structure`, or as its keys and values. With a `layout` (beam
        search), x is one position of several hypotheses per sentence, which share a memory. A `StaticPast` needs no layout:
        x [B, M, D] has M hypotheses per sentence.
        """
        if isinstance(memory, Tensor):
            memory = self.cross_attention.project_memory(memory, structure)
        attended, so_far = self.self_attention(x, past)
        x = self.self_attention_norm(x + self.dropout(attended))
        x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory, memory_attend_mask, layout)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), so_far
