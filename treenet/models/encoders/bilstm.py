"""The bidirectional LSTM. Shapes: B batch, L leaves, S positions, D model."""

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.bilstm import build_bilstm, last_states, run_bilstm
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.recurrent import RecurrentDecoder
from treenet.models.encoders.base import PieceEmbedding, VocabSizes
from treenet.models.encoders.lstm_base import LSTMEncoder, LSTMStates


class BiLSTMEncoder(LSTMEncoder):
    """`num_encoder_layers` layers of two directions, of d_model / 2 each; dropout before, between and after them.

    The whole source is the last states of both directions: forward at the last leaf, backward at the first.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, embedding)
        self.forward_layers, self.backward_layers = build_bilstm(config.d_model, config.num_encoder_layers)

    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Both directions side by side at every leaf: S = L."""
        layers, pad_mask = (self.forward_layers, self.backward_layers), batch.leaf_pad_mask
        return LSTMStates(*run_bilstm(self.embed_leaves(batch), pad_mask, *layers, self.dropout, with_cells=with_cells), pad_mask)

    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        return last_states(states, batch.leaf_pad_mask)


register("bilstm", Architecture(BiLSTMEncoder, RecurrentDecoder, uses=("classification",)))
