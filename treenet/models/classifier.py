"""Classifiers: an encoder, and a head that maps its states to classes. Shapes: B batch, P positions, D model, C classes."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.input_kinds import InputKind
from treenet.data.labelled import LabelledBatch
from treenet.layers.dropout import Dropout
from treenet.models.encoders.base import Encoder, mean_state
from treeproc.common.settings import UserError
from treeproc.shards.schema import UNK_ID


class ClassLogits(NamedTuple):
    """At least float32.

    `positions` is set if the model also learns the classes of phrases, in the order of the batch's positions.
    """

    examples: Tensor  # [B, C]
    positions: Tensor | None  # [B, P, C]


class Classifier(nn.Module):
    """A classifier of examples, and of all phrases that the encoder has positions for, through one head.

    The head is a linear map to classes, shared by positions and examples, or the head for pairs of sentences.
    """

    def __init__(self, encoder: Encoder, head: nn.Module, options: ClassifierConfig):
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.word_dropout = Dropout(options.word_dropout)
        self.pooling = options.pooling
        self.classifies_positions = options.supervision == "all_phrases" and encoder.reads.positions != "leaves"

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the encoder."""
        return self.encoder.reads

    def forward(self, batch: LabelledBatch) -> ClassLogits:
        """Compute the logits of examples, and of positions if these are learned."""
        batch = self._drop_words(batch)
        memory = self.encoder(batch)
        if self.pooling == "own":
            summary = self.encoder.summarize(memory, batch)
        else:
            summary = mean_state(memory) if self.pooling == "mean" else memory.states[:, 0]
        positions = self._classify(memory.states) if self.classifies_positions else None
        return ClassLogits(self._classify(summary), positions)

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
    if reads.columns and reads.positions == "leaves":
        raise UserError(
            f"classifier.supervision must be root, because model.name = {config.name} reads {reads} of whole examples, but is "
            f"{options.supervision}"
        )
    if reads.positions != "leaves" and options.pooling != "own":
        raise UserError(
            f"classifier.pooling must be own if model.name = {config.name} learns the classes of all phrases, but is "
            f"{options.pooling}; set classifier.supervision=root"
        )
