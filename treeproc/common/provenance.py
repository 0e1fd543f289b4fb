"""Provenance of data sets and runs: software, machine and time, in FOLDER/provenance.json.

A note for people. No fingerprint covers it, no command reads it to decide anything, and comparisons byte for byte leave it
out. It holds no names of users or hosts, no paths and no command lines, which may hold any of them.
"""

import functools
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

import treeproc
from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.messages import format_seconds, warn
from treeproc.common.storage import AnyPath

DISTRIBUTION = "tree-attention"
PROVENANCE = "provenance.json"
PACKAGES = ("torch", "ray", "stanza", "sentencepiece", "sacrebleu")
FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "unfinished"
NOTE_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]
_CPU_OF_PROCESS = "the command's process and its children that ended"
_CPU_OF_WORKERS = f"{_CPU_OF_PROCESS}, and Ray's workers except those that were lost"

# The file may come from anywhere, and what it says is printed: nothing long, and nothing that moves a terminal's cursor.
_Text = Annotated[str, StringConstraints(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Facts = dict[_Text, _Text | bool | int | None]
_Seconds = Annotated[float, Field(ge=0, le=1e10)]


class Session(BaseModel):
    """One command's work on a folder. Fields that a later version adds are kept."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    command: _Text
    software: _Facts
    packages: _Facts
    machine: _Facts
    workers: list[_Facts] = []  # the kinds of machines of Ray's workers, and their packages that the command has not
    started: _Text
    wall_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    cpu_covers: _Text = _CPU_OF_PROCESS
    did: dict[_Text, int] = {}
    started_from: _Text | None = None  # the sha256 of the weights of another run, with which a training began
    outcome: _Text = UNFINISHED

    def add_worker(self, usage: dict) -> None:
        """Count what a `Meter` of another process has seen."""
        self.cpu_s = (self.cpu_s or 0.0) + usage["cpu_s"]
        self.cpu_covers = _CPU_OF_WORKERS
        other = {name: version for name, version in usage["packages"].items() if version != self.packages.get(name)}
        if (worker := usage["machine"] | other) not in self.workers:
            self.workers.append(worker)

    def machines(self) -> list[_Facts]:
        """Return the machines of Ray's workers; that of the command if it has none."""
        return [{name: worker.get(name) for name in self.machine} for worker in self.workers] or [self.machine]

    def packages_at_work(self) -> list[_Facts]:
        """Return the packages of Ray's workers; those of the command if it has none."""
        found = [{name: worker.get(name, here) for name, here in self.packages.items()} for worker in self.workers]
        return found or [self.packages]


class _File(BaseModel):
    model_config = ConfigDict(extra="allow")

    sessions: list[Session]


class Recorder:
    """The session of a running command. It is in the file from the first `note` on, so a session without work is left out."""

    def __init__(self, folder: AnyPath, command: str):
        self._path = folder / PROVENANCE
        self._started = self._noted = time.monotonic()
        self._meter = Meter()
        self._earlier: list[Session] | None = None
        self.session = Session(
            command=command, software=software(), packages=packages(), machine=self._meter.machine(), started=now()
        )

    def keep_up(self, **did: int) -> None:
        """Call `note` only if the last one is some seconds old: a store takes a while, and there may be many shards."""
        self.session.did |= did
        if time.monotonic() - self._noted >= NOTE_S:
            self.note()

    def note(self, **did: int) -> None:
        """Write what the session did up to now. Raises UserError when the disk or the store refuses."""
        if self._earlier is None:
            self._earlier = _read_or_set_aside(self._path)
        session = self.session
        session.did |= did
        session.machine = self._meter.machine()
        session.wall_s = round(time.monotonic() - self._started, 1)
        session.cpu_s = round((session.cpu_s or 0.0) + self._meter.cpu_s(), 1)
        self._write([*self._earlier, session])
        self._noted = time.monotonic()

    def withdraw(self) -> None:
        """Take the session back, of a command that leaves nothing. The file goes if it holds no earlier session."""
        earlier, self._earlier = self._earlier, None
        if earlier:
            self._write(earlier)
        elif earlier is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, sessions: list[Session]) -> None:
        atomic_write(self._path, json_bytes({"sessions": [session.model_dump(mode="json") for session in sessions]}))

    def end(self, outcome: str) -> None:
        """Write how it ended, if it did anything."""
        if self._earlier is not None:
            self.session.outcome = outcome
            self.note()


@contextmanager
def recorded(folder: AnyPath, command: str) -> Iterator[Recorder]:
    """Keep a session of `command` in FOLDER/provenance.json. The caller must hold the folder's lock.

    If the process is killed, the file keeps the last note, with the outcome `unfinished`.
    """
    recorder = Recorder(folder, command)
    try:
        yield recorder
    except BaseException as error:
        with suppress(UserError):  # the error that is under way says more
            recorder.end(STOPPED if isinstance(error, KeyboardInterrupt) else FAILED)
        raise
    recorder.end(FINISHED if recorder.session.outcome == UNFINISHED else recorder.session.outcome)


class Meter:
    """CPU time of this process, of all its threads, and of its children that ended."""

    def __init__(self) -> None:
        self._last = _cpu_seconds()

    def cpu_s(self) -> float:
        """Return the CPU seconds since the last call."""
        last, self._last = self._last, _cpu_seconds()
        return self._last - last

    @staticmethod
    def machine() -> dict[str, str | int | None]:
        """Return the kind of processor, its cores, and the GPU that this process uses, if it uses one."""
        torch = sys.modules.get("torch")  # a process without it uses no GPU
        cuda = getattr(torch, "cuda", None)
        return {**_processor(), "gpu": cuda.get_device_name() if cuda is not None and cuda.is_initialized() else None}

    def usage(self) -> dict:
        """Return the usage of this process, as `Session.add_worker` takes it."""
        return {"cpu_s": self.cpu_s(), "machine": self.machine(), "packages": packages()}


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


@functools.cache
def _processor() -> dict[str, str | int | None]:
    name = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = facts.get("model name", name)
        if {"cpu family", "model"} <= facts.keys():  # machines of a cloud may hide the name: "AMD EPYC" is four generations
            name += f" (family {facts['cpu family']}, model {facts['model']})"
    return {"processor": "".join(filter(str.isprintable, name))[:300], "cores": os.cpu_count()}


def packages() -> dict[str, str | None]:
    """Return versions of Python and of the libraries that results depend on, without loading them; None for a missing one."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def read_sessions(folder: AnyPath) -> list[Session]:
    """Read the sessions of a data set or run, oldest first; none if it was made without provenance or the file is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return _read(folder / PROVENANCE)
    return []


def _read(path: AnyPath) -> list[Session]:
    """Read the sessions. Raises OSError, ValueError or RecursionError when the file is missing or damaged."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    return _File.model_validate(json.loads(path.read_bytes())).sessions


def _read_or_set_aside(path: AnyPath) -> list[Session]:
    """Read the sessions so far. A damaged file goes to another name: the work does not depend on it."""
    try:
        return _read(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        names = (path.parent / f"provenance.damaged-{number}.json" for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        reason = "not in the form that this program writes" if isinstance(error, ValidationError) else str(error)[:200]
        warn(f"warning: {path} is damaged ({reason}); the command renames it to {kept.name} and begins a new file")
        if isinstance(path, Path):
            os.replace(path, str(kept))
        else:
            atomic_write(kept, path.read_bytes())
        return []


def describe_sessions(sessions: list[Session]) -> list[str]:
    """Return two or three lines a session for a person, or one that says there is none."""
    if not sessions:
        return ["without provenance"]
    lines, before = [], None
    for session in sessions:
        times = [] if session.wall_s is None else [format_seconds(session.wall_s)]
        times += [] if session.cpu_s is None else [f"{format_seconds(session.cpu_s)} of CPU"]
        did = ", ".join(f"{name} {count:,}" for name, count in session.did.items())
        began = session.started.replace("T", " ").replace("Z", " UTC")
        lines.append(f"{began}, {session.command} ({did}): {session.outcome} after {', '.join(times) or 'an unknown time'}")
        made_by = [
            f"  {describe_software(session.software)}; {describe_packages(session.packages)}",
            f"  {describe_machines(session)}",
        ]
        lines += ["  with the same software and machine"] if made_by == before else made_by
        lines += [f"  started from weights {session.started_from}"] if session.started_from else []
        before = made_by
    return lines


def describe_software(own: Mapping[str, object]) -> str:
    """Describe the result of `software` in words."""
    changed = " with changes" if own.get("clean") is False else ""
    commit = f"commit {str(own['commit'])[:12]}{changed}" if own.get("commit") else "no commit known"
    return f"{DISTRIBUTION} {own.get('version') or 'of unknown version'} ({commit})"


def describe_packages(found: Mapping[str, object]) -> str:
    """Describe the result of `packages` in words."""
    return ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())


def describe_machines(session: Session) -> str:
    """Return the kind of machine of the command, and those of Ray's workers where they are others."""
    workers = [machine for machine in session.workers if machine != session.machine]
    return _describe_machine(session.machine) + "".join(f"; workers on {_describe_machine(machine)}" for machine in workers)


def _describe_machine(machine: _Facts) -> str:
    other = {name: machine[name] for name in ("python", *PACKAGES) if name in machine}  # than those of the command
    found = f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('gpu') or 'no GPU'}"
    return f"{found}, {describe_packages(other)}" if other else found


@functools.cache
def software() -> dict[str, str | bool | None]:
    """Return the version of this software, its git commit, and whether the checkout is unchanged; None without a checkout."""
    number = treeproc.__version__
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _ROOT:  # installed, or inside another project's checkout
        return {"version": number, "commit": None, "clean": None}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"version": number, "commit": _git("rev-parse", "HEAD"), "clean": None if changes is None else not changes}


def commit_of(path: Path) -> dict[str, str]:
    """Return the name of a file in its git repository, and the commit that changed it last.

    Raises UserError unless the present commit has the file as it is.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; give another file, or write it and commit it with git")
    git, name = partial(_git, folder=path.resolve().parent), path.resolve().name
    committed = git("rev-parse", f"HEAD:./{name}")
    if committed is None or git("hash-object", "--", name) != committed:
        state = "in no commit of git" if committed is None else "not as in the last commit of git"
        raise UserError(f"{path} is {state}; commit it, then run the same command again")
    return {"file": f"{git('rev-parse', '--show-prefix')}{name}", "commit": str(git("log", "-1", "--format=%H", "--", name))}


def now() -> str:
    """Return the time, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _git(*arguments: str, folder: Path = _ROOT) -> str | None:
    """Return the output of git without the last newline; None if git is missing or fails."""
    try:
        found = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.rstrip("\n") if found.returncode == 0 else None
