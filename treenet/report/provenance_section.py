"""The provenance of the runs of a report and their data sets: software, machines and time."""

from collections.abc import Sequence
from html import escape

from treenet.report.markup import TableCell, text
from treenet.report.report_model import Page, Report
from treenet.report.report_runs import ReportRun
from treeproc.common.progress import format_seconds
from treeproc.common.provenance import Session, describe_machines, describe_packages, describe_software, read_sessions
from treeproc.common.storage import AnyPath


def read_making(runs: Sequence[ReportRun]) -> dict[str, list[Session]]:
    """Read sessions of every run, then of every data set, by the name of what they made."""
    made = {run.name: read_sessions(run.folder) for run in runs}
    trained: dict[AnyPath, list[str]] = {}
    for run in runs:
        trained.setdefault(run.data, []).append(run.name)
    return made | {f"data of {', '.join(names)}": read_sessions(data) for data, names in trained.items()}


def show_training(report: Report) -> list[list[TableCell]]:
    """Return the rows of the table of runs: time, machines and software of all sessions that trained each run."""
    trained = [[one for one in report.made.get(run.name, ()) if one.command.startswith("train")] for run in report.runs]
    if not any(trained):
        return []
    wall = [sum(one.wall_s or 0.0 for one in sessions) for sessions in trained]
    rows = [[text("wall time of training"), *(_seconds(seconds or None) for seconds in wall)]]
    for title, describe in (("trained on", describe_machines), ("packages", _main_packages)):
        found = ["; ".join(dict.fromkeys(describe(one) for one in sessions)) for sessions in trained]
        rows.append([text(title), *(TableCell(escape(one or "–"), "wrap") for one in found)])
    return rows


def _main_packages(session: Session) -> str:
    found = ({name: packages.get(name) for name in ("python", "torch")} for packages in session.packages_at_work())
    return "; ".join(dict.fromkeys(map(describe_packages, found)))


def show_making(page: Page) -> str:
    """Show one row a command, oldest first."""
    if not page.report.made:
        return ""
    titles = ("run or data set", "began", "did", "ended", "software", "packages", "machine")
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
