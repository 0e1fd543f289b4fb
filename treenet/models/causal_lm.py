"""Causal language models: every state predicts the piece that follows it, or the action that follows it in a tree.

Shapes: B batch, T positions, D model, V entries of the table.
"""

from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.models.encoders.base import Encoder


class CausalLM(nn.Module):
    """An encoder that reads `tgt_in` of a batch, and whose states see no later position. The softmax uses its table."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the encoder."""
        return self.encoder.reads

    def forward(self, batch: TreeBatch) -> tuple[Tensor, Tensor | None]:
        """Return the states [B, T, D] that give the logits of `tgt_out`, and the encoder's own loss, if it has one."""
        memory, loss = self.encoder.encode_to_train(batch)
        return memory.states, loss

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits [..., D] -> [..., V] with the tied table. Half precision becomes float32."""
        return self.encoder.embedding.logits(x)
