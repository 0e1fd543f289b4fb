"""The sections of classifiers: their scores and confusion matrices, and examples with the classes that runs predict."""

from collections.abc import Sequence
from dataclasses import dataclass

from treenet.data.splits import read_sources, read_split
from treenet.report.report_inputs import Missing, ReportRun, own_index
from treenet.report.report_model import Report
from treenet.report.settings import ReportSettings
from treenet.report.tables import result_columns, results_with
from treenet.runs.run_results import parse_columns, predictions_path, read_predictions
from treenet.tasks.class_scores import confusion_columns
from treenet.tasks.learning import find_unlearned, say_unlearned
from treenet.tasks.tables import Column, numbers
from treeproc.common.settings import UserError
from treeproc.shards.store import class_names

CLASSIFICATION = "classification"


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
    there = [run for run in runs if split in run.scores and not run.statuses[split].changed]
    there = [run for run in there if (own_index(run) or {}).get("totals")]  # an exported run has no text
    there = [run for run in there if run.scores[split].get("own_data", True)]
    there = [run for run in there if run.fingerprints.get("text_fingerprint") == there[0].fingerprints.get("text_fingerprint")]
    index = own_index(there[0]) if there else None
    if index is None or index.get("pairs"):
        return []
    data, of = there[0].data, there[0].scores[split].get("split", split)
    try:
        numbers = [row["example_id"] for row in read_split(data, "text", of)]
        texts = dict(zip(numbers, read_sources(data, of), strict=True))
    except UserError as error:
        there[0].missing.append(Missing(f"no examples: {error}"))
        return []
    names = class_names(index)
    rows = {run.name: _predictions(run, split, set(texts), len(names)) for run in there}
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
    return [
        ClassExample(one + 1, texts[one], names[first[one][0]], {name: names[own[one][1]] for name, own in rows.items()})
        for one in numbers
    ]


def _predictions(run: ReportRun, result: str, examples: set[int], num_classes: int) -> dict[int, tuple[int, int]]:
    """Return class and predicted class by example. Raises UserError for a file of other examples or classes."""
    path, hint = predictions_path(run.folder, result), f"run {run.statuses[result].command}"
    columns = {"example_id": int, "label": int, "predicted": int}
    numbers, *classes = parse_columns(read_predictions(run.folder, result, hint), path, columns, hint)
    found = dict(zip(numbers, zip(*classes, strict=True), strict=True))
    if found.keys() != examples or max(map(max, found.values())) >= num_classes:
        raise UserError(f"{path} is damaged: its examples or classes are not those of {run.data}; {hint}")
    return found


def classes_section(report: Report) -> dict:
    """Return the table of scores, and the confusion matrix of each run on the split."""
    scored = results_with("accuracy", report.runs)
    on_split = {run.name: confusion_columns(entry) for run, result, entry in scored if result == report.split}
    matrices = {name: columns for name, columns in on_split.items() if columns}
    unlearned = say_unlearned(find_unlearned({f"{run.name}, {result}": entry for run, result, entry in scored}))
    return {"classes": result_columns(scored), "unlearned": unlearned, "matrices": matrices}


def class_examples_section(report: Report) -> dict:
    """Return a table of examples with the predictions of the runs."""
    examples = report.scored.examples
    columns = [
        numbers("line", [one.line for one in examples]),
        Column("text", [one.text for one in examples], "wrap"),
        Column("class", [one.label for one in examples]),
        *(Column(name, [one.predicted[name] for one in examples]) for name in (examples[0].predicted if examples else ())),
    ]
    said = f"Lines of {report.split} and their predicted classes. By default, they are lines on which a run is wrong."
    return {"columns": examples and columns, "caption": said}
