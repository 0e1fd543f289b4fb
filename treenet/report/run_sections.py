"""The sections of what was run and how: settings, learning curves, and the provenance of runs and data sets."""

import math
from collections.abc import Sequence
from html import escape

from treenet.report.compare import speed
from treenet.report.markup import TableCell, code, number, show_hash, table, tag, text
from treenet.report.report_inputs import FINGERPRINTS, ReportRun
from treenet.report.report_model import Page, Report
from treenet.runs.metrics_log import best_validation
from treeproc.common.messages import format_seconds
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


def show_runs(page: Page) -> list[str]:
    """Show facts, settings that differ, and the settings that all runs share."""
    report, out = page.report, []
    if not report.runs:
        return out
    rows = [[text("model"), *(TableCell(escape(str(run.config["model"].get("name", ""))), "n") for run in report.runs)]]
    examples, targets = ("training examples", "classes") if report.of_classes else ("training pairs", "target tokens")
    facts = (("parameters", "parameters"), ("examples", examples), ("target_tokens", f"{targets} an epoch"))
    for key, title in facts:
        rows.append([text(title), *(number(run.facts.get(key)) for run in report.runs)])
    rows.append([text("updates"), *(number(run.step) for run in report.runs)])
    if any(run.weights_sha256 for run in report.runs):
        rows.append([text("averaged weights, sha256"), *(show_hash(run.weights_sha256) for run in report.runs)])
    title, best = _best_validations(report)
    rows.append([text(title), *(value for value, _ in best)])
    rows.append([text("at update"), *(number(step) for _, step in best)])
    rows.append([text(f"{targets} a second, median"), *(number(speed(run), ",.0f") for run in report.runs)])
    rows += show_training(report)
    rules = [len(rows)]
    if any(run.trees for run in report.runs):
        rows.append([text("trees of the data"), *(TableCell(escape(run.trees or "–"), "n") for run in report.runs)])
    same = {}
    for key, title in FINGERPRINTS.items():
        found = [run.fingerprints.get(key) for run in report.runs]
        if len(set(found)) == 1 and found[0]:
            same[title] = found[0]
        elif any(found):
            rows.append([text(f"{title}, fingerprint"), *(TableCell(code(value) if value else "–", "n") for value in found)])
    for key, values in report.differing.items():
        if key != "model.name":
            rows.append([TableCell(code(key)), *(TableCell(escape(_value(value)), "n") for value in values)])
    head = [text("fact or setting"), *(TableCell(escape(run.name), "n") for run in report.runs)]
    caption = "The runs, and every setting in which they differ." if len(report.runs) > 1 else "The run."
    out.append(page.table(caption, head, rows, rules=[rule for rule in rules if rule < len(rows)]))
    if same:
        who = "All runs have the same data" if len(report.runs) > 1 else "The data"
        message = ", ".join(f"{escape(title)} {code(value)}" for title, value in same.items())
        out.append(tag("p", f"{who}, by fingerprint: {message}.", class_="note"))
    shared = [[TableCell(code(key)), TableCell(escape(_value(value)))] for key, value in report.shared.items()]
    count = f"{len(shared)} settings " + ("that all runs share" if len(report.runs) > 1 else "of the run")
    settings = table("Values as in config.yaml.", [text("setting"), text("value")], shared)
    out.append(tag("details", tag("summary", count) + settings))
    return out


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()  # as in YAML
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def show_curves(page: Page) -> str:
    """Show the figure of learning curves, if a run has metrics."""
    if "learning_curves" not in page.figures:
        return ""
    below = "target tokens a second, by update."
    if page.report.of_classes:
        below = "accuracy there, by update. Compare accuracies: the first is over phrases if a model learns their classes."
    said = f"Negative log-likelihood of training batches (thin) and of the validation split, and {below}"
    return page.figure("learning_curves", said)


def _best_validations(report: Report) -> tuple[str, list[tuple[TableCell, int | None]]]:
    """Return a title, and for each run its best value on valid and the update of it.

    Classifiers have their accuracy: the nll of a model that learns the classes of phrases is over phrases, that of others over
    texts.
    """
    sign, score, title, form = (-1, "accuracy", "accuracy", ".2%") if report.of_classes else (1, "nll", "NLL", ".3f")
    best = [best_validation(run.metrics, lambda line: sign * line.get(score, math.nan)) for run in report.runs]
    return f"best validation {title}", [(number(line and line[score], form), line and line["step"]) for line in best]
