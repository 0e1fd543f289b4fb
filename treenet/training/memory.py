"""Memory of a worker: what there is, what it has needed so far, and how it is kept."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from treeproc.common.settings import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts KiB


def machine_memory() -> int:
    """Bytes of memory that a process may have: of the machine, or of the container where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def check_fits(parameters: int, copies: int) -> None:
    """Raises UserError when so many copies of a model's float32 parameters are more than the memory of this machine."""
    needed, there = 4 * copies * parameters, machine_memory()
    if needed > there:
        what = "weights, gradients and Adam's two moments" if copies > 1 else "weights"
        raise UserError(
            f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB of memory ({what}), but there are "
            f"{there / 2**30:,.1f} GiB; choose smaller sizes, as of model.d_model, model.d_ff and the layers"
        )


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free for the next ones, on Linux with glibc.

    It would give what is free at the end of its memory back to the system, which clears it page by page when the next
    update asks for it again: about a twentieth of a small model's update on a CPU. Pieces above 32 MiB are still given back.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune:
        tune(_TRIM_THRESHOLD, 2**30)
        tune(_MMAP_THRESHOLD, 2**25)  # where it would end up by itself, which setting the other one prevents
