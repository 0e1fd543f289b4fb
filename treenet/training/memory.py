"""Memory of a worker: the peak so far, and settings of the allocators and of a cache."""

import ctypes
import os
import resource
import sys

import torch

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
