"""The ranks of a run, one or several: sums, broadcasts, and failures that stop all of them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treeproc.common.settings import UserError


class TrainingFailed(UserError):
    """Raised on all ranks at once, so that no rank waits for another. A new start would only repeat it."""


@dataclass(frozen=True)
class Sum:
    """A sum over the ranks that has started."""

    tensor: Tensor
    rounded: Tensor  # the tensor itself, if it is not rounded
    work: dist.Work | None

    def wait(self) -> None:
        """Wait until the tensor has its sum. On CUDA, only later operations of the device wait."""
        if self.work is not None:
            self.work.wait()
        if self.rounded is not self.tensor:
            self.tensor.copy_(self.rounded)


class Ranks:
    """This rank among `world_size`. With more than one, a process group must be there."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.device = rank, world_size, device

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and logs."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: Tensor, dtype: torch.dtype) -> "Sum":
        """Start `sum` of values rounded to `dtype`. It is complete after `Sum.wait`."""
        if self.world_size == 1:
            return Sum(tensor, tensor, None)
        rounded = tensor.to(dtype)
        return Sum(tensor, rounded, dist.all_reduce(rounded, async_op=True))

    def from_leader(self, value: Any) -> Any:
        """Return the leader's value on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def fail_together(self, failure: str | None) -> None:
        """Raise TrainingFailed on all ranks if any of them has a failure. All ranks must call this."""
        for message in self.gather(failure):
            if message is not None:
                raise TrainingFailed(message)
