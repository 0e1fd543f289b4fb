"""Threads that send a run to its loggers while it trains. A logger that fails or hangs never stops the training."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

from treenet.config import TrainConfig
from treenet.loggers.content import LOGGERS, RunContent, RunIdentity, RunReader, identify, read_identity
from treeproc.common.errors import UserError, describe_missing, first_line, one_line, require
from treeproc.common.files import file_lock
from treeproc.common.messages import warn
from treeproc.common.settings import load_settings
from treeproc.common.storage import AnyPath, RemotePath

# Seconds between two looks at metrics.jsonl, and until a logger that failed is tried again.
POLL_S, RETRY_S = 5.0, 60.0
# Seconds that the end of a training waits for a logger, and after an error.
END_S, ERROR_END_S = 60.0, 5.0
_LOCK = ".loggers-lock"


class Logger(Protocol):
    """A place that gets a copy of a run: the class `Logger` of a file of `treenet/extras/loggers`.

    Every method may raise any exception.
    `place` says where the run is, `package` is what must be installed, and `remote_place` the environment variable that a run in
    an object store needs. `trains`: whether the run trains now.
    """

    package: ClassVar[str]
    remote_place: ClassVar[str]
    place: str

    def __init__(self, identity: RunIdentity, trains: bool): ...

    @staticmethod
    def has_place(local: bool) -> bool: ...

    def open(self) -> None: ...

    def send(self, content: RunContent) -> None: ...

    def close(self, state: str | None) -> None: ...


def find_logger(name: str) -> type[Logger]:
    """Return the class of a logger. Its package is not imported."""
    return import_module(f"treenet.extras.loggers.{name}").Logger


@dataclass
class Logged:
    """The state of a run: finished, stopped or failed, None for a command that does not train. `said` has a line a logger."""

    state: str | None = None
    said: list[str] = field(default_factory=list)


def check_loggers(config: TrainConfig, out: AnyPath) -> None:
    """Raise UserError for a logger whose package is missing, or that has no place for the run."""
    for name in outside(config):
        logger = find_logger(name)
        require(logger.package, f"loggers: {name}", f"leave {name} out of loggers")
        if not logger.has_place(not isinstance(out, RemotePath)):
            raise UserError(f"loggers: {name} with --out in an object store needs the environment variable {logger.remote_place}")


def outside(config: TrainConfig) -> list[str]:
    """Return the loggers that are not files of the run, which a thread feeds."""
    return [name for name in config.loggers if name != "tensorboard"]


@contextmanager
def logged_training(
    config: TrainConfig, run_dir: Path, out: AnyPath, metrics: AnyPath, data_fingerprint: str
) -> Iterator[Logged]:
    """Send a run to its loggers while the body trains it. The body sets `Logged.state`.

    `metrics` is where metrics.jsonl grows: the run folder, or its store. At the end, `Logged.said` has a line for each logger.
    """
    logged = Logged("failed")
    if not outside(config):
        yield logged
        return
    with file_lock(run_dir / _LOCK):
        identify(run_dir, out, config, data_fingerprint)
        with _fed(outside(config), run_dir, metrics, logged):
            yield logged


def log_scores(run_dir: Path) -> None:
    """Send the scores of a run to its loggers, and all else that they lack. A failure is a warning.

    While the run trains, the training sends them.
    """
    if not (run_dir / LOGGERS).exists():
        return
    try:
        names = outside(load_settings(TrainConfig, run_dir / "config.yaml"))
        with file_lock(run_dir / _LOCK, wait=False), _fed(names, run_dir, run_dir, Logged()):
            pass
    except BlockingIOError:
        return
    except UserError as error:
        warn(f"warning: the loggers did not get the scores: {error}")


@contextmanager
def _fed(names: Sequence[str], run_dir: Path, metrics: AnyPath, logged: Logged) -> Iterator[None]:
    identity, reader = read_identity(run_dir), RunReader(run_dir, metrics)
    trains = logged.state is not None

    def maker(name: str) -> Callable[[], Logger]:
        return lambda: find_logger(name)(identity, trains)

    feeds = [Feed(name, maker(name), reader.read) for name in names]
    for feed in feeds:
        feed.start()
    try:
        yield
    except BaseException:
        for feed in feeds:
            feed.end(logged.state, ERROR_END_S)
        raise
    logged.said += [feed.end(logged.state, END_S) for feed in feeds]


class Feed:
    """The thread of one logger."""

    def __init__(self, name: str, make: Callable[[], Logger], read: Callable[[], RunContent]):
        self._name, self._make, self._read = name, make, read
        self._logger: Logger | None = None
        self._is_open, self._fault = False, ""
        self._state: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)

    def start(self) -> None:
        """Load the package here, because imports in two threads may block each other. Then begin to send."""
        with self._faults():
            self._logger = self._make()
        self._thread.start()

    def end(self, state: str | None, wait_s: float) -> str:
        """Send the rest and close the logger. Returns a line that says where the run is, or what is missing and why."""
        self._state = state
        self._ending.set()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._warn(f"no answer in {wait_s:.0f} s")
        if self._fault or self._logger is None:
            return f"{self._name}: numbers are missing there ({self._fault}); the same command sends them"
        return f"{self._name}: {one_line(self._logger.place)}"

    def _run(self) -> None:
        self._send()
        while not self._ending.wait(RETRY_S if self._fault else POLL_S):
            self._send()
        self._send()
        with self._faults():
            if self._is_open and self._logger:
                self._logger.close(self._state)

    def _send(self) -> None:
        """Send what is missing. After a failure, a new logger asks what has arrived."""
        with self._faults():
            self._logger = self._logger or self._make()
            if not self._is_open:
                self._logger.open()
                self._is_open = True
            self._logger.send(self._read())
            self._fault = ""
            return
        if self._is_open:
            with suppress(Exception):
                self._logger.close(None)
        self._logger, self._is_open = None, False

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn any failure of a logger into a warning."""
        try:
            yield
        except (Exception, SystemExit) as error:
            known = describe_missing(error) if isinstance(error, ModuleNotFoundError) else None
            self._warn(one_line(known or first_line(error)))

    def _warn(self, fault: str) -> None:
        if not self._fault:
            warn(f"warning: {self._name}: {fault}; the command goes on without it")
        self._fault = fault
