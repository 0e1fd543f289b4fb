"""Encoders that find structure without trees: constituent attention, and ON-LSTM below self-attention.

Shapes: B batch, L leaves, D model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.constituents import NeighbouringAttention, constituent_prior
from treenet.layers.recurrent import RecurrentLayer
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.models.encoders.base import Memory, PieceEmbedding, TransformerEncoder, VocabSizes
from treenet.models.registry import Architecture, register
from treeproc.common.errors import UserError


class ConstituentEncoder(TransformerEncoder):
    """Transformer layers, each with a constituent prior (Wang, Lee and Chen, 2019).

    Layer l finds a^l by neighbouring attention over its input and by the hierarchical constraint. All its heads attend by E = C *
    softmax(Q K^T / sqrt(d_k)), with d_k the width of a head as in the released code; the paper has d. The rest is the plain
    Transformer, post-norm as in all models here. The released code is pre-norm with GELU and a separate output matrix, and reads
    `[CLS]` and words.
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


class OnLSTMHybridEncoder(TransformerEncoder):
    """The cascade of ON-LSTM and self-attention (Hao et al., 2019, arXiv 1909.01562).

    The recurrent layers map the embeddings to H^K, and the self-attention layers map H^K to H^L. The memory is H^K + H^L, without
    a layer norm. Chosen here: one direction, over the Transformer's embeddings and sinusoids, and layers with residual and
    post-norm.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        """Raise UserError if no layer is left for one of the two."""
        hybrid, num_layers = config.hybrid, config.num_encoder_layers
        num_recurrent = hybrid.num_recurrent_layers or (num_layers + 1) // 2
        if num_recurrent >= num_layers:
            raise UserError(
                f"model.hybrid.num_recurrent_layers must be less than model.num_encoder_layers = {num_layers}, because the other "
                f"layers are of self-attention, but is {num_recurrent}"
            )
        super().__init__(config, vocab, embedding, num_layers=num_layers - num_recurrent)
        self.short_cut = hybrid.short_cut
        self.recurrent_layers = nn.ModuleList(
            [RecurrentLayer(hybrid.cell, config.d_model, hybrid.chunk_size, config.dropout) for _ in range(num_recurrent)]
        )

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        recurrent = self.dropout(self.embed_leaves(batch))
        for layer in self.recurrent_layers:  # padding comes last, so real leaves do not read it
            recurrent = layer(recurrent)
        x = recurrent
        for layer in self.layers:
            x = layer(x, attend_mask)
        return Memory(x + recurrent if self.short_cut else x, batch.leaf_pad_mask)

    def probed_layers(self) -> Sequence[nn.Module]:
        return [*self.recurrent_layers, *self.layers]


register("on_lstm_hybrid", Architecture(OnLSTMHybridEncoder, TransformerDecoder))
