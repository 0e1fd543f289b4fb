"""Transformers whose self-attention is biased by relations between words, by the settings of `model.relations`.

Relative positions (Shaw et al., 2018); absolute and relative structural positions (Wang et al., 2019); tree distances, tree
traversals and a specialised head for tags or dependency labels, as in docs/models.md. Shapes: B batch, L leaves, D model.
"""

from torch import Tensor

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.batch import Reads, TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.positions import StructuralPositions
from treenet.layers.relations import Related, RelatedSelfAttention, Relations, RelativeCausalSelfAttention
from treenet.models.classifier import Classifier
from treenet.models.encoders import Encoder, Memory, VocabSizes, build_embedding
from treenet.models.seq2seq import Seq2Seq
from treeproc.common.settings import UserError


class EncodesRelations:
    """`encode` with relations between leaves, for a model that is an `Encoder`."""

    @classmethod
    def reads_with(cls, config: ModelConfig) -> Reads:
        """Dependencies only where some setting needs them."""
        if config.relations.read_arcs:
            return "dependencies"
        return "words" if config.relations.label_head == "pos_tag" else "leaves"

    def add_relations(self, config: ModelConfig, vocab: VocabSizes) -> None:
        """What an `Encoder` lacks. Raises UserError when the data set has no labels for the specialised head."""
        self.reads, settings = self.reads_with(config), config.relations
        self.adds_sinusoids, self.label_kind = settings.positions == "sequence", settings.label_head
        self.structural_positions = None
        if settings.positions in ("depth", "both"):
            self.structural_positions = StructuralPositions(self.positions, fused=settings.positions == "both")
        self.label_embedding = None
        if self.label_kind != "none":
            rows = {"pos_tag": vocab.pos_tags, "deprel": vocab.deprels}[self.label_kind]
            if not rows:
                raise UserError(f"model.relations.label_head: is {self.label_kind}, but the data set has no vocabulary of it")
            self.label_embedding = build_embedding(rows, config.d_model)
        self.relations = Relations(settings)
        for number, layer in enumerate(self.encoder_layers):
            layer.self_attention = RelatedSelfAttention(
                config.d_model,
                config.num_heads,
                config.attention_dropout,
                self.relations,
                label_head=self.label_embedding is not None and number == 0,
            )

    def encode(self, batch: TreeBatch) -> Memory:
        """The leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        ids = self.relations(batch.leaf_pieces.shape[1], batch.structure, batch.leaf_pieces.device)
        related = Related(ids, self._embed_labels(batch))
        x = self.dropout(self._embed_leaves(batch))
        for layer in self.encoder_layers:
            x = layer(x, attend_mask, related)
        return Memory(x, batch.leaf_pad_mask)

    def _embed_leaves(self, batch: TreeBatch) -> Tensor:
        """[B, L, D]."""
        x = self.embedding_scale * self.piece_embedding(batch.leaf_pieces)
        if self.structural_positions is not None:
            return self.structural_positions(x, batch.structure.of_leaves(batch.structure.arcs.depth))
        return self.positions(x) if self.adds_sinusoids else x

    def _embed_labels(self, batch: TreeBatch) -> Tensor | None:
        """[B, L, D] for the specialised head, with the place in the sentence."""
        if self.label_embedding is None:
            return None
        words = batch.structure
        labels = words.pos_tag if self.label_kind == "pos_tag" else words.of_leaves(words.arcs.deprel)
        return self.dropout(self.positions(self.embedding_scale * self.label_embedding(labels)))


class RelationTransformer(EncodesRelations, Seq2Seq):
    """Relations in the encoder; with `model.relations.decoder`, relative positions in the decoder's self-attention too."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        self.add_relations(config, vocab)
        self.relative_decoder, sequence = config.relations.decoder, config.relations.sequence
        if self.relative_decoder:
            for layer in self.decoder_layers:
                layer.self_attention = RelativeCausalSelfAttention(
                    config.d_model, config.num_heads, config.attention_dropout, sequence.clip, sequence.values
                )

    def embed_pieces(self, pieces: Tensor, first: int = 0) -> Tensor:
        """Target pieces [B, T] at positions from `first` -> [B, T, D]."""
        if self.relative_decoder:
            return self.embedding_scale * self.piece_embedding(pieces)
        return super().embed_pieces(pieces, first)


class RelationTransformerClassifier(EncodesRelations, Encoder, Classifier):
    """The encoder; the class of an example is read from the mean of the leaves, or from the first.

    Raises UserError where phrases are to be learned: the arcs are those of whole examples.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        Encoder.__init__(self, config, vocab)
        self.add_relations(config, vocab)
        if self.reads != "leaves" and classifier.supervision != "root":
            raise UserError(
                "classifier.supervision must be root where model.relations reads tags or dependencies, which are those of whole "
                f"examples, but is {classifier.supervision}"
            )
        self.add_head(config, classifier, num_classes)
