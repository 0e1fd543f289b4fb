"""Measurements of a step on a GPU beside time: the kernels that it launches, and how often the host waits."""

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], object], device: torch.device, *, warm_up: int, rounds: int) -> float:
    """Return the median wall time of a step, with the device's work."""
    for _ in range(warm_up):
        step()
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class Kernels(NamedTuple):
    """The kernels and copies that a step puts on the GPU: their number, and their time in ms. None on a CPU.

    If the time is well below the time of the step, the host bounds it.
    """

    count: int | None
    ms: float | None

    def columns(self) -> dict[str, float | None]:
        return {"kernels": self.count, "ms of kernels": self.ms}


def count_kernels(step: Callable[[], object], device: torch.device) -> Kernels:
    """Count kernels and copies that a step puts on the GPU."""
    if device.type != "cuda":
        return Kernels(None, None)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Kernels(len(events), sum(event.time_range.elapsed_us() for event in events) / 1e3)


@contextlib.contextmanager
def noted_waits(device: torch.device) -> Iterator[list[str]]:
    """Record the places where the host waits for the GPU. The list is complete at the end of the block, and None on CPUs."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)]


def count_waits(step: Callable[[], object], device: torch.device) -> int | None:
    """Count how often the host waits within a step; None on a CPU."""
    with noted_waits(device) as waits:
        step()
    return len(waits) if device.type == "cuda" else None


def peak_gib(step: Callable[[], object], device: torch.device) -> float | None:
    """Return the highest memory of tensors while a step runs; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30
