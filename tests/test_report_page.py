"""The page of a report: every text that comes from files is text on it, never markup."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from treenet.analysis.attention_stats import AttentionStats, Group
from treenet.analysis.encoder_attention import EncoderStats, QueryStats
from treenet.evaluation.buckets import FrequencyBucket
from treenet.evaluation.significance import SeedTest
from treenet.experiments.recorded_study import FORMS, form_of, report_records
from treenet.experiments.records import read_records
from treenet.report.answer import Answer, SystemResult
from treenet.report.class_sections import ClassExample
from treenet.report.compare import ScoreRow, ScoreTable, speed
from treenet.report.inside_sections import probes_section
from treenet.report.lines import Frequencies, Lines
from treenet.report.page import render_page
from treenet.report.report_inputs import FINGERPRINTS, Missing, ReportRun, ReportStudy
from treenet.report.report_model import Inside, Report, Scored
from treenet.report.score_sections import ablations_section
from treenet.report.sentence_views import View
from treenet.report.tables import result_columns
from treenet.runs.result_provenance import ResultStatus
from treeproc.common.provenance import Session

pytestmark = pytest.mark.slow

RECORDS = Path(__file__).resolve().parent.parent / "docs" / "results" / "runs"
SHARES = np.full((1, 2), 0.5)


class Planted:
    """Makes hostile texts, and knows them."""

    def __init__(self):
        self.names = []

    def __call__(self, name: str) -> str:
        self.names.append(name)
        return f"</script><i title=\"'&{name}"


def make_run(evil: Planted, split: str) -> ReportRun:
    entry = {"num_examples": 1, "bleu": 1.0, "accuracy": 1.0, "classes": [evil("class"), "b"], "confusion": [[1, 0], [0, 1]]}
    probes = {
        "settings": {},
        "data": {},
        "software": {"version": evil("probing version")},
        "weights": evil("probed weights"),
        "tasks": {evil("probe"): {"majority": 0.5, "results": [
            {"states": "trained", "layer": 1, "of": evil("state"), "test": 0.5, "half_interval": None}]}},
    }  # fmt: skip
    run = ReportRun(
        name=evil("run"), folder=Path(), given="", config={"model": {"name": evil("model")}, "data": "d", "task": "translation"},
        facts={}, metrics=[], scores={split: entry}, translations={}, fingerprints={name: evil(name) for name in FINGERPRINTS},
        trees=evil("trees"), step=1, finished=True, weights_sha256=evil("sha")[:8], probes=probes,
    )  # fmt: skip
    evil.names.remove("sha")  # only its first characters are shown
    run.statuses = {split: ResultStatus(changed="x")}
    run.missing = [Missing(evil("missing"), evil("command that adds"))]
    run.stale = [Missing(evil("stale"), evil("command that renews"))]
    return run


def make_study(evil: Planted, folder: str) -> ReportStudy:
    records = list(read_records(RECORDS / folder).values())[:8]
    form, report = form_of(records), report_records(records)
    for row in report[form.rows]:
        row[form.system] = evil(f"{folder} {row[form.system]}")
    return ReportStudy(evil(folder), "given", form, report, (evil(f"{folder} cell"),))


def make_report(evil: Planted) -> Report:
    split, system, against = evil("split"), evil("system"), evil("against")
    run = make_run(evil, split)
    second = replace(run, name=evil("second run"), fingerprints=dict.fromkeys(FINGERPRINTS, "same"))
    signature = {"bleu": 1.0, "bleu_signature": evil("signature"), "decoding": {evil("setting of search"): evil("its value")}}
    record = {evil("metric"): 2.0, "weights": evil("weights"), "software": {"commit": "c", "version": evil("version")}}
    bucket = {"from": 0, "to": 1, "num_examples": 1, "bleu": 1.0}
    row = ScoreRow(run.name, evil("result"), signature | record | {"buckets": {"words": [bucket]}}, {evil.names[-3]: 2.0})
    row.values = {"bleu": 1.0, next(iter(record)): 2.0}
    group = Group(evil("phrase"), 1, SHARES, 0.5)
    queries = QueryStats(1, SHARES, 0.5, SHARES, 0.5)
    view = View(
        run.name, 0, evil("source"), evil("reference"), evil("translation"), 1.0, leaves=[evil("leaf")], labels=[evil("label")],
        starts=[0], ends=[1], parents=[-1], heights=[1], tokens=[evil("token"), "end"], weights=np.full((1, 1, 2, 2), 0.5),
    )  # fmt: skip
    evil.names.remove("translation")  # in the pictures, its tokens are shown
    test = SeedTest(1.0, 3, (0.5, 1.5), 0.01, 0.1, 0.1)
    rows = [SystemResult(system, (1,), 1.0, None), SystemResult("b", (1,), 2.0, 1.0, 1.0, against, test)]
    session = {"software": {"version": evil("software")}, "packages": {evil("package"): "1"}, "started": evil("start")}
    session |= {"machine": {"processor": evil("processor")}, "did": {evil("work"): 1}, "outcome": evil("outcome")}
    lines = Lines(1, evil("measured"), None, [evil("system of lines")], [1], [1], [1], ["s"], ["r"], [["t"]], [[1.0]])
    return Report(
        title=evil("title"),
        split=split,
        runs=[run, second],
        studies=[make_study(evil, "multi30k"), make_study(evil, "sst2"), ReportStudy(evil("begun"), "given", FORMS[0], None)],
        differing={evil("key"): [evil("value"), [evil("one of several")]]},
        shared={evil("shared key"): evil("shared value")},
        warnings=[evil("warning")],
        ablations=[(evil("variant"), run)],
        made={run.name: [Session(command=f"train {evil('command')}", **session)], evil("made"): []},
        answers=[Answer(evil("about"), "bleu", evil("name of metric"), system, rows)],
        inside=Inside(
            {run.name: AttentionStats("reference", 1, 1, 1, 1, SHARES, [group], [group])},
            {second.name: EncoderStats(1, queries, queries, [group], [group])},
            {0: [view]},
        ),
        scored=Scored(
            [ScoreTable(split, "", list(row.values), [row], row, [evil("note")]), ScoreTable(split, "", [], [])],
            frequencies=[
                Frequencies("", (0,), (FrequencyBucket(1, 1, 1, [1.0]),), 1, evil("tokenizer"), (evil("note of words"),)),
                Frequencies(evil("why none")),
            ],
            lines=lines,
            examples=[ClassExample(1, evil("text"), evil("class of the text"), {run.name: evil("predicted")})],
        ),
    )


def test_no_text_of_a_file_is_markup():
    evil = Planted()
    report = make_report(evil)
    figures = {name: '<svg role="img"></svg>' for form in FORMS for name, _ in report.of_form(form)}
    page = render_page(report, figures)
    missing = [name for name in evil.names if f"&amp;{name}" not in page and f"\\u0026{name}" not in page]
    assert len(evil.names) > 60 and missing == []
    assert "<i title" not in page and page.count("</script>") == page.count("<script") == 4


def test_results_of_one_name_on_other_data_are_marked():
    def result(run: str, name: str, **entry: object) -> tuple:
        return SimpleNamespace(name=run, statuses={name: ResultStatus()}), name, {"nll": 1.0, **entry}

    def data(text: str) -> dict:
        return {"data": {"text_fingerprint": text}}

    rows = [
        result("a", "test.data-news", **data("x")),
        result("b", "test.data-news", **data("y")),
        result("c", "test.data-news", **data("x")),
        result("a", "pairs-p", **data("x"), pairs_fingerprint="p"),
        result("b", "pairs-p", **data("y"), pairs_fingerprint="p"),
        result("c", "pairs-p", **data("x"), pairs_fingerprint="q"),
        result("a", "surprisal-s", **data("x")),
        result("b", "surprisal-s", **data("y")),
    ]
    (names,) = (column.cells for column in result_columns(rows) if column.title == "result")
    marked = [name for name in names if "of other data than that of a" in name]
    assert len(names) == 8 and marked == [names[1], names[5]]


def test_the_table_of_probes_has_each_task_at_its_own_highest_layer():
    report = make_report(Planted())
    results = [
        {"states": "trained", "layer": layer, "of": "mean", "test": layer / 10, "half_interval": None} for layer in range(1, 4)
    ]
    tasks = {"pos_tag": results, "depth": results[:1]}
    for layer, text in ((1, "3 (depth: 1)"), (3, "3")):
        tasks["depth"] = results[:layer]
        probes = {"data": {}, "settings": {}, "tasks": {name: {"majority": 0.5, "results": of} for name, of in tasks.items()}}
        section = probes_section(replace(report, runs=[replace(report.runs[0], name="run", probes=probes)]))
        columns = {column.title: column.cells for column in section["columns"]}
        assert section["tops"] == {"run": text}
        assert (columns["task"], columns["trained"]) == (["pos tag", "depth"], ["30.00", f"{layer}0.00"])


def test_the_table_of_ablations_has_the_digits_of_the_scores():
    report = make_report(Planted())
    (_, run), table = report.ablations[0], report.scored.tables[0]
    run.scores[report.split] |= {"nll": 2.34567, "bleu": 2.34567}
    table.metrics = ["nll", "bleu"]
    assert [column.cells for column in ablations_section(report)["columns"][-2:]] == [["2.346"], ["2.35"]]


def test_the_speed_is_the_median_as_in_summaries_and_records():
    lines = [{"event": "train", "step": step, "nll": 1.0, "tokens_per_s": rate} for step, rate in enumerate((100.0, 300.0), 1)]
    assert speed(replace(make_report(Planted()).runs[0], metrics=lines)) == 200.0
