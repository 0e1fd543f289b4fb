"""Whole commands on damaged settings, files, models, data sets and run folders, each in a separate process.

A server imports PyTorch and the workflows, and forks a child for every command. So one command costs tenths of a second. The
child has a folder with copies of the inputs that it damages, a limit of time and of memory, and no terminal.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fuzz_cases import FuzzCase
from fuzz_kinds import make_case
from fuzz_oracles import silent_loss
from fuzz_world import ALL_COMMANDS, REPOSITORY, build_world, main_of

from treeproc.common.command_line import run_cli

LIMIT_S = 60
MEMORY = 12 << 30
MOST_CHARACTERS = 500
FAULTS = ("traceback", "late", "not one line", "long line", "written elsewhere", "other status", "silent")
# The allowed exit statuses: done; some cells of a study failed (1); refused.
STATUSES = {"scaling": (0, 1, 2), "compare_seeds": (0, 1, 2)}
# Allowed lines on standard error beside the refusal: progress, warnings, and the next step.
_NOTE = re.compile(
    r"warning: |note: |[\w ]+: [\d,]+(/[\d,]+)? |parser: |\w+: \d+ of \d+ shards|\S+ averaged: |drawing figures|attention of |"
    r"chrF of |counting the words |"
    r"tests? of |[\w.-]+: (running|done|failed|waiting|interrupted|new|left out|finished already|start)|[\d,]+ of [\d,]+ |"
    r"(tokenizer|pos|text|trees): |\d+ cells|stopped |.* failed: |.* is damaged; the job makes it again|"
    r"\S+ (on|of) |[\w ]+, \d+ s$|"
    r"[\w ,]+ \.\.\.$"  # a running child
)


@dataclass
class Outcome:
    case: FuzzCase
    status: int  # -1 if it exceeded its time
    seconds: float
    errors: str
    faults: list[str]
    lost: list[str]  # what an accepted command lost or changed in silence


def everything(folder: Path, but: Sequence[Path]) -> dict[str, tuple]:
    """Return the files below a folder, without those that may be written."""
    found = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(root) / name not in but]
        for name in [*folders, *files]:
            path = Path(root) / name
            if path not in but:
                state = path.lstat()
                is_folder = path.is_dir() and not path.is_symlink()
                found[str(path)] = (state.st_mode, 0 if is_folder else state.st_size, 0 if is_folder else state.st_mtime_ns)
    return found


def _child(case: FuzzCase, outputs: tuple[Path, Path]) -> None:
    """Run the command in this process, which ends with its status."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, path in ((1, outputs[0]), (2, outputs[1])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(_environment(case))
    os.chdir(case.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 0
    sys.argv = [case.workflow, *case.argv]
    try:
        run_cli(main_of(case.workflow))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _environment(case: FuzzCase) -> dict[str, str]:
    places = {"TMPDIR": "tmp", "HOME": "home", "TREE_ATTENTION_CACHE": "cache", "MPLCONFIGDIR": "home"}
    places |= {"TORCHINDUCTOR_CACHE_DIR": "cache"}
    return {name: str(case.folder / place) for name, place in places.items()} | {"RAY_ADDRESS": "local"}


def judge(case: FuzzCase, status: int, seconds: float, errors: str, output: str, before: dict) -> list[str]:
    """Return the rules that a command broke."""
    faults = []
    if "Traceback (most recent call last)" in errors + output:
        faults.append("traceback")
    if status == -1 or seconds > LIMIT_S:
        faults.append("late")
    elif status not in STATUSES.get(case.workflow, (0, 2)):
        faults.append("other status")
    lines = [line for line in re.split(r"[\n\r]", errors) if line.strip()]
    if any(len(line) > MOST_CHARACTERS for line in [*lines, *(output.split("\n") if status == 2 else [])]):
        faults.append("long line")
    if status == 2 and "traceback" not in faults:
        error_lines = [line for line in lines if line.startswith("error: ")]
        others = [line for line in lines if not line.startswith("error: ") and not _NOTE.match(line)]
        if others or (len(error_lines) != 1 and case.workflow != "verify") or (error_lines and lines[-1] != error_lines[-1]):
            faults.append("not one line")
    if everything(case.folder, case.may_change()) != before:
        faults.append("written elsewhere")
    return faults


class Pool:
    """Children that run at the same time, and their results."""

    def __init__(self, width: int, *, keep: bool, as_process: bool):
        """`keep` keeps the folders of faults. `as_process` starts commands as users do, and not as forks of this process."""
        self._width, self._keep, self._as_process = width, keep, as_process
        self._running: dict[int, tuple[FuzzCase, float, dict]] = {}

    def run(self, cases: Iterator[FuzzCase]) -> Iterator[Outcome]:
        for case in cases:
            while len(self._running) >= self._width:
                yield from self._wait()
            self._start(case)
        while self._running:
            yield from self._wait()

    def _start(self, case: FuzzCase) -> None:
        before = everything(case.folder, case.may_change())
        outputs = case.folder / "stdout", case.folder / "stderr"
        if self._as_process:
            script = REPOSITORY / "workflows" / f"{case.workflow}.py"
            start = [str(script)] if script.exists() else ["-m", f"treeproc.{case.workflow}"]
            argv = [arg.encode("utf-8", "surrogateescape").replace(b"\0", b"?") for arg in case.argv]
            environment = {**os.environ, **_environment(case)}
            with open(outputs[0], "wb") as out, open(outputs[1], "wb") as errors:
                pid = subprocess.Popen(
                    [sys.executable, *start, *argv], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=case.folder,
                    env=environment, start_new_session=True,
                ).pid  # fmt: skip
        else:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(case, outputs)
        self._running[pid] = case, time.monotonic(), before

    def _wait(self) -> Iterator[Outcome]:
        time.sleep(0.01)
        for pid, (case, started, before) in list(self._running.items()):
            seconds = time.monotonic() - started
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and seconds <= LIMIT_S:
                continue
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # also the processes that it started and left
            if not done:
                os.waitpid(pid, 0)
                status = None
            del self._running[pid]
            code = -1 if status is None else os.waitstatus_to_exitcode(status)
            errors, output = ((case.folder / name).read_bytes().decode(errors="replace") for name in ("stderr", "stdout"))
            faults = judge(case, code, seconds, errors, output, before)
            lost = silent_loss(case, output, errors) if code == 0 else []
            faults += ["silent"] if lost else []
            if not faults or not self._keep:
                shutil.rmtree(case.folder, ignore_errors=True)
            yield Outcome(case, code, seconds, errors, faults, lost)


def in_child(function, *arguments) -> None:
    """Call a function in a fork, so that this process stays clean. Raises RuntimeError if it fails."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{function.__name__} failed")


def load_everything() -> None:
    """Import the modules of all commands once."""
    import safetensors.torch  # noqa: F401
    import sentencepiece  # noqa: F401
    import stanza.pipeline.core  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for name in ALL_COMMANDS:
        main_of(name)


def fuzz_commands(counts: dict[str, int], world: Path, scratch: Path, pool: Pool, first: int) -> Iterator[Outcome]:
    """Run so many cases of every kind, numbered from `first`. `world` is made if it does not exist yet."""
    load_everything()
    if not (world / "done.json").exists():
        world.mkdir(parents=True, exist_ok=True)
        in_child(build_world, world)
    numbers = ((kind, first + number) for kind, count in counts.items() for number in range(count))
    yield from pool.run(make_case(number, kind, world, scratch) for kind, number in numbers)


def summarize(outcomes: Sequence[Outcome]) -> Iterator[dict]:
    """Return the figures of every kind for JSON lines."""
    for kind in dict.fromkeys(outcome.case.kind for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.case.kind == kind]
        figures = {
            "inputs": len(own),
            "refused": sum(outcome.status == 2 for outcome in own),
            "done": sum(outcome.status == 0 for outcome in own),
            **{name: sum(name in outcome.faults for outcome in own) for name in FAULTS},
            "slowest_s": round(max(outcome.seconds for outcome in own), 1),
        }
        for metric, value in figures.items():
            yield {"benchmark": "fuzz", "case": kind, "metric": metric, "value": value}


def describe_fault(outcome: Outcome) -> str:
    """Describe one fault for a person."""
    case = outcome.case
    return json.dumps(
        {"faults": outcome.faults, "case": case.folder.name, "workflow": case.workflow, "damage": case.damage[:200],
         "status": outcome.status, "seconds": round(outcome.seconds, 1), "lost": outcome.lost[:3],
         "stderr": outcome.errors[-700:]}
    )  # fmt: skip
