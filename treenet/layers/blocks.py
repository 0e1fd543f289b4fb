"""Post-norm Transformer layers (equation 3). Leaves and nodes share layer norms and feed-forward weights.

Shapes: B batch, T target positions, S source positions, D model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import CausalSelfAttention, CrossAttention, KeysValues, Readers, SelfAttention
from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.structure import TreeStructure

if TYPE_CHECKING:
    from treenet.config import ModelConfig, TreeAttentionConfig


class FeedForward(nn.Module):
    """ReLU feed-forward sub-layer."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.inner = build_linear(d_model, d_ff)
        self.outer = build_linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.outer(F.relu(self.inner(x)))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward; over trees when `tree` is given (equations 19, 20)."""

    def __init__(self, config: ModelConfig, tree: TreeAttentionConfig | None = None):
        super().__init__()
        self.self_attention = SelfAttention(config.d_model, config.num_heads, config.attention_dropout, tree)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, attend_mask: Tensor | None = None, structure: Any = None, **inputs: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]; `structure` and `inputs` are what the self-attention reads beside the states."""
        num_leaves = structure.num_leaves if isinstance(structure, TreeStructure) else None
        return self.finish(x, self.self_attention(x, attend_mask, structure, **inputs), num_leaves)

    def finish(self, x: Tensor, attended: Tensor, num_leaves: int | None = None) -> Tensor:
        """What comes after self-attention, both [B, S, D] -> [B, S, D]; with `num_leaves`, positions from there on are nodes."""
        x = self.self_attention_norm(x + self.dropout(attended, num_leaves))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x), num_leaves))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention (over trees when `tree` is given) and feed-forward."""

    def __init__(self, config: ModelConfig, tree: TreeAttentionConfig | None = None):
        super().__init__()
        self.self_attention = CausalSelfAttention(config.d_model, config.num_heads, config.attention_dropout)
        self.cross_attention = CrossAttention(config.d_model, config.num_heads, config.attention_dropout, tree)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.cross_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        memory: KeysValues,
        memory_attend_mask: Tensor | None,
        past: KeysValues | None = None,
        readers: Readers | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """x [B, T, D] -> [B, T, D] and the self-attention keys and values, the `past` of the next step.

        With `readers`, which says who shares a memory, x is one position of several hypotheses a sentence.
        """
        attended, past = self.self_attention(x, past)
        x = self.self_attention_norm(x + self.dropout(attended))
        x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory, memory_attend_mask, readers)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), past
