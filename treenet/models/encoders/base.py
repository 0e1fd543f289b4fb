"""The bases of all encoders: embeddings, the memory for a decoder or a head, what an encoder says of itself, Transformer layers.

Shapes: B batch, L leaves, S positions, T sequence length, D model, V pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import LEAVES, InputKind
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.backend import product_dtype
from treenet.layers.blocks import EncoderLayer, SinusoidalPositions, end_stack
from treenet.layers.core import Dropout, Modules, Scratch, WordDropout, multiply_by_table
from treenet.models.pretrained import PretrainedLeaves
from treenet.structure import TreeStructure
from treeproc.common.storage import AnyPath


@dataclass(frozen=True)
class VocabSizes:
    """Rows of the embedding tables; 0 if a data set has no such vocabulary."""

    pieces: int
    labels: int
    pos_tags: int = 0
    deprels: int = 0
    pretrained: Mapping | None = None  # of `pretrained.pretrained_facts`


@dataclass
class Memory:
    """The memory: the encoder output that a decoder attends to or a head reads."""

    states: Tensor  # [B, S, D]; tree encoders: leaves, then nodes
    pad_mask: Tensor  # [B, S] bool, True = padding
    structure: TreeStructure | None = None  # trees of the source, for tree cross-attention
    summary: Tensor | None = None  # [B, D], a state of the whole example that has no position


@dataclass(frozen=True)
class DataFacts:
    """The facts of a data set that an encoder checks."""

    folder: AnyPath
    distinguishes: Callable[[str], bool]  # whether the vocabulary "labels" or "pos_tags" has at least two informative entries


class PieceEmbedding(nn.Embedding):
    """The table of pieces [V, D]. The leaves, the decoder input and the output softmax use it.

    With the defaults, entries are N(0, 1/D) and vectors are scaled by sqrt(D). So inputs have unit variance, and logits have unit
    scale.
    """

    def __init__(self, pieces: int, d_model: int, *, std: float | None = None, scale: float | None = None):
        super().__init__(pieces, d_model)
        nn.init.normal_(self.weight, std=d_model**-0.5 if std is None else std)
        self.scale = d_model**0.5 if scale is None else scale

    has_order = False  # whether vectors depend on the places of leaves

    def forward(self, pieces: Tensor) -> Tensor:
        """Embed pieces [..., T] -> [..., T, D]."""
        return self.scale * super().forward(pieces)

    def of_leaves(self, batch: TreeBatch) -> Tensor:
        """Return the vectors of leaves [B, L, D]."""
        return self(batch.leaf_pieces)

    def vectors(self, pieces: Tensor) -> Tensor:
        """Return rows of the table [..., D], without the scale."""
        return F.embedding(pieces, self.weight)

    def logits(self, x: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Compute logits: x [..., D] -> [..., V]. Half precision becomes float32.

        With `scratch`, x is [R, D]. Then logits of float32 on a CPU are in this memory.
        """
        if scratch and x.device.type == "cpu" and x.dtype == product_dtype(x) == torch.float32:
            return multiply_by_table(x, self.weight, scratch)
        logits = F.linear(x, self.weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Encoder(nn.Module, ABC):
    """An encoder: maps a batch of sentences to a state for every position.

    The caller gives `embedding`, because the decoder and the output softmax share its table.
    """

    reads: InputKind = LEAVES
    has_transformer_layers: ClassVar[bool] = False  # whether it reads `ModelConfig.layer_settings`
    layers: Modules[Any]  # of an encoder of Transformer layers, or of convolutions
    auxiliary_loss: ClassVar[str] = ""  # name of the encoder's own loss in metrics (see `encode_to_train`); empty for none

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding | PretrainedLeaves):
        super().__init__()
        self.d_model = config.d_model
        self.embedding: Any = embedding  # translation and language models have a `PieceEmbedding`
        self.dropout = Dropout(config.dropout)

    @classmethod
    def build_embedding(cls, config: ModelConfig, vocab: VocabSizes) -> PieceEmbedding | PretrainedLeaves:
        """Build the table of pieces for encoders of this class, or the pretrained encoder in its place."""
        if vocab.pretrained is not None:
            return PretrainedLeaves(vocab.pretrained, config.d_model)
        return PieceEmbedding(vocab.pieces, config.d_model)

    @classmethod
    def reads_with(cls, config: ModelConfig) -> InputKind:
        """Return the input kind of an encoder with these settings."""
        return cls.reads

    @classmethod
    def check_data(cls, config: ModelConfig, data: DataFacts) -> None:
        """Raise UserError if the data set lacks something that these settings need beyond the columns of the input kind."""

    def add_tables(self, vocab: VocabSizes) -> None:
        """Make the tables that are not for pieces. They are drawn after the decoder, so a seed keeps its initial weights."""

    @abstractmethod
    def forward(self, batch: TreeBatch) -> Memory:
        """Compute the states of a batch."""

    def encode_to_train(self, batch: TreeBatch) -> tuple[Memory, Tensor | None]:
        """Run `forward`. Also returns the encoder's own loss, weighted and summed over the batch, which is trained too."""
        return self(batch), None

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """Return the encoder's own state of an example [B, D]; for sequences it is the mean."""
        return mean_state(memory)

    def probed_layers(self) -> Sequence[nn.Module]:
        """Return the layers with a state for every position, lowest first; none if only the memory has them."""
        return ()


def mean_state(memory: Memory) -> Tensor:
    """Return the mean of the real positions [B, D]."""
    real = ~memory.pad_mask
    return (memory.states * real[..., None]).sum(1) / real.sum(1, keepdim=True)


def build_embedding(rows: int, d_model: int) -> nn.Embedding:
    """Build a table of labels or tags [rows, D], N(0, 1/D): unit variance after the scaling by sqrt(D)."""
    embedding = nn.Embedding(rows, d_model)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    return embedding


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
        return self.dropout(self.embedding.of_leaves(batch))

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        return self.own_state(memory.states, batch)


class TransformerEncoder(Encoder):
    """Transformer layers over leaves, with sinusoidal positions.

    Encoders that differ in their self-attention hand `build_attention` to the constructor: the attention of layer `number`,
    counted from 0.
    """

    has_transformer_layers = True

    def __init__(
        self,
        config: ModelConfig,
        vocab: VocabSizes,
        embedding: PieceEmbedding | PretrainedLeaves,
        build_attention: Callable[[int], nn.Module] | None = None,
        num_layers: int | None = None,
    ):
        super().__init__(config, vocab, embedding)
        self.positions = SinusoidalPositions(config.d_model)
        self.word_dropout = WordDropout(config.source_word_dropout)
        build_attention = build_attention or (lambda _: build_self_attention(config))
        self.layers = build_layers(config, build_attention, num_layers)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_leaves(batch))
        for layer in self.layers:
            x = layer(x, attend_mask)
        return Memory(x, batch.leaf_pad_mask)

    def embed_leaves(self, batch: TreeBatch) -> Tensor:
        """Embed the leaves [B, L, D]."""
        x = self.word_dropout(self.embedding.of_leaves(batch))
        return x if self.embedding.has_order else self.positions(x)

    def probed_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)


def build_layers(
    config: ModelConfig, build_attention: Callable[[int], nn.Module], num_layers: int | None = None
) -> Modules[EncoderLayer]:
    """Build Transformer layers with the attention of layer `number`, counted from 0."""
    numbers = range(num_layers or config.num_encoder_layers)
    return end_stack(Modules(EncoderLayer(config, build_attention(number)) for number in numbers), config)


def build_self_attention(config: ModelConfig) -> SelfAttention:
    """Build plain multi-head self-attention."""
    return SelfAttention(config.d_model, config.num_heads, config.attention_dropout)
