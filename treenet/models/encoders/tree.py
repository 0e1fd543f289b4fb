"""The encoder of the Tree Transformer (section 4.4, figure 6). Shapes: B batch, L leaves, N nodes, S = L + N, D model."""

import torch
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import TREES
from treenet.layers.attention import SelfAttention
from treenet.layers.relations import RelativeTreeSelfAttention
from treenet.layers.tree_layers import prepare_trees, run_layers
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import build_tree_decoder
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes, build_embedding
from treenet.models.encoders.transformer import TransformerEncoder


class TreeEncoder(TransformerEncoder):
    """Tree attention over leaves and nodes.

    Leaves are embedded as in the plain Transformer, nodes by their label: their place is in the tree structure, so they get
    no position. With `model.tree.relative_positions`, leaves have relative positions beside sinusoids: with relative positions
    alone, the accumulated values of a node do not show where its leaves are.
    """

    reads = TREES

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding, lambda _: build_tree_attention(config))
        self.tree, self.attention_dropout = config.tree, config.attention_dropout

    def add_tables(self, vocab: VocabSizes) -> None:
        self.label_embedding = build_embedding(vocab.labels, self.d_model)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return memory of leaves, then nodes."""
        pad_mask = torch.cat([batch.leaf_pad_mask, batch.node_pad_mask], dim=1)
        drops_weights = bool(self.training and self.attention_dropout)
        structure = prepare_trees(batch.structure, self.tree, self.embedding.weight, drops_weights=drops_weights)
        nodes = self.embedding.scale * self.label_embedding(batch.node_labels)
        x = self.dropout(torch.cat([self.embed_leaves(batch), nodes], dim=1), structure.num_leaves)
        return Memory(run_layers(self.layers, x, structure, self.tree, pad_mask), pad_mask, structure)

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """Return the state of the first root [B, D]."""
        return memory.states[:, memory.structure.num_leaves]


def build_tree_attention(config: ModelConfig) -> SelfAttention:
    """Build multi-head self-attention over leaves and nodes."""
    attention = RelativeTreeSelfAttention if config.tree.relative_positions else SelfAttention
    return attention(config.d_model, config.num_heads, config.attention_dropout, config.tree)


register("tree_transformer", Architecture(TreeEncoder, build_tree_decoder, uses=("classification",)))
