"""The sections of what was run and how: settings, learning curves, and the provenance of runs and data sets."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from treenet.report.compare import speed
from treenet.report.report_inputs import FINGERPRINTS, ReportRun
from treenet.report.report_model import Report
from treenet.report.tables import code, fact_columns, show_hash
from treenet.runs.metrics_log import best_validation
from treenet.tasks.tables import NONE, Column, number
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


def making_section(report: Report) -> dict:
    """Return a table with one row a command, oldest first."""
    rows = []
    for name, sessions in report.made.items():
        if not sessions:
            rows.append((name, "without provenance", *[NONE] * 7))
        for one in sessions:
            began = one.started.replace("T", " ").replace("Z", " UTC")
            did = ", ".join(f"{what} {count:,}" for what, count in one.did.items())
            made_by = describe_software(one.software), describe_packages(one.packages), describe_machines(one)
            command = f"{one.command}: {did}" if did else one.command
            rows.append((name, began, command, one.outcome, *made_by, _seconds(one.wall_s), _seconds(one.cpu_s)))
    titles = ("run or data set", "began", "did", "ended", "software", "packages", "machine", "time", "CPU time")
    columns = [
        Column(title, cells, "n" * ("time" in title)) for title, cells in zip(titles, zip(*rows, strict=True), strict=False)
    ]
    return {"columns": rows and columns, "caption": "Every command that worked on a run or its data set, from provenance.json."}


def _seconds(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)


def runs_section(report: Report) -> dict:
    """Return the facts and settings that differ, what all data sets share, and the settings that all runs share."""
    runs, facts, same = report.runs, dict[str, list[str]](), {}
    if not runs:
        return {}
    facts["model"] = [str(run.config["model"].get("name", "")) for run in runs]
    examples = "training pairs" if report.task == "translation" else "training examples"
    targets = "classes" if report.of_classes else "target tokens"
    facts["parameters"] = [number(run.facts.get("parameters")) for run in runs]
    facts[examples] = [number(run.facts.get("examples")) for run in runs]
    facts[f"{targets} an epoch"] = [number(run.facts.get("target_tokens")) for run in runs]
    facts["updates"] = [number(run.step) for run in runs]
    if any(run.weights_sha256 for run in runs):
        facts["averaged weights, sha256"] = [show_hash(run.weights_sha256) for run in runs]
    # The nll of a classifier that learns the classes of phrases is over phrases, that of others over texts.
    sign, score, title, form = (-1, "accuracy", "accuracy", ".2%") if report.of_classes else (1, "nll", "NLL", ".3f")
    best = [best_validation(run.metrics, lambda line: sign * line.get(score, math.nan)) or {} for run in runs]
    facts[f"best validation {title}"] = [number(line.get(score), form) for line in best]
    facts["at update"] = [number(line.get("step")) for line in best]
    facts[f"{targets} a second, median"] = [number(speed(run), ",.0f") for run in runs]
    trained = [[one for one in report.made.get(run.name, ()) if one.command.startswith("train")] for run in runs]
    if any(trained):
        facts["wall time of training"] = [_seconds(sum(one.wall_s or 0.0 for one in sessions) or None) for sessions in trained]
        for title, describe in (("trained on", describe_machines), ("packages", _main_packages)):
            facts[title] = [_wrapped("; ".join(dict.fromkeys(map(describe, sessions))) or NONE) for sessions in trained]
    rule = len(facts)
    if any(run.trees for run in runs):
        facts["trees of the data"] = [run.trees or NONE for run in runs]
    for key, title in FINGERPRINTS.items():
        found = [run.fingerprints.get(key) for run in runs]
        if len(set(found)) == 1 and found[0]:
            same[title] = found[0]
        elif any(found):
            facts[f"{title}, fingerprint"] = [code(value) if value else NONE for value in found]
    facts |= {code(key): list(map(_value, values)) for key, values in report.differing.items() if key != "model.name"}
    settings = [Column("setting", list(map(code, report.shared))), Column("value", list(map(_value, report.shared.values())))]
    columns = fact_columns("fact or setting", [run.name for run in runs], facts)
    return {"facts": columns, "rule": rule, "same": same, "settings": settings}


def _main_packages(session: Session) -> str:
    found = ({name: packages.get(name) for name in ("python", "torch")} for packages in session.packages_at_work())
    return "; ".join(dict.fromkeys(map(describe_packages, found)))


def _wrapped(text: str) -> Markup:
    """Return a text of several lines for a column of numbers."""
    return Markup('<span class="wrap">{}</span>').format(text)


def _value(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()  # as in YAML
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)
