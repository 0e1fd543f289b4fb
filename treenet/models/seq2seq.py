"""What every encoder-decoder model shares beside its encoder: the decoder and step-by-step decoding. Not a model itself.

Shapes: B batch, L leaves, N nodes, S memory positions, T target positions, D model, V pieces, R live hypotheses.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.batch import TreeBatch
from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.layers.attention import KeysValues, padding_to_attend_mask
from treenet.layers.blocks import DecoderLayer
from treenet.models.encoders import Encoder, Memory, VocabSizes


@dataclass
class DecoderState:
    """R hypotheses after `step` positions. Steps and selections make new states; none is changed."""

    sources: Tensor  # [R] row of the encoded batch that a hypothesis translates
    memory: list[KeysValues]  # per layer, [R, H, S, K]
    memory_attend_mask: Tensor  # [R, 1, 1, S]
    past: list[KeysValues]  # per layer, self-attention keys and values [R, H, step, K]
    step: int

    def select(self, rows: Tensor) -> "DecoderState":
        """Hypotheses `rows` [R'] in that order; a row may occur more than once, or not at all."""
        sources = self.sources[rows]
        memory, attend_mask = self.memory, self.memory_attend_mask
        # Beam search mostly reorders hypotheses of one sentence: the memory, by far the larger part, stays in place.
        if not torch.equal(sources, self.sources):
            memory = [(keys[rows], values[rows]) for keys, values in memory]
            attend_mask = attend_mask[rows]
        past = [(keys[rows], values[rows]) for keys, values in self.past]
        return DecoderState(sources, memory, attend_mask, past, self.step)


class Seq2Seq(Encoder):
    """Base of the encoder-decoder models; a model may have an `encode` of its own.

    Encoder leaves, decoder input and output softmax share one table [V, D]. `tree` makes encoder self-attention and
    decoder cross-attention tree attentions.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, tree: TreeAttentionConfig | None = None):
        super().__init__(config, vocab, tree)
        self.decoder_layers = nn.ModuleList([DecoderLayer(config, tree) for _ in range(config.num_decoder_layers)])

    def forward(self, batch: TreeBatch) -> Tensor:
        """Teacher forcing: logits [B, T, V] of `tgt_out`, float32 at least."""
        memory = self.encode(batch)
        attend_mask = padding_to_attend_mask(memory.pad_mask)
        x = self.dropout(self.embed_pieces(batch.tgt_in))  # padding comes last: the causal mask hides it
        for layer in self.decoder_layers:
            x, _ = layer(x, layer.cross_attention.project_memory(memory.states, memory.structure), attend_mask)
        return self.compute_logits(x)

    def start_decoding(self, memory: Memory) -> DecoderState:
        """One empty hypothesis a sentence. Keys and (accumulated) values of the memory are computed here, once."""
        projected = [layer.cross_attention.project_memory(memory.states, memory.structure) for layer in self.decoder_layers]
        return DecoderState(
            sources=torch.arange(len(memory.states), device=memory.states.device),
            memory=projected,
            memory_attend_mask=padding_to_attend_mask(memory.pad_mask),
            past=[(keys[:, :, :0], values[:, :, :0]) for keys, values in projected],
            step=0,
        )

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis [R] -> logits [R, V] of the next one, and the new state."""
        x = self.dropout(self.embed_pieces(tokens[:, None], first=state.step))
        pasts = []
        for layer, memory, past in zip(self.decoder_layers, state.memory, state.past, strict=True):
            x, past = layer(x, memory, state.memory_attend_mask, past)
            pasts.append(past)
        state = DecoderState(state.sources, state.memory, state.memory_attend_mask, pasts, state.step + 1)
        return self.compute_logits(x[:, 0]), state

    def compute_logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V] with the tied table; half precision becomes float32."""
        logits = F.linear(x, self.piece_embedding.weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
