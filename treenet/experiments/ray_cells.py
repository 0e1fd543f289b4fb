"""Cells of a grid side by side on a Ray cluster: each is a task, which trains by itself or starts its own Ray Train run.

The driver keeps the ledger. It asks the cluster for the room of waiting cells, so that an autoscaler sees them all. A cell starts
when its room is there. Demands and tasks die with the driver. Cells that it leaves behind continue from their checkpoints.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import ray
import torch

from treenet.experiments.grid import CellWork, Follow, describe_unexpected, end_cell, run_cell
from treenet.experiments.ledger import FAILED, INTERRUPTED, Cell, CellResult, Ledger, last_step
from treenet.jobs.ray_room import ON_HEAD, Room, Rooms, bundles_of, given_to_training, refuse_more_than_there_is
from treenet.jobs.train_job import on_sigterm
from treenet.runs.mirror import STOP_FILE
from treenet.runs.ray_metrics import count_failure
from treeproc.common.files import atomic_write, locked
from treeproc.common.folder_kinds import RUN, mark_folder
from treeproc.common.ray_internals import nodes_called_back
from treeproc.common.ray_session import start_ray
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

POLL_S = 2.0
# Seconds in which cells may save a checkpoint after SIGTERM.
STOP_S = 60.0
# A cell whose process or node is lost so often in a row, without a new checkpoint, has failed.
MAX_FAILURES = 3
# After a kill of the driver, its tasks may live for some seconds.
FREE_S = 60.0


def run_cells_with_ray(cells: Sequence[Cell], work: CellWork, ledger: Ledger, parallel: int | None) -> None:
    """Run `cells` in this order, `parallel` at a time (None: as many as the cluster has room for, also while it grows).

    SIGTERM stops it. The running cells then have a checkpoint.
    """
    if not cells:
        return
    start_ray()
    refuse_more_than_there_is(cells[0].config)
    waiting, stopped_at, stop = deque(cells), None, threading.Event()
    running: dict[ray.ObjectRef, tuple[Room, Cell]] = {}
    losses: Counter[str] = Counter()  # of each cell, since its last new checkpoint
    leaving: set[str] = set()  # cells on nodes that announced their end
    with (
        on_sigterm(stop.set),
        Follow(cells) as follow,
        Rooms(bundles_of(cells[0].config), () if _trains_alone(cells[0]) else ON_HEAD) as rooms,
    ):
        while waiting or running:
            if stop.is_set():
                stopped_at = stopped_at or time.monotonic()
                waiting.clear()
                if time.monotonic() > stopped_at + STOP_S:
                    break
            called_back = nodes_called_back()  # cells of more workers leave these by themselves
            for room, cell in running.values():
                if called_back and _trains_alone(cell) and room.node() in called_back:
                    leaving.add(cell.name)
                if stop.is_set() or cell.name in leaving:
                    atomic_write(cell.folder / STOP_FILE, b"")  # repeatedly, because a run that starts removes it
            rooms.want(min(len(waiting), (parallel or len(cells)) - len(running)))
            while free := rooms.take():
                cell = waiting.popleft()
                mark_folder(cell.folder, RUN)
                ledger.start(cell)
                running[_start(cell, work, free)] = free, cell
            ready, _ = ray.wait(list(running), timeout=POLL_S) if running else ([], stop.wait(POLL_S * bool(waiting)))
            for reference in ready:
                room, cell = running.pop(reference)
                room.give_back()
                result = _result(reference, cell)
                if result.status == INTERRUPTED and not stop.is_set():
                    if cell.name in leaving:
                        result = replace(result, error="the cluster takes its node back")
                        waiting.append(cell)
                    elif result.error:
                        count_failure(cell.name)
                        progress = last_step(cell.folder) > ledger.entries[cell.name].start_step
                        losses[cell.name] = 1 if progress else losses[cell.name] + 1
                        if losses[cell.name] <= MAX_FAILURES:
                            waiting.append(cell)
                        else:
                            result = replace(result, status=FAILED)
                leaving.discard(cell.name)
                end_cell(cell, result, work, ledger)
                follow.show([cell], ledger.counts())
            follow.show([cell for _, cell in running.values()], ledger.counts(), rooms.describe())


def _trains_alone(cell: Cell) -> bool:
    return cell.config.workers == 1


def _start(cell: Cell, work: CellWork, room: Room) -> ray.ObjectRef:
    """Start the task of a cell in its room. Cells of more workers leave it to Ray Train.

    Their tasks are on the node of the first worker, where Ray Train's controller and most of its memory will be, too. Ray does
    not start a task again: the driver does, when there is room again.
    """
    place = room.in_first_bundle()
    if not _trains_alone(cell):
        place = room.beside_workers()
    task = ray.remote(max_retries=0, max_calls=1)(_run)
    return task.options(name=cell.name, **place).remote(cell, work, os.environ.get("RAY_ADDRESS"), room)


def _run(cell: Cell, work: CellWork, address: str | None, room: Room) -> CellResult:
    """Run a cell in a task. With more workers, scoring is a separate task in the room of the first one, with its GPU.

    Without this room, trained cells would wait behind the cells that begin. What fails in a cell of one worker without a reason
    that the user can resolve is done again in another process, as Ray Train does it.
    """

    def score(folder: AnyPath) -> dict:
        place = room.in_first_bundle()
        if not room.node():  # lost workers may have had another one
            place = {"num_cpus": 1, "num_gpus": int(cell.config.use_gpu)}
        try:
            return ray.get(ray.remote(lambda: work.score(folder)).options(name=f"score {cell.name}", **place).remote())
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    if _trains_alone(cell):
        return train_in(room, cell, work, address, threads=int(not cell.config.use_gpu), unexpected=INTERRUPTED)
    return train_in(room, cell, replace(work, score=score), address)


def train_in(
    room: Room, cell: Cell, work: CellWork, address: str | None, threads: int = 0, unexpected: str = FAILED
) -> CellResult:
    """Run a cell in this process or by its workers, in a room of the Ray at `address`; 0 threads: as many as PyTorch chooses.

    A run that another process holds is waited for.
    """
    if address:
        os.environ["RAY_ADDRESS"] = address  # a cluster, which can grow, or a Ray of this machine only
    if threads:
        torch.set_num_threads(threads)
    try:
        with locked(cell.folder, wait_s=FREE_S):
            pass
    except UserError as error:
        return CellResult(FAILED, 0.0, error=str(error))
    with given_to_training(room):
        return run_cell(cell, work, unexpected=unexpected)


def _result(reference: ray.ObjectRef, cell: Cell) -> CellResult:
    """Return the result of the task; it is interrupted if its process or its node died."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return CellResult(FAILED, 0.0, error=describe_unexpected(error, cell.folder))
    except ray.exceptions.RayError as error:
        return CellResult(INTERRUPTED, 0.0, error=describe_unexpected(error, cell.folder))
