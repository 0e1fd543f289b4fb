"""The ranks of a run, of which there may be one: sums, broadcasts, and failures that all of them hear of."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treeproc.common.settings import UserError


class TrainingFailed(UserError):
    """Raised on all ranks at once, so that none waits for another. Starting again would only repeat it."""


@dataclass(frozen=True)
class Sum:
    """A sum over the ranks that is under way."""

    tensor: Tensor
    rounded: Tensor  # the tensor itself, where it is not rounded
    work: dist.Work | None

    def wait(self) -> None:
        """The tensor has its sum: on CUDA, for what is started from now on."""
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
        """True on the rank that writes files and logs."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` becomes, in place, its sum over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: Tensor, dtype: torch.dtype) -> "Sum":
        """`sum`, of values rounded to `dtype`, which is done when it was waited for."""
        if self.world_size == 1:
            return Sum(tensor, tensor, None)
        rounded = tensor.to(dtype)
        return Sum(tensor, rounded, dist.all_reduce(rounded, async_op=True))

    def from_leader(self, value: Any) -> Any:
        """The leader's value, whatever the others have."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def gather(self, value: Any) -> list:
        """The values of all ranks, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def fail_together(self, failure: str | None) -> None:
        """Raises TrainingFailed on all ranks when any of them has a failure; all must call."""
        for message in self.gather(failure):
            if message is not None:
                raise TrainingFailed(message)
