"""Limits on the time that Ray Train's workers take to start and to make an update, and that a training takes to end.

Every rank writes every BEAT_S seconds into Ray's store of keys what it does. A thread of the driver reads this. Another one
counts, and never waits for Ray, which may hang. Only time in which it runs counts.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from treenet.config.training import WatchConfig
from treenet.jobs.ray_interrupt import InterruptibleTrainer
from treeproc.common.errors import first_line
from treeproc.common.files import atomic_write
from treeproc.common.messages import format_seconds, under_way, warn
from treeproc.common.ray_internals import processes_of, store_of_keys
from treeproc.common.ray_session import end_command
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

BEAT_S, TICK_S = 2.0, 1.0
# Longer pauses are of this process, too: it was stopped, or the machine slept.
LONGEST_TICK_S = 10.0
# A rank that has told nothing for so long does not run.
SILENT_S = 10.0
# Seconds that other nodes have for an answer, and for the stacks of a process.
CALL_S = 30.0
# Seconds in which the command must go on after its workers were ended.
GRACE_S = 60.0
# Share of the limit of a stop after which the workers get no more time.
STOP_SHARE = 0.75
UPDATE, ENDED, _STOP = "update", "ended", " of the stop"
# What a call raises while Ray is busy or ends.
FAILURES = (RayError, OSError, RuntimeError)


class Beat(NamedTuple):
    """The present work of a rank; `number` grows with every beat."""

    group: str
    number: int
    phase: str
    updates: int
    ranks: int
    process: int
    machine: str


class Heart:
    """Tells the driver what this process does, a rank, until it is closed."""

    def __init__(self, out: str, group: str, rank: int, ranks: int):
        self.updates, self.phase, self._stop = 0, "the start of the rank", threading.Event()
        self._thread = _start(self._beat, f"{out}/{rank}", group, ranks)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CALL_S)

    def update(self) -> None:
        """Note that an update begins."""
        self.updates, self.phase = self.updates + 1, UPDATE

    def _beat(self, key: str, group: str, ranks: int) -> None:
        store, machine = store_of_keys(), ray.util.get_node_ip_address()
        for number in count(1):
            phase = ENDED if self._stop.is_set() else under_way() or self.phase
            with suppress(*FAILURES):
                store and store[0](key, json.dumps(Beat(group, number, phase, self.updates, ranks, os.getpid(), machine)))
            if phase == ENDED:
                return
            self._stop.wait(BEAT_S)


class Watch:
    """Context manager that ends groups of workers that hang, and this command if that does not help.

    `is_stopping` says whether the training is to end.
    """

    def __init__(self, limits: WatchConfig, out: AnyPath, is_stopping: Callable[[], bool]):
        self._limits, self._out, self._is_stopping = limits, out, is_stopping
        self._trainer: InterruptibleTrainer | None = None
        self._group, self._beats, self._end = "", list[Beat](), threading.Event()
        self._lasting: dict[object, tuple[object, float]] = {}  # what is awaited, and for how long it has been the same
        self._stages: dict[str, int] = {}  # of a wait: 1 when stacks are noted, 2 when the group is ended

    def __enter__(self) -> "Watch":
        _start(self._read)
        _start(self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()

    @contextmanager
    def over(self, trainer: InterruptibleTrainer, group: str) -> Iterator[None]:
        """Watch a group of workers from its start to its end, also by Ctrl-C."""
        self._beats, self._lasting = [], {key: value for key, value in self._lasting.items() if key == _STOP}
        self._trainer, self._group = trainer, group
        try:
            yield
        except KeyboardInterrupt:
            self.end_group()
            raise
        finally:
            self._trainer = None

    def end_group(self) -> None:
        """Kill the controller. Ray then kills all that it started, on all nodes, also what does not answer."""
        if controller := self._trainer and self._trainer.controller:
            _start(ray.kill, controller)

    def _read(self) -> None:
        """Read the beats of the present group, in a thread that may hang in Ray."""
        store = store_of_keys()
        while store and not self._end.wait(BEAT_S):
            beats: list[Beat] = []
            with suppress(*FAILURES):
                while len(beats) < (beats[0].ranks if beats else 1) and (value := store[1](f"{self._out}/{len(beats)}")):
                    beats.append(Beat(*json.loads(value)))
            if beats and len(beats) == beats[0].ranks and {beat.group for beat in beats} == {self._group}:
                self._beats = beats

    def _look(self) -> None:
        last = time.monotonic()
        while not self._end.wait(TICK_S):
            before, last = last, time.monotonic()
            self.tick(min(last - before, LONGEST_TICK_S))

    def tick(self, seconds: float) -> None:
        """Count `seconds`, and do what is due."""
        if is_stopping := self._is_stopping():
            lasting = self._count(_STOP, 0, seconds)
            self._act(_STOP, "the training goes on after the request to stop", lasting, self._limits.stop_s)
        if self._trainer is None or not store_of_keys():
            return
        if is_stopping and not self._beats:
            self.end_group()  # no rank can save a checkpoint
        what, lasting, limit = self._slowest(seconds)
        if not is_stopping:
            self._act("", what, lasting, limit)

    def _count(self, key: object, token: object, seconds: float) -> float:
        """Return for how long `token` of `key` has been the same."""
        before, lasting = self._lasting.get(key, (None, 0.0))
        self._lasting[key] = token, lasting + seconds if token == before else 0.0
        return self._lasting[key][1]

    def _slowest(self, seconds: float) -> tuple[str, float, float | None]:
        """Return what is awaited for the longest time, its seconds, and its limit."""
        if not (beats := self._beats):
            return "the workers have not started", self._count("start", 0, seconds), self._limits.start_s
        waits = []
        for rank, beat in enumerate(beats):
            if beat.phase != ENDED:
                lasting = silent = self._count((rank, "beat"), beat.number, seconds)
                if beat.phase == UPDATE:
                    lasting = self._count((rank, UPDATE), beat.updates, seconds)
                waits.append((silent >= SILENT_S, lasting, rank))
        if not waits:
            return "the workers have ended, but Ray Train goes on", self._count(ENDED, 0, seconds), self._limits.update_s
        is_silent, lasting, rank = max(waits)  # those that are silent first: the others wait for them
        what = "has not answered" if is_silent else "has made no update"
        return f"rank {rank} (process {beats[rank].process} on {beats[rank].machine}) {what}", lasting, self._limits.update_s

    def _act(self, which: str, what: str, lasting: float, limit: float | None) -> None:
        """Note stacks at half the limit. At the limit, end the group; later, this command. It ends within the limit of a stop."""
        if limit is None:
            return
        end, last = (STOP_SHARE * limit, limit) if which == _STOP else (limit, limit + GRACE_S)
        what = f"{what} for {format_seconds(lasting)}"
        stage, before = (lasting >= limit / 2) + (lasting >= end), self._stages.get(which, 0)
        self._stages[which] = stage
        if before < 1 <= stage:
            _start(self._note_stacks, f"{what}; the command ends the workers after {format_seconds(end)}")
        if before < 2 <= stage:
            warn(f"warning: {what}; the command ends the workers")
            self.end_group()
        if lasting >= last:
            end_command(f"{what}, and Ray does not end it; the same command continues")

    def _note_stacks(self, what: str) -> None:
        """Write the stacks of controller, helpers and workers into the run folder, and tell it."""
        path, text, why = self._out / f"hung-{time.strftime('%Y%m%d-%H%M%S')}.txt", "", "Ray has not begun"
        try:
            if controller := self._trainer and self._trainer.controller:
                text, why = _stacks_of(controller)
            if text:
                atomic_write(path, text.encode()) if isinstance(path, Path) else path.write_bytes(text.encode())
        except (*FAILURES, UserError, subprocess.SubprocessError) as error:
            text, why = "", first_line(error)
        warn(f"warning: {what}; {f'stacks are in {path}' if text else f'no stacks, because {why}'}")


def _stacks_of(actor: ActorHandle) -> tuple[str, str]:
    """Return the stacks of an actor and of those that it started, on all nodes that answer in time, and why some are missing."""
    processes, task = processes_of(actor), ray.remote(num_cpus=0)(_stacks)
    answers = [_stacks(processes.pop(ray.get_runtime_context().get_node_id(), []))]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in processes]
    asked = [task.options(scheduling_strategy=place).remote(mine) for place, mine in zip(places, processes.values(), strict=True)]
    for answer in ray.wait(asked, num_returns=len(asked), timeout=CALL_S)[0] if asked else ():
        with suppress(RayError):  # its node has died
            answers.append(ray.get(answer, timeout=CALL_S))
    return "\n".join(text for text, _ in answers), next((why for _, why in answers if why), "Ray names no process")


def _stacks(pids: Sequence[int]) -> tuple[str, str]:
    """Return the stacks of processes of this machine by py-spy, which does not stop them, and why some are missing."""
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--pid"]
    done = [subprocess.run([*command, str(pid)], capture_output=True, text=True, timeout=CALL_S) for pid in pids]
    why = next((one.stderr.strip()[:200] for one in done if one.stderr), "")
    return "".join(one.stdout for one in done), why and f"py-spy failed: {why}"


def _start(call: Callable, *arguments: object) -> threading.Thread:
    """Call a function in a thread, because it may hang."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread
