"""The encoder with constituent attention (Wang, Lee and Chen, 2019): it finds its constituents without trees.

Shapes: B batch, L leaves, D model.
"""

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.constituents import NeighbouringAttention, constituent_prior
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import TransformerEncoder


class ConstituentEncoder(TransformerEncoder):
    """Transformer layers, each with a constituent prior.

    Layer l finds a^l by neighbouring attention over its input and by the hierarchical constraint. All its heads attend by E = C *
    softmax(Q K^T / sqrt(d_k)). The rest is the plain Transformer, post-norm as in all models here.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding)
        self.constituents = config.constituents
        self.neighbours = nn.ModuleList([NeighbouringAttention(config.d_model, self.constituents) for _ in self.layers])

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        return Memory(self._encode(batch)[0], batch.leaf_pad_mask)

    def link_probabilities(self, batch: TreeBatch) -> Tensor:
        """Return a^l [B, layers, L - 1]: the probability, in each layer, that the leaves of a link are in one constituent."""
        return torch.stack(self._encode(batch)[1], dim=1)

    def _encode(self, batch: TreeBatch) -> tuple[Tensor, list[Tensor]]:
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        links = ~batch.leaf_pad_mask[:, 1:]
        x = self.dropout(self.embed_leaves(batch))
        link_probs: list[Tensor] = []
        for number, (neighbours, layer) in enumerate(zip(self.neighbours, self.layers, strict=True)):
            link_probs.append(neighbours(x, links, link_probs[-1] if link_probs else None))
            x = layer(x, attend_mask, prior=constituent_prior(link_probs[-1], number, self.constituents))
        return x, link_probs


register("constituent_transformer", Architecture(ConstituentEncoder, TransformerDecoder, uses=("masked_lm",)))
