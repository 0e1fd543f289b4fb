"""The report of a study whose records alone are there."""

import re
from collections.abc import Sequence
from pathlib import Path

from treenet.evaluation.bootstrap import statistics_of
from treenet.experiments import scaling_report, seeds_report
from treenet.experiments.ledger import check_labels
from treenet.experiments.records import Record
from treenet.experiments.seeds import MEASURES, SeedGridConfig
from treenet.experiments.settings import GridConfig
from treenet.experiments.study import StudyForm
from treenet.tasks.translation_metrics import MAIN, OF_STUDIES
from treeproc.common.settings import UserError

FORMS = (scaling_report.FORM, seeds_report.FORM)


def form_of(records: Sequence[Record]) -> StudyForm:
    """Return the form of the study of some records. There must be a record."""
    return next((form for form in FORMS if form.system in records[0]["labels"]), FORMS[0])


def systems_of(records: Sequence[Record]) -> list[str]:
    """Return the names of the systems or models, sorted. Raises UserError if labels are damaged."""
    form = form_of(records)
    for record in records:
        check_labels(record["labels"], f"the record of {record['cell']}", form.labels)
    return sorted({str(record["labels"][form.system]) for record in records})


def report_records(records: Sequence[Record], baseline: str | None = None, main: str | None = None) -> dict:
    """Return the content of comparison.json or scaling.json. There must be a record.

    A comparison tests all systems against the baseline. A study tests its main model against the baseline, and all others
    against the main model. A name that is unset or has no record is that of a grid without settings, or else the first one.
    """
    names = systems_of(records)
    if form_of(records) is seeds_report.FORM:
        base = _first((baseline, SeedGridConfig().baseline), names)
        grid = SeedGridConfig(systems={name: {} for name in dict.fromkeys((base, *names))}, baseline=base)
        task = records[0]["settings"].get("task")
        if task not in MEASURES:
            raise UserError(
                f"the record of {records[0]['cell']} is damaged: its task must be {' or '.join(MEASURES)}; restore it"
            )
        return seeds_report.build_report(task, grid, records)
    return scaling_report.build_report(study_grid(records, baseline, main), records)


def study_grid(records: Sequence[Record], baseline: str | None = None, main: str | None = None) -> GridConfig:
    """Return the grid of a study of the data size from its records."""
    names, usual, first = systems_of(records), GridConfig(), records[0]
    if len(first["scores"]) != 1:
        raise UserError(f"the record of {first['cell']} is damaged: it must have the scores of one split; restore it")
    ((split, scores),) = first["scores"].items()
    metric = next((name for name in OF_STUDIES if first["sentences"].keys() >= set(statistics_of(name))), MAIN)
    references = re.match(r"nrefs:(\d{1,3})\b", str(scores.get(f"{metric}_signature")))
    base = _first((baseline, usual.baseline), names)
    return GridConfig(
        fractions=tuple(sorted({float(record["labels"]["fraction"]) for record in records})),
        models={name: {} for name in dict.fromkeys((_first((main, *usual.models), names), base, *names))},
        baseline=base,
        split=split,
        more_references=[Path()] * (int(references[1]) - 1 if references else 0),  # only their number counts
        metric=metric,
    )


def _first(wanted: Sequence[str | None], names: Sequence[str]) -> str:
    """Return the first of the wanted names that is there, or else the first name."""
    return next(name for name in (*wanted, *names) if name is not None and name in names)
