"""The facts of a report, and their numbers as report.json holds them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from treenet.analysis.attention_stats import AttentionStats
from treenet.analysis.encoder_attention import EncoderStats
from treenet.experiments.recorded_study import FORMS
from treenet.experiments.study import StudyForm
from treenet.report.answer import Answer
from treenet.report.compare import ScoreTable
from treenet.report.lines import Frequencies, Lines
from treenet.report.report_inputs import LANGUAGE, ReportRun, ReportStudy, task_of_runs
from treenet.report.sentence_views import View
from treenet.runs.result_provenance import recorded_origin
from treeproc.common.provenance import Session, software


@dataclass(frozen=True)
class Inside:
    """Attention of the models of the runs on the split."""

    attention: dict[str, AttentionStats] = field(default_factory=dict)
    encoder: dict[str, EncoderStats] = field(default_factory=dict)  # self-attention, of the runs whose weights can be computed
    views: dict[int, list[View]] = field(default_factory=dict)  # by example, in the order in which they are shown
    left_out: int = 0  # examples for which there was no room
    without_encoder: int = 0  # examples of `views` whose encoder self-attention had no room

    @property
    def pictures(self) -> list[View]:
        """Return all views."""
        return [view for of_example in self.views.values() for view in of_example]


@dataclass(frozen=True)
class Scored:
    """The scores of the runs, with their tests."""

    tables: list[ScoreTable] = field(default_factory=list)
    answer: Answer | None = None
    frequencies: list[Frequencies] = field(default_factory=list)  # one a table
    lines: Lines | None = None  # all sentences of the split
    examples: Sequence = ()  # `ClassExample` of classifiers


@dataclass(frozen=True)
class Report:
    """Everything that a page shows, except its figures."""

    title: str
    split: str
    runs: list[ReportRun]
    studies: list[ReportStudy]
    differing: dict[str, list]
    shared: dict[str, object]
    warnings: list[str]
    ablations: list[tuple[str, ReportRun]]
    made: dict[str, list[Session]]  # by run or data set, oldest first
    answers: list[Answer]  # of the runs, then of each study
    inside: Inside
    scored: Scored

    def of_form(self, form: StudyForm) -> list[tuple[str, ReportStudy]]:
        """Return the studies of one form, each with the name of its figure."""
        found = [study for study in self.studies if study.form is form]
        return [(f"{form.name}_{number}", study) for number, study in enumerate(found, 1)]

    @property
    def task(self) -> str:
        return task_of_runs(self.runs)

    @property
    def of_classes(self) -> bool:
        """Return whether the runs are classifiers."""
        return self.task == "classification"

    @property
    def of_language(self) -> bool:
        """Return whether the runs are language models."""
        return self.task in LANGUAGE


def report_numbers(report: Report) -> dict:
    """Return the content of report.json: every number of the page but the single attention weights."""

    def run_facts(run: ReportRun) -> dict:
        gaps = {name: [asdict(one) for one in found] for name, found in (("missing", run.missing), ("stale", run.stale))}
        facts = {"updates": run.step, "finished": run.finished, "weights_sha256": run.weights_sha256}
        return {"name": run.name, **facts, "trees": run.trees, **run.fingerprints, **run.facts, **gaps}

    tables = [
        {
            "split": scores.split,
            "text_fingerprint": scores.text,
            "baseline": scores.baseline and {"run": scores.baseline.run, "result": scores.baseline.result},
            "notes": scores.notes,
            "signatures": scores.signatures(),
            "rows": [
                {
                    "run": row.run,
                    "result": row.result,
                    **row.values,
                    "buckets": row.record.get("buckets", {}),
                    "origin": recorded_origin(row.record),
                    "stale": row.status.changed,
                    "tests": {name: asdict(test) | {"difference": test.difference} for name, test in row.tests.items()},
                }
                for row in scores.rows
            ],
        }
        for scores in report.scored.tables
    ]
    return {
        "title": report.title,
        "software": software(),
        "runs": [run_facts(run) for run in report.runs],
        "provenance": {name: [one.model_dump(mode="json") for one in sessions] for name, sessions in report.made.items()},
        "differing_settings": report.differing,
        "warnings": report.warnings,
        "answers": [answer.to_json() for answer in report.answers],
        **({"classes": {run.name: run.scores for run in report.runs}} if report.of_classes else {}),
        **({"language": {run.name: run.scores for run in report.runs}} if report.of_language else {}),
        **({"examples": [asdict(one) for one in report.scored.examples]} if report.scored.examples else {}),
        "scores": tables,
        "word_frequency": [asdict(found) for found in report.scored.frequencies],
        "ablations": [{"variant": name, "run": run.name} for name, run in report.ablations],
        **{
            key: {study.name: study.report for _, study in report.of_form(form)}
            for key, form in zip(("studies", "comparisons"), FORMS, strict=True)
        },
        "stale_cells": {study.name: study.stale for study in report.studies if study.stale},
        "attention": {name: stats.to_json() for name, stats in report.inside.attention.items()},
        "encoder_attention": {name: stats.to_json() for name, stats in report.inside.encoder.items()},
        "attention_weights_sha256": {
            run.name: run.weights_sha256 for run in report.runs if run.name in report.inside.attention | report.inside.encoder
        },
        "probes": {run.name: run.probes for run in report.runs if run.probes},
        "sentences": [
            {name: getattr(view, name) for name in ("line", "example_id", "run", "source", "reference", "translation", "chrf")}
            for view in report.inside.pictures
        ],
    }
