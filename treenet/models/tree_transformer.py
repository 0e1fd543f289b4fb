"""The Tree Transformer of the paper (section 4.4, figure 6)."""

import torch

from treenet.batch import TreeBatch
from treenet.config import ModelConfig
from treenet.layers.attention import padding_to_attend_mask
from treenet.models.seq2seq import Memory, Seq2Seq, VocabSizes, build_embedding


class TreeTransformer(Seq2Seq):
    """Encoder over leaves and nodes; tree attention in the encoder and in the decoder's cross-attention.

    Leaves are embedded as in the plain Transformer, nodes by their label: their place is in the tree structure, so
    they get no position.
    """

    reads_trees = True

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab, config.tree)
        self.label_embedding = build_embedding(vocab.labels, config.d_model)
        self.subtree_mask = config.tree.subtree_mask

    def encode(self, batch: TreeBatch) -> Memory:
        """Memory of leaves, then nodes: S = L + N."""
        pad_mask = torch.cat([batch.leaf_pad_mask, batch.node_pad_mask], dim=1)
        structure = batch.structure
        attend_mask = None if self.subtree_mask else padding_to_attend_mask(pad_mask)
        nodes = self.embedding_scale * self.label_embedding(batch.node_labels)
        x = self.dropout(torch.cat([self.embed_pieces(batch.leaf_pieces), nodes], dim=1), structure.num_leaves)
        for layer in self.encoder_layers:
            x = layer(x, attend_mask, structure)
        return Memory(x, pad_mask, structure)
