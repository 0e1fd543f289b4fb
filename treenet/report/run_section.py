"""The section of the runs: what each is made of, and what spoils a comparison."""

from html import escape

from treenet.report.compare import speed, validation
from treenet.report.formats import show_hash
from treenet.report.markup import TableCell, code, number, table, tag, text
from treenet.report.provenance_section import show_training
from treenet.report.report_model import Page

_FINGERPRINTS = {"text_fingerprint": "text", "tree_fingerprint": "trees", "vocab_fingerprint": "vocabulary"}


def show_runs(page: Page) -> list[str]:
    """Show facts, settings that differ, and the settings that all runs share."""
    report, out = page.report, []
    if not report.runs:
        return out
    rows = [[text("model"), *(TableCell(escape(str(run.config["model"].get("name", ""))), "n") for run in report.runs)]]
    facts = (("parameters", "parameters"), ("examples", "training pairs"), ("target_tokens", "target tokens an epoch"))
    for key, title in facts:
        rows.append([text(title), *(number(run.facts.get(key)) for run in report.runs)])
    rows.append([text("updates"), *(number(run.step) for run in report.runs)])
    if any(run.weights_sha256 for run in report.runs):
        rows.append([text("averaged weights, sha256"), *(show_hash(run.weights_sha256) for run in report.runs)])
    best = [validation(run) for run in report.runs]
    rows.append([text("best validation NLL"), *(number(line and line["nll"], ".3f") for line in best)])
    rows.append([text("at update"), *(number(line and line["step"]) for line in best)])
    rows.append([text("target tokens a second, median"), *(number(speed(run), ",.0f") for run in report.runs)])
    rows += show_training(report)
    rules = [len(rows)]
    if any(run.trees for run in report.runs):
        rows.append([text("trees of the data"), *(TableCell(escape(run.trees or "–"), "n") for run in report.runs)])
    same = {}
    for key, title in _FINGERPRINTS.items():
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
    return page.figure(
        "learning_curves",
        "Negative log-likelihood of training batches (thin) and of the validation split, and target tokens a second, by update.",
    )
