"""Translation models: an encoder and a decoder that share the table of pieces.

Shapes: B batch, T target positions, D model, V pieces, R live hypotheses.
"""

from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.models.decoders.base import Decoder, DecoderState
from treenet.models.decoders.static_state import StaticState
from treenet.models.encoders.base import Encoder, Memory


class Seq2Seq(nn.Module):
    """A translation model, for training and search."""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the encoder."""
        return self.encoder.reads

    def encode(self, batch: TreeBatch) -> Memory:
        """Return the memory of the sources."""
        return self.decoder.read(self.encoder, batch)

    def decode(self, batch: TreeBatch) -> Tensor:
        """Run with teacher forcing: the states [B, T, D] that give the logits of `tgt_out`."""
        return self.decoder(batch.tgt_in, self.encode(batch))

    def decode_to_train(self, batch: TreeBatch) -> tuple[Tensor, Tensor | None]:
        """Return the states of `decode`, and the encoder's own loss, if it has one."""
        if not self.encoder.auxiliary_loss:
            return self.decode(batch), None
        memory, loss = self.encoder.encode_to_train(batch)
        return self.decoder(batch.tgt_in, memory), loss

    def forward(self, batch: TreeBatch) -> Tensor:
        """Run with teacher forcing: logits [B, T, V] of `tgt_out`, at least float32."""
        return self.compute_logits(self.decode(batch))

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits [..., D] -> [..., V] with the tied table. Half precision becomes float32."""
        return self.encoder.embedding.logits(x)

    def start_decoding(self, memory: Memory) -> DecoderState:
        """Start with one empty hypothesis per sentence. Everything that depends only on the sources is computed here, once."""
        return self.decoder.start(memory)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Map the last token of each hypothesis [R] to logits [R, V] of the next one, and the new state."""
        x, state = self.decoder.step(tokens, state)
        return self.compute_logits(x), state

    @property
    def has_static_cache(self) -> bool:
        """Return whether the decoder can search with steps that all have the same shapes."""
        return self.decoder.has_static_cache

    def start_static(self, memory: Memory, beam_width: int, most_positions: int) -> StaticState:
        """Start with `beam_width` empty hypotheses per sentence, of up to `most_positions` steps, in memory of fixed shape."""
        return self.decoder.start_static(memory, beam_width, most_positions)

    def step_static(self, tokens: Tensor, state: StaticState) -> Tensor:
        """Map the last token of each hypothesis [R] to logits [R, V] of the next one. Changes `state` in place."""
        return self.compute_logits(self.decoder.step_static(tokens, state))
