"""What every translation model offers, and what those with a Transformer decoder share beside the encoder.

Shapes: B batch, L leaves, N nodes, S memory positions, T target positions, D model, V pieces, R live hypotheses,
A sentences that have some.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.data.batch import Reads, TreeBatch
from treenet.layers.attention import KeysValues, Readers, padding_to_attend_mask
from treenet.layers.blocks import DecoderLayer
from treenet.models.encoders import Encoder, Memory, VocabSizes, tied_logits


@dataclass
class DecoderState:
    """R hypotheses of A sentences after `step` positions. Steps and selections make new states; none is changed.

    The memory is kept once a sentence, however many hypotheses read it.
    """

    sources: Tensor  # [R] row of the encoded batch that a hypothesis translates
    active: Tensor  # [A] the rows that are translated, ascending
    readers: Readers
    memory: list[KeysValues]  # per layer, [A, H, S, K]
    memory_attend_mask: Tensor  # [A, 1, 1, S]
    past: list[tuple[Tensor, ...]]  # per layer, [R, ...]: keys and values of self-attention, last inputs of a convolution
    step: int

    @classmethod
    def begin(cls, pad_mask: Tensor, memory: list[KeysValues], past: list[tuple[Tensor, ...]], **more: Any) -> Self:
        """One empty hypothesis for each of the sentences whose memory has `pad_mask` [B, S], True = padding."""
        sources = torch.arange(len(pad_mask), device=pad_mask.device)
        readers = Readers.build(sources, len(sources))
        return cls(sources, sources, readers, memory, padding_to_attend_mask(pad_mask), past, step=0, **more)

    def select(self, rows: Tensor) -> "DecoderState":
        """Hypotheses `rows` [R'] in that order; a row may occur more than once, or not at all."""
        sources, active, readers = self.sources[rows], self.active, self.readers
        memory, attend_mask = self.memory, self.memory_attend_mask
        if not torch.equal(sources, self.sources):
            active, place = sources.unique(return_inverse=True)
            readers = Readers.build(place, len(active))
            # Beam search mostly reorders hypotheses of one sentence: the memory, by far the larger part, stays in place.
            if not torch.equal(active, self.active):
                kept = torch.searchsorted(self.active, active)
                memory = [(keys.index_select(0, kept), values.index_select(0, kept)) for keys, values in memory]
                attend_mask = attend_mask[kept]
        past = [tuple(part.index_select(0, rows) for part in parts) for parts in self.past]
        changed = {"memory": memory, "memory_attend_mask": attend_mask, "past": past}
        return replace(self, sources=sources, active=active, readers=readers, **changed)


class EncoderDecoder(nn.Module, ABC):
    """What training and search ask of a translation model. Decoder input and output softmax share one table."""

    piece_embedding: nn.Embedding  # [V, D]
    reads: Reads
    auxiliary_loss = ""  # what metrics call the model's own loss (see `decode_to_train`); empty for none

    @classmethod
    def reads_with(cls, config: ModelConfig) -> Reads:
        """What a model of these settings reads."""
        return cls.reads

    @abstractmethod
    def encode(self, batch: TreeBatch) -> Memory:
        """What the decoder reads of the sources."""

    @abstractmethod
    def decode(self, batch: TreeBatch) -> Tensor:
        """Teacher forcing: the states [B, T, D] that the logits of `tgt_out` are computed from."""

    @abstractmethod
    def start_decoding(self, memory: Memory) -> Any:
        """One empty hypothesis a sentence. What depends on the sources alone is computed here, once."""

    @abstractmethod
    def decode_step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The last token of each hypothesis [R] -> logits [R, V] of the next one, and the new state."""

    def decode_to_train(self, batch: TreeBatch) -> tuple[Tensor, Tensor | None]:
        """The states of `decode`, and a loss of the model's own, weighted and summed over the batch, which is trained too."""
        return self.decode(batch), None

    def forward(self, batch: TreeBatch) -> Tensor:
        """Teacher forcing: logits [B, T, V] of `tgt_out`, float32 at least."""
        return self.compute_logits(self.decode(batch))

    def compute_logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V] with the tied table; half precision becomes float32."""
        return tied_logits(x, self.piece_embedding)


class Seq2Seq(Encoder, EncoderDecoder):
    """Base of the models with a Transformer decoder; a model may have an `encode` of its own.

    Encoder leaves, decoder input and output softmax share one table. `tree` makes encoder self-attention and decoder
    cross-attention tree attentions.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, tree: TreeAttentionConfig | None = None):
        super().__init__(config, vocab, tree)
        self.decoder_layers = nn.ModuleList([DecoderLayer(config, tree) for _ in range(config.num_decoder_layers)])

    def decode(self, batch: TreeBatch) -> Tensor:
        return self.decode_memory(batch, self.encode(batch))

    def decode_memory(self, batch: TreeBatch, memory: Memory) -> Tensor:
        """`decode` over the memory that `encode` has made of the batch."""
        attend_mask = padding_to_attend_mask(memory.pad_mask)
        x = self.dropout(self.embed_pieces(batch.tgt_in))  # padding comes last: the causal mask hides it
        for layer in self.decoder_layers:
            x, _ = layer(x, layer.cross_attention.project_memory(memory.states, memory.structure), attend_mask)
        return x

    def start_decoding(self, memory: Memory) -> DecoderState:
        """One empty hypothesis a sentence. Keys and (accumulated) values of the memory are computed here, once."""
        projected = [layer.cross_attention.project_memory(memory.states, memory.structure) for layer in self.decoder_layers]
        past = [layer.self_attention.start(keys) for layer, (keys, _) in zip(self.decoder_layers, projected, strict=True)]
        return DecoderState.begin(memory.pad_mask, [(keys.contiguous(), values.contiguous()) for keys, values in projected], past)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis [R] -> logits [R, V] of the next one, and the new state."""
        x = self.dropout(self.embed_pieces(tokens[:, None], first=state.step))
        pasts = []
        for layer, memory, past in zip(self.decoder_layers, state.memory, state.past, strict=True):
            x, past = layer(x, memory, state.memory_attend_mask, past, state.readers)
            pasts.append(past)
        return self.compute_logits(x[:, 0]), replace(state, past=pasts, step=state.step + 1)
