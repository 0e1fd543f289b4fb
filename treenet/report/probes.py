"""The section of linear probes: a table over runs with their baselines, and accuracy by layer."""

from html import escape

from treenet.probing.probe_results import table_rows, task_name
from treenet.report.formats import status_name
from treenet.report.markup import TableCell, number, paragraph, text
from treenet.report.report_model import Page
from treenet.runs.result_provenance import describe_origin
from treeproc.common.command_names import as_called

_COLUMNS = ("majority", "embeddings", "untrained", "trained")


def probes_name(index: int) -> str:
    """Return the name of the figure of a run."""
    return f"probes_{index + 1}"


def show_probes(page: Page) -> list[str]:
    runs = [run for run in page.report.runs if run.probes]
    if not runs:
        return []
    out = [
        paragraph(
            f"Linear classifiers on frozen states of the encoder ({as_called('workflows/probe.py')}), trained on sentences of "
            "train and scored on test. Compare a trained model with its untrained version, which reads the same trees: the "
            "difference is what it has learned."
        )
    ]
    found = [{(task, of, layer): values for task, layer, of, values in table_rows(run.probes)} for run in runs]
    # The last layer of each; the others are in the figure.
    last = [max((layer for _, _, layer in one if layer), default=0) for one in found]
    shown = [{(t, of): v for (t, of, layer), v in one.items() if layer == top} for one, top in zip(found, last, strict=True)]
    names = [", ".join(filter(None, [run.name, status_name(run.probes_status)])) for run in runs]
    head = [text("task"), text("state")]
    alone = len(runs) == 1 and names == [runs[0].name]
    head += [TableCell(escape(name if alone else f"{run}: {name}"), "n") for run in names for name in _COLUMNS]
    rows = []
    for task, of in dict.fromkeys(key for one in shown for key in one):
        values = [one.get((task, of), {}) for one in shown]
        accuracies = [value.get(name) for value in values for name in _COLUMNS]
        rows.append([text(task_name(task)), text(of), *(number(one and 100 * one, ".2f") for one in accuracies)])
    layers = ", ".join(f"{name} {top}" for name, top in zip(names, last, strict=True))
    out.append(page.table(f"Accuracy of probes in %, at the highest layer that was probed ({layers}).", head, rows))
    for index, run in enumerate(page.report.runs):
        if probes_name(index) in page.figures:
            name = names[runs.index(run)]
            out.append(page.figure(probes_name(index), f"{name}: accuracy of probes by encoder layer."))
    made = "; ".join(f"{name}: {describe_origin(run.probes)}" for name, run in zip(names, runs, strict=True))
    out.append(paragraph(f"Made with: {made}.", class_="note"))
    if any(_basis(run.probes) != _basis(runs[0].probes) for run in runs):
        out.append(
            paragraph(
                "Do not compare these numbers: the probes of the runs have different settings, or other text.", class_="note"
            )
        )
    return out


def _basis(entry: dict) -> tuple:
    """Return the key that two runs must share to be compared. The models' trees may differ; labels are those of the parser."""
    return entry["settings"], *(entry["data"].get(name) for name in ("text_fingerprint", "parsed_fingerprint"))
