"""Modes of a worker: settings of its memory, activations that are computed again, and deterministic kernels."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.layers.dropout import DropoutKeys

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # all versions read the older name
_EXPANDABLE = "expandable_segments:True"
_KERNEL_CACHE, _MOST_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts KiB


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


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensors, on Linux with glibc.

    By default, it returns the free end of its memory to the system. The system then clears that memory page by page at the next
    update. This costs about a twentieth of a small model's update on a CPU. The library still returns pieces above 32 MiB.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune:
        tune(_TRIM_THRESHOLD, 2**30)
        tune(_MMAP_THRESHOLD, 2**25)  # glibc would reach this value by itself, but the other setting prevents that


def bound_kernel_cache() -> None:
    """Let oneDNN keep 64 kernels, unless the user has set a number. It reads it at its first product of the process.

    oneDNN makes a kernel for every shape of a product in bfloat16, and keeps 1,024 of them. Nearly every batch has other shapes,
    and on processors with matrix units (AMX) a kernel takes megabytes. One update has fewer than 64 shapes.
    """
    os.environ.setdefault(_KERNEL_CACHE, _MOST_KERNELS)


def recompute_layers(model: nn.Module, keys: DropoutKeys, draws_numbers: bool) -> None:
    """Make Transformer layers of `model` keep no activations for backward, with the same results, gradients and dropout.

    `draws_numbers`: layers also draw from PyTorch's generator. Then its state is kept with their input.
    """
    for module in model.modules():
        if isinstance(module, EncoderLayer | DecoderLayer):
            # Only the forward method is replaced: hooks and parameters stay as they are.
            module.forward = partial(_recomputed, module.forward, keys, draws_numbers)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], keys: DropoutKeys, draws_numbers: bool, *inputs: Any, **named_inputs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _as_before(keys, (keys.keys, keys.calls))

    options = {"use_reentrant": False, "preserve_rng_state": draws_numbers, "context_fn": contexts}
    return checkpoint(forward, *inputs, **options, **named_inputs)


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
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
