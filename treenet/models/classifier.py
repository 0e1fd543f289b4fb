"""What every classifier shares: the head, and what the class of an example is read from. Not a model itself.

Shapes: B batch, P positions, D model, C classes.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.batch import Reads
from treenet.data.labelled import LabelledBatch
from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.models.encoders import Memory
from treeproc.common.settings import UserError
from treeproc.shards.schema import UNK_ID


class ClassLogits(NamedTuple):
    """Float32 at least. `positions` are there when the classes of phrases are learned too, in the order of the batch's."""

    examples: Tensor  # [B, C]
    positions: Tensor | None  # [B, P, C]


class Classifier(nn.Module):
    """Base of the classifiers, beside one that has `encode`; the model's constructor calls `add_head`."""

    reads: Reads = "leaves"

    @classmethod
    def reads_with(cls, config: ModelConfig) -> Reads:
        """What a model of these settings reads."""
        return cls.reads

    def add_head(self, config: ModelConfig, classifier: ClassifierConfig, num_classes: int) -> None:
        """A linear map to classes, shared by all positions and the example. Raises UserError for settings that do not fit."""
        self.head = build_linear(config.d_model, num_classes)
        self.word_dropout = Dropout(classifier.word_dropout)
        self.pooling = classifier.pooling
        self.classifies_positions = classifier.supervision == "all_phrases" and self.reads != "leaves"
        if self.classifies_positions and self.pooling != "own":
            raise UserError(
                f"classifier.pooling must be own where model.name = {config.name} learns the classes of all phrases, but is "
                f"{self.pooling}; set classifier.supervision=root"
            )

    def encode(self, batch: LabelledBatch) -> Memory:
        """States of the positions."""
        raise NotImplementedError

    def summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """The model's own state of an example [B, D]: of sequences the mean."""
        return mean_state(memory)

    def forward(self, batch: LabelledBatch) -> ClassLogits:
        """Classes of examples, and of positions when these are learned."""
        memory = self.encode(self._drop_words(batch))
        if self.pooling == "own":
            summary = self.summarize(memory, batch)
        else:
            summary = mean_state(memory) if self.pooling == "mean" else memory.states[:, 0]
        positions = self._classify(memory.states) if self.classifies_positions else None
        return ClassLogits(self._classify(summary), positions)

    def _drop_words(self, batch: LabelledBatch) -> LabelledBatch:
        """In training, pieces as if they were unknown, each with the probability of `classifier.word_dropout`."""
        if not self.training or not self.word_dropout.p:
            return batch
        kept = self.word_dropout(torch.ones(*batch.leaf_pieces.shape, 1, device=batch.leaf_pieces.device))[..., 0] > 0
        return replace(batch, leaf_pieces=batch.leaf_pieces.where(kept, UNK_ID))

    def _classify(self, states: Tensor) -> Tensor:
        logits = self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean_state(memory: Memory) -> Tensor:
    """Mean of the real positions [B, D]."""
    real = ~memory.pad_mask
    return (memory.states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
