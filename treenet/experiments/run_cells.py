"""Runs the cells of a grid: one after another in this process, or side by side in processes or on Ray."""

from collections.abc import Iterable

from treenet.experiments.grid import CellWork, run_cells_here
from treenet.experiments.ledger import Cell, Ledger
from treenet.experiments.process_cells import run_cells_in_processes
from treeproc.common.extras import require


def need_ray(cells: Iterable[Cell]) -> bool:
    """Return whether cells have Ray Train workers. Then their driver has the grid alone; otherwise processes share it."""
    return any(cell.config.workers for cell in cells)


def run_cells(cells: Iterable[Cell], work: CellWork, ledger: Ledger, parallel: int | None = None) -> None:
    """Run the cells that are not done in the ledger, and record how each cell ended.

    `parallel` cells run at a time: with `workers` on Ray (None: as many as the cluster has room for), else in processes. Without
    `workers`, None runs them one after another in this process. SIGTERM saves a checkpoint and stops. The next call runs the
    waiting and interrupted cells.
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
