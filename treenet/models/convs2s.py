"""Convolutional sequence to sequence learning (Gehring et al., 2017).

Shapes: B batch, L leaves, S = L memory positions, T target positions, D model, V pieces, R live hypotheses, A sentences.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import Reads, TreeBatch
from treenet.layers.attention import KeysValues, padding_to_attend_mask
from treenet.layers.dropout import Dropout
from treenet.layers.gated_convolution import HALF, ConvolutionEncoderLayer, MultiStepAttentionLayer, build_normalised_linear
from treenet.layers.positions import LearnedPositions
from treenet.models.encoders import Memory, VocabSizes
from treenet.models.seq2seq import DecoderState, EncoderDecoder

EMBEDDING_STD = 0.1  # section 3.5


@dataclass
class ConvMemory(Memory):
    """Encoder outputs z as `states`, and what attention reads where it looks: z + e, e the embedded leaf (equation 2)."""

    values: Tensor | None = None  # [B, S, D]

    def keys_values(self) -> KeysValues:
        """[B, 1, S, D] each, for all layers."""
        return self.states[:, None], self.values[:, None]


@dataclass
class ConvDecoderState(DecoderState):
    """The memory is one for all layers; `past` is the last inputs of each layer's convolution [R, W - 1, D]."""

    weights: list[tuple[Tensor, ...]]  # of each layer, normalised


class ConvS2S(EncoderDecoder):
    """Gated convolutions in encoder and decoder; every decoder layer attends to the source."""

    reads: Reads = "leaves"

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__()
        d_model, dropout, settings = config.d_model, config.dropout, config.convs2s
        self.released = settings.rule == "released"
        self.piece_embedding = nn.Embedding(vocab.pieces, d_model)
        nn.init.normal_(self.piece_embedding.weight, std=EMBEDDING_STD)
        self.dropout = Dropout(dropout)
        self.source_positions = LearnedPositions(settings.position_rows, d_model, EMBEDDING_STD)
        self.encoder_input = build_normalised_linear(d_model, d_model, dropout)
        self.encoder_layers = nn.ModuleList(
            [ConvolutionEncoderLayer(d_model, settings.encoder_kernel, dropout) for _ in range(config.num_encoder_layers)]
        )
        self.encoder_output = build_normalised_linear(d_model, d_model, 0.0)
        self.target_positions = LearnedPositions(settings.position_rows, d_model, EMBEDDING_STD)
        self.decoder_input = build_normalised_linear(d_model, d_model, dropout)
        self.decoder_layers = nn.ModuleList([MultiStepAttentionLayer(config) for _ in range(config.num_decoder_layers)])
        self.decoder_output = build_normalised_linear(d_model, d_model, 0.0)

    def encode(self, batch: TreeBatch) -> ConvMemory:
        embedded = self.dropout(self.source_positions(self.piece_embedding(batch.leaf_pieces)))
        x = self.encoder_input(embedded)
        for layer in self.encoder_layers:
            x = layer(x, batch.leaf_pad_mask)
        # Every attention adds to the gradient of the encoder, which gets their mean (section 3.5).
        x = scale_gradient(self.encoder_output(x), (0.5 if self.released else 1.0) / len(self.decoder_layers))
        # The mean of S values has a variance S times lower than theirs: it counts sqrt(S) times (section 3.5).
        scale = (~batch.leaf_pad_mask).sum(1)[:, None, None].to(x.dtype).sqrt()
        return ConvMemory(x, batch.leaf_pad_mask, values=(HALF if self.released else 1.0) * scale * (x + embedded))

    def decode(self, batch: TreeBatch) -> Tensor:
        memory = self.encode(batch)
        attend_mask = padding_to_attend_mask(memory.pad_mask)
        x, embedded = self._embed(batch.tgt_in)
        for layer in self.decoder_layers:
            x, _ = layer(x, embedded, memory.keys_values(), attend_mask)
        return self.dropout(self.decoder_output(x))

    def start_decoding(self, memory: ConvMemory) -> ConvDecoderState:
        past = [(layer.convolution.start(memory.states),) for layer in self.decoder_layers]
        weights = [layer.weights() for layer in self.decoder_layers]
        return ConvDecoderState.begin(memory.pad_mask, [memory.keys_values()], past, weights=weights)

    def decode_step(self, tokens: Tensor, state: ConvDecoderState) -> tuple[Tensor, ConvDecoderState]:
        x, embedded = self._embed(tokens[:, None], first=state.step)
        pasts = []
        for layer, weights, (past,) in zip(self.decoder_layers, state.weights, state.past, strict=True):
            x, past = layer(x, embedded, state.memory[0], state.memory_attend_mask, past, state.readers, weights)
            pasts.append((past,))
        return self.compute_logits(self.decoder_output(x[:, 0])), replace(state, past=pasts, step=state.step + 1)

    def _embed(self, pieces: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Target pieces [B, T] at positions from `first`: inputs of the first layer, and embedded pieces, [B, T, D] each."""
        embedded = self.dropout(self.target_positions(self.piece_embedding(pieces), first))
        return self.decoder_input(embedded), embedded


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by `factor`."""
    return factor * x + (1 - factor) * x.detach()
