"""Commands in the process of the test: without the seconds that the start of a process takes."""

import atexit
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import pkgutil
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from unittest import mock

import pytest
import torch
from execnet.gateway_base import ExecModel, Popen2IO
from execnet.xspec import XSpec

from treenet.cli.main import COMMANDS, command_of, main
from treenet.data import loader_server
from treeproc.common.command_line import run_cli
from treeproc.common.storage import AnyPath
from treeproc.common.trial import run_child


def without_times(report: Path | AnyPath) -> object:
    """Return the content of a study's report without the seconds of training, in which equal runs differ."""

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {name: strip(one) for name, one in value.items() if name != "seconds"}
        return [strip(one) for one in value] if isinstance(value, list) else value

    return strip(json.loads(report.read_bytes()))


def main_of(script: str) -> Callable[[Sequence[str]], None]:
    """The function of the command of `workflows/SCRIPT`."""
    return pkgutil.resolve_name(COMMANDS[command_of(Path(script).stem)][0])


def run_here(script: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """`python workflows/SCRIPT ARGS...` with its output, for tests in which the process is not the claim."""
    return _run([f"tree-attention {command_of(Path(script).stem)}", *map(str, arguments)], lambda: run_cli(main_of(script)), cwd)


def run_installed_here(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """`tree-attention ARGS...`."""
    return _run(["tree-attention", *map(str, arguments)], main, cwd)


def run_jobs_here(worker, arguments, jobs):
    """Run jobs in this process, the last one first. What is sent goes through pickle and JSON as on Ray."""
    from treeproc.stages.ray_job import from_json, to_json  # loads Ray

    built = worker(**pickle.loads(pickle.dumps(arguments))) if jobs else None
    for number, job in reversed(list(enumerate(jobs))):
        yield number, from_json(to_json(built(**from_json(to_json(job)))))


def tasks_here(patch: pytest.MonkeyPatch) -> list[str]:
    """Run the jobs of Ray in this process. Returns the names of the workers, and adds to them whenever one runs."""
    from treeproc.stages import ray_job

    names = []

    def run_on_ray(worker, arguments, jobs, **options):
        names.append(worker.__name__)
        return run_jobs_here(worker, arguments, jobs)

    patch.setattr(ray_job, "run_on_ray", run_on_ray)
    patch.setattr(ray_job, "all_nodes_see", lambda inputs: True)
    return names


PROCESSES = multiprocessing.get_context("forkserver")


def start_forkserver(modules: list[str]) -> None:
    """Start the process that those of `PROCESSES` come from, with these modules. What they write is not for the terminal."""
    multiprocessing.set_forkserver_preload([*modules, "tests.frozen_modules"])
    kept = [os.dup(stream) for stream in (1, 2)]
    print_to(Path(os.devnull))
    # Ray's C++ side reads these once, when Ray is loaded: its forks may work for any job, of a node that lives.
    with mock.patch.dict(os.environ, RAY_JOB_ID="f" * 8, RAY_RAYLET_PID=str(os.getpid())):
        forkserver.ensure_running()
    for stream, file in zip((1, 2), kept, strict=True):
        os.dup2(file, stream)
        os.close(file)


def forkserver_of_parent() -> None:
    """Let processes of this one, which is of `PROCESSES`, come from where it came from itself.

    Each would load for five CPU seconds.
    """
    shared = forkserver._forkserver
    shared._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    shared.ensure_running = resource_tracker.ensure_running


class ForkedTester(Popen2IO):
    """A process of pytest-xdist, with what execnet asks of one. Its start takes milliseconds, not ten CPU seconds."""

    def __init__(self, spec: XSpec, execmodel: ExecModel):
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        files = [_OpenFile(number) for number in (theirs_in, theirs_out, 2)]
        self._process = PROCESSES.Process(target=_test, args=(files, dict(os.environ)))
        self._process.start()
        for number in (theirs_in, theirs_out):
            os.close(number)
        super().__init__(open(ours_out, "wb"), open(ours_in, "rb"), execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Started(PROCESSES.Process):
    """`python workflows/SCRIPT ARGS...` in a process, for tests that signal it; its output goes to `log`.

    It has loaded what `toyruns` names, and so starts in a tenth of a second instead of seconds.
    """

    def __init__(self, log: Path, script: str, *arguments: object):
        argv = [f"workflows/{script}", *map(str, arguments)]
        super().__init__(target=_start, args=(log, argv, dict(os.environ)))
        self.start()


class ForkedServer(PROCESSES.Process):
    """The server of loader processes, with what `LoaderProcesses` asks of a `subprocess.Popen`.

    It comes from a process that has loaded PyTorch: in a tenth of a second instead of two CPU seconds.
    """

    def __init__(self, argv: list[str], *, pass_fds: Sequence[int], env: dict[str, str], **options: object):
        super().__init__(target=_serve, args=([_OpenFile(number) for number in pass_fds], env))
        self.start()

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


def forked_trial(command: list[str], *, input: bytes, timeout: float, env: dict[str, str], **options: object):
    """`subprocess.run` for `treeproc.common.trial`: its process has loaded what takes it two CPU seconds."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answer:
        given.write(input)
        given.seek(0)
        files = [_OpenFile(file.fileno()) for file in (given, answer)]
        process = PROCESSES.Process(target=_try, args=(files, [command[2], *command[4:]], env))
        process.start()
        process.join(timeout)
        assert process.exitcode is not None, command
        answer.seek(0)
        return subprocess.CompletedProcess(command, process.exitcode, answer.read())


class _OpenFile:
    """The number of an open file, which a process of `PROCESSES` opens when it gets it."""

    def __init__(self, number: int):
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[object]]:
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(file: object) -> int:
    return file.detach()


def print_to(path: Path) -> None:
    """Append all that this process writes from now on to a file."""
    with open(path, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def printed_by(function: Callable[..., None], place: Path, *arguments: object) -> str:
    """Run a function in a new process, which gets `place` to print to; returns what it prints."""
    process = PROCESSES.Process(target=function, args=(place, *arguments))
    process.start()
    process.join()
    assert process.exitcode == 0, place.read_text()
    return place.read_text()


def returned_memory() -> int:
    """Make 100 MiB of tensors and free them; returns how many bytes of them the system gets back."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    tensors = [torch.full((2**18,), 1.0) for _ in range(100)]
    before = held()
    del tensors
    return before - held()


def _test(files: list[int], environment: dict[str, str]) -> None:
    _use(files, environment)
    forkserver_of_parent()
    try:
        exec(eval(open(0, closefd=False).readline()))  # the first line that execnet sends to `python -c`
    finally:
        atexit._run_exitfuncs()  # not run otherwise in a process of `multiprocessing`


def _try(files: list[int], argv: list[str], environment: dict[str, str]) -> None:
    _use(files, environment)
    sys.stdin = open(0, closefd=False)
    sys.path[:] = json.loads(argv[1])
    set_limit, loaded = resource.setrlimit, int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()

    def beside_what_is_loaded(kind: int, limits: tuple[int, int]) -> None:
        set_limit(kind, tuple(limit + loaded for limit in limits) if kind == resource.RLIMIT_DATA else limits)

    resource.setrlimit = beside_what_is_loaded
    sys.argv = argv
    run_child()


def _use(files: list[int], environment: dict[str, str]) -> None:
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)


def _serve(files: list[int], environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    loader_server.main(*map(str, files))


def _start(log: Path, argv: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    print_to(log)
    sys.argv = argv
    run_cli(main_of(argv[0]))


def _run(argv: list[str], run, cwd: Path | None) -> subprocess.CompletedProcess:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    status = 0
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or "."),
    ):
        try:
            run()
        except SystemExit as end:
            status = end.code or 0
    return subprocess.CompletedProcess(argv, status, *(stream.buffer.getvalue().decode() for stream in (out, err)))
