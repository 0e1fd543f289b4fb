"""The memory of this machine, and whether a model fits into it."""

import os
from contextlib import suppress
from pathlib import Path

from treeproc.common.settings import UserError


def machine_memory() -> int:
    """Return the bytes of memory that a process may have: of the machine, or of the container if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def check_fits(parameters: int, copies: int) -> None:
    """Raise UserError if so many copies of a model's float32 parameters exceed the memory of this machine."""
    needed, there = 4 * copies * parameters, machine_memory()
    if needed > there:
        what = "weights, gradients and Adam's two moments" if copies > 1 else "weights"
        raise UserError(
            f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB of memory ({what}), but this machine has "
            f"{there / 2**30:,.1f} GiB; choose smaller sizes, for example model.d_model, model.d_ff or fewer layers"
        )
