"""Cells of a grid side by side in processes of this machine, without Ray: for small models, on its cores or on one GPU.

Each process takes cells of the ledger until none is left. A cell prints to its log.txt. When the driver ends, in any way, the
processes save and end too.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from treenet.experiments.grid import CellWork, Follow, on_sigterm, run_cell, run_cells_here
from treenet.experiments.ledger import RUNNING, Cell, CellResult, Ledger
from treeproc.common.files import atomic_write
from treeproc.common.messages import is_quiet, messages_shown, warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath

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
    with on_sigterm() as stop, Follow(cells) as follow:
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
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
