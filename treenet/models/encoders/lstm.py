"""The base of encoders with hidden states and cells, and the bidirectional LSTM.

Shapes: B batch, L leaves, S positions, D model.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.bilstm import build_bilstm, last_states, run_bilstm
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding, VocabSizes

LSTMState = tuple[Tensor, Tensor]  # hidden state and cell [B, D]


@dataclass
class LSTMStates:
    """States of all positions, before dropout."""

    hidden: Tensor  # [B, S, D]
    cells: Tensor | None  # [B, S, D], where they were asked for
    pad_mask: Tensor  # [B, S] bool, True = padding
    num_leaves: int | None = None  # positions from there on are nodes


class LSTMEncoder(Encoder):
    """Base of the encoders that an LSTM decoder can start from."""

    @abstractmethod
    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """States of the positions."""

    @abstractmethod
    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        """What stands for the whole source [B, D], of hidden states or of cells [B, S, D]."""

    def forward(self, batch: TreeBatch) -> Memory:
        states = self.run(batch, with_cells=False)
        return Memory(self.drop(states), states.pad_mask)

    def drop(self, states: LSTMStates) -> Tensor:
        """Hidden states after dropout [B, S, D]."""
        return self.dropout(states.hidden, states.num_leaves)

    def embed_leaves(self, batch: TreeBatch) -> Tensor:
        """[B, L, D]."""
        return self.dropout(self.embedding(batch.leaf_pieces))

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        return self.own_state(memory.states, batch)


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
