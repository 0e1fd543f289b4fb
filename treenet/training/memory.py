"""Memory that a worker has needed so far."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts KiB
