"""Bidirectional LSTM. Shapes: B batch, L leaves, D model."""

from torch import Tensor

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.labelled import LabelledBatch
from treenet.layers.bilstm import build_bilstm, last_states, run_bilstm
from treenet.layers.dropout import Dropout
from treenet.models.classifier import Classifier
from treenet.models.encoders import Memory, VocabSizes, build_embedding
from treenet.models.recurrent import RecurrentDecoder, RecurrentMemory


class BiLSTMClassifier(Classifier):
    """`num_encoder_layers` layers of two directions, of d_model / 2 each; dropout before, between and after them.

    The class of an example is read from the last states of both directions.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        super().__init__()
        self.piece_embedding = build_embedding(vocab.pieces, config.d_model)
        self.embedding_scale = config.d_model**0.5
        self.dropout = Dropout(config.dropout)
        self.forward_layers, self.backward_layers = build_bilstm(config.d_model, config.num_encoder_layers)
        self.add_head(config, classifier, num_classes)

    def encode(self, batch: LabelledBatch) -> Memory:
        """Both directions side by side at every leaf."""
        x = self.dropout(self.embedding_scale * self.piece_embedding(batch.leaf_pieces))
        x, _ = run_bilstm(x, batch.leaf_pad_mask, self.forward_layers, self.backward_layers, self.dropout)
        return Memory(self.dropout(x), batch.leaf_pad_mask)

    def summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """The last states [B, D]: forward at the last leaf, backward at the first."""
        return last_states(memory.states, batch.leaf_pad_mask)


class BiLSTMSeq2Seq(RecurrentDecoder):
    """The same encoder below an LSTM decoder, which starts from the last states and cells: Tree2Seq without its trees."""

    reads = "leaves"

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        self.forward_layers, self.backward_layers = build_bilstm(config.d_model, config.num_encoder_layers)

    def encode(self, batch: TreeBatch) -> RecurrentMemory:
        """Both directions side by side at every leaf: S = L."""
        pad_mask = batch.leaf_pad_mask
        x = self.embed_pieces(batch.leaf_pieces)
        layers = self.forward_layers, self.backward_layers
        hidden, cells = run_bilstm(x, pad_mask, *layers, self.dropout, with_cells=True)
        return self.remember(hidden, cells, pad_mask, (last_states(hidden, pad_mask), last_states(cells, pad_mask)))
