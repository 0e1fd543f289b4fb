"""The encoder of the cascade of ON-LSTM and self-attention (Hao et al., 2019, arXiv 1909.01562).

Shapes: B batch, L leaves, D model.
"""

from collections.abc import Sequence

from torch import nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.recurrent import RecurrentLayer
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import TransformerEncoder
from treeproc.common.errors import UserError


class OnLSTMHybridEncoder(TransformerEncoder):
    """The recurrent layers map the embeddings to H^K, and the self-attention layers map H^K to H^L. The memory is H^K + H^L."""

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
