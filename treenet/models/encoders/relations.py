"""Encoders whose self-attention is biased by relations between words, by the settings of `model.relations`.

The relations are relative positions (Shaw et al., 2018), and absolute and relative structural positions (Wang et al., 2019).
Others are tree distances, tree traversals and a specialised head for tags or dependency labels.

Shapes: B batch, L leaves, D model.
"""

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import DEPENDENCIES, LEAVES, WORDS, InputKind
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.blocks import StructuralPositions
from treenet.layers.relations import Related, RelatedSelfAttention, Relations
from treenet.models.decoders.transformer import build_relative_decoder
from treenet.models.encoders.base import DataFacts, Memory, PieceEmbedding, TransformerEncoder, VocabSizes, build_embedding
from treenet.models.registry import Architecture, register
from treeproc.common.errors import UserError


class RelationEncoder(TransformerEncoder):
    """Transformer layers over leaves, with relations on keys and values.

    Raises UserError if the data set has no labels for the specialised head.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        settings = config.relations
        relations, with_label_head = Relations(settings), settings.label_head != "none"
        rows = {"none": 0, "pos_tag": vocab.pos_tags, "deprel": vocab.deprels}[settings.label_head]
        if with_label_head and not rows:
            raise UserError(
                f"model.relations.label_head: is {settings.label_head}, but the data set has no list of such labels; preprocess "
                "it again"
            )
        sizes = config.d_model, config.num_heads, config.attention_dropout
        super().__init__(
            config,
            vocab,
            embedding,
            lambda number: RelatedSelfAttention(*sizes, relations, label_head=with_label_head and number == 0),
        )
        self.reads = self.reads_with(config)
        self.relations, self.label_kind = relations, settings.label_head
        self.adds_sinusoids = settings.positions == "sequence"
        self.structural_positions = None
        if settings.positions in ("depth", "both"):
            self.structural_positions = StructuralPositions(self.positions, fused=settings.positions == "both")
        self.label_embedding = build_embedding(rows, config.d_model) if rows else None

    @classmethod
    def reads_with(cls, config: ModelConfig) -> InputKind:
        """Return the input kind. It has dependencies only if some setting needs them."""
        if config.relations.read_arcs:
            return DEPENDENCIES
        return WORDS if config.relations.label_head == "pos_tag" else LEAVES

    @classmethod
    def check_data(cls, config: ModelConfig, data: DataFacts) -> None:
        if config.relations.label_head == "pos_tag" and not data.distinguishes("pos_tags"):
            raise UserError(
                f"{data.folder} has no part-of-speech tags, which model.relations.label_head = pos_tag reads; preprocess again "
                "with parser.name=stanza, or of given trees with parser.given_labels=parsed"
            )

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        ids = self.relations(batch.leaf_pieces.shape[1], batch.structure, batch.leaf_pieces.device)
        related = Related(ids, self._embed_labels(batch))
        x = self.dropout(self.embed_leaves(batch))
        for layer in self.layers:
            x = layer(x, attend_mask, related)
        return Memory(x, batch.leaf_pad_mask)

    def embed_leaves(self, batch: TreeBatch) -> Tensor:
        """Embed the leaves: [B, L, D]."""
        x = self.word_dropout(self.embedding.of_leaves(batch))
        if self.structural_positions is not None:
            return self.structural_positions(x, batch.structure.of_leaves(batch.structure.arcs.depth))
        return self.positions(x) if self.adds_sinusoids else x

    def _embed_labels(self, batch: TreeBatch) -> Tensor | None:
        """Embed labels and the position in the sentence for the specialised head: [B, L, D]."""
        if self.label_embedding is None:
            return None
        words = batch.structure
        labels = words.pos_tag if self.label_kind == "pos_tag" else words.of_leaves(words.arcs.deprel)
        return self.dropout(self.positions(self.embedding.scale * self.label_embedding(labels)))


register("relation_transformer", Architecture(RelationEncoder, build_relative_decoder, uses=("classification",)))
