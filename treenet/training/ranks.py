"""The ranks of a run, one or several: sums, broadcasts, and failures that stop all of them. The modes of each.

Modes are settings of its memory, activations that are computed again, and deterministic kernels.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.layers.core import DropoutKeys
from treenet.models.pretrained import PretrainedLeaves
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


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # all versions read the older name
_EXPANDABLE = "expandable_segments:True"
_KERNEL_CACHE, _MOST_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"


def begin_peak(device: torch.device) -> None:
    """Let `peak_memory` begin anew, because a process may train several runs. Where Linux forbids it, the old peak stays."""
    if device.type == "cuda":
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes since `begin_peak`: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def expand_segments() -> None:
    """Let the CUDA allocator enlarge its segments instead of adding others. Batches of changing sizes would leave gaps.

    If the user has set the allocator, nothing changes. CUDA reads the setting at its first use. If CUDA is in use, the allocator
    gets it at once.
    """
    if any(name in os.environ for name in _ALLOCATOR):
        return
    os.environ[_ALLOCATOR[0]] = _EXPANDABLE  # for this process before it uses CUDA, and for those that it starts
    if torch.cuda.is_initialized() and (change := getattr(torch.cuda.memory, "_set_allocator_settings", None)):
        change(_EXPANDABLE)


def flight_recorder(folder: Path) -> dict[str, str]:
    """Return the environment with which NCCL writes its last collectives into `folder`, a file a rank, if one takes too long."""
    place = str(folder / "nccl-rank-")
    files = {"TORCH_FR_DUMP_TEMP_FILE": place, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": place}
    return {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **files}


def bound_kernel_cache() -> None:
    """Let oneDNN keep 64 kernels, unless the user has set a number. It reads it at its first product of the process.

    oneDNN makes a kernel for every shape of a product in bfloat16, and keeps 1,024 of them. Nearly every batch has other shapes,
    and on processors with matrix units (AMX) a kernel takes megabytes. One update has fewer than 64 shapes.
    """
    os.environ.setdefault(_KERNEL_CACHE, _MOST_KERNELS)


def recompute_layers(model: nn.Module, keys: DropoutKeys, draws_numbers: bool) -> None:
    """Make Transformer layers of `model` keep no activations for backward, with the same results, gradients and dropout.

    `draws_numbers`: our layers also draw from PyTorch's generator. Then its state is kept with their input, as it always is for
    those of a pretrained encoder. Raises UserError if these are trained, and transformers does not mark them.
    """

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _as_before(keys, (keys.keys, keys.calls))

    layers: dict[nn.Module, bool] = {}
    layers |= {module: draws_numbers for module in model.modules() if isinstance(module, EncoderLayer | DecoderLayer)}
    for module in model.modules():
        if isinstance(module, PretrainedLeaves) and module.is_trained:
            layers |= dict.fromkeys(module.layers(), True)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
    for layer, draws in layers.items():
        # Only the forward method is replaced: hooks and parameters stay as they are.
        layer.forward = partial(checkpoint, layer.forward, preserve_rng_state=draws, **options)


@contextmanager
def _as_before(keys: DropoutKeys, state: tuple) -> Iterator[None]:
    """Continue dropout from `state`, because other layers or another pass have used it since."""
    now = keys.keys, keys.calls
    keys.keys, keys.calls = state
    try:
        yield
    finally:
        keys.keys, keys.calls = now


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_mode(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels, if `wanted`. An operation without one raises an error.

    cuBLAS reads this setting at its first use. So call this before the first matrix product on the GPU.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing here reads memory that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
