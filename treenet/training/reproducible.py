"""The deterministic mode: the same command gives the same bits on a GPU too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
