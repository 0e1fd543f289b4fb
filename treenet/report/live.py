"""Reports while runs train: the page is made again whenever a run has something new, and reloads itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from treenet.experiments.ledger import DONE, FAILED, LEDGER, Ledger
from treenet.experiments.scaling_table import SCALING
from treenet.experiments.seeds_report import COMPARISON
from treenet.report.markup import TableCell, number, paragraph, tag, text
from treenet.report.report_model import Page
from treenet.report.settings import ReportSettings
from treenet.runs.checkpoint import AVERAGED, is_complete
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path

# Seconds between two looks at the runs, and between two loads of the page.
REFRESH_S = 10


@dataclass(frozen=True)
class Live:
    """A page of runs that are not at their end. `refresh_s` is None on the last one, after which nothing is watched."""

    at: str
    refresh_s: int | None
    cells: dict[str, tuple[int, int]]  # by study: cells that are done or have failed, and all of them


def watch(settings: ReportSettings, make: Callable[[Live | None], Path], say: Callable[[str], None]) -> None:
    """Make the page whenever a run or study has something new; at the end of all of them, the whole report.

    `make` writes the page: a small one of live runs, or with None the whole report. Ctrl-C ends it, with a page that no
    longer reloads. Raises UserError for runs in an object store: nothing there announces new files.
    """
    folders = [as_path(run) for run in settings.runs]
    for folder in folders:
        if not isinstance(folder, Path):
            raise UserError(f"--watch follows runs of this machine, but {folder} is in an object store; leave --watch out")
    seen: object = None
    try:
        while not all(map(_has_ended, folders)):
            if (now := list(_signature(folders))) != seen:
                page = make(_live(folders, REFRESH_S))
                if seen is None:
                    say(f"page     {page}, which reloads every {REFRESH_S} s; Ctrl-C ends this command, but not the training")
                seen = now
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        make(_live(folders, None))
        say("stopped; the page stays as it is, and the same command without --watch makes the complete report")
        return
    make(None)


def _has_ended(folder: Path) -> bool:
    """Return whether a run has ended with its averaged model, or every cell of a study is done or has failed."""
    if (folder / LEDGER).is_file():
        over, total = _count_cells(folder)
        return over == total
    return is_complete(folder / AVERAGED)


def _count_cells(folder: Path) -> tuple[int, int]:
    states = [entry.status for entry in Ledger.read(folder).entries.values()]
    return sum(status in (DONE, FAILED) for status in states), len(states)


def _signature(folders: list[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield the state of the files that a live page reads."""
    for folder in folders:
        for name in ("metrics.jsonl", LEDGER, SCALING, COMPARISON):
            with suppress(OSError):
                found = (folder / name).stat()
                yield str(folder / name), found.st_mtime_ns, found.st_size


def _live(folders: list[Path], refresh_s: int | None) -> Live:
    cells = {str(folder): _count_cells(folder) for folder in folders if (folder / LEDGER).is_file()}
    return Live(datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), refresh_s, cells)


def show_live(page: Page, live: Live) -> list[str]:
    """Show the state of every run and study."""
    again = f"the page reloads every {live.refresh_s} s" if live.refresh_s else "no command watches the runs any more"
    message = f"Made at {live.at}; {again}. The complete report, at the end of all runs, adds scores, sentences and attention."
    out, report = [tag("div", paragraph(message), class_="callout", role="note")], page.report
    head = [text("run"), *(TableCell(name, "n") for name in ("update", "of", "training loss", "best validation NLL", "state"))]
    rows = []
    for run in report.runs:
        trained = [line for line in run.metrics if line["event"] == "train"]
        best = min(
            (line["nll"] for line in run.metrics if line["event"] == "valid" and line.get("nll") is not None), default=None
        )
        loss = trained[-1].get("loss") if trained else None
        cells = [text(run.name), number(trained[-1]["step"] if trained else run.step), number(run.config.get("max_steps"))]
        cells += [
            number(loss, ".3f"),
            number(best, ".3f"),
            TableCell("ended" if run.finished else "running or stopped", "n"),
        ]
        rows.append(cells)
    if rows:
        out.append(page.table("Progress of the runs.", head, rows))
    for name, (over, total) in live.cells.items():
        out.append(paragraph(f"{name}: {over} of {total} cells are done or have failed."))
    return out
