"""Models composed of an encoder and more: translation models, classifiers, masked and causal language models.

The weights of attention are here too. Layers attend by kernels that return no weights. An explicit softmax computes them again,
from what goes into the attention modules.

Shapes: B batch, L leaves, N nodes, P or T positions, S memory positions, D model, H heads, A decoder layers, C classes. V are
pieces or entries of the table, R live hypotheses.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.data.labelled import LabelledBatch
from treenet.layers.attention import CrossAttention, KeysValues, SelfAttention, padding_to_attend_mask
from treenet.layers.core import Dropout, Scratch, build_linear
from treenet.layers.scaled_dot_product import attend, attention_weights
from treenet.models.decoders.transformer import Decoder, DecoderState, StaticState
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding, mean_state
from treenet.structure import TreeStructure
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID, UNK_ID


class ComposedModel(nn.Module):
    """A model of an encoder. An output softmax uses its table of pieces."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the encoder."""
        return self.encoder.reads

    def compute_logits(self, x: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Compute logits [..., D] -> [..., V] with the tied table; see `PieceEmbedding.logits`."""
        return self.encoder.embedding.logits(x, scratch)


class Seq2Seq(ComposedModel):
    """A translation model, for training and search."""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__(encoder)
        self.decoder = decoder

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

    def start_decoding(self, memory: Memory) -> DecoderState:
        """Start with one empty hypothesis per sentence. Everything that depends only on the sources is computed here, once."""
        return self.decoder.start(memory)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Map the last token of each hypothesis [R] to logits [R, V] of the next one, and the new state."""
        x, state = self.decode_states(tokens, state)
        return self.compute_logits(x), state

    def decode_states(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Map the last token of each hypothesis [R] to the state [R, D] that gives the logits, and the new state."""
        return self.decoder.step(tokens, state)

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


class ClassLogits(NamedTuple):
    """Logits of classes, at least float32.

    `positions` is set if the model also learns the classes of phrases, in the order of the batch's positions.
    """

    examples: Tensor  # [B, C]
    positions: Tensor | None  # [B, P, C]


class Classifier(ComposedModel):
    """A classifier of examples, and of all phrases that the encoder has positions for, through one head.

    The head is a linear map to classes, shared by positions and examples, or the head for pairs of sentences. An example is then
    a pair.
    """

    def __init__(self, encoder: Encoder, head: nn.Module, options: ClassifierConfig):
        super().__init__(encoder)
        self.head = head
        self.word_dropout = Dropout(options.word_dropout)
        self.pooling = options.pooling
        if self.pooling == "attention":
            self.query = nn.Parameter(torch.zeros(encoder.d_model))  # at first, the state is the mean
        self.classifies_positions = options.supervision == "all_phrases" and encoder.reads.positions != "leaves"

    @property
    def reads_pairs(self) -> bool:
        """Return whether an example is a pair of sentences, which are neighbours in a batch."""
        return isinstance(self.head, PairHead)

    def forward(self, batch: LabelledBatch) -> ClassLogits:
        """Compute the logits of examples, and of positions if these are learned."""
        batch = self._drop_words(batch)
        memory = self.encoder(batch)
        positions = self._classify(memory.states) if self.classifies_positions else None
        return ClassLogits(self._classify(self._summarize(memory, batch)), positions)

    def _summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """Return the state of every example [B, D], as `classifier.pooling` says."""
        match self.pooling:
            case "own":
                return self.encoder.summarize(memory, batch)
            case "mean":
                return mean_state(memory)
            case "attention":
                states = memory.states[:, None]
                query = self.query.expand(len(states), 1, 1, -1)
                return attend(query, states, states, padding_to_attend_mask(memory.pad_mask), 0.0)[:, 0, 0]
        return memory.states[:, 0]

    def _drop_words(self, batch: LabelledBatch) -> LabelledBatch:
        """Replace pieces by the unknown one in training, with the probability `classifier.word_dropout`: word dropout."""
        if not self.training or not self.word_dropout.p:
            return batch
        kept = self.word_dropout(torch.ones(*batch.leaf_pieces.shape, 1, device=batch.leaf_pieces.device))[..., 0] > 0
        return replace(batch, leaf_pieces=batch.leaf_pieces.where(kept, UNK_ID))

    def _classify(self, states: Tensor) -> Tensor:
        logits = self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_supervision(config: ModelConfig, options: ClassifierConfig, reads: InputKind) -> None:
    """Raise UserError if an encoder of this kind cannot learn what the settings ask for."""
    if options.supervision != "all_phrases":
        return
    if (reads.columns or reads.constituents) and reads.positions == "leaves":
        raise UserError(
            f"classifier.supervision must be root, because model.name = {config.name} reads {reads} of whole examples, but is "
            f"{options.supervision}"
        )
    if reads.positions != "leaves" and options.pooling != "own":
        raise UserError(
            f"classifier.pooling must be own if model.name = {config.name} learns the classes of all phrases, but is "
            f"{options.pooling}; set classifier.supervision=root"
        )


class MaskedPieceEmbedding(PieceEmbedding):
    """The table of pieces, and the vector of the mask. A leaf with the id V gets that vector.

    The mask is not a piece. So the vocabulary of a data set stays the same, and a model never predicts the mask.
    """

    def __init__(self, pieces: int, d_model: int):
        super().__init__(pieces, d_model)
        self.mask_id = pieces
        self.mask = nn.Parameter(torch.empty(d_model).normal_() * d_model**-0.5)

    def forward(self, pieces: Tensor) -> Tensor:
        """Embed pieces [..., T], V for the mask -> [..., T, D]."""
        masked = pieces == self.mask_id
        x = F.embedding(pieces.masked_fill(masked, PAD_ID), self.weight)
        return self.scale * torch.where(masked[..., None], self.mask, x)


class MaskedLM(ComposedModel):
    """An encoder with a `MaskedPieceEmbedding`. The output softmax uses the same table.

    `mask_id` is the id of the mask among the pieces of leaves.
    """

    def __init__(self, encoder: Encoder, mask_id: int):
        super().__init__(encoder)
        self.mask_id = mask_id

    def forward(self, batch: TreeBatch) -> Tensor:
        """Return the states [B, L, D] that give the logits of the leaves."""
        return self.encoder(batch).states[:, : batch.leaf_pieces.shape[1]]


class CausalLM(ComposedModel):
    """An encoder that reads `tgt_in` of a batch, and whose states see no later position. The softmax uses its table."""

    def forward(self, batch: TreeBatch) -> tuple[Tensor, Tensor | None]:
        """Return the states [B, T, D] that give the logits of `tgt_out`, and the encoder's own loss, if it has one."""
        memory, loss = self.encoder.encode_to_train(batch)
        return memory.states, loss


def compute_weights(module: CrossAttention, x: Tensor, keys_values: KeysValues, attend_mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) of equations 21, 22 and 24, for what `CrossAttention.forward` takes: [B, H, T, S]."""
    return attention_weights(module.split_heads(module.queries(x)), keys_values[0], attend_mask)


def explicit_mask(module: SelfAttention, attend_mask: Tensor | None, structure: TreeStructure | None) -> Tensor | None:
    """Return the mask that the module attends by, of a form that expands to [B, H, S, S]; None if all may attend to all."""
    if attend_mask is None and module.accumulation is not None and structure is not None:
        return structure.attend_mask()[:, None]
    return attend_mask


def compute_self_weights(
    module: SelfAttention,
    x: Tensor,
    attend_mask: Tensor | None = None,
    structure: TreeStructure | None = None,
    prior: Tensor | None = None,
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) of equations 12 to 18, for what `SelfAttention.forward` takes: [B, H, S, S]."""
    queries, keys, _ = module.project(x, structure)
    mask = explicit_mask(module, attend_mask, structure)
    weights = attention_weights(module.split_heads(queries), module.split_heads(keys), mask)
    return weights if prior is None else weights * prior[:, None]


@contextmanager
def record_attention(model: Seq2Seq) -> Iterator[list[Tensor]]:
    """Yield a list that gets the weights [B, H, T, S] of every cross-attention that runs meanwhile, lowest layer first.

    For teacher forcing: in a search, hypotheses share the memory of their sentence.
    """
    recorded: list[Tensor] = []

    def record(module: CrossAttention, inputs: tuple, _: Tensor) -> None:
        recorded.append(compute_weights(module, *inputs[:3]))

    with ExitStack() as hooks:
        for layer in model.decoder.layers:
            hooks.enter_context(layer.cross_attention.register_forward_hook(record))
        yield recorded


@torch.inference_mode()
def attend_batch(model: Seq2Seq, batch: TreeBatch) -> list[np.ndarray]:
    """Return weights [A, H, T, L + N] of every example without its padding. A node's weight is that of all its positions."""
    with record_attention(model) as recorded:
        model(batch)
    weights = torch.stack(recorded, dim=1)  # [B, A, H, T, S]
    real_targets, real = batch.tgt_out != PAD_ID, ~batch.source_pad_mask()
    leaves = batch.leaf_pieces.shape[1]
    copies = 0 if batch.structure is None else batch.structure.positions_of_node
    if copies > 1:
        of_nodes = weights[..., leaves:].unflatten(-1, (-1, copies)).sum(-1)
        weights = torch.cat([weights[..., :leaves], of_nodes], dim=-1)
        real = torch.cat([real[:, :leaves], real[:, leaves::copies]], dim=1)
    return [weights[row][:, :, real_targets[row]][..., real[row]].numpy(force=True) for row in range(len(batch))]


NUM_SCORES = 5


class PairHead(nn.Module):
    """Logits of K scores or classes from the product of two states and the distance between them, through a sigmoid layer.

    It is that of Tai et al. (2015), section 4.2. If it is `ordered`, the layer reads the two states too. Shapes: P pairs.
    """

    def __init__(self, d_model: int, d_hidden: int, num_outputs: int = NUM_SCORES, *, ordered: bool = False):
        super().__init__()
        self.ordered = ordered
        self.compare = build_linear((4 if ordered else 2) * d_model, d_hidden)
        self.scores = build_linear(d_hidden, num_outputs)

    def forward(self, states: Tensor) -> Tensor:
        """Map states [2 P, D] to logits [P, K]. The states of a pair are neighbours."""
        left, right = states.unflatten(0, (-1, 2)).unbind(1)
        own = [left, right] if self.ordered else []
        return self.scores(self.compare(torch.cat([left * right, (left - right).abs(), *own], dim=1)).sigmoid())


def score_distribution(scores: Tensor) -> Tensor:
    """Return the distribution [P, K] over 1 to K whose mean is the score [P].

    It uses only the whole numbers next to the score.
    """
    return (1 - (scores[:, None] - _whole_scores(scores)).abs()).clamp(min=0)


def expected_score(logits: Tensor) -> Tensor:
    """Return the mean [P] of the softmax of logits [P, K]."""
    return logits.softmax(1) @ _whole_scores(logits)


def _whole_scores(like: Tensor) -> Tensor:
    return torch.arange(1, NUM_SCORES + 1, dtype=like.dtype, device=like.device)
