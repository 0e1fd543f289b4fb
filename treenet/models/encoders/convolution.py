"""Encoders with a lightweight or a dynamic convolution instead of self-attention (Wu et al., 2019)."""

from typing import ClassVar

from torch import nn

from treenet.config import ModelConfig
from treenet.layers.convolution import CentredConvolution, DynamicKernels, LightweightKernels, kernel_size
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import build_dynamicconv_decoder, build_lightconv_decoder
from treenet.models.encoders.base import PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import TransformerEncoder


class LightConvEncoder(TransformerEncoder):
    """Lightweight convolutions: one kernel per layer and head (section 3.1)."""

    kernels: ClassVar[type[nn.Module]] = LightweightKernels

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        sizes = config.convolution.encoder_kernels

        def build_convolution(number: int) -> CentredConvolution:
            return CentredConvolution(config, self.kernels(config, kernel_size(sizes, number)))

        super().__init__(config, vocab, embedding, build_convolution)


class DynamicConvEncoder(LightConvEncoder):
    """Dynamic convolutions: each position computes its kernels from its own input (section 3.2)."""

    kernels = DynamicKernels


register("lightconv", Architecture(LightConvEncoder, build_lightconv_decoder))
register("dynamicconv", Architecture(DynamicConvEncoder, build_dynamicconv_decoder))
