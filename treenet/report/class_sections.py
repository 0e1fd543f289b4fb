"""The sections of classifiers: their scores with intervals, confusion matrices, and examples."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from treenet.data.splits import read_sources
from treenet.report.markup import TableCell, number, paragraph, show_status, text
from treenet.report.report_inputs import Missing, ReportRun, own_index
from treenet.report.report_model import Page
from treenet.report.settings import ReportSettings
from treeproc.common.files import read_text
from treeproc.common.settings import UserError
from treeproc.shards.store import class_names

CLASSIFICATION = "classification"
_MOST_CLASSES = 20  # of a confusion matrix on a page
_SCORES = {"accuracy": "accuracy, %", "macro_f1": "macro F1, %", "binary_accuracy": "two classes, %"}


@dataclass(frozen=True)
class ClassExample:
    """An example of the split: its line, text, class, and the class that each run predicts, by name of the run."""

    line: int
    text: str
    label: str
    predicted: dict[str, str]


def choose_class_examples(runs: Sequence[ReportRun], settings: ReportSettings) -> list[ClassExample]:
    """Return the chosen examples, or those in which predictions differ most from each other, and then from the class.

    Runs whose scores are stale, or of another text than the first run's, take no part. There is none without their data
    set or its text, or of pairs. Raises UserError for a line that the split does not have.
    """
    split = settings.split  # or another result of one, as test.last
    there = [run for run in runs if split in run.scores and not run.statuses[split].changed and own_index(run)]
    there = [run for run in there if run.scores[split].get("own_data", True)]
    there = [run for run in there if run.fingerprints.get("text_fingerprint") == there[0].fingerprints.get("text_fingerprint")]
    index = own_index(there[0]) if there else None
    if index is None or index.get("pairs"):
        return []
    try:
        texts = read_sources(there[0].data, there[0].scores[split].get("split", split))
    except UserError as error:
        there[0].missing.append(Missing(f"no examples: {error}"))
        return []
    names, rows = class_names(index), {run.name: _predictions(run, split) for run in there}
    first = rows[there[0].name]
    if settings.lines:
        numbers = [line - 1 for line in settings.lines]
        if missing := [number + 1 for number in numbers if number not in first]:
            raise UserError(f"lines: {split} has no line {missing[0]}")
    else:

        def doubt(example: int) -> tuple[int, int]:
            found = [own[example][1] for own in rows.values()]
            return -len(set(found)), -sum(one != first[example][0] for one in found)

        wrong = [one for one in first if any(own[one][1] != first[one][0] for own in rows.values())]
        numbers = sorted(wrong, key=lambda one: (*doubt(one), one))[: settings.sentences]
    places = {example: place for place, example in enumerate(sorted(first))}
    return [
        ClassExample(one + 1, texts[places[one]], names[first[one][0]], {name: names[own[one][1]] for name, own in rows.items()})
        for one in numbers
    ]


def _predictions(run: ReportRun, result: str) -> dict[int, tuple[int, int]]:
    """Return class and predicted class by example."""
    path = run.folder / f"predictions.{result}.tsv"
    hint = f"run workflows/evaluate.py --out {run.given} split={result}"
    try:
        rows = csv.DictReader(io.StringIO(read_text(path, hint)), delimiter="\t")
        return {int(row["example_id"]): (int(row["label"]), int(row["predicted"])) for row in rows}
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{path} is damaged; {hint}") from None


def show_classes(page: Page) -> list[str]:
    """Return the table of scores, and the confusion matrix of each run on the split."""
    runs, split = [run for run in page.report.runs if run.config.get("task") == CLASSIFICATION], page.report.split
    scored = [(run, result, entry) for run in runs for result, entry in run.scores.items() if "accuracy" in entry]
    if not scored:
        return []
    shown = {key: title for key, title in _SCORES.items() if any(key in entry for *_, entry in scored)}
    head = [text("run"), text("result"), TableCell("examples", "n")]
    for title in shown.values():
        head += [TableCell(title, "n"), TableCell("95 %", "n")]
    rows = []
    for run, result, entry in scored:
        cells = [text(run.name), text(result + show_status(run.statuses[result])), number(entry.get("num_examples"))]
        for key in shown:
            interval = entry.get(f"{key}_interval")
            cells.append(number(100 * entry[key] if key in entry else None, ".2f"))
            cells.append(TableCell("{:.2f} to {:.2f}".format(*(100 * end for end in interval)) if interval else "–", "n"))
        rows.append(cells)
    said = "Scores of the runs. The intervals hold for other examples, and not for other seeds of training."
    out = [page.table(said, head, rows)]
    for run, result, entry in scored:
        names, matrix = entry.get("classes"), entry.get("confusion")
        if result == split and matrix and names and len(names) <= _MOST_CLASSES:
            head = [text("class"), *(TableCell(text(name).content, "n") for name in names)]
            cells = [[text(name), *(number(count) for count in row)] for name, row in zip(names, matrix, strict=True)]
            out.append(page.table(f"{run.name} on {split}: examples by class (row) and predicted class (column).", head, cells))
    out.append(paragraph("A test between systems needs several seeds of each: give the folder of compare-seeds.", class_="note"))
    return out


def show_class_examples(page: Page) -> str:
    """Return a table of examples with the predictions of the runs."""
    examples = page.report.scored.examples
    if not examples:
        return ""
    names = list(examples[0].predicted)
    rows = [
        [number(one.line), TableCell(text(one.text).content, "wrap"), text(one.label), *(text(one.predicted[n]) for n in names)]
        for one in examples
    ]
    said = f"Lines of {page.report.split} and their predicted classes. By default, they are lines on which a run is wrong."
    return page.table(said, [TableCell("line", "n"), text("text"), text("class"), *map(text, names)], rows)
