"""A grid of runs: each cell is trained and scored, here one after another, or side by side in processes of this machine.

Processes need no Ray: they are for small models, on the cores or on one GPU. Each takes cells of the ledger until none is left. A
cell prints to its log.txt. When the driver ends, in any way, the processes save and end too.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from treenet.config import TrainConfig
from treenet.experiments.ledger import DONE, FAILED, INTERRUPTED, RUNNING, Cell, CellResult, Entry, Ledger
from treenet.experiments.records import refuse_other_budget
from treenet.jobs.train_job import on_sigterm
from treenet.jobs.train_run import RunSummary
from treenet.runs.checkpoint import AVERAGED, checkpoint_folders
from treenet.runs.metrics_log import logged_step
from treenet.runs.run_folder import recorded_sha256
from treeproc.common.command_line import describe_refusal
from treeproc.common.files import atomic_write
from treeproc.common.messages import Progress, format_seconds, is_quiet, messages_shown, tell, warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath

_STARTING = "starting cells"
POLL_S = 1.0  # seconds between two looks for a cell that another process left


def _never_stale(folder: AnyPath) -> str:
    return ""


def _fits(scores: Mapping) -> str:
    return ""


def _no_record(folder: AnyPath, entry: Entry) -> None:
    pass


@dataclass(frozen=True)
class CellWork:
    """The steps of a cell. Training and scoring can repeat on the same folder, and can run in other processes and on other nodes.

    `train` continues a run and returns whether it is finished. `score` writes RUN/scores.json and returns its summary for a
    person. `stale` describes why scores of a finished run do not fit its present model or the study, and `unlike` does so for
    those of a record. Both are empty if they fit. `problem` is why no cell can be scored; it is empty if they can.
    `record` stores the results of a cell that is done; it runs where the ledger is.
    """

    train: Callable[[TrainConfig, AnyPath], RunSummary]
    score: Callable[[AnyPath], dict]
    stale: Callable[[AnyPath], str] = _never_stale
    unlike: Callable[[Mapping], str] = _fits
    problem: str = ""
    record: Callable[[AnyPath, Entry], None] = _no_record


def run_cell(cell: Cell, work: CellWork, unexpected: str = FAILED) -> CellResult:
    """Train and score one cell. Any error becomes the cell's result, and the other cells continue.

    `unexpected` is the status after an error that the user cannot resolve.
    """
    started = time.monotonic()

    def result(status: str, error: str = "", scores: dict | None = None) -> CellResult:
        return CellResult(status, time.monotonic() - started, scores or {}, error)

    try:
        # A trained model whose checkpoints were removed is only scored.
        is_trained = not checkpoint_folders(cell.folder) and recorded_sha256(cell.folder / AVERAGED) is not None
        if not is_trained and not work.train(cell.config, cell.folder).finished:
            return result(INTERRUPTED)
        refuse_other_budget(cell.folder, cell.config)
        return result(DONE, scores=work.score(cell.folder))
    except UserError as error:
        return result(FAILED, str(error))
    except Exception as error:
        if isinstance(error, OSError) and (reason := describe_refusal(error)):
            return result(FAILED, reason)
        return result(unexpected, describe_unexpected(error, cell.folder))


def describe_unexpected(error: Exception, folder: AnyPath) -> str:
    """Return one line about an unexpected error, and write the traceback to FOLDER/error.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "error.txt", "".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; see {folder / 'error.txt'}"


def run_cells_here(
    cells: Sequence[Cell],
    work: CellWork,
    ledger: Ledger,
    run: Callable[[Cell, CellWork], CellResult] = run_cell,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Run cells in this process, one after another, until all are done. It waits for cells that other processes have.

    It continues a cell of a process that died. It ends if a run was stopped, or if `is_stopped` returns True between two cells.
    """
    waits = False
    while not is_stopped():
        with ledger.taken(cells) as cell:
            if cell is not None:
                tell(f"\n{cell.name} ({ledger.counts()})")
                result = run(cell, work)
                end_cell(cell, result, work, ledger)
                if result.status == INTERRUPTED:
                    return
                continue
        left = ledger.in_order(cells)
        if not left:
            return
        if not waits:
            tell(f"\nwaiting for cells of other processes: {', '.join(cell.name for cell in left)}")
        waits = True
        time.sleep(POLL_S)


def end_cell(cell: Cell, result: CellResult, work: CellWork, ledger: Ledger) -> None:
    """Record and print how a cell ended. The ledger is last: a cell whose record a kill prevented, or left old, runs again."""
    if result.status == DONE:
        work.record(cell.folder, ledger.entries[cell.name])
    ledger.end(cell, result)
    what = result.error or ", ".join(f"{name} {value:.2f}" for name, value in result.result.items())
    tell(f"{cell.name}: {result.status} after {format_seconds(result.seconds)}{': ' if what else ''}{what}")


class Follow:
    """Shows the progress of all cells in updates, from the files of their runs."""

    def __init__(self, cells: Sequence[Cell]):
        self._steps, self._has_begun = {cell.name: logged_step(cell.folder) for cell in cells}, False
        total = sum(cell.config.max_steps for cell in cells)
        self._progress = Progress("cells", total, unit="steps", initial=sum(self._steps.values()))

    def __enter__(self) -> "Follow":
        self._progress.__enter__()
        self._progress.show_phase(_STARTING)
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)

    def show(self, running: Iterable[Cell], counts: str, waits_for: str = "") -> None:
        self._steps |= {cell.name: logged_step(cell.folder) for cell in running}
        advance = sum(self._steps.values()) - self._progress.count
        self._progress.update(advance, postfix=counts)
        if advance and not self._has_begun:
            self._has_begun = True
            self._progress.began()
        phase = waits_for or ("" if self._has_begun else _STARTING)
        if phase != self._progress.phase:
            self._progress.show_phase(phase)


LOG = "log.txt"
FOLLOW_S = 2.0
# Seconds in which stopped processes may save a checkpoint.
STOP_S = 60.0


def run_cells_in_processes(cells: Sequence[Cell], work: CellWork, ledger: Ledger, processes: int) -> None:
    """Run `cells` in so many processes, which share the threads of this one. SIGTERM stops them; each saves a checkpoint."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, theirs = context.Pipe()
    count = min(processes, len(cells))
    arguments = (cells, work, ledger, max(1, torch.get_num_threads() // count), theirs, is_quiet())
    running = [context.Process(target=_run, args=arguments) for _ in range(count)]
    stop = threading.Event()
    with on_sigterm(stop.set), Follow(cells) as follow:
        try:
            for process in running:
                process.start()
            theirs.close()
            while running and not stop.is_set():
                wait([process.sentinel for process in running], timeout=FOLLOW_S)
                before = _running(cells, ledger)
                ledger.refresh()
                follow.show([*before, *_running(cells, ledger)], ledger.counts())
                for process in [process for process in running if not process.is_alive()]:
                    running.remove(process)
                    if process.exitcode:
                        ledger.interrupt_dead()
                        message = f"a process ended with status {process.exitcode}; other processes run its cell"
                        warn(f"warning: {message}")
        finally:
            ours.close()
            for process in running:
                process.join(STOP_S)
                process.kill()
    ledger.interrupt_dead()


def _running(cells: Sequence[Cell], ledger: Ledger) -> list[Cell]:
    return [cell for cell in cells if ledger.entries[cell.name].status == RUNNING]


def _run(cells: Sequence[Cell], work: CellWork, ledger: Ledger, threads: int, driver: Connection, quiet: bool) -> None:
    """Run one of the processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; this one ends with its driver
    torch.set_num_threads(threads)
    stop = threading.Event()
    threading.Thread(target=_end_with, args=(driver, stop.set), daemon=True).start()
    with messages_shown(quiet=quiet):
        try:
            run_cells_here(cells, work, ledger, _run_logged, stop.is_set)
        except UserError as error:
            warn(f"error: {error}")
            sys.exit(2)


def _end_with(driver: Connection, stop: Callable[[], None]) -> None:
    """Wait until the driver closes its end of the connection or is gone, then end as after SIGTERM."""
    with suppress(EOFError, OSError):
        driver.recv()
    stop()
    os.kill(os.getpid(), signal.SIGTERM)


def _run_logged(cell: Cell, work: CellWork) -> CellResult:
    with printing_to_log(cell.folder):
        return run_cell(cell, work)


@contextmanager
def printing_to_log(folder: AnyPath) -> Iterator[None]:
    """Redirect output in this context to the end of FOLDER/log.txt, also that of libraries in C.

    A log in a store gets it at the end of the context, and nothing of a process that is killed.
    """
    if isinstance(folder, RemotePath):
        with tempfile.TemporaryDirectory() as name:
            with printing_to_log(Path(name)):
                yield
            before = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
            atomic_write(folder / LOG, before + (Path(name) / LOG).read_bytes())
        return
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with open(folder / LOG, "ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
