"""Timing and memory of alternatives that are compared in one process."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


def emit(benchmark: str, case: str, metric: str, value: float, **more: object) -> None:
    """Print one JSON line on standard output, which has no other output."""
    print(json.dumps({"benchmark": benchmark, "case": case, "metric": metric, "value": round(value, 4), **more}), flush=True)


@dataclass
class Step:
    """Forward and backward of `forward()`, with fresh gradients of `tensors`; `half` is bf16 autocast."""

    tensors: Sequence[Tensor]
    forward: Callable[[], Tensor]
    half: bool = False

    def __call__(self) -> None:
        self.clear()
        with torch.autocast(self.tensors[0].device.type, dtype=torch.bfloat16, enabled=self.half):
            out = self.forward()
        out.backward(torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape))

    def clear(self) -> None:
        """Free the gradients."""
        for tensor in self.tensors:
            tensor.grad = None


@dataclass
class Times:
    """Seconds of every round, by alternative.

    Rounds are interleaved, so all alternatives of a round saw the same machine load.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def ratio(self, name: str, base: str) -> tuple[float, dict[str, float]]:
        """Return the ratio of the minima, and minimum, median and maximum of the ratios of single rounds."""
        rounds = [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=False)]
        spread = {"min": min(rounds), "median": statistics.median(rounds), "max": max(rounds)}
        return self.best(name) / self.best(base), {k: round(v, 4) for k, v in spread.items()} | {"rounds": len(rounds)}


def time_once(step: Callable[[], None], device: torch.device) -> float:
    """Return seconds of one step: CPU time of this process, or time on the GPU."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3
    begin = time.process_time()
    step()
    return time.process_time() - begin


def time_interleaved(steps: Mapping[str, Callable[[], None]], device: torch.device, rounds: int, budget_s: float) -> Times:
    """Run all steps once per round, in an order that turns, for `rounds` rounds or until `budget_s` of wall time is spent.

    Every step warms up once, and then runs at least twice.
    """
    names = list(steps)
    for name in names:
        steps[name]()
    times = Times({name: [] for name in names})
    started = time.monotonic()
    for index in range(rounds):
        if index >= 2 and time.monotonic() - started > budget_s:
            break
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            times.seconds[name].append(time_once(steps[name], device))
    return times


def peak_bytes(step: Step, device: torch.device) -> int:
    """Return the highest memory of one step above that before it, with temporaries inside operators.

    On the CPU it comes from the allocator's events in PyTorch's profiler, on a GPU from its caching allocator. The step must have
    run before.
    """
    step.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
