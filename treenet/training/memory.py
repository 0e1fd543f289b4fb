"""Memory of a worker: what it has needed so far, and how it is kept."""

import ctypes
import resource
import sys

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts KiB


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free for the next ones, on Linux with glibc.

    It would give large pieces back to the system at once, which clears them page by page when the next update asks for
    them again: up to a tenth of a small model's update on a CPU.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune:
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            tune(option, 2**30)
