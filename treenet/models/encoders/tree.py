"""The encoder of the Tree Transformer (section 4.4, figure 6). Shapes: B batch, L leaves, N nodes, S = L + N, D model."""

import torch
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import TREES
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.autocast import product_dtype
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import build_tree_decoder
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes, build_embedding
from treenet.models.encoders.transformer import TransformerEncoder
from treenet.structure.on_device import prepare


class TreeEncoder(TransformerEncoder):
    """Tree attention over leaves and nodes.

    Leaves are embedded as in the plain Transformer, nodes by their label: their place is in the tree structure, so they get
    no position.
    """

    reads = TREES

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        sizes = config.d_model, config.num_heads, config.attention_dropout
        super().__init__(config, vocab, embedding, lambda _: SelfAttention(*sizes, config.tree))
        self.tree, self.attention_dropout = config.tree, config.attention_dropout

    def add_tables(self, vocab: VocabSizes) -> None:
        self.label_embedding = build_embedding(vocab.labels, self.d_model)

    def forward(self, batch: TreeBatch) -> Memory:
        """Memory of leaves, then nodes."""
        pad_mask = torch.cat([batch.leaf_pad_mask, batch.node_pad_mask], dim=1)
        weight = self.embedding.weight
        # FlexAttention has no dropout of attention weights; on CPUs it has no backward pass.
        blocks = weight.device.type == "cuda" and not (self.training and self.attention_dropout)
        structure = prepare(batch.structure, self.tree, weight.dtype, product_dtype(weight), blocks)
        attend_mask = None if self.tree.subtree_mask else padding_to_attend_mask(pad_mask)
        nodes = self.embedding.scale * self.label_embedding(batch.node_labels)
        x = self.dropout(torch.cat([self.embed_leaves(batch), nodes], dim=1), structure.num_leaves)
        for layer in self.layers:
            x = layer(x, attend_mask, structure, num_leaves=structure.num_leaves)
        return Memory(x, pad_mask, structure)

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """The state of the first root [B, D]."""
        return memory.states[:, memory.structure.num_leaves]


register("tree_transformer", Architecture(TreeEncoder, build_tree_decoder, uses=("classification",)))
