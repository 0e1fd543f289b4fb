"""The base of encoders with hidden states and cells.

Shapes: B batch, L leaves, S positions, D model.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from treenet.data.batch import TreeBatch
from treenet.models.encoders.base import Encoder, Memory

LSTMState = tuple[Tensor, Tensor]  # hidden state and cell [B, D]


@dataclass
class LSTMStates:
    """States of all positions, before dropout."""

    hidden: Tensor  # [B, S, D]
    cells: Tensor | None  # [B, S, D], if they were asked for
    pad_mask: Tensor  # [B, S] bool, True = padding
    num_leaves: int | None = None  # positions from there on are nodes


class LSTMEncoder(Encoder):
    """Base of the encoders that an LSTM decoder can start from."""

    @abstractmethod
    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Compute states of the positions."""

    @abstractmethod
    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        """Return a summary of the source [B, D], of hidden states or of cells [B, S, D]."""

    def forward(self, batch: TreeBatch) -> Memory:
        states = self.run(batch, with_cells=False)
        return Memory(self.drop(states), states.pad_mask)

    def drop(self, states: LSTMStates) -> Tensor:
        """Return hidden states after dropout [B, S, D]."""
        return self.dropout(states.hidden, states.num_leaves)

    def embed_leaves(self, batch: TreeBatch) -> Tensor:
        """Embed the leaves: [B, L, D]."""
        return self.dropout(self.embedding(batch.leaf_pieces))

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        return self.own_state(memory.states, batch)
