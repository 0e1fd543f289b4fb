"""The constituent-attention Tree Transformer (Wang, Lee and Chen, 2019): it finds its constituents without trees.

Shapes: B batch, L leaves, D model.
"""

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.constituents import NeighbouringAttention, constituent_prior
from treenet.models.encoders import Memory, VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.seq2seq import Seq2Seq


class EncodesConstituents:
    """`encode` with a constituent prior in every layer, for a model that is an `Encoder`; see `add_neighbours`.

    Layer l finds a^l by neighbouring attention over its input and the hierarchical constraint, and all its heads attend by
    E = C * softmax(Q K^T / sqrt(d_k)). The rest is the plain Transformer's, post-norm as in all models here.
    """

    def add_neighbours(self, config: ModelConfig) -> None:
        """What the prior needs: a neighbouring attention for every encoder layer."""
        self.constituents = config.constituents
        self.neighbours = nn.ModuleList([NeighbouringAttention(config.d_model, self.constituents) for _ in self.encoder_layers])

    def encode(self, batch: TreeBatch) -> Memory:
        """The leaves of a batch as memory: S = L."""
        return Memory(self._encode(batch)[0], batch.leaf_pad_mask)

    def link_probabilities(self, batch: TreeBatch) -> Tensor:
        """a^l [B, layers, L - 1]: whether the leaves of a link are of one constituent, layer by layer."""
        return torch.stack(self._encode(batch)[1], dim=1)

    def _encode(self, batch: TreeBatch) -> tuple[Tensor, list[Tensor]]:
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        links = ~batch.leaf_pad_mask[:, 1:]
        x = self.dropout(self.embed_pieces(batch.leaf_pieces))
        joined: list[Tensor] = []
        for number, (neighbours, layer) in enumerate(zip(self.neighbours, self.encoder_layers, strict=True)):
            joined.append(neighbours(x, links, joined[-1] if joined else None))
            x = layer(x, attend_mask, prior=constituent_prior(joined[-1], number, self.constituents))
        return x, joined


class ConstituentTransformer(EncodesConstituents, Seq2Seq):
    """As the encoder of a translation model; the decoder is the plain Transformer's."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        self.add_neighbours(config)


class ConstituentMaskedLM(EncodesConstituents, MaskedLM):
    """As a masked language model, which is how the paper trains and parses."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        self.add_neighbours(config)
