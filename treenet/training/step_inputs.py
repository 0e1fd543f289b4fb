"""The inputs of a forward pass of one micro-batch, beside the weights. The host makes all of them before it sends anything.

Shapes: B batch, M targets that count in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.config import TrainConfig
from treenet.data.batch import TreeBatch
from treenet.data.hashed_sampling import hash_ids
from treenet.data.transfer import send_packed
from treenet.layers.dropout import keys_of
from treenet.tasks.base import Task


@dataclass
class StepInputs:
    """A batch with its targets, and the random seeds drawn for it."""

    batch: TreeBatch
    dropout_keys: tuple[Tensor, ...]  # [B] int32 for every pass
    counted: Tensor | None  # [M] int64, the flat places of targets that count; None if they are looked up, or if all count

    @classmethod
    def build(cls, task: Task, batch: TreeBatch, seeds: Sequence[int] | None, device: torch.device) -> "StepInputs":
        """Build the inputs of a batch on the host, for a device.

        Each seed is one pass; without seeds it is a validation, without dropout.

        With a mask of targets, a GPU would wait for the number of those that count. So accelerators get their places.
        """
        batch = task.choose_targets(batch, seeds[0] if seeds else None)
        keys = tuple(keys_of(hash_ids(batch.example_ids.numpy() + (seed << 31))) for seed in seeds or ())
        return cls(batch, keys, None if device.type == "cpu" else task.counted_targets(batch))

    def to(self, device: torch.device) -> "StepInputs":
        """Return the inputs on `device`. An accelerator gets them in one copy, and the host does not wait for it."""
        return self if self.batch.leaf_pieces.device.type == device.type else send_packed(self, device)


@dataclass(frozen=True)
class StepSeeds:
    """The seeds of an update. They follow from (seed, step)."""

    generator: int  # for PyTorch's generator
    passes: list[int]  # for the keys of dropout in each forward pass; the first is also for the targets

    @classmethod
    def of(cls, config: TrainConfig, step: int) -> "StepSeeds":
        first, *others = np.random.SeedSequence([config.seed, step]).generate_state(3, np.uint32).tolist()
        return cls(first, others if config.optimizer.r_drop else others[:1])
