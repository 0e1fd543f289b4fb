"""The LSTM over leaves, in both directions or forward. Shapes: B batch, L leaves, S positions, D model."""

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.bilstm import build_bilstm, build_lstm, last_state, last_states, run_bilstm, run_lstm
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.recurrent import RecurrentDecoder
from treenet.models.encoders.base import PieceEmbedding, VocabSizes
from treenet.models.encoders.lstm_base import LSTMEncoder, LSTMStates


class BiLSTMEncoder(LSTMEncoder):
    """`num_encoder_layers` layers of two directions, of d_model / 2 each; dropout before, between and after them.

    The state of the whole source is the last states of both directions: forward at the last leaf, backward at the first. With
    `recurrent.directions: forward`, layers have only that direction, with d_model.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, embedding)
        sizes = config.d_model, config.num_encoder_layers
        if config.recurrent.directions == "both":
            self.forward_layers, self.backward_layers = build_bilstm(*sizes)
        else:
            self.forward_layers, self.backward_layers = build_lstm(config.d_model, *sizes), None

    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Return all directions side by side at every leaf: S = L."""
        x, pad_mask = self.embed_leaves(batch), batch.leaf_pad_mask
        if self.backward_layers is None:
            return LSTMStates(*run_lstm(x, self.forward_layers, self.dropout, with_cells=with_cells), pad_mask)
        layers = self.forward_layers, self.backward_layers
        return LSTMStates(*run_bilstm(x, pad_mask, *layers, self.dropout, with_cells=with_cells), pad_mask)

    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        return (last_state if self.backward_layers is None else last_states)(states, batch.leaf_pad_mask)


register("bilstm", Architecture(BiLSTMEncoder, RecurrentDecoder, uses=("classification",)))
