"""Memory of a worker: how much it has needed so far, and how it is kept."""

import ctypes
import os
import resource
import sys

import torch

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the older name is the one that all versions read
_EXPANDABLE = "expandable_segments:True"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts KiB


def expand_segments() -> None:
    """Have the CUDA allocator enlarge its pieces of memory in place of adding others: batches of ever new sizes leave gaps.

    Nothing changes where the user has set the allocator. The setting is read when CUDA is first used, or set then.
    """
    if any(name in os.environ for name in _ALLOCATOR):
        return
    os.environ[_ALLOCATOR[0]] = _EXPANDABLE  # for this process before it uses CUDA, and for those that it starts
    if torch.cuda.is_initialized() and (change := getattr(torch.cuda.memory, "_set_allocator_settings", None)):
        change(_EXPANDABLE)


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free for the next ones, on Linux with glibc.

    It would give what is free at the end of its memory back to the system, which clears it page by page when the next
    update asks for it again: about a twentieth of a small model's update on a CPU. Pieces above 32 MiB are still given back.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune:
        tune(_TRIM_THRESHOLD, 2**30)
        tune(_MMAP_THRESHOLD, 2**25)  # where it would end up by itself, which setting the other one prevents
