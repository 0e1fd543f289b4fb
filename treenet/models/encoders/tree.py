"""Encoders over constituency trees: tree attention, the linearised tree, and multi-granularity self-attention.

Shapes: B batch, L leaves, N nodes, S positions, D model.
"""

import torch
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import LINEARIZED, PHRASES, TREES
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import position_pad_mask, prepare_trees, run_layers
from treenet.layers.phrase_attention import PhraseAttention
from treenet.layers.relations import Related, RelatedSelfAttention, Relations, RelativeTreeSelfAttention
from treenet.models.decoders.transformer import TransformerDecoder, build_relative_decoder, build_tree_decoder
from treenet.models.encoders.base import (
    DataFacts,
    Memory,
    PieceEmbedding,
    TransformerEncoder,
    VocabSizes,
    build_embedding,
    build_self_attention,
)
from treenet.models.registry import Architecture, register
from treenet.structure import Partition, TreeStructure
from treeproc.common.errors import UserError


class TreeEncoder(TransformerEncoder):
    """The encoder of `tree_transformer`, with embeddings: tree attention over leaves and nodes (section 4.4, figure 6).

    S = L + N. Leaves are embedded as in the plain Transformer, nodes by their label: their place is in the tree structure, so
    they get no position. With `model.tree.relative_positions`, leaves have relative positions beside sinusoids: with relative
    positions alone, the accumulated values of a node do not show where its leaves are.
    """

    reads = TREES

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding, lambda _: build_tree_attention(config))
        self.tree, self.attention_dropout = config.tree, config.attention_dropout

    def add_tables(self, vocab: VocabSizes) -> None:
        self.label_embedding = build_embedding(vocab.labels, self.d_model)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return memory of leaves, then nodes."""
        pad_mask = position_pad_mask(batch.structure)
        drops_weights = bool(self.training and self.attention_dropout)
        structure = prepare_trees(batch.structure, self.tree, self.embedding.weight, drops_weights=drops_weights)
        nodes, leaves = self.embedding.scale * self.label_embedding(batch.node_labels), self.embed_leaves(batch)
        if self.tree.nodes == "labels_and_leaves":
            nodes = nodes + _means_of_leaves(leaves, structure)
        x = self.dropout(torch.cat([leaves, nodes], dim=1), structure.num_leaves)
        return Memory(run_layers(self.layers, x, structure, self.tree, pad_mask), pad_mask, structure)

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """Return the state of the first root [B, D]."""
        return memory.states[:, batch.structure.num_leaves]


def _means_of_leaves(leaves: Tensor, structure: TreeStructure) -> Tensor:
    """Return the mean of the leaves of each node, leaves [B, L, D] -> [B, N, D]; 0 for padding nodes."""
    start, end = structure.start.long()[..., None], structure.end.long()[..., None]
    place = torch.arange(leaves.shape[1], device=leaves.device)
    inside = ((start <= place) & (place < end)).to(leaves.dtype)
    return inside @ leaves / (end - start).clamp(min=1)


def build_tree_attention(config: ModelConfig) -> SelfAttention:
    """Build multi-head self-attention over leaves and nodes."""
    attention = RelativeTreeSelfAttention if config.tree.relative_positions else SelfAttention
    return attention(config.d_model, config.num_heads, config.attention_dropout, config.tree)


register("tree_transformer", Architecture(TreeEncoder, build_tree_decoder, uses=("classification",)))


class LinearizedEncoder(TransformerEncoder):
    """The linearised tree (Li et al., 2017; Currey and Heafield, 2019): a Transformer that reads brackets among the words.

    It has relative positions or sinusoids of the places in the sequence, S = L + 2N. The model has the same information as tree
    attention. No part of it knows trees.
    """

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
        pieces = self.word_dropout(self.embedding.of_leaves(batch))
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


register("linearized_transformer", Architecture(LinearizedEncoder, build_relative_decoder, uses=("classification",)))


class MultiGranularityEncoder(TransformerEncoder):
    """Multi-granularity self-attention (Hao et al., 2019, arXiv 1909.02222).

    The lower layers have a head for every size of n-grams and every level of the trees.

    The weighted loss of phrase tags is added to the loss of the task in training.
    """

    reads = PHRASES
    auxiliary_loss = "tag_loss"

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        """Raise UserError if there are too few heads or layers."""
        phrases, num_layers = config.phrases, config.num_encoder_layers
        granularities = len(phrases.ngrams) + len(phrases.levels)
        if not 0 < granularities < config.num_heads:
            raise UserError(
                f"model.phrases.ngrams and model.phrases.levels must name 1 to {config.num_heads - 1} granularities together, "
                f"but name {granularities}: each takes a head, and one of model.num_heads = {config.num_heads} is for the words"
            )
        num_phrase_layers = phrases.num_layers or (num_layers + 1) // 2
        if num_phrase_layers > num_layers:
            raise UserError(
                f"model.phrases.num_layers must be at most model.num_encoder_layers = {num_layers}, but is {num_phrase_layers}"
            )
        super().__init__(
            config,
            vocab,
            embedding,
            lambda number: PhraseAttention(config, vocab.labels) if number < num_phrase_layers else build_self_attention(config),
        )
        self.phrases, self.num_phrase_layers = phrases, num_phrase_layers

    @classmethod
    def check_data(cls, config: ModelConfig, data: DataFacts) -> None:
        if config.phrases.tag_loss and not data.distinguishes("labels"):
            raise UserError(
                f"{data.folder} has one label for all phrases, so model.phrases.tag_loss has nothing to learn; set it to 0, or "
                "preprocess again with parser.name=stanza, or preprocess given trees with parser.given_labels=parsed"
            )

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        return self._encode(batch, with_tags=False)[0]

    def encode_to_train(self, batch: TreeBatch) -> tuple[Memory, Tensor]:
        return self._encode(batch, with_tags=True)

    def _encode(self, batch: TreeBatch, with_tags: bool) -> tuple[Memory, Tensor]:
        """Return memory, and the weighted tag loss; 0 without tags."""
        partitions = [Partition.ngrams(batch.leaf_pad_mask, n) for n in self.phrases.ngrams]
        partitions += [Partition.level(batch.structure, level, with_tags) for level in self.phrases.levels]
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_leaves(batch))
        tag_losses: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x, attend_mask, *((partitions, tag_losses) if number < self.num_phrase_layers else ()))
        total = sum(tag_losses, start=x.new_zeros((), dtype=torch.float32))
        return Memory(x, batch.leaf_pad_mask), self.phrases.tag_loss * total


register("multi_granularity", Architecture(MultiGranularityEncoder, TransformerDecoder))
