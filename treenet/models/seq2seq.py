"""Translation models: an encoder and a decoder that share the table of pieces.

Shapes: B batch, T target positions, D model, V pieces, R live hypotheses.
"""

from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.models.decoders.base import Decoder, DecoderState
from treenet.models.encoders.base import Encoder, Memory


class Seq2Seq(nn.Module):
    """A translation model, as training and search use it."""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @property
    def reads(self) -> InputKind:
        """The input kind of the encoder."""
        return self.encoder.reads

    def encode(self, batch: TreeBatch) -> Memory:
        """The memory of the sources."""
        return self.decoder.read(self.encoder, batch)

    def decode(self, batch: TreeBatch) -> Tensor:
        """Teacher forcing: the states [B, T, D] that the logits of `tgt_out` are computed from."""
        return self.decoder(batch.tgt_in, self.encode(batch))

    def decode_to_train(self, batch: TreeBatch) -> tuple[Tensor, Tensor | None]:
        """The states of `decode`, and the encoder's own loss, where it has one."""
        if not self.encoder.auxiliary_loss:
            return self.decode(batch), None
        memory, loss = self.encoder.encode_to_train(batch)
        return self.decoder(batch.tgt_in, memory), loss

    def forward(self, batch: TreeBatch) -> Tensor:
        """Teacher forcing: logits [B, T, V] of `tgt_out`, float32 at least."""
        return self.compute_logits(self.decode(batch))

    def compute_logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V] with the tied table; half precision becomes float32."""
        return self.encoder.embedding.logits(x)

    def start_decoding(self, memory: Memory) -> DecoderState:
        """One empty hypothesis a sentence. What depends on the sources alone is computed here, once."""
        return self.decoder.start(memory)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis [R] -> logits [R, V] of the next one, and the new state."""
        x, state = self.decoder.step(tokens, state)
        return self.compute_logits(x), state
