"""Cells of a grid side by side on a Ray cluster: each is a task that starts its own Ray Train run.

The driver keeps the ledger. Its tasks die with it. Cells that it leaves behind continue from their checkpoints.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import ray

from treenet.config import TrainConfig
from treenet.experiments.grid import CellWork, Follow, describe_unexpected, end_cell, on_sigterm, run_cell
from treenet.experiments.ledger import FAILED, Cell, CellResult, Ledger
from treenet.jobs.train_run import make_run_folder
from treenet.runs.mirror import STOP_FILE
from treeproc.common.files import atomic_write, locked
from treeproc.common.ray_session import start_ray
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

POLL_S = 2.0
# Seconds in which cells may save a checkpoint after SIGTERM.
STOP_S = 60.0
# After a kill of the driver, its tasks may live for some seconds.
FREE_S = 60.0


def run_cells_with_ray(cells: Sequence[Cell], work: CellWork, ledger: Ledger, parallel: int | None) -> None:
    """Run `cells` in this order, `parallel` at a time (None: as many as the cluster has room for, also while it grows).

    SIGTERM stops it. The running cells then have a checkpoint.
    """
    start_ray()
    waiting, running, stopped_at = deque(cells), {}, None
    task = ray.remote(num_cpus=0)(_run)  # Ray Train requests the resources of the training
    with on_sigterm() as stop, Follow(cells) as follow:
        while waiting or running:
            if stop.is_set():
                stopped_at = stopped_at or time.monotonic()
                waiting.clear()
                for cell in running.values():
                    atomic_write(cell.folder / STOP_FILE, b"")  # repeatedly, because a run that starts removes it
                if time.monotonic() > stopped_at + STOP_S:
                    break
            while waiting and len(running) < (parallel or room(waiting[0].config)):
                cell = waiting.popleft()
                make_run_folder(cell.folder)
                ledger.start(cell)
                running[task.options(name=cell.name).remote(cell, work, os.environ.get("RAY_ADDRESS"))] = cell
            ready, _ = ray.wait(list(running), timeout=POLL_S) if running else ([], [])
            for reference in ready:
                cell = running.pop(reference)
                result = _result(reference, cell)
                end_cell(cell, result, work, ledger)
                follow.show([cell], ledger.counts())
            follow.show(running.values(), ledger.counts())


def room(config: TrainConfig) -> int:
    """Return the number of cells that the cluster has room for now, at least one: a cluster may grow for it."""
    return max(1, int(ray.cluster_resources().get("GPU" if config.use_gpu else "CPU", 0)) // config.workers)


def _run(cell: Cell, work: CellWork, address: str | None) -> CellResult:
    """Run a cell in a task. Scoring is a separate task. It gets a GPU if the training has one."""
    if address:
        os.environ["RAY_ADDRESS"] = address  # a cluster, which can grow, or a Ray of this machine only
    task = ray.remote(num_cpus=1, num_gpus=int(cell.config.use_gpu))(_score)

    def score(folder: AnyPath) -> dict:
        try:
            return ray.get(task.remote(work, folder))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    try:
        wait_until_free(cell.folder)
    except UserError as error:
        return CellResult(FAILED, 0.0, error=str(error))
    return run_cell(cell, replace(work, score=score))


def _score(work: CellWork, folder: AnyPath) -> dict:
    return work.score(folder)


def wait_until_free(folder: AnyPath) -> None:
    """Wait for the lock of a run. Raises UserError if it is not free after FREE_S."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            with locked(folder):
                return
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _result(reference: ray.ObjectRef, cell: Cell) -> CellResult:
    """Return the result of the task. The task has failed if its process died more often than Ray restarts it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return CellResult(FAILED, 0.0, error=describe_unexpected(error, cell.folder))
