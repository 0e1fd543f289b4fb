"""The base of all decoders, the state of a search, and the Transformer decoder, over any encoder.

A state grows, or has fixed shapes for GPUs. The Transformer decoder has tree cross-attention if the memory has trees.

Shapes: B batch (sentences), S memory positions, T target positions, D model, H heads, K = D / H, R live hypotheses, A sentences
whose memory is kept. A sentence without a hypothesis is dropped after a while. Of fixed shapes: M hypotheses of each sentence, C
positions that the state can hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import (
    BeamLayout,
    CausalSelfAttention,
    CrossAttention,
    GrowingPast,
    KeysValues,
    Paths,
    StaticPast,
    grown,
    padding_to_attend_mask,
)
from treenet.layers.backend import product_dtype
from treenet.layers.blocks import DecoderLayer, SinusoidalPositions, end_stack
from treenet.layers.convolution import CausalConvolution, Kernels, kernel_size
from treenet.layers.core import Dropout, Modules, WordDropout
from treenet.layers.relations import RelativeCausalSelfAttention
from treenet.layers.scaled_dot_product import as_bias
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding
from treenet.structure import TreeStructure

FIRST_CAPACITY = 32  # positions; then twice as many, whenever they are used up
KEPT_MEMORY = 0.75  # the memory of sentences is kept while more than this share has hypotheses


@dataclass
class StaticState:
    """M hypotheses of each of B sentences, sentence after sentence. Steps and selections change it in place."""

    memory: list[KeysValues]  # per layer, [B, H, S, K]
    memory_bias: Tensor  # [B, 1, 1, S], -inf at padding, else 0
    past: list[KeysValues]  # per layer, [B, H, M, C, K]
    paths: Paths
    position: Tensor  # [1] int64, of the next step

    @classmethod
    def begin(cls, pad_mask: Tensor, memory: list[KeysValues], beam_width: int, dtype: torch.dtype) -> "StaticState":
        """Make `beam_width` empty hypotheses for each sentence. `pad_mask` [B, S] of the memory is True at padding.

        Self-attention has keys and values of type `dtype`.
        """
        capacity, device = FIRST_CAPACITY, pad_mask.device

        def empty(like: Tensor) -> Tensor:
            batch, heads, _, width = like.shape
            return torch.zeros(batch, heads, beam_width, capacity, width, dtype=dtype, device=device)

        past = [(empty(keys), empty(values)) for keys, values in memory]
        paths = Paths(len(pad_mask), beam_width, capacity, device)
        position = torch.zeros(1, dtype=torch.long, device=device)
        return cls(memory, as_bias(padding_to_attend_mask(pad_mask), dtype), past, paths, position)

    @property
    def beam_width(self) -> int:
        """Return M."""
        return self.paths.table.shape[1]

    @property
    def capacity(self) -> int:
        """Return C."""
        return self.paths.table.shape[2]

    def grow(self) -> None:
        """Double the capacity, in new memory. What is stored stays."""
        capacity = 2 * self.capacity
        self.past = [(grown(keys, 3, capacity), grown(values, 3, capacity)) for keys, values in self.past]
        self.paths.grow(capacity)

    def next_pasts(self) -> list[StaticPast]:
        """Return the past of each layer at the next position, before its keys and values are stored."""
        self.paths.stay(self.position)
        bias = as_bias(self.paths.attend_mask(), self.past[0][0].dtype)
        return [StaticPast(keys, values, self.position, bias) for keys, values in self.past]

    def select(self, rows: Tensor, beam_width: int | None = None) -> "StaticState":
        """Go on with hypotheses `rows` [B * M], each of the sentence of its new place. `beam_width` is always M."""
        self.paths.select(rows)
        return self


@dataclass
class DecoderState:
    """R hypotheses of A sentences after `step` positions. Steps and selections make new states; no state is changed in place.

    The memory is kept once per sentence, for any number of hypotheses. A sentence without hypotheses stays for a while.
    """

    sources: Tensor  # [R] row of the memory that a hypothesis translates
    layout: BeamLayout
    memory: list[KeysValues]  # per layer, [A, H, S, K]
    memory_attend_mask: Tensor  # [A, 1, 1, S]
    past: Sequence[tuple[Tensor, ...]]  # per layer, [R, ...]: keys and values of self-attention, last inputs of a convolution
    step: int
    selects_past: bool = field(default=True, kw_only=True)  # else the next step selects the rows of `going`
    going: Tensor | None = field(default=None, kw_only=True)  # [R] rows of `past`; None: all, in order
    structure: TreeStructure | None = field(default=None, kw_only=True)  # of all sentences at the start, for `PrefixDecoder`

    @classmethod
    def begin(cls, pad_mask: Tensor, memory: list[KeysValues], past: Sequence[tuple[Tensor, ...]], **more: Any) -> Self:
        """Make one empty hypothesis for each sentence. `pad_mask` [B, S] of the memory is True at padding."""
        sources = torch.arange(len(pad_mask), device=pad_mask.device)
        layout = BeamLayout.full(len(sources), beam_width=1)
        return cls(sources, layout, memory, padding_to_attend_mask(pad_mask), past, step=0, **more)

    def select(self, rows: Tensor, beam_width: int | None = None) -> "DecoderState":
        """Return the state of hypotheses `rows` [R'], in that order. A row may occur several times, or not at all.

        With `beam_width`, there are so many rows for each sentence, sentence after sentence.
        """
        past = self.past
        going: Tensor | None = rows if self.going is None else self.going[rows]
        if self.selects_past:
            going, past = None, [tuple(part.index_select(0, rows) for part in parts) for parts in past]
        if beam_width is not None:
            layout = BeamLayout.full(len(self.memory_attend_mask), beam_width)
            sources = torch.arange(len(self.memory_attend_mask), device=rows.device).repeat_interleave(beam_width)
            return replace(self, sources=sources, layout=layout, past=past, going=going)
        sources, layout, memory, attend_mask = self.sources[rows], self.layout, self.memory, self.memory_attend_mask
        if not torch.equal(sources, self.sources):
            counts = sources.bincount(minlength=len(attend_mask))
            kept = counts.nonzero()[:, 0]
            # The memory is by far the larger part: it is copied when a quarter of it is not read any more.
            if len(kept) <= KEPT_MEMORY * len(counts):
                memory = [(keys.index_select(0, kept), values.index_select(0, kept)) for keys, values in memory]
                sources, counts, attend_mask = torch.searchsorted(kept, sources), counts[kept], attend_mask[kept]
            layout = BeamLayout.build(sources, counts)
        return replace(
            self, sources=sources, layout=layout, memory=memory, memory_attend_mask=attend_mask, past=past, going=going
        )


AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)
AnyMemory = TypeVar("AnyMemory", bound=Memory)
AnyState = TypeVar("AnyState", bound=DecoderState)


class Decoder(nn.Module, ABC, Generic[AnyEncoder, AnyMemory, AnyState]):
    """Maps the memory of a source and the pieces so far to the state that predicts the next piece."""

    layers: "Modules[Any]"

    def read(self, encoder: AnyEncoder, batch: TreeBatch) -> AnyMemory:
        """Make the memory of a batch for this decoder."""
        return encoder(batch)

    @abstractmethod
    def forward(self, tgt_in: Tensor, memory: AnyMemory) -> Tensor:
        """Run with teacher forcing: tgt_in [B, T] -> states [B, T, D]."""

    @abstractmethod
    def start(self, memory: AnyMemory) -> AnyState:
        """Start with one empty hypothesis per sentence. Everything that depends only on the sources is computed here, once."""

    @property
    def has_static_cache(self) -> bool:
        """Return whether `start_static` exists: a search whose steps all have the same shapes."""
        return False

    def start_static(self, memory: AnyMemory, beam_width: int, most_positions: int) -> StaticState:
        """Start with `beam_width` empty hypotheses per sentence, of up to `most_positions` steps, in memory of fixed shape."""
        raise NotImplementedError(f"{type(self).__name__} has no static cache")

    def step_static(self, tokens: Tensor, state: StaticState) -> Tensor:
        """Map the last token of each hypothesis [B * M] to states [B * M, D] of the next one. Changes `state` in place."""
        raise NotImplementedError(f"{type(self).__name__} has no static cache")

    @abstractmethod
    def step(self, tokens: Tensor, state: AnyState) -> tuple[Tensor, AnyState]:
        """Map the last token of each hypothesis [R] to states [R, D] of the next one, and the new state of the search."""


class TransformerDecoder(Decoder[Encoder, Memory, DecoderState]):
    """Transformer layers (Vaswani et al., 2017) over target pieces, with sinusoidal positions.

    A decoder with another self-attention passes `build_attention` to the constructor: the attention of layer `number`, counted
    from 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: PieceEmbedding,
        build_attention: Callable[[int], nn.Module] | None = None,
        *,
        tree_attention: bool = False,
        adds_positions: bool = True,
    ):
        super().__init__()
        self.embedding = embedding
        self.positions = SinusoidalPositions(config.d_model) if adds_positions else None
        self.dropout = Dropout(config.dropout)
        self.word_dropout = WordDropout(config.target_word_dropout)
        sizes = config.d_model, config.num_heads, config.attention_dropout
        build_attention = build_attention or (lambda _: CausalSelfAttention(*sizes))
        tree = config.tree if tree_attention else None
        layers = (
            DecoderLayer(config, build_attention(number), CrossAttention(*sizes, tree))
            for number in range(config.num_decoder_layers)
        )
        self.layers = end_stack(Modules(layers), config)

    def forward(self, tgt_in: Tensor, memory: Memory) -> Tensor:
        attend_mask = padding_to_attend_mask(memory.pad_mask)
        x = self._embed(tgt_in)  # padding comes last, so the causal mask hides it
        for layer in self.layers:
            x, _ = layer(x, memory.states, attend_mask, structure=memory.structure)
        return x

    def start(self, memory: Memory) -> DecoderState:
        """Start with one empty hypothesis per sentence. Keys and (accumulated) values of the memory are computed here, once."""
        projected = self._project(memory)
        past = [layer.self_attention.start(keys) for layer, (keys, _) in zip(self.layers, projected, strict=True)]
        return DecoderState.begin(memory.pad_mask, projected, past, selects_past=not self.has_static_cache)

    @property
    def has_static_cache(self) -> bool:
        """Return whether all layers have self-attention. The past of convolutions has no static form."""
        return all(isinstance(layer.self_attention, CausalSelfAttention) for layer in self.layers)

    def start_static(self, memory: Memory, beam_width: int, most_positions: int) -> StaticState:
        if self.positions is not None:
            self.positions.rows(most_positions)
        dtype = product_dtype(self.layers[0].self_attention.queries_keys_values.weight)
        return StaticState.begin(memory.pad_mask, self._project(memory), beam_width, dtype)

    def step_static(self, tokens: Tensor, state: StaticState) -> Tensor:
        x = self.embedding(tokens.view(-1, state.beam_width))
        x = self.dropout(x if self.positions is None else self.positions.at(x, state.position))
        for layer, memory, past in zip(self.layers, state.memory, state.next_pasts(), strict=True):
            x, _ = layer(x, memory, state.memory_bias, past)
        state.position.add_(1)
        return x.flatten(0, 1)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        x = self._embed(tokens[:, None], first=state.step)
        pasts = []
        for layer, memory, past in zip(self.layers, state.memory, state.past, strict=True):
            given: GrowingPast | tuple[Tensor, ...] = past
            if self.has_static_cache:
                keys, values = past
                given = GrowingPast(keys, values, state.going)
            x, past = layer(x, memory, state.memory_attend_mask, given, state.layout)
            pasts.append(past)
        return x[:, 0], replace(state, past=pasts, going=None, step=state.step + 1)

    def _project(self, memory: Memory) -> list[KeysValues]:
        """Return keys and (accumulated) values of the memory for each layer."""
        projected = [layer.cross_attention.project_memory(memory.states, memory.structure) for layer in self.layers]
        return [(keys.contiguous(), values.contiguous()) for keys, values in projected]

    def _embed(self, pieces: Tensor, first: int = 0) -> Tensor:
        """Embed target pieces [B, T] at positions from `first` -> [B, T, D]."""
        x = self.word_dropout(self.embedding(pieces))
        return self.dropout(x if self.positions is None else self.positions(x, first))


class PrefixDecoder(TransformerDecoder):
    """Reads all pieces so far at every step, for `model.tree.implementation=reference`. The `past` has these pieces [R, T]."""

    has_static_cache = False

    def start(self, memory: Memory) -> DecoderState:
        no_pieces = torch.zeros(len(memory.pad_mask), 0, dtype=torch.long, device=memory.pad_mask.device)
        return DecoderState.begin(memory.pad_mask, self._project(memory), [(no_pieces,)], structure=memory.structure)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        pieces = torch.cat([state.past[0][0], tokens[:, None]], dim=1)
        x, attend_mask = self._embed(pieces), state.memory_attend_mask[state.sources]
        for layer, keys_values in zip(self.layers, state.memory, strict=True):
            keys, values = (part[state.sources] for part in keys_values)
            x, _ = layer(x, (keys, values), attend_mask, structure=state.structure)
        return x[:, -1], replace(state, past=[(pieces,)], step=state.step + 1)


def build_tree_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a decoder with tree cross-attention (equations 21 to 24).

    With `model.tree.relative_positions`, relative positions replace the decoder's sinusoids.
    """
    if config.tree.implementation == "reference":
        return PrefixDecoder(config, embedding, tree_attention=True)
    return _build_relative(config, embedding, config.tree.relative_positions, values=True, tree_attention=True)


def build_relative_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a Transformer decoder. With `model.relations.decoder`, relative positions replace sinusoids (Shaw et al., 2018)."""
    sequence = config.relations.sequence
    return _build_relative(config, embedding, sequence.clip if config.relations.decoder else 0, values=sequence.values)


def _build_relative(
    config: ModelConfig, embedding: PieceEmbedding, clip: int, *, values: bool, tree_attention: bool = False
) -> TransformerDecoder:
    """Build a decoder with relative positions of up to `clip` places; with sinusoids if `clip` is 0."""
    sizes = config.d_model, config.num_heads, config.attention_dropout
    build = (lambda _: RelativeCausalSelfAttention(*sizes, clip, values)) if clip else None
    return TransformerDecoder(config, embedding, build, tree_attention=tree_attention, adds_positions=not clip)


def build_convolutional_decoder(
    config: ModelConfig, embedding: PieceEmbedding, kernels: Callable[[ModelConfig, int], Kernels]
) -> TransformerDecoder:
    """Build a decoder with lightweight or dynamic convolutions instead of self-attention (Wu et al., 2019)."""
    sizes = config.convolution.decoder_kernels
    return TransformerDecoder(
        config, embedding, lambda number: CausalConvolution(config, kernels(config, kernel_size(sizes, number)))
    )
