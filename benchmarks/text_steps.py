"""Ways to run the jobs of the text stage, which keep account of every step: CPU time of tasks and of the driver, clock time."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treeproc.stages.ray_job import from_json, to_json


@dataclass
class Step:
    """One call of a runner. The driver's time includes what it does with results while other tasks run."""

    worker: str
    jobs: int
    tasks_s: list[float] = field(default_factory=list)  # CPU seconds of each task
    driver_s: float = 0.0  # CPU seconds
    seconds: float = 0.0  # by the clock


def two_to_one(steps: Sequence[Step], driver_s: float) -> float:
    """How many times as fast two processes are as one, on two cores that do nothing else: computed from CPU times.

    `driver_s` is the driver's CPU time of the whole run. What it does outside of steps is serial. Within a step, one process
    leaves the second core to the driver. Two processes share both cores with it. A step takes at least as long as its longest
    task.
    """
    serial = driver_s - sum(step.driver_s for step in steps)
    one = serial + sum(max(sum(step.tasks_s), step.driver_s) for step in steps)
    two = serial + sum(max((sum(step.tasks_s) + step.driver_s) / 2, *step.tasks_s, 0.0) for step in steps)
    return one / two


class Empty:
    """A worker without work."""

    def __call__(self, number: int) -> int:
        return number


class OnRay:
    """Runs jobs in tasks of an embedded Ray of `cpus` CPUs, as the text stage does."""

    def __init__(self, cpus: int, folder: Path):
        import ray

        os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
        for try_again in (True, True, False):  # Ray may not start in time on a busy machine
            try:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
                break
            except Exception:
                ray.shutdown()
                if not try_again:
                    raise
        self._folder = folder
        self.steps: list[Step] = []
        for _ in self(Empty, {}, [{"number": number} for number in range(2 * cpus)]):  # Ray starts its processes
            pass
        self.steps.clear()

    def __call__(self, worker: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, object]]:
        from treeproc.stages.ray_job import run_on_ray

        if not jobs:
            return
        step = Step(worker.__name__, len(jobs))
        self.steps.append(step)
        began, cpu = time.monotonic(), time.process_time()
        options = {"folder": self._folder, "in_tasks": True, "count_usage": lambda usage: step.tasks_s.append(usage["cpu_s"])}
        try:
            yield from run_on_ray(worker, arguments, jobs, **options)
        finally:  # the stage may not ask again after the last result
            step.seconds, step.driver_s = time.monotonic() - began, time.process_time() - cpu


class Here:
    """Runs jobs in this process, and keeps their CPU time apart from that of the driver."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, worker: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, object]]:
        if not jobs:
            return
        step = Step(worker.__name__, len(jobs))
        self.steps.append(step)
        start = began = time.process_time()
        built = worker(**arguments)
        try:
            for number, job in enumerate(jobs):
                result = to_json(built(**from_json(to_json(job))))
                step.tasks_s.append(time.process_time() - began)
                yield number, from_json(result)
                began = time.process_time()
        finally:
            step.driver_s = time.process_time() - start - sum(step.tasks_s)
