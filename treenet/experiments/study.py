"""What the workflows of a grid of runs share: they run what is missing, report, and say what is left."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from treenet.config import TrainConfig
from treenet.inference.origin import NOT_RECORDED, RunState, Standing
from treenet.inference.results import SCORES, read_scores
from treenet.training.grid import Work, need_ray, run_cells
from treenet.training.ledger import DONE, FAILED, LEDGER, Cell, Ledger
from treenet.training.run import STOPPED_BY_SIGTERM, make_run_folder
from treeproc.files import atomic_write, held, locked, read_json
from treeproc.settings import UserError, dump_settings

_REPORT_LOCK = ".report-lock"


def check_once(values: tuple) -> tuple:
    """Raises ValueError for a value that stands twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"must hold every value once, but is {list(values)}")
    return values


def check_name(field: str, name: str) -> None:
    """Raises ValueError for a name that cannot be part of a folder's."""
    if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
        raise ValueError(f"{field}: a name is part of a folder's and must be letters, digits, _ and ., but is {name!r}")


def stale_scores(names: Sequence[str], folder: Path) -> dict[str, Standing]:
    """Those of the named scores in a run folder that are no longer of the run as it is."""
    scores, state = read_scores(folder), RunState(folder)
    standings = {name: state.judge(scores[name]) for name in names if name in scores}
    return {name: standing for name, standing in standings.items() if standing.changed}


def describe_stale(names: Sequence[str], folder: Path) -> str:
    """What changed since those scores were made, in words; empty where nothing did."""
    return "; ".join(f"{name}: {standing.changed}" for name, standing in stale_scores(names, folder).items())


def read_fresh_scores(names: Sequence[str], folder: Path, mend: str, form: type | None = None) -> dict[str, dict]:
    """scores.json of a run. Raises UserError where it has not the `form`, or where those of `names` are stale."""
    scores = read_json(folder / SCORES, mend, form)
    for name, standing in stale_scores(names, folder).items():
        raise UserError(
            f"{folder}: the scores of {name} are not of the run as it is ({standing.changed}); to renew them: {standing.command}"
        )
    return scores


def count_not_recorded(cells: Sequence[dict]) -> str:
    """A line about cells whose scores name no weights; empty where there are none."""
    count = sum(cell.get("weights_sha256") is None for cell in cells)
    return f"{count} of {len(cells)} cells {NOT_RECORDED}" if count else ""


def show_cells(cells: Sequence[Cell], out: Path) -> str:
    """The state of every cell, one a line."""
    entries = Ledger.read(out).entries
    return "\n".join(f"{cell.name}: {entries[cell.name].status if cell.name in entries else 'new'}" for cell in cells)


def run_study(
    config: TrainConfig, cells: Sequence[Cell], work: Work, out: Path, parallel: int | None, report: Callable[[Ledger], str]
) -> None:
    """Run the cells that are not done, print the report of all, and leave the process with a status where some are left.

    Without Ray, several such commands may work on one study: the last one to end reports on all cells.
    """
    make_run_folder(out)
    with locked(out, shared=not need_ray(cells)):
        ledger = Ledger.open(out, cells)
        atomic_write(out / "config.yaml", dump_settings(config).encode())
        for cell in cells:
            if ledger.entries[cell.name].status == DONE and (changed := work.stale(cell.folder)):
                said = f"{cell.name}: its scores are not of its model as it is ({changed}); it is averaged and scored again"
                print(f"warning: {said}", file=sys.stderr)
                ledger.reopen(cell)
        run_cells(cells, work, ledger, parallel)
        with held(out / _REPORT_LOCK):
            ledger.refresh()
            print(f"\n{report(ledger)}")
    left = {cell.name: ledger.entries[cell.name] for cell in cells if ledger.entries[cell.name].status != DONE}
    for name, entry in left.items():
        if entry.status == FAILED:
            print(f"{name} failed: {entry.error}", file=sys.stderr)
    if any(entry.status != FAILED for entry in left.values()):
        print(f"stopped with {ledger.counts()}; the same command continues", file=sys.stderr)
        sys.exit(STOPPED_BY_SIGTERM)
    if left:
        print(f"{len(left)} of {len(cells)} cells failed, see {out / LEDGER}; the same command tries them again", file=sys.stderr)
        sys.exit(1)
