"""Limits on the time that Ray Train's workers take to start and to make an update, and that a training takes to end.

Every rank tells Ray every BEAT_S seconds what it does. Threads of the driver read this and count. None of them waits for Ray
without a limit, because Ray, its controller or a worker may hang. Only time in which they run counts.
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
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from treenet.config.training import WatchConfig
from treenet.jobs.ray_interrupt import InterruptibleTrainer
from treeproc.common.errors import first_line
from treeproc.common.files import atomic_write
from treeproc.common.messages import format_seconds, under_way, warn
from treeproc.common.ray_internals import forget_values, processes_of, read_value, tell_value
from treeproc.common.ray_session import end_command
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

BEAT_S, TICK_S = 2.0, 1.0
# Longer pauses are of this process, too: it was stopped, or the machine slept.
LONGEST_TICK_S = 10.0
# Seconds that other nodes have for an answer, and for the stacks of a process.
CALL_S = 30.0
# Seconds in which the command must go on after its workers were ended.
GRACE_S = 60.0
# Share of the limit of a stop after which the workers get no more time.
STOP_SHARE = 0.75
# A rank that has told nothing for so long does not run.
SILENT_S = 5 * BEAT_S
UPDATE, ENDED = "update", "ended"
_STOP = " of the stop"
# What a call raises while Ray is busy or ends.
FAILURES = (RayError, OSError, RuntimeError)


@dataclass(frozen=True)
class Beat:
    """What a rank does: `number` grows with every beat."""

    number: int
    phase: str
    updates: int
    ranks: int
    process: int
    machine: str


class Heart:
    """Context manager of a rank that tells the driver what this process does, under the name of its group of workers."""

    def __init__(self, group: str, rank: int, ranks: int):
        self._key, self._ranks, self._stop = f"{group}/{rank}", ranks, threading.Event()
        self.updates, self.phase = 0, "the start of the rank"
        self._thread = _start(self._beat)

    def __enter__(self) -> "Heart":
        return self

    def __exit__(self, *exception: object) -> None:
        self.phase = ENDED
        self._stop.set()
        self._thread.join(CALL_S)

    def update(self) -> None:
        """Note that an update begins."""
        self.updates += 1
        self.phase = UPDATE

    def _beat(self) -> None:
        number, machine, is_last = 0, ray.util.get_node_ip_address(), False
        while not is_last:
            number, is_last = number + 1, self._stop.is_set()
            phase = self.phase if is_last else under_way() or self.phase
            with suppress(*FAILURES):
                tell_value(self._key, json.dumps([number, phase, self.updates, self._ranks, os.getpid(), machine]))
            self._stop.wait(BEAT_S)


def flight_recorder(folder: Path) -> dict[str, str]:
    """Return the environment with which NCCL writes its last collectives into `folder`, a file a rank, if one takes too long."""
    place = str(folder / "nccl-rank-")
    files = {"TORCH_FR_DUMP_TEMP_FILE": place, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": place}
    return {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **files}


class Watch:
    """Context manager that ends groups of workers that hang, and this command if that does not help.

    `is_stopping` says whether the training is to end.
    """

    def __init__(self, limits: WatchConfig, out: AnyPath, is_stopping: Callable[[], bool]):
        self._limits, self._out, self._is_stopping = limits, out, is_stopping
        self._trainer: InterruptibleTrainer | None = None
        self._group = ""
        self._beats: dict[int, Beat] = {}
        self._lasting: dict[object, tuple[object, float]] = {}  # what is awaited, and for how long it has been the same
        self._done: set[str] = set()
        self._end, self._is_blind = threading.Event(), False

    def __enter__(self) -> "Watch":
        _start(self._read)
        _start(self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()

    @contextmanager
    def over(self, trainer: InterruptibleTrainer, group: str) -> Iterator[None]:
        """Watch a group of workers from its start to its end."""
        self._beats, self._lasting = {}, {key: value for key, value in self._lasting.items() if key == _STOP}
        self._trainer, self._group = trainer, group
        try:
            yield
        finally:
            self._trainer = None
            _start(forget_values, f"{group}/")

    def end_group(self) -> None:
        """Kill the controller. Ray then kills all that it started, on all nodes, also what does not answer."""
        if self._trainer is not None and (controller := self._trainer.controller) is not None:
            _start(ray.kill, controller)

    def _read(self) -> None:
        """Read the beats of the present group, in a thread that may hang in Ray."""
        while not self._end.wait(BEAT_S):
            if self._trainer is None:
                continue
            group, beats = self._group, {}
            try:
                while len(beats) < (beats[0].ranks if beats else 1) and (value := read_value(f"{group}/{len(beats)}")):
                    beats[len(beats)] = Beat(*json.loads(value))
            except ImportError:  # Ray has no such store any more
                self._is_blind = True
                return
            except FAILURES:
                continue
            if group == self._group and beats and len(beats) == beats[0].ranks:
                self._beats = beats

    def _look(self) -> None:
        last = time.monotonic()
        while not self._end.wait(TICK_S):
            now = time.monotonic()
            self.tick(min(now - last, LONGEST_TICK_S))
            last = now

    def tick(self, seconds: float) -> None:
        """Count `seconds`, and do what is due."""
        if is_stopping := self._is_stopping():
            lasting = self._count(_STOP, 0, seconds)
            self._act(_STOP, "the training goes on after the request to stop", lasting, self._limits.stop_s)
        if self._trainer is None or self._is_blind:
            return
        if is_stopping and not self._beats and self._once("early stop"):
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
        for rank, beat in beats.items():
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
        if lasting < limit / 2:
            self._done -= {f"note{which}", f"end{which}"}
        elif self._once(f"note{which}"):
            _start(self._note_stacks, f"{what}; the command ends the workers after {format_seconds(end)}")
        if lasting >= end and self._once(f"end{which}"):
            warn(f"warning: {what}; the command ends the workers")
            self.end_group()
        if lasting >= last:
            end_command(f"{what}, and Ray does not end it; the same command continues")

    def _once(self, name: str) -> bool:
        is_first = name not in self._done
        self._done.add(name)
        return is_first

    def _note_stacks(self, what: str) -> None:
        """Write the stacks of controller, helpers and workers into the run folder, and tell it."""
        path, text, why = self._out / f"hung-{time.strftime('%Y%m%d-%H%M%S')}.txt", "", "Ray has not begun"
        try:
            if self._trainer is not None and (controller := self._trainer.controller) is not None:
                text, why = _stacks_of(controller)
            if text:
                atomic_write(path, text.encode()) if isinstance(path, Path) else path.write_bytes(text.encode())
        except (*FAILURES, UserError) as error:
            text, why = "", first_line(error)
        warn(f"warning: {what}; {f'stacks are in {path}' if text else f'no stacks, because {why}'}")


def _stacks_of(actor: ActorHandle) -> tuple[str, str]:
    """Return the stacks of an actor and of those that it started, on all nodes that answer in time, and why some are missing."""
    processes = processes_of(actor)
    answers = [_stacks(mine)] if (mine := processes.pop(ray.get_runtime_context().get_node_id(), [])) else []
    places, task = [NodeAffinitySchedulingStrategy(node, soft=False) for node in processes], ray.remote(num_cpus=0)(_stacks)
    asked = [task.options(scheduling_strategy=place).remote(mine) for place, mine in zip(places, processes.values(), strict=True)]
    for answer in ray.wait(asked, num_returns=len(asked), timeout=CALL_S)[0] if asked else ():
        with suppress(RayError):  # its node has died
            answers.append(ray.get(answer, timeout=CALL_S))
    text = "\n".join(stacks for stacks, _ in answers if stacks)
    return text, next((why for _, why in answers if why), "Ray names no process")


def _start(call: Callable, *arguments: object) -> threading.Thread:
    """Call a function in a thread, because it may hang."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def _stacks(pids: Sequence[int]) -> tuple[str, str]:
    """Return the stacks of processes of this machine by py-spy, which does not stop them, and why some are missing."""
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        return "", "py-spy is not installed"
    texts, why = [], ""
    for pid in pids:
        try:
            done = subprocess.run([program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=CALL_S / 3)
            texts.append(done.stdout.decode(errors="replace"))
            why = why or done.stderr.decode(errors="replace").partition("\n")[0]
        except (OSError, subprocess.SubprocessError) as error:
            why = why or first_line(error)
    return "\n".join(filter(None, texts)), why and f"py-spy failed: {why}"
