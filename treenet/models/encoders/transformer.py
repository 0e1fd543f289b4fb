"""The encoder of the plain Transformer (Vaswani et al., 2017), the base of all encoders made of Transformer layers.

Shapes: B batch, L leaves, T sequence length, D model.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import EncoderLayer, SinusoidalPositions, end_stack
from treenet.layers.dropout import WordDropout
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding, VocabSizes
from treenet.models.registry import Architecture, register


class TransformerEncoder(Encoder):
    """Transformer layers over leaves, with sinusoidal positions.

    Encoders that differ in their self-attention hand `build_attention` to the constructor: the attention of layer `number`,
    counted from 0.
    """

    has_transformer_layers = True

    def __init__(
        self,
        config: ModelConfig,
        vocab: VocabSizes,
        embedding: PieceEmbedding,
        build_attention: Callable[[int], nn.Module] | None = None,
        num_layers: int | None = None,
    ):
        super().__init__(config, embedding)
        self.positions = SinusoidalPositions(config.d_model)
        self.word_dropout = WordDropout(config.source_word_dropout)
        build_attention = build_attention or (lambda _: build_self_attention(config))
        self.layers = build_layers(config, build_attention, num_layers)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_leaves(batch))
        for layer in self.layers:
            x = layer(x, attend_mask)
        return Memory(x, batch.leaf_pad_mask)

    def embed_leaves(self, batch: TreeBatch) -> Tensor:
        """Embed the leaves [B, L, D]."""
        x = self.word_dropout(self.embedding.of_leaves(batch))
        return x if self.embedding.has_order else self.positions(x)

    def probed_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)


def build_layers(
    config: ModelConfig, build_attention: Callable[[int], nn.Module], num_layers: int | None = None
) -> nn.ModuleList:
    """Build Transformer layers with the attention of layer `number`, counted from 0."""
    numbers = range(num_layers or config.num_encoder_layers)
    return end_stack(nn.ModuleList(EncoderLayer(config, build_attention(number)) for number in numbers), config)


def build_self_attention(config: ModelConfig) -> SelfAttention:
    """Build plain multi-head self-attention."""
    return SelfAttention(config.d_model, config.num_heads, config.attention_dropout)


register("transformer", Architecture(TransformerEncoder, TransformerDecoder, uses=("classification", "masked_lm")))
