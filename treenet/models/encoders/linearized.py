"""The linearised tree: a plain Transformer that reads labelled brackets among the words.

Sources: Li et al. (2017), Currey and Heafield (2019). The model has the same information as tree attention. No part of it knows
trees. Shapes: B batch, L leaves, N nodes, S = L + 2N, D model.
"""

import torch

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import LINEARIZED
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.relations import Related, RelatedSelfAttention, Relations
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import build_relative_decoder
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes, build_embedding
from treenet.models.encoders.transformer import TransformerEncoder
from treeproc.common.errors import UserError


class LinearizedEncoder(TransformerEncoder):
    """Transformer layers over the linearised tree, with relative positions or sinusoids of the places in it."""

    reads = LINEARIZED

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        """Raise UserError for relations that only words have."""
        settings = config.relations
        if settings.read_arcs or settings.label_head != "none":
            raise UserError(
                "model.relations of a linearized_transformer may set sequence, decoder, and positions to none or sequence; leave "
                "out all others, because brackets have no arcs or tags"
            )
        sizes, relations = (config.d_model, config.num_heads, config.attention_dropout), Relations(settings)
        super().__init__(config, vocab, embedding, lambda _: RelatedSelfAttention(*sizes, relations))
        self.relations, self.adds_sinusoids = relations, settings.positions == "sequence"

    def add_tables(self, vocab: VocabSizes) -> None:
        self.brackets = build_embedding(2 * vocab.labels, self.d_model)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return leaves, then the opening and the closing bracket of every node, as memory."""
        place, pad_mask = batch.structure.place, batch.source_pad_mask()
        pieces = self.word_dropout(self.embedding(batch.leaf_pieces))
        label = 2 * batch.node_labels
        brackets = self.brackets(torch.stack([label, label + 1], dim=2).flatten(1))
        x = torch.cat([pieces, self.embedding.scale * brackets], dim=1)
        if self.adds_sinusoids:
            x = x + self.positions.rows(x.shape[1])[place]
        x = self.dropout(x, batch.leaf_pieces.shape[1])
        related, attend_mask = Related(self.relations.of_places(place)), padding_to_attend_mask(pad_mask)
        for layer in self.layers:
            x = layer(x, attend_mask, related, num_leaves=batch.leaf_pieces.shape[1])
        return Memory(x, pad_mask)


register("linearized_transformer", Architecture(LinearizedEncoder, build_relative_decoder))
