"""The numbers of a report, as report.json holds them."""

from dataclasses import asdict

from treenet.report.report_model import Report
from treenet.report.report_runs import ReportRun
from treenet.runs.result_provenance import recorded_origin
from treeproc.common.provenance import software


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
        "scores": tables,
        "word_frequency": [found.to_json() for found in report.scored.frequencies],
        "ablations": [{"variant": name, "run": run.name} for name, run in report.ablations],
        "studies": {study.name: study.report for study in report.studies},
        "comparisons": {study.name: study.report for study in report.comparisons},
        "stale_cells": {study.name: study.stale for study in [*report.studies, *report.comparisons] if study.stale},
        "attention": {name: stats.to_json() for name, stats in report.inside.attention.items()},
        "encoder_attention": {name: stats.to_json() for name, stats in report.inside.encoder.items()},
        "attention_weights_sha256": {
            run.name: run.weights_sha256 for run in report.runs if run.name in report.inside.attention | report.inside.encoder
        },
        "probes": {run.name: run.probes for run in report.runs if run.probes},
        "sentences": [
            {name: getattr(view, name) for name in ("line", "example_id", "run", "source", "reference", "translation", "chrf")}
            for views in report.inside.views.values()
            for view in views
        ],
    }
