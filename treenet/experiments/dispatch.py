"""The place where the cells of a grid run: this process one after another, or side by side processes of their own or Ray."""

from collections.abc import Iterable

from treenet.experiments.grid import CellWork, run_cells_here
from treenet.experiments.ledger import Cell, Ledger
from treenet.experiments.process_cells import run_cells_in_processes
from treeproc.common.extras import require


def need_ray(cells: Iterable[Cell]) -> bool:
    """Whether cells have Ray Train workers. Their driver has the grid to itself; other processes share it."""
    return any(cell.config.workers for cell in cells)


def run_cells(cells: Iterable[Cell], work: CellWork, ledger: Ledger, parallel: int | None = None) -> None:
    """Run what the ledger does not have as done, and leave in it how each cell ended.

    `parallel` cells run at a time, with `workers` in Ray (None: as many as the cluster has room for), else in processes of
    their own, or one after another in this one (None). SIGTERM saves a checkpoint and stops: cells that are waiting or
    interrupted are left for the next time.
    """
    cells = ledger.in_order(cells)
    if need_ray(cells):
        require("ray", "a study with workers", "give workers=0 to train each cell in one process")
        from treenet.experiments.ray_cells import run_cells_with_ray  # a grid without Ray must not import it

        run_cells_with_ray(cells, work, ledger, parallel)
    elif cells and (parallel or 1) > 1:
        run_cells_in_processes(cells, work, ledger, parallel)
    else:
        run_cells_here(cells, work, ledger)
