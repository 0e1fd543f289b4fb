"""What translation models and classifiers share: embeddings and encoders over leaves, with or without trees.

Shapes: B batch, L leaves, N nodes, S positions, T sequence length, D model, V pieces.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.data.batch import Reads, TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.blocks import EncoderLayer
from treenet.layers.dropout import Dropout
from treenet.layers.positions import SinusoidalPositions
from treenet.structure import TreeStructure


@dataclass(frozen=True)
class VocabSizes:
    """Rows of the embedding tables; 0 where a data set has no such vocabulary."""

    pieces: int
    labels: int
    pos_tags: int = 0
    deprels: int = 0


@dataclass
class Memory:
    """What an encoder leaves to a decoder or a classifier."""

    states: Tensor  # [B, S, D]; tree models: leaves, then nodes
    pad_mask: Tensor  # [B, S] bool, True = padding
    structure: TreeStructure | None = None  # trees of the source, for tree cross-attention


class Encoder(nn.Module):
    """The plain Transformer's encoder (Vaswani et al., 2017). With `tree`, its self-attention is tree attention."""

    reads: Reads = "leaves"

    def __init__(self, config: ModelConfig, vocab: VocabSizes, tree: TreeAttentionConfig | None = None):
        super().__init__()
        self.embedding_scale = math.sqrt(config.d_model)
        self.piece_embedding = build_embedding(vocab.pieces, config.d_model)
        self.positions = SinusoidalPositions(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.encoder_layers = nn.ModuleList([EncoderLayer(config, tree) for _ in range(config.num_encoder_layers)])

    def encode(self, batch: TreeBatch) -> Memory:
        """The leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_pieces(batch.leaf_pieces))
        for layer in self.encoder_layers:
            x = layer(x, attend_mask)
        return Memory(x, batch.leaf_pad_mask)

    def embed_pieces(self, pieces: Tensor, first: int = 0) -> Tensor:
        """pieces [B, T] at positions from `first` -> [B, T, D]."""
        return self.positions(self.embedding_scale * self.piece_embedding(pieces), first)


class EncodesTrees:
    """`encode` over leaves and nodes (section 4.4, figure 6), for a model that is an `Encoder` with tree attention.

    Leaves are embedded as in the plain Transformer, nodes by their label: their place is in the tree structure, so
    they get no position.
    """

    reads: Reads = "trees"

    def add_nodes(self, config: ModelConfig, vocab: VocabSizes) -> None:
        """What the nodes need: a table of labels [labels, D]."""
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

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """The state of the first root [B, D]."""
        return memory.states[:, memory.structure.num_leaves]


def tied_logits(x: Tensor, embedding: nn.Embedding) -> Tensor:
    """[..., D] -> [..., V] with the table of pieces; half precision becomes float32."""
    logits = F.linear(x, embedding.weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def build_embedding(rows: int, d_model: int) -> nn.Embedding:
    """N(0, 1/D): unit variance after the scaling by sqrt(D), and logits of unit scale from the tied table."""
    embedding = nn.Embedding(rows, d_model)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    return embedding
