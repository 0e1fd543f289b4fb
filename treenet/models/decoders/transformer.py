"""The Transformer decoder, over any encoder. It has tree cross-attention if the memory has trees.

Shapes: B batch, T target positions, R hypotheses, D model.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.layers.attention import CausalSelfAttention, CrossAttention, GrowingPast, KeysValues, padding_to_attend_mask
from treenet.layers.blocks import DecoderLayer, SinusoidalPositions, end_stack
from treenet.layers.convolution import CausalConvolution, DynamicKernels, LightweightKernels, kernel_size
from treenet.layers.dropout import Dropout, WordDropout
from treenet.layers.relations import RelativeCausalSelfAttention
from treenet.layers.torch_internals import product_dtype
from treenet.models.decoders.base import Decoder, DecoderState, StaticState
from treenet.models.encoders.base import Memory, PieceEmbedding


class TransformerDecoder(Decoder):
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
        self.layers = end_stack(nn.ModuleList(layers), config)

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
            given = GrowingPast(*past, state.going) if self.has_static_cache else past
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


def build_tree_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a decoder with tree cross-attention (equations 21 to 24).

    With `model.tree.relative_positions`, relative positions replace the decoder's sinusoids.
    """
    return _build_relative(config, embedding, config.tree.relative_positions, values=True, tree_attention=True)


def build_relative_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a Transformer decoder. With `model.relations.decoder`, relative positions replace sinusoids (Shaw et al., 2018)."""
    sequence = config.relations.sequence
    return _build_relative(config, embedding, sequence.clip if config.relations.decoder else 0, values=sequence.values)


def _build_relative(
    config: ModelConfig, embedding: PieceEmbedding, clip: int, *, values: bool, tree_attention: bool = False
) -> TransformerDecoder:
    """Build a decoder with relative positions of up to `clip` places; with sinusoids if `clip` is 0."""
    if not clip:
        return TransformerDecoder(config, embedding, tree_attention=tree_attention)
    sizes = config.d_model, config.num_heads, config.attention_dropout
    return TransformerDecoder(
        config,
        embedding,
        lambda _: RelativeCausalSelfAttention(*sizes, clip, values),
        tree_attention=tree_attention,
        adds_positions=False,
    )


def build_lightconv_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a decoder with lightweight convolutions instead of self-attention (Wu et al., 2019)."""
    return _build_convolutional(config, embedding, LightweightKernels)


def build_dynamicconv_decoder(config: ModelConfig, embedding: PieceEmbedding) -> TransformerDecoder:
    """Build a decoder with dynamic convolutions instead of self-attention (Wu et al., 2019)."""
    return _build_convolutional(config, embedding, DynamicKernels)


def _build_convolutional(
    config: ModelConfig, embedding: PieceEmbedding, kernels: Callable[[ModelConfig, int], nn.Module]
) -> TransformerDecoder:
    sizes = config.convolution.decoder_kernels
    return TransformerDecoder(
        config, embedding, lambda number: CausalConvolution(config, kernels(config, kernel_size(sizes, number)))
    )
