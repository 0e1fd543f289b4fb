"""A grid of runs: each cell is trained and scored, one after another in this process or side by side in Ray."""

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from treenet.config import TrainConfig
from treenet.training.ledger import DONE, FAILED, INTERRUPTED, Cell, CellResult, Ledger
from treenet.training.run import RunSummary
from treeproc.files import atomic_write
from treeproc.progress import format_seconds
from treeproc.settings import UserError


@dataclass(frozen=True)
class Work:
    """What is done in a cell. Both functions can be repeated on the same folder, and Ray can send them to other nodes.

    `train` continues a run and says whether it is finished; `score` leaves RUN/scores.json and returns what a person
    wants to see of it. `stale` says why the scores of a finished run are not of its model as it is, nothing where they are.
    """

    train: Callable[[TrainConfig, Path], RunSummary]
    score: Callable[[Path], dict]
    stale: Callable[[Path], str] = lambda folder: ""


def run_cell(cell: Cell, work: Work) -> CellResult:
    """Train and score one cell. An error, whatever it is, is the cell's result: the other cells go on."""
    started = time.monotonic()

    def result(status: str, **facts) -> CellResult:
        return CellResult(status, time.monotonic() - started, **facts)

    try:
        if not work.train(cell.config, cell.folder).finished:
            return result(INTERRUPTED)
        return result(DONE, result=work.score(cell.folder))
    except UserError as error:
        return result(FAILED, error=str(error))
    except Exception as error:
        return result(FAILED, error=describe_error(error, cell.folder))


def describe_error(error: Exception, folder: Path) -> str:
    """One line about an error that nobody foresaw; the whole of it is in FOLDER/error.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "error.txt", "".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; see {folder / 'error.txt'}"


def run_cells(cells: Iterable[Cell], work: Work, ledger: Ledger, parallel: int | None = None) -> None:
    """Run what the ledger does not have as done, and leave in it how each cell ended.

    Cells with `workers` run in Ray, `parallel` at a time (None: as many as the cluster has room for), those without one
    after another. SIGTERM saves a checkpoint and stops: cells that are waiting or interrupted are left for the next time.
    """
    cells = ledger.in_order(cells)
    if cells and cells[0].config.workers:
        from treenet.training.ray_cells import run_cells_with_ray  # a grid without Ray must not import it

        run_cells_with_ray(cells, work, ledger, parallel)
        return
    for cell in cells:
        ledger.start(cell)
        print(f"\n{cell.name} ({ledger.counts()})", flush=True)
        result = run_cell(cell, work)
        ledger.end(cell, result)
        print(describe_result(cell, result), flush=True)
        if result.status == INTERRUPTED:
            return


def describe_result(cell: Cell, result: CellResult) -> str:
    """One line for the log."""
    what = result.error or ", ".join(f"{name} {value:.2f}" for name, value in result.result.items())
    return f"{cell.name}: {result.status} after {format_seconds(result.seconds)}{': ' if what else ''}{what}"
