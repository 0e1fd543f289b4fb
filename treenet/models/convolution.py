"""Transformers whose self-attention is a lightweight or a dynamic convolution (Wu et al., 2019); cross-attention is as it was."""

from collections.abc import Callable

from torch import nn

from treenet.config import ModelConfig
from treenet.layers.convolution import CausalConvolution, CentredConvolution, DynamicKernels, LightweightKernels
from treenet.models.encoders import VocabSizes
from treenet.models.seq2seq import Seq2Seq


class _ConvolutionModel(Seq2Seq):
    """A Transformer, in which convolutions then take the place of self-attentions."""

    kernels: Callable[[ModelConfig, int], nn.Module]

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        for layers, convolution, sizes in (
            (self.encoder_layers, CentredConvolution, config.convolution.encoder_kernels),
            (self.decoder_layers, CausalConvolution, config.convolution.decoder_kernels),
        ):
            for index, layer in enumerate(layers):
                layer.self_attention = convolution(config, self.kernels(config, sizes[min(index, len(sizes) - 1)]))


class LightConv(_ConvolutionModel):
    """One kernel a layer and head (section 3.1)."""

    kernels = LightweightKernels


class DynamicConv(_ConvolutionModel):
    """Kernels that positions make themselves, of their own input (section 3.2)."""

    kernels = DynamicKernels
