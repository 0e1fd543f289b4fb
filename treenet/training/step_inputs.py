"""What a forward pass of one micro-batch reads beside the weights. All of it is made on the host, before anything is sent.

Shapes: B batch, M targets that count in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from treenet.config import TrainConfig
from treenet.data.batch import TreeBatch
from treenet.data.packing import Packed, pack
from treenet.data.plan import hash_ids
from treenet.layers.dropout import keys_of
from treenet.tasks.base import Task

Value = TypeVar("Value")


@dataclass
class StepInputs:
    """A batch with its targets, and what is drawn for it."""

    batch: TreeBatch
    dropout_keys: tuple[Tensor, ...]  # [B] int32 for every pass
    counted: Tensor | None  # [M] int64, the flat places of targets that count; None where they are looked for, or all count

    @classmethod
    def build(cls, task: Task, batch: TreeBatch, seeds: Sequence[int] | None, device: torch.device) -> "StepInputs":
        """Of a batch on the host, for a device. Each seed is one pass; without seeds it is a validation, without dropout.

        A mask of targets would have a GPU wait for the number of those that count, so accelerators get their places.
        """
        batch = task.choose_targets(batch, seeds[0] if seeds else None)
        keys = tuple(keys_of(hash_ids(batch.example_ids.numpy() + (seed << 31))) for seed in seeds or ())
        return cls(batch, keys, None if device.type == "cpu" else task.counted_targets(batch))

    def to(self, device: torch.device) -> "StepInputs":
        """On `device`: to an accelerator in one copy, which the host does not wait for."""
        if self.batch.leaf_pieces.device.type == device.type:
            return self
        packed = pack(self)
        return Packed(send(packed.buffer, device), packed.layout).unpack()


@dataclass(frozen=True)
class StepSeeds:
    """What is drawn in an update follows from (seed, step)."""

    generator: int  # of PyTorch's generator
    passes: list[int]  # of the keys of dropout in each forward pass; the first is also that of targets

    @classmethod
    def of(cls, config: TrainConfig, step: int) -> "StepSeeds":
        first, *others = np.random.SeedSequence([config.seed, step]).generate_state(3, np.uint32).tolist()
        return cls(first, others if config.optimizer.r_drop else others[:1])


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. On CUDA the copy goes from pinned memory, and the host does not wait for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Sender:
    """Sends packed values to an accelerator while it computes: on CUDA on a stream of its own, from pinned memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, packed: Packed[Value]) -> Value:
        """The value on the device, for what is started from now on."""
        if self._stream is None:
            return Packed(packed.buffer.to(self._device), packed.layout).unpack()
        with torch.cuda.stream(self._stream):
            buffer = packed.buffer.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        buffer.record_stream(computing)  # its memory is not given away before what reads it is done
        return Packed(buffer, packed.layout).unpack()
