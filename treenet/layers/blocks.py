"""Transformer layers (equation 3), post-norm or pre-norm, and what they read: positions, and prepared trees.

Leaves and nodes share layer norms and feed-forward weights. Pre-norm (Wang et al., 2019, arXiv 1906.01787) normalises the input
of a sub-layer, and the output of the last layer. Layer-drop (Fan et al., 2020, arXiv 1909.11556) skips a layer in training. It
draws for each example by itself, so a batch-mate changes nothing.

Positions are sinusoids of the place in the sentence (Vaswani et al., 2017), or of the depth in its dependency tree (Wang et al.,
2019). They may also be learned vectors (Gehring et al., 2017).

Shapes: B batch, T target positions, L leaves, S source positions (leaves, then nodes), D model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import BeamLayout, CrossAttention, KeysValues, Past, padding_to_attend_mask
from treenet.layers.backend import product_dtype
from treenet.layers.core import Dropout, Modules, build_linear
from treenet.structure import TreeStructure
from treenet.structure.prepare import prepare

if TYPE_CHECKING:
    from treenet.config import ModelConfig, TreeAttentionConfig


def compute_sinusoids(length: int, d_model: int) -> Tensor:
    """Return [length, d_model] float32: sines in the even dimensions, cosines in the odd ones."""
    if torch.get_default_device().type == "meta":
        return torch.empty(length, d_model)  # only the shape is wanted, and the rest would load PyTorch's compiler
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """Adds positions. The table is not a parameter, and grows with the longest sequence so far."""

    def __init__(self, d_model: int, length: int = 512):
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", compute_sinusoids(length, d_model), persistent=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Add positions first, first + 1, ... to x [B, T, D] -> [B, T, D]."""
        return x + self.rows(first + x.shape[1], first)

    def at(self, x: Tensor, position: Tensor) -> Tensor:
        """Add the one `position` [1] to all of x [B, M, D]. It must be in the table: call `rows` first."""
        return x + self.table.index_select(0, position)

    def rows(self, length: int, first: int = 0) -> Tensor:
        """Return positions `first` to length - 1: [length - first, D]."""
        if length > len(self.table):
            with torch.inference_mode(False):  # a table of a search may be trained with later
                self.table = compute_sinusoids(2 * length, self.table.shape[1]).to(self.table)
        return self.table[first:length]


class StructuralPositions(nn.Module):
    """Adds absolute structural positions: the sinusoid of a word's depth, fused with that of its place in the sentence.

    The formula is tanh(W_a PE(place) + W_b PE(depth) + b).
    """

    def __init__(self, sinusoids: SinusoidalPositions, fused: bool):
        super().__init__()
        self.sinusoids = sinusoids
        d_model = sinusoids.table.shape[1]
        self.place = build_linear(d_model, d_model) if fused else None
        self.depth = build_linear(d_model, d_model) if fused else None

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        """Add them to x [B, L, D], with depth [B, L] below L -> [B, L, D]."""
        table = self.sinusoids.rows(x.shape[1])
        if self.place is None or self.depth is None:
            return x + F.embedding(depth, table)
        return x + torch.tanh(self.place(table) + F.embedding(depth, self.depth(table)))


class LearnedPositions(nn.Module):
    """Adds a learned vector per position. Positions beyond the table share its last row."""

    def __init__(self, rows: int, d_model: int, std: float):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, d_model).normal_(std=std))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Add positions first, first + 1, ... to x [B, T, D] -> [B, T, D]."""
        rows = torch.arange(first, first + x.shape[1], device=x.device).clamp(max=len(self.table) - 1)
        return x + self.table[rows]


class FeedForward(nn.Module):
    """ReLU feed-forward sub-layer, with dropout of its inner units."""

    def __init__(self, d_model: int, d_ff: int, dropout: float):
        super().__init__()
        self.inner = build_linear(d_model, d_ff)
        self.outer = build_linear(d_ff, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, num_leaves: int | None = None) -> Tensor:
        """Map [B, S, D] -> [B, S, D]. With `num_leaves`, positions from there on are nodes."""
        return self.outer(self.dropout(F.relu(self.inner(x)), num_leaves))


class _Layer(nn.Module):
    """The common part of layers: residual connections around sub-layers, and layer-drop around the layer."""

    def __init__(self, config: ModelConfig, layer_drop: float):
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dropout = Dropout(config.dropout)
        self.layer_drop = Dropout(layer_drop)
        self.final_norm: nn.LayerNorm | None = None

    def enter(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        """Return the input of the sub-layer of this norm, [B, S, D] -> [B, S, D]."""
        return norm(x) if self.pre_norm else x

    def leave(self, norm: nn.LayerNorm, x: Tensor, result: Tensor, num_leaves: int | None = None) -> Tensor:
        """Add the result of the sub-layer of this norm to x, both [B, S, D] -> [B, S, D]."""
        x = x + (self.dropout(result, num_leaves) if self.training else result)
        return x if self.pre_norm else norm(x)

    def end(self, before: Tensor, x: Tensor) -> Tensor:
        """Skip the layer in some examples: its input `before` and its output, both [B, S, D] -> [B, S, D]."""
        if self.training and self.layer_drop.p:
            kept = self.layer_drop(torch.ones(len(x), 1, 1, dtype=x.dtype, device=x.device)) > 0
            x = torch.where(kept, x, before)
        return x if self.final_norm is None else self.final_norm(x)


class EncoderLayer(_Layer):
    """A self-attention, or its replacement, and a feed-forward sub-layer (over trees equations 19, 20)."""

    def __init__(self, config: ModelConfig, self_attention: nn.Module):
        super().__init__(config, config.encoder_layer_drop)
        self.self_attention: Any = self_attention
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation_dropout)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, *inputs: Any, num_leaves: int | None = None, **named_inputs: Any) -> Tensor:
        """Map x [B, S, D] -> [B, S, D]. The self-attention reads `inputs` beside the states.

        With `num_leaves`, positions from there on are nodes.
        """
        before = x
        attended = self.self_attention(self.enter(self.self_attention_norm, x), *inputs, **named_inputs)
        x = self.leave(self.self_attention_norm, x, attended, num_leaves)
        mapped = self.feed_forward(self.enter(self.feed_forward_norm, x), num_leaves)
        return self.end(before, self.leave(self.feed_forward_norm, x, mapped, num_leaves))


class DecoderLayer(_Layer):
    """A causal self-attention, or its replacement, a cross-attention and a feed-forward sub-layer."""

    def __init__(self, config: ModelConfig, self_attention: Any, cross_attention: CrossAttention):
        super().__init__(config, config.decoder_layer_drop)
        self.self_attention: Any = self_attention  # a module: that of `CausalSelfAttention`, or its replacement
        self.cross_attention = cross_attention
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation_dropout)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.cross_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        x: Tensor,
        memory: KeysValues | Tensor,
        memory_attend_mask: Tensor | None,
        past: Past | KeysValues | None = None,
        layout: BeamLayout | None = None,
        structure: TreeStructure | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Map x [B, T, D] -> [B, T, D]. Also returns the self-attention keys and values, the `past` of the next step.

        The memory is given as states [B, S, D], with their trees in `structure`, or as its keys and values. Its mask is bool, or
        a bias, as in `treenet.layers.attention`. With a `layout` (beam search), x is one position of several hypotheses per
        sentence, which share a memory. A `StaticPast` needs no layout: x [B, M, D] has M hypotheses per sentence.
        """
        if isinstance(memory, Tensor):
            memory = self.cross_attention.project_memory(memory, structure)
        before = x
        attended, so_far = self.self_attention(self.enter(self.self_attention_norm, x), past)
        x = self.leave(self.self_attention_norm, x, attended)
        read = self.cross_attention(self.enter(self.cross_attention_norm, x), memory, memory_attend_mask, layout, structure)
        x = self.leave(self.cross_attention_norm, x, read)
        mapped = self.feed_forward(self.enter(self.feed_forward_norm, x))
        return self.end(before, self.leave(self.feed_forward_norm, x, mapped)), so_far


AnyLayer = TypeVar("AnyLayer", bound=_Layer)


def end_stack(layers: Modules[AnyLayer], config: ModelConfig) -> Modules[AnyLayer]:
    """Return the layers of a stack. With pre-norm, the last one gets a norm of its output."""
    if config.norm == "pre" and len(layers):
        layers[-1].final_norm = nn.LayerNorm(config.d_model)
    return layers


def prepare_trees(
    structure: TreeStructure, tree: TreeAttentionConfig, like: Tensor, *, drops_weights: bool = False
) -> TreeStructure:
    """Return the structure with all maps that layers read, for vectors as `like`; `drops_weights`: attention has dropout now."""
    # FlexAttention has no dropout of attention weights; on CPUs it has no backward pass.
    blocks = like.device.type == "cuda" and not drops_weights
    return prepare(structure, tree, like.dtype, product_dtype(like), blocks)


def position_pad_mask(structure: TreeStructure) -> Tensor:
    """Return [B, S] bool, True = padding: leaves, then nodes."""
    return torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)


def attend_mask_of(tree: TreeAttentionConfig, pad_mask: Tensor) -> Tensor | None:
    """Return the mask of attention layers; None if they attend by the trees (equation 11)."""
    return None if tree.subtree_mask else padding_to_attend_mask(pad_mask)


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, structure: TreeStructure, tree: TreeAttentionConfig, pad_mask: Tensor
) -> Tensor:
    """Run x [B, S, D], leaves, then nodes, through `EncoderLayer`s over a prepared structure -> [B, S, D]."""
    attend_mask = attend_mask_of(tree, pad_mask)
    for layer in layers:
        x = layer(x, attend_mask, structure, num_leaves=structure.num_leaves)
    return x
