"""The provenance of the runs of a report and their data sets: software, machines and time."""

from collections.abc import Sequence

from treenet.report.contents import Page
from treenet.report.markup import TableCell, text
from treenet.report.report_runs import ReportRun
from treeproc.common.progress import format_seconds
from treeproc.common.provenance import Session, describe_machines, describe_packages, describe_software, read_sessions
from treeproc.common.storage import AnyPath


def read_making(runs: Sequence[ReportRun]) -> dict[str, list[Session]]:
    """Sessions of every run, then of every data set, by the name of what they made."""
    made = {run.name: read_sessions(run.folder) for run in runs}
    trained: dict[AnyPath, list[str]] = {}
    for run in runs:
        trained.setdefault(run.data, []).append(run.name)
    return made | {f"data of {', '.join(names)}": read_sessions(data) for data, names in trained.items()}


def show_making(page: Page) -> str:
    """One row a command, oldest first."""
    if not page.report.made:
        return ""
    titles = ("", "began", "did", "ended", "software", "packages", "machine")
    head = [*map(text, titles), TableCell("time", "n"), TableCell("CPU time", "n")]
    rows = []
    for name, sessions in page.report.made.items():
        if not sessions:
            rows.append([text(name), text("without provenance"), *[text("–")] * (len(head) - 2)])
        for session in sessions:
            began = session.started.replace("T", " ").replace("Z", " UTC")
            did = ", ".join(f"{what} {count:,}" for what, count in session.did.items())
            made_by = (describe_software(session.software), describe_packages(session.packages), describe_machines(session))
            cells = [name, began, f"{session.command}: {did}" if did else session.command, session.outcome, *made_by]
            rows.append([*map(text, cells), _seconds(session.wall_s), _seconds(session.cpu_s)])
    return page.table("Every command that worked on a run or its data set, from provenance.json.", head, rows)


def _seconds(value: float | None) -> TableCell:
    return TableCell("–" if value is None else format_seconds(value), "n")
