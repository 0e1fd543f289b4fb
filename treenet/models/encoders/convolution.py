"""Encoders of convolutions: lightweight or dynamic instead of self-attention (Wu et al., 2019), or gated (Gehring et al., 2017).

Shapes: B batch, S = L leaves, D model.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.blocks import LearnedPositions
from treenet.layers.convolution import (
    EMBEDDING_STD,
    HALF,
    CentredConvolution,
    ConvolutionEncoderLayer,
    DynamicKernels,
    Kernels,
    LightweightKernels,
    build_normalised_linear,
    kernel_size,
)
from treenet.layers.core import Modules
from treenet.models.decoders.convs2s import ConvMemory, ConvS2SDecoder
from treenet.models.decoders.transformer import build_convolutional_decoder
from treenet.models.encoders.base import Encoder, PieceEmbedding, TransformerEncoder, VocabSizes
from treenet.models.registry import Architecture, register


class LightConvEncoder(TransformerEncoder):
    """Lightweight convolutions: one kernel per layer and head (section 3.1)."""

    kernels: ClassVar[type[Kernels]] = LightweightKernels

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        sizes = config.convolution.encoder_kernels

        def build_convolution(number: int) -> CentredConvolution:
            return CentredConvolution(config, self.kernels(config, kernel_size(sizes, number)))

        super().__init__(config, vocab, embedding, build_convolution)


class DynamicConvEncoder(LightConvEncoder):
    """Dynamic convolutions: each position computes its kernels from its own input (section 3.2)."""

    kernels = DynamicKernels


register("lightconv", Architecture(LightConvEncoder, partial(build_convolutional_decoder, kernels=LightweightKernels)))
register("dynamicconv", Architecture(DynamicConvEncoder, partial(build_convolutional_decoder, kernels=DynamicKernels)))


class ConvS2SEncoder(Encoder):
    """Gated convolutions over leaves with learned positions."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding)
        d_model, dropout, settings = config.d_model, config.dropout, config.convs2s
        self.scale = HALF if settings.rule == "released" else 1.0
        # Every attention adds to the gradient of the encoder. The encoder gets their mean (section 3.5).
        self.gradient_scale = (0.5 if settings.rule == "released" else 1.0) / config.num_decoder_layers
        self.positions = LearnedPositions(settings.position_rows, d_model, EMBEDDING_STD)
        self.input = build_normalised_linear(d_model, d_model, dropout)
        self.layers = Modules(
            [ConvolutionEncoderLayer(d_model, settings.encoder_kernel, dropout) for _ in range(config.num_encoder_layers)]
        )
        self.output = build_normalised_linear(d_model, d_model, 0.0)

    @classmethod
    def build_embedding(cls, config: ModelConfig, vocab: VocabSizes) -> PieceEmbedding:
        return PieceEmbedding(vocab.pieces, config.d_model, std=EMBEDDING_STD, scale=1.0)

    def forward(self, batch: TreeBatch) -> ConvMemory:
        embedded = self.dropout(self.positions(self.embedding(batch.leaf_pieces)))
        x = self.input(embedded)
        for layer in self.layers:
            x = layer(x, batch.leaf_pad_mask)
        x = scale_gradient(self.output(x), self.gradient_scale)
        # The mean of S values has an S times lower variance than the values, so it is multiplied by sqrt(S) (section 3.5).
        scale = (~batch.leaf_pad_mask).sum(1)[:, None, None].to(x.dtype).sqrt()
        return ConvMemory(x, batch.leaf_pad_mask, values=self.scale * scale * (x + embedded))

    def probed_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x, with its gradient multiplied by `factor`."""
    return factor * x + (1 - factor) * x.detach()


register("convs2s", Architecture(ConvS2SEncoder, ConvS2SDecoder))
