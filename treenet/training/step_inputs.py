"""What a forward pass of one micro-batch reads beside the weights. All of it is made on the host, before anything is sent.

Shapes: B batch, M targets that count in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.packing import Packed, pack
from treenet.data.plan import hash_ids
from treenet.layers.dropout import keys_of
from treenet.tasks.base import Task


@dataclass
class StepInputs:
    """A batch with its targets, and what is drawn for it."""

    batch: TreeBatch
    dropout_keys: tuple[Tensor, ...]  # [B] int32 for every pass
    counted: Tensor | None  # [M] int64, the flat places of targets that count; None where they are looked for, or all count

    @classmethod
    def build(
        cls, task: Task, model: nn.Module, batch: TreeBatch, seeds: Sequence[int] | None, device: torch.device
    ) -> "StepInputs":
        """Of a batch on the host, for a device. Each seed is one pass; without seeds it is a validation, without dropout.

        A mask of targets would have a GPU wait for the number of those that count, so accelerators get their places.
        """
        batch = task.choose_targets(model, batch, seeds[0] if seeds else None)
        keys = tuple(keys_of(hash_ids(batch.example_ids.numpy() + (seed << 31))) for seed in seeds or ())
        return cls(batch, keys, None if device.type == "cpu" else task.counted_targets(batch))

    def to(self, device: torch.device) -> "StepInputs":
        """On `device`: to an accelerator in one copy, which the host does not wait for."""
        if device.type == "cpu":
            return self
        packed = pack(self)
        return Packed(send(packed.buffer, device), packed.layout).unpack()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. On CUDA the copy goes from pinned memory, and the host does not wait for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
