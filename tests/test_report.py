"""The report of tiny runs on toy data: the page's numbers are the runs', and in a browser the pictures answer."""

import json
import math
import shutil
from dataclasses import asdict, replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import toydata
import yaml
from axe import NO_AXE, WIDTHS, violations
from browser import MISSING, browser
from commands import main_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from pictures import pictures
from PIL import Image
from strategies import trees
from toydata import write_toy_data
from toyruns import make_config

from treenet.analysis.attention_stats import node_heights, run_attention
from treenet.analysis.encoder_attention import run_encoder_attention
from treenet.cli.export import main as export_main
from treenet.config import TrainConfig
from treenet.data.splits import read_references, read_split
from treenet.evaluation.bootstrap import compare_systems
from treenet.evaluation.buckets import measure_sources
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.evaluation.significance import ABOUT_WEIGHTS, EXPLAINED, SeedTest
from treenet.experiments.ledger import DONE, Entry, Ledger
from treenet.experiments.recorded_study import report_records
from treenet.experiments.records import Recording, read_records
from treenet.experiments.scaling_report import FORM, LABELS, read_result
from treenet.experiments.seeds import MEASURES, SeedsConfig
from treenet.experiments.seeds_report import FORM as SEEDS_FORM
from treenet.experiments.seeds_report import LABELS as SEEDS_LABELS
from treenet.experiments.settings import ScalingConfig
from treenet.jobs.train_run import run_training
from treenet.report import build, sentence_views
from treenet.report.build import write_report
from treenet.report.compare import ablations, references_of, score_tables, settings_of, warnings
from treenet.report.figures import shade, share_text
from treenet.report.inside_sections import probes_section
from treenet.report.lines import collect_lines
from treenet.report.report_inputs import read_report_inputs, short_names
from treenet.report.sentence_views import BOX_HEIGHT, View, build_views, choose_examples, lay_out
from treenet.report.settings import ReportSettings
from treenet.runs.exported_run import export_run
from treenet.runs.loading import load_run
from treenet.runs.metrics_log import read_metrics
from treenet.runs.run_folder import read_facts
from treenet.tasks.translation_metrics import sentence_chrf
from treeproc.common.files import atomic_write
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.shards.lengths import read_lengths
from treeproc.shards.store import fingerprint_of, read_index

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
EVIL = "<script>document.title='run'</script>"
EVIL_LABEL = "<b>&$x^$"
RUNS = {"tree": (), "plain": ("model.name=transformer",), "no<mask": ("model.tree.subtree_mask=false",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A data set with markup in a word and in a label, and three runs that are trained and scored."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toydata, "WORDS", [*toydata.WORDS[:6], EVIL])
        patch.setattr(toydata, "LABELS", [*toydata.LABELS[:4], EVIL_LABEL])
        write_toy_data(folder / "data", train=20, valid=4, test=8)
    for name, overrides in RUNS.items():
        size = ("max_steps=2", "checkpoint_every=1", "validate_every=1", "model.num_decoder_layers=2", "decoding.beam_size=2")
        config = make_config(folder / "data", *size, "decoding.max_length_factor=0.5", *overrides)
        run_training(config, folder / name)
        evaluate_run(folder / name, EvaluateSettings())
    return folder


def report_settings(folder: Path, *names: str, **more) -> ReportSettings:
    return ReportSettings(runs=tuple(str(folder / name) for name in names or RUNS), bootstrap_samples=100, **more)


@pytest.fixture(scope="module")
def out(folder) -> Path:
    with pictures():
        files = write_report(report_settings(folder, sentences=3, title="A <i>title</i>"), folder / "out")
    assert all(path.stat().st_size for path in files)
    return folder / "out"


@pytest.fixture
def nothing_inside(monkeypatch) -> None:
    """The page lacks attention and scores of sentences, which take seconds."""
    monkeypatch.setattr(build, "_look_inside", lambda *_: build.Inside())


@pytest.mark.usefixtures("nothing_inside")
def test_metrics_of_another_run_are_told(folder, tmp_path):
    shutil.copytree(folder / "tree", tmp_path / "run")
    write_report(report_settings(folder, str(tmp_path / "run"), sentences=0), tmp_path / "own")
    shutil.copy(folder / "plain" / "metrics.jsonl", tmp_path / "run")
    write_report(report_settings(folder, str(tmp_path / "run"), sentences=0), tmp_path / "other")
    pages = [(tmp_path / name / "index.html").read_text() for name in ("own", "other")]
    assert ["metrics.jsonl is of another run: its loss on valid at update" in page for page in pages] == [False, True]


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps texts by tag, attributes and links."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.ids, self.links, self.texts, self.rows = [], [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert not any(name.startswith("on") for name in values), tag
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "xlink:href", "action") if name in values]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "br", "input"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page(out) -> Reader:
    return Reader((out / "index.html").read_text())


def test_the_page_is_whole_and_loads_nothing(out, page):
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link == "data:," or (link[1:] in page.ids if link.startswith("#") else (out / unquote(link)).is_file()), link
    text = (out / "index.html").read_text()
    assert text.count("<script") == 4 and "http:" not in text.replace("http://www.w3.org/", "") and "https:" not in text
    assert '<th scope="col"></th>' not in text and '<th scope="col" class="n"></th>' not in text  # every column has a name
    assert text.count('class="box"') == text.count('class="box" tabindex="0" role="group" aria-label="')
    assert "default-src 'none'" in text and "@import" not in text and len(text) < 600_000


def test_texts_are_escaped(out, page):
    text = (out / "index.html").read_text()
    assert EVIL not in text and EVIL_LABEL not in text and "A <i>title" not in text and "no<mask" not in text
    assert "A <i>title</i>" in page.texts and any(EVIL in message for message in page.texts)
    sentence_views = json.loads(text.partition('id="views">')[2].partition("</script>")[0])
    assert any(EVIL_LABEL in name for view in sentence_views for name in view["names"])


def test_scores_and_tests_are_those_of_the_runs(folder, out, page):
    references = read_references(folder / "data", "test")
    lines = {name: (folder / name / "translations.test.txt").read_text().split("\n")[:-1] for name in RUNS}
    numbers = json.loads((out / "report.json").read_text())
    (table,) = numbers["scores"]
    assert table["baseline"] == {"run": "plain", "result": "test"}  # the first without trees
    for row in table["rows"]:
        scores = json.loads((folder / row["run"] / "scores.json").read_text())["test"]
        assert row["bleu"] == scores["bleu"] and row["chrf"] == scores["chrf"]
        shown = next(cells for cells in page.rows if cells and cells[0] == row["run"] and len(cells) > 7)
        assert f"{scores['chrf']:.2f}" in shown and f"{scores['bleu']:.2f}" in shown
        if row["run"] == "plain":
            assert row["tests"] == {}
            continue
        found = compare_systems(lines["plain"], lines[row["run"]], references, 100)
        for name, test in found.items():
            expected = asdict(test) | {"difference": test.difference, "interval": list(test.interval) if test.interval else None}
            assert row["tests"][name] == expected
            assert f"{test.difference:+.2f}".replace("-", "−") in shown
        assert found["bleu"].signature in page.texts
        assert row["tests"]["bleu"]["about"] == ABOUT_WEIGHTS and not any("*" in cell for cell in shown)
    caption = next(message for message in page.texts if "Scores on test" in message)
    assert f"p is of these weights alone: {EXPLAINED}" in caption
    (frequency,) = numbers["word_frequency"]
    assert not frequency["missing"] and frequency["training_lines"] == 20 and frequency["rows"] == [0, 1, 2]
    assert any(row[:1] == ["times in training"] for row in page.rows)
    assert any("how often they occur in the 20 lines of the training text" in message for message in page.texts)
    # The baseline stands first, although it was given second.
    assert [row["run"] for row in table["rows"]] == [run["name"] for run in numbers["runs"]] == ["plain", "tree", "no<mask"]
    (answer,) = numbers["answers"]  # on the first screen
    assert answer["rows"][0]["system"] == "plain"
    assert answer["baseline"] == "plain" and [row["test"] for row in answer["rows"]] == [None] * 3
    assert page.texts.index(answer["sentence"]) < min(i for i, one in enumerate(page.texts) if "fingerprint" in one)


def test_all_sentences_are_those_of_the_runs(folder, out):
    text = (out / "index.html").read_text()
    data = json.loads(text.partition('id="lines-data">')[2].partition("</script>")[0])
    references = read_references(folder / "data", "test")
    assert data["systems"] == ["plain", "tree", "no<mask"] and data["baseline"] == 0 and data["measured"] == "tree"
    assert data["line"] == list(range(1, 9)) and data["total"] == 8 and data["reference"] == references
    for name, lines, chrf in zip(data["systems"], data["translations"], data["chrf"], strict=True):
        assert lines == (folder / name / "translations.test.txt").read_text().split("\n")[:-1]
        assert chrf == sentence_chrf(lines, references).round(2).tolist()
    rows = list(read_split(folder / "data", "text", "test"))
    assert data["source"] == [row["source"] for row in rows]
    sizes = measure_sources(read_split(folder / "data", "encoded", "test"))
    assert data["words"] == sizes["words"].tolist() and data["depth"] == sizes["depth"].tolist()
    assert any(EVIL in line for line in data["source"])


@pytest.mark.usefixtures("nothing_inside")
def test_every_metric_that_scores_hold_gets_a_column(folder, tmp_path):
    for name in ("tree", "plain"):
        shutil.copytree(folder / name, tmp_path / name)
    record = json.loads((tmp_path / "tree" / "scores.json").read_text())
    words = [{"from": 0, "to": 10, "num_examples": 3, "bleu": 7.25}, {"from": 11, "to": None, "num_examples": 5, "bleu": 8}]
    more = {"other_score": 33.125, "other_score_signature": "tok:moses", "exact": True, "buckets": {"words": words}}
    record["test"] |= more
    record["test.untrained"] = {**record["test"], "bleu": 0.5}
    record["unsupervised_parse-test"] = {"split": "test", "sentence_f1": 0.4}
    (tmp_path / "tree" / "scores.json").write_text(json.dumps(record))
    write_report(report_settings(tmp_path, "tree", "plain", sentences=0), tmp_path / "out")
    page = Reader((tmp_path / "out" / "index.html").read_text())
    head = next(row for row in page.rows if "other score" in row)
    assert head[1:4] == ["BLEU", "difference", "p"] and "exact" not in head
    assert any(row[0] == "tree" and "33.12" in row for row in page.rows) and "tok:moses" in page.texts
    assert not any("parse" in cell for row in page.rows for cell in row)
    assert any(row[0] == "tree (untrained)" and "0.50" in row for row in page.rows)
    assert (
        "tree, test.untrained: no test, because its translations are missing, or have changed since they were "
        "scored." in page.texts
    )
    for bucket in (["up to 10", "3", "7.25", "7.25"], ["11 and more", "5", "8.00", "8.00"]):
        found = next(row for row in page.rows if row[0] == bucket[0])
        assert found[:2] + found[-2:] == bucket


def test_attention_is_that_of_the_runs(folder, out, page):
    attention = json.loads((out / "report.json").read_text())["attention"]
    for name in RUNS:
        assert attention[name] == run_attention(load_run(folder / name), "test").to_json()
    trees = {name: found for name, found in attention.items() if found["nodes"]}
    assert list(trees) == ["tree", "no<mask"] and attention["plain"]["target_to_nodes"]["mean"] == 0
    encoders = json.loads((out / "report.json").read_text())["encoder_attention"]
    for name in RUNS:
        assert encoders[name] == run_encoder_attention(load_run(folder / name), "test").to_json()
    row = next(row for row in page.rows if row[0] == "Node → itself")
    shares = [encoders[name]["nodes"]["to_itself"] for name in ("tree", "no<mask")]
    expected = [f"{100 * share['mean']:.1f} ± {100 * share['deviation']:.1f}" for share in shares]
    assert row[1:] == ["–", *expected]  # the plain model has no nodes
    for chart in ("attention", "encoder_attention"):
        assert all((out / "figures" / f"{chart}_by_{kind}.svg").is_file() for kind in ("label", "height"))
    row = next(row for row in page.rows if row[0] == "Target → nodes")
    for cell, found in zip(row[1:], trees.values(), strict=True):
        both = found["target_to_nodes"]
        assert cell == f"{100 * both['mean']:.1f} ± {100 * both['deviation']:.1f}"


def test_the_report_shows_differences_and_warns_of_unfair_comparisons(folder, page):
    assert ["model.tree.subtree_mask", "true", "true", "false"] in [[cell.lower() for cell in row] for row in page.rows]
    runs, *_ = read_report_inputs([str(folder / name) for name in RUNS], "test")
    differing, shared = settings_of(runs)
    assert set(differing) == {"model.name", "model.tree.subtree_mask"} and shared["batch.max_tokens"] == 64
    assert warnings(runs, runs[1]) == []
    other = replace(
        runs[0],
        config={**runs[0].config, "seed": 5, "batch": {**runs[0].config["batch"], "max_tokens": 32}},
        fingerprints={**runs[0].fingerprints, "pieces_fingerprint": "other", "tree_fingerprint": "other"},
        step=9,
    )
    message = warnings([other, runs[1]], runs[1])
    assert len(message) == 4 and "other pieces" in message[0] and "other trees" in message[1] and "9 updates" in message[3]
    assert "batch.max_tokens is 32, not 64" in message[2] and "seed is 5, not 1" in message[2]
    optimizer, model = ({**runs[0].config[name]} for name in ("optimizer", "model"))
    tuned = {**runs[0].config, "optimizer": optimizer | {"clip_norm": 2.0}, "model": model | {"dropout": 0.35}}
    [message] = warnings([replace(runs[0], config=tuned)], runs[1])
    assert "has other settings than" in message and "optimizer.clip_norm is 2.0, not the default" in message
    assert "model.dropout is 0.35, not " in message and "subtree_mask" not in message
    labels = replace(runs[0], fingerprints={**runs[0].fingerprints, "vocab_fingerprint": "other"})
    assert warnings([labels], runs[1]) == []  # other labels of nodes alone
    scored = {key: value for key, value in labels.fingerprints.items() if key != "pieces_fingerprint"}  # the data set is gone
    assert "another vocabulary" in warnings([replace(labels, fingerprints=scored)], runs[1])[0]


@pytest.mark.usefixtures("nothing_inside")
def test_trees_of_the_data_are_named(folder, out, page, tmp_path):
    assert ["trees of the data", "random", "random", "random"] in page.rows
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "tree", tmp_path / "tree")
    index, config = (tmp_path / name for name in ("data/encoded/index.json", "tree/config.yaml"))
    form = {"tree_source": "dependencies", "phrases": "layered", "phrase_labels": "upos"}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"tree_source": "dependencies", "tree_settings": form}))
    config.write_text(config.read_text().replace(str(folder / "data"), str(tmp_path / "data")))
    write_report(report_settings(tmp_path, "tree", sentences=0), tmp_path / "out")
    (shown,) = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert shown["trees"] == "dependencies (phrases=layered, phrase_labels=upos)"
    form = {"tree_source": "shuffled", "tree_settings": {}}
    counts = {"own_nodes": 5, "given_nodes": 3, "shared_nodes": 2, "own_shapes": 1, "compared_lines": 4}
    values = json.loads(index.read_text()) | form
    values["totals"] = {split: total | counts for split, total in values["totals"].items()}
    index.write_text(json.dumps(values))
    runs, *_ = read_report_inputs([str(tmp_path / "tree")], "test")
    agreement = "unlabelled F1 with the lines' own trees 0.50, 25.0% of the shapes are the same"
    (table,) = score_tables(runs, None, 1)
    assert table.notes == [f"tree has shuffled trees: {agreement}."]
    index.unlink()
    assert read_report_inputs([str(tmp_path / "tree")], "test")[0][0].trees is None


@pytest.mark.usefixtures("nothing_inside")
def test_a_run_that_reads_the_other_side_is_not_tested_against_the_references_of_the_first(folder, tmp_path):
    index, other = tmp_path / "data/encoded/index.json", tmp_path / "other"
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "tree", other)
    index.write_text(json.dumps(json.loads(index.read_text()) | {"fingerprint": "other", "tree_settings": {"side": "target"}}))
    changes = {
        str(folder / "data"): str(tmp_path / "data"),
        read_index(folder / "data/encoded")["fingerprint"]: "other",
        fingerprint_of(read_references(folder / "data", "test")): fingerprint_of(read_references(tmp_path / "data", "test")),
    }
    for path in (other / "config.yaml", *other.rglob("*.json")):
        for old, new in changes.items():
            path.write_text(path.read_text().replace(old, new))
    runs, _ = read_report_inputs([str(folder / "plain"), str(folder / "tree"), str(other)], "test")
    tables = score_tables(runs, runs[0], 10)
    assert [[row.run for row in table.rows] for table in tables] == [["plain", "tree"], ["other"]]
    assert tables[0].rows[1].tests and not tables[1].rows[0].tests
    for (table, has), side in zip(((tables[0], runs[:2]), (tables[1], runs[2:])), ("target", "source"), strict=True):
        found, lines = references_of(table, runs)
        assert found in has and lines == [row[side] for row in read_split(folder / "data", "text", "test")]
    assert collect_lines(tables, runs, "test").systems == ["plain", "tree"]
    assert "other reads the target side of its text, plain the source, so do not compare the two." in warnings(runs, runs[0])
    for run in runs:
        run.probes = {"settings": {}, "data": {}, "tasks": {}}
    assert [probes_section(SimpleNamespace(runs=some))["comparable"] for some in (runs[:2], runs)] == [True, False]
    write_report(report_settings(folder, "plain", str(other), sentences=0), tmp_path / "out")
    shown = json.loads((tmp_path / "out/report.json").read_text())["scores"]
    assert [row["tests"] for table in shown for row in table["rows"]] == [{}, {}]


def test_ablations_are_runs_that_differ_in_the_tree_alone(folder, page):
    runs, *_ = read_report_inputs([str(folder / name) for name in RUNS], "test")
    variants = [("Tree Transformer", "tree"), ("Tree Transformer – SubMask", "no<mask")]
    assert [(name, run.name) for name, run in ablations(runs)] == variants
    assert any(row[:2] == ["Tree Transformer – SubMask", "no<mask"] for row in page.rows)
    runs[2].config["max_steps"] = 3
    assert ablations(runs) == []


def test_sentences_are_those_of_the_largest_differences(folder):
    runs, *_ = read_report_inputs([str(folder / name) for name in ("plain", "tree")], "test")
    references = read_references(folder / "data", "test")
    gains = sentence_chrf(runs[1].translations["test"], references) - sentence_chrf(runs[0].translations["test"], references)
    chosen = choose_examples(runs, runs[0], "test", 8, ())
    assert sorted(chosen) == list(range(8)) and gains[chosen[0]] == gains.max() and gains[chosen[1]] == gains.min()
    leaves = read_lengths(folder / "data" / "encoded", "test")["leaves"]
    legible = np.flatnonzero((leaves >= sentence_views._FEWEST) & (leaves <= sentence_views._MOST))
    assert 2 <= len(legible) < 8  # enough for two: none but these is shown
    first, last = choose_examples(runs, runs[0], "test", 2, ())
    assert {first, last} <= set(legible.tolist())
    assert gains[first] == gains[legible].max() and gains[last] == gains[legible].min()
    assert choose_examples(runs, runs[0], "test", 2, (8, 4, 8)) == [7, 3]
    assert len(choose_examples(runs[:1], runs[0], "test", 3, ())) == 3 and choose_examples(runs, runs[0], "test", 0, ()) == []
    with pytest.raises(UserError, match="has no line 99; its lines are 1 to 8"):
        choose_examples(runs, runs[0], "test", 2, (1, 99))


def test_a_run_that_is_not_finished_shows_what_it_has(folder, tmp_path):
    run = tmp_path / "begun"
    shutil.copytree(folder / "tree", run, ignore=shutil.ignore_patterns("averaged", "scores.json", "translations.*"))
    gone = tmp_path / "gone"
    shutil.copytree(folder / "plain", gone)
    config = (gone / "config.yaml").read_text()
    (gone / "config.yaml").write_text(config.replace(str(folder / "data"), str(tmp_path / "nowhere")))
    write_report(report_settings(tmp_path, "begun", "gone"), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    missing = {run["name"]: " ".join(one["said"] + one["command"] for one in run["missing"]) for run in found["runs"]}
    assert (
        f"no averaged model, after 2 of 2 updatestree-attention train --config {run}/config.yaml --out {run}" in missing["begun"]
    )
    assert f"tree-attention evaluate --out {run} split=test" in missing["begun"]
    assert "its data set is missing or was made again" in missing["gone"] and found["sentences"] == []
    assert [row["run"] for row in found["scores"][0]["rows"]] == ["gone"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Learning curves" in text and 'id="sentences"' not in text and "; to add it: <code>tree-attention" in text


def test_an_exported_run_has_scores_but_nothing_of_sentences(folder, tmp_path, monkeypatch):
    """A folder `data` where the command runs is not that of the run, which once was read."""
    exported = tmp_path / "exported"
    export_run(load_run(folder / "tree"), exported)
    for name in ("scores.json", "translations.test.txt"):
        shutil.copy(folder / "tree" / name, exported)
    monkeypatch.chdir(folder)
    write_report(report_settings(tmp_path, "exported"), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["run"] for row in found["scores"][0]["rows"]] == ["exported"] and not found["attention"]
    said = [one["said"] for one in found["runs"][0]["missing"]]
    assert said == ["it was exported without its data set, so the page has nothing that needs its sentences"]


def test_a_run_without_a_transformer_decoder_has_scores_and_curves_but_no_attention(folder, tmp_path):
    size = ("max_steps=1", "checkpoint_every=1", "validate_every=1", "decoding.beam_size=2", "decoding.max_length_factor=0.5")
    run_training(make_config(folder / "data", *size, "model.name=convs2s"), tmp_path / "convolution")
    evaluate_run(tmp_path / "convolution", EvaluateSettings())
    runs = (str(folder / "plain"), str(tmp_path / "convolution"))
    write_report(ReportSettings(runs=runs, bootstrap_samples=100, sentences=1), tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(numbers["attention"]) == ["plain"] and len(numbers["scores"][0]["rows"]) == 2
    assert "no Transformer decoder" in numbers["runs"][1]["missing"][0]["said"]


def test_the_same_command_writes_the_same_bytes_and_removes_old_figures(folder, tmp_path):
    chosen = report_settings(folder, "plain", sentences=1)
    with pictures():
        first, again = ({path.name: path.read_bytes() for path in write_report(chosen, tmp_path)} for _ in range(2))
    assert first == again
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    write_report(report_settings(folder, "plain", sentences=0), tmp_path)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "mine.png",
        *(name for name in first if name.endswith((".png", ".svg")) and not name.startswith("line_")),
    }


def test_sentences_for_which_there_is_no_room_are_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_MOST_WEIGHTS", 1500)
    write_report(report_settings(folder, "plain", sentences=8), tmp_path)
    shown = json.loads((tmp_path / "report.json").read_text())["sentences"]
    assert 0 < len(shown) < 8
    assert f"{8 - len(shown)} more sentences are left out" in (tmp_path / "index.html").read_text()


def test_attention_of_the_encoder_for_which_there_is_no_room_is_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_MOST_SELF_WEIGHTS", 1500)
    write_report(report_settings(folder, "plain", sentences=8), tmp_path)
    text = (tmp_path / "index.html").read_text()
    sentence_views = json.loads(text.partition('id="views">')[2].partition("</script>")[0])
    kept = [view["encoder"] for view in sentence_views if view["encoder"]]
    assert len(sentence_views) == 8 and 0 < len(kept) < 8 and sum(len(one["weights"]) for one in kept) <= 1500
    assert f"The encoder's attention of {8 - len(kept)} sentences is left out" in text
    assert text.count('class="source"') == len(kept)


@pytest.mark.usefixtures("nothing_inside")
def test_a_study_brings_its_table_and_plot(folder, tmp_path):
    study = tmp_path / "study"
    config = ScalingConfig(data=folder / "data", grid={"fractions": (1.0,), "seeds": (1,), "bootstrap_samples": 50})
    entries = {}
    for model, name in (("transformer", "plain"), ("tree_transformer", "tree")):
        shutil.copytree(folder / name, study / "cells" / f"{model}-1-seed1")
        labels = {"model": model, "fraction": 1.0, "seed": 1}
        settings = load_settings(TrainConfig, folder / name / "config.yaml").model_dump(mode="json")
        fingerprint = read_facts(folder / name)["data_fingerprint"]
        entries[f"{model}-1-seed1"] = Entry(labels, settings, fingerprint, status=DONE, starts=1)
    (study / "ledger.json").write_text(json.dumps({"cells": {name: vars(entry) for name, entry in entries.items()}}))
    write_report(report_settings(tmp_path, "study"), tmp_path / "out")
    assert "no cell of the study is done yet" in (tmp_path / "out" / "index.html").read_text()
    records = Recording(LABELS, partial(read_result, config)).read_all(Ledger.read(study), study)
    FORM.write(config, records, study)
    write_report(report_settings(tmp_path, "study"), tmp_path / "out")
    report = json.loads((study / "scaling.json").read_text())
    page = Reader((tmp_path / "out" / "index.html").read_text())
    for point in report["points"]:
        row = next(
            row for row in page.rows if row[0] == point["model"] and len(row) > 8 and f"{point['bleu']['mean']:.2f}" in row
        )
        if "comparison" in point:  # one seed: no interval, no p over seeds, no star
            assert row[-4:-1] == ["–", "–", "–"] and row[-1][-1].isdigit()
    assert any(EXPLAINED in message for message in page.texts)
    assert (tmp_path / "out" / "figures" / "scaling_1.svg").is_file()


@pytest.mark.usefixtures("nothing_inside")
@pytest.mark.parametrize("task", ["sick", "sst5_whole_words"])
def test_a_comparison_over_seeds_brings_its_table_and_picture(task, folder, tmp_path):
    """The comparison of real records, with a run beside it. Before its first cell is done, the page says so."""
    study = tmp_path / "study"
    study.mkdir()
    config = load_settings(SeedsConfig, ROOT / "workflows" / "configs" / f"seeds_{task[:4]}.yaml", [], data=tmp_path)
    (study / "config.yaml").write_bytes(dump_settings(config).encode())
    (study / "ledger.json").write_text('{"cells": {}}')
    settings = report_settings(tmp_path, "study", str(folder / "plain"), sentences=0)
    write_report(settings, tmp_path / "out")
    assert "study: no cell of the study is done yet" in (tmp_path / "out" / "index.html").read_text()
    records = Recording(SEEDS_LABELS, lambda path: ({}, {}), ROOT / "docs" / "results" / "runs" / task).kept()
    records["tree_transformer-seed1"]["labels"]["system"] = records["tree_transformer-seed1"]["cell"] = EVIL
    SEEDS_FORM.write(config, list(records.values()), study)
    with pictures():
        write_report(settings, tmp_path / "out")
    report = json.loads((study / "comparison.json").read_text())
    text = (tmp_path / "out" / "index.html").read_text()
    page, measures = Reader(text), MEASURES[config.task]
    assert EVIL not in text and len(report["systems"]) > 5
    answer = json.loads((tmp_path / "out" / "report.json").read_text())["answers"][-1]
    assert answer["sentence"] in page.texts and len(answer["rows"]) == len(report["systems"])
    for row in report["systems"]:
        first, shown = (cells for cells in page.rows if cells and cells[0].removesuffix(" (baseline)") == row["system"])
        assert first[1] == measures.show(row[f"test.{measures.headline}"]["mean"])
        assert shown[1] == str(len(row["seeds"])) and f"{row['parameters']:,}" == shown[-2]
        assert measures.show_mean(row[f"test.{measures.headline}"], measures.headline) in shown
        if tests := row.get("tests"):
            test = SeedTest(**tests[f"test.{measures.headline}"])
            difference, *interval = (measures.show(x, "+").replace("-", "−") for x in (test.difference, *(test.interval or ())))
            assert difference in shown and first[2:4] == [difference, " to ".join(interval) or "–"]
    assert any("compared pairs of cells were trained with different commits" in message for message in page.texts)
    assert (tmp_path / "out" / "figures" / "seeds_1.svg").is_file() and 'aria-label="seeds 1"' in text
    assert json.loads((tmp_path / "out" / "report.json").read_text())["comparisons"]["study"] == report


@pytest.mark.parametrize(
    ("task", "scored", "said"),
    [
        ("relatedness", True, "its scores are in {run}/scores.json"),
        ("relatedness", False, "tree-attention evaluate --out {run} scores it"),
    ],
)
def test_a_run_of_another_task_is_refused_with_the_place_of_its_scores(tmp_path, task, scored, said):
    config = {"task": task, "data": "data", "model": {"name": "transformer"}, "max_steps": 1, "checkpoint_every": 1}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "run.json").write_text("{}")
    if scored:
        (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(UserError) as raised:
        read_report_inputs([f"{tmp_path}/"], "test")
    wanted = f"{tmp_path}/ is a run of {task}, and a report reads runs of translation, classification and language models, and "
    assert str(raised.value) == f"{wanted}studies of all tasks; {said.format(run=tmp_path)}"


def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, monkeypatch):
    main = main_of("report.py")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "ledger.json").write_text("{}")
    (tmp_path / "seeds" / "config.yaml").write_text("task: classification\ndata: d\nmodel: {name: bilstm}\n")
    (tmp_path / "seeds" / "comparison.json").write_text('{"task": "classification", "systems": 5}')
    tree = str(folder / "tree")
    for arguments, expected in (
        ([tree], "give --out DIR"),
        (["--out", str(tmp_path / "out")], "give the folders of runs or studies"),
        (["--out", str(tmp_path / "out"), str(tmp_path / "empty")], "neither a run nor a study: .*config.yaml is missing"),
        (["--out", str(tmp_path / "out"), str(tmp_path / "nowhere")], "neither a run nor a study"),
        (["--out", str(tmp_path / "out"), str(tmp_path / "seeds")], "comparison.json is damaged: baseline: Field required"),
        (["--out", str(tmp_path / "out"), tree, tree], "is given twice"),
        (["--out", str(tmp_path / "out"), tree, f"{tree}/"], "is given twice"),
        (["--out", str(tmp_path / "out"), tree, "lines=[99]"], "has no line 99"),
        (["--out", str(tmp_path / "out"), tree, "baseline=other"], "baseline must be one of tree, but is other"),
        (["--out", str(tmp_path / "out"), tree, "sentence=3"], "unknown key"),
        (["--out", str(tmp_path / "file"), tree, "sentences=0"], "is a file, but must be a folder; choose another --out"),
    ):
        with pytest.raises(UserError, match=expected) as raised:
            main(arguments)
        assert "\n" not in str(raised.value)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UserError, match="must be an absolute path in a submitted job"):
        main(["--out", str(tmp_path / "out"), "runs/tree"])
    assert not (tmp_path / "out").exists() and (tmp_path / "file").read_text() == ""


RECORDS = Path(__file__).resolve().parent.parent / "docs" / "results" / "runs"


@pytest.mark.parametrize(
    ("study", "place", "value"),
    [
        ("control_a/arcs", "scores.test.bleu", None), ("control_a/arcs", "scores.test.bleu_signature", 5),
        ("control_a/arcs", "scores.test.bleu_signature", "nrefs:" + 30 * "9"), ("agreement_pretrained", "facts", {}),
        ("agreement_pretrained", "scores.test.accuracy", float("nan")), ("agreement_pretrained", "scores.test.accuracy", "x"),
    ],
)  # fmt: skip
def test_damaged_records_are_one_line(tmp_path, study, place, value):
    path = sorted((RECORDS / study).glob("*.json"))[0]
    record = json.loads(path.read_text())
    *parents, last = place.split(".")
    inner = record
    for name in parents:
        inner = inner[name]
    inner[last] = value
    (tmp_path / path.name).write_text(json.dumps(record))
    with pytest.raises(UserError, match="damaged|number of references"):
        read_report_inputs([str(tmp_path)], "test")


@pytest.mark.parametrize(
    ("key", "value"),
    [("points", 5), ("points", [5]), ("metric", "x"), ("cells", [5]), ("baseline", None), ("points.0.pairs", float("nan")),
     ("points.0.bleu", None), ("points.0.fraction", "x"), ("points.1.comparison.against", "x"), ("cells", [{}]),
     ("points.1.comparison", {"x": 1})],
)  # fmt: skip
def test_a_damaged_study_is_one_line(tmp_path, key, value):
    report = report_records(list(read_records(RECORDS / "control_a" / "arcs").values())[:2])
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    inner = report
    for name in parents:
        inner = inner[name]
    inner[last] = value
    (tmp_path / "ledger.json").write_text('{"cells": {}}')
    (tmp_path / "scaling.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match="scaling.json is damaged: "):
        read_report_inputs([str(tmp_path)], "test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record["scores"].update(valid=record["scores"].pop("test")), "has no .* of test; keep"),
        (lambda record: record["sentences"].clear(), "has no numbers of single sentences for the metric bleu; keep"),
        (
            lambda record: record["scores"]["test"].update(bleu_signature="nrefs:3|x"),
            "another number of references than nrefs:1 of the first record; remove it, or keep",
        ),
    ],
)  # fmt: skip
def test_records_of_two_studies_are_told_apart_in_words_of_the_report(tmp_path, change, said):
    first, second, *_ = sorted((RECORDS / "control_a" / "arcs").glob("*.json"))
    shutil.copy(first, tmp_path)
    record = json.loads(second.read_text())
    change(record)
    (tmp_path / second.name).write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"{said} the records of each study in a separate folder$"):
        read_report_inputs([str(tmp_path)], "test")


HUGE = ("1e308", "-1e308", "1" + 400 * "0")


@pytest.mark.parametrize("value", HUGE, ids=lambda value: value[:6])
@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("scores.json", "test.bleu"), ("scores.json", "test.buckets.depth.0.bleu"), ("scores.json", "test.num_examples"),
        ("run.json", "parameters"), ("scaling.json", "points.0.bleu.mean"), ("comparison.json", "systems.0.seconds"),
    ],
)  # fmt: skip
def test_numbers_whose_sums_overflow_are_one_line(folder, tmp_path, file, key, value):
    """They ended in an OverflowError or a ValueError of Python or of matplotlib."""
    place = tmp_path / "given"
    if (folder / "plain" / file).is_file():
        shutil.copytree(folder / "plain", place)
        content = json.loads((place / file).read_text())
    else:
        place.mkdir()
        (place / "ledger.json").write_text('{"cells": {}}')
        row = {"model": "m", "system": "m", "seeds": [1], "parameters": 1, "seconds": 1.0, "fraction": 1.0, "pairs": 9.0}
        row |= {metric: {"mean": 1.0, "values": [1.0], "half_interval": None} for metric in ("bleu", "chrf")}
        content = {
            "split": "test",
            "task": "classification",
            "baseline": "m",
            "metric": "bleu",
            **{name: [] for name in ("cells", "slopes", "pooled")},
            **{name: {} for name in ("unlike", "confounded")},
            key.partition(".")[0]: [row],
        }
        if file == "comparison.json":
            (place / "config.yaml").write_text("task: classification\ndata: d\nmodel: {name: bilstm}\n")
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    inner = content
    for name in parents:
        inner = inner[name]
    inner[last] = json.loads(value)
    (place / file).write_text(json.dumps(content))
    settings = ReportSettings(runs=(str(place),))
    with pytest.raises(UserError, match=rf"given/{file} is damaged: {key}.*, but is -?1") as raised:
        write_report(settings, tmp_path / "out")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["-9e99", "Infinity", "NaN"])
@pytest.mark.filterwarnings("ignore")  # of matplotlib
@pytest.mark.usefixtures("nothing_inside", "rendered")
def test_unlikely_numbers_are_drawn_and_shown(folder, tmp_path, value):
    for name in ("plain", "tree"):
        shutil.copytree(folder / name, tmp_path / name)
    file = tmp_path / "tree" / "scores.json"
    record = json.loads(file.read_text(), parse_float=lambda digits: json.loads(value))  # all scores
    file.write_text(json.dumps(record))
    lines = [json.loads(line) for line in (tmp_path / "tree" / "metrics.jsonl").read_text().splitlines()]
    changed = [{name: json.loads(value) if isinstance(old, float) else old for name, old in line.items()} for line in lines]
    huge = {**lines[0], "step": 10**400}
    written = "".join(json.dumps(line) + "\n" for line in [*changed, huge])
    (tmp_path / "tree" / "metrics.jsonl").write_text(written)
    assert read_metrics(tmp_path / "tree")[-1]["step"] == lines[-1]["step"]  # the last line is damaged
    run, *_ = read_report_inputs([str(tmp_path / "tree")], "test").runs
    assert len(run.metrics) == len(lines)
    write_report(report_settings(tmp_path, "plain", "tree", sentences=0), tmp_path / "out")
    assert "Learning curves" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("key", "value"), [("seed", ".inf"), ("seed", "[1]"), ("max_steps", "x"), ("model", "{name: [a]}"), ("task", "chess")]
)
def test_a_configuration_that_no_run_has_is_one_line(folder, tmp_path, key, value):
    for name in ("config.yaml", "run.json"):
        shutil.copy(folder / "plain" / name, tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {key: yaml.safe_load(value)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=rf"{tmp_path}/config.yaml: {key}") as raised:
        read_report_inputs([str(tmp_path)], "test")
    assert "\n" not in str(raised.value)


def test_a_path_of_a_run_may_have_an_equals_sign(folder, tmp_path, monkeypatch):
    """`runs/lr=0.1` was taken for a setting of that name."""
    main = main_of("report.py")
    monkeypatch.chdir(tmp_path)
    for name in ("lr=0.1", "title=x"):
        (tmp_path / name).symlink_to(folder / "plain")
    for run, message in (
        ("lr=0.1", "runs: lr=0.1 is given twice"), (str(tmp_path / "lr=0.1"), "is given twice"),
        ("./title=x", r"runs: \./title=x is given twice"), ("runs/lr=0.2", "runs: runs/lr=0.2 is given twice"),
        ("lr=0.2", "lr: unknown key"), ("title=x", "give the folders of runs"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            main(["--out", str(tmp_path / "out"), run, run])
    with pytest.raises(UserError, match="--out must be another folder than RUN"):
        export_main(["--out", str(tmp_path / "lr=0.1"), "lr=0.1", "to=safetensors"])


def test_the_command_line_says_where_the_page_is(folder, tmp_path, capsys):
    main = main_of("report.py")
    main(["--out", str(tmp_path), str(folder / "plain"), "sentences=0"])
    assert str(tmp_path / "index.html") in capsys.readouterr().out


def test_a_long_name_of_a_run_is_cut_in_names_of_figures(tmp_path):
    def figure(run: str) -> str:
        return View(run, 2, "", "", "", 0.0, [], [], [], [], [], [], [], np.zeros((1, 1, 1, 0))).figure

    assert figure("a/b") == "line_3.a%2Fb" and figure("a" * 226) == f"line_3.{'a' * 226}"
    names = {figure(name) for name in ("\u5b57" * 30, "\u5b57" * 29 + "\u5b50", "a" * 227)}
    assert len(names) == 3
    for name in (*names, figure("a" * 226)):
        atomic_write(tmp_path / f"{name}.png", b"")


def test_short_names_tell_runs_apart():
    assert short_names(["a/x/run", "a/y/run", "b"]) == ["x/run", "y/run", "b"]
    assert short_names(["runs/tree/", "./plain"]) == ["tree", "plain"] and short_names([]) == []
    assert short_names(["s3://one/run", "s3://two/run"]) == ["one/run", "two/run"]


TEXTS = st.sampled_from(["i", "word", "\u2581a", "\u2581unbelievable", "\u2581", "木", "WHADVP", "POS=NN"])


@given(trees(), st.data())
@num_examples(80)
def test_no_box_and_no_edge_of_a_picture_lies_on_another_box(tree, data):
    count = len(tree.spans)
    view = View(
        "run", 0, "", "", "", 0.0,
        leaves=[data.draw(TEXTS) for _ in range(tree.num_leaves)],
        labels=[data.draw(TEXTS) for _ in range(count)],
        starts=[span[0] for span in tree.spans],
        ends=[span[1] for span in tree.spans],
        parents=tree.parents,
        heights=node_heights(tree.span_array[:, 2]).tolist(),
        tokens=["end"],
        weights=np.zeros((1, 1, 1, tree.num_leaves + count)),
    )  # fmt: skip
    layout = lay_out(view)
    assert len(layout.boxes) == tree.num_leaves + count and len(layout.edges) <= tree.num_leaves + count
    small = 1e-6
    for i, one in enumerate(layout.boxes):
        assert one.x - one.half >= 0 and one.x + one.half <= layout.width
        assert one.y - BOX_HEIGHT / 2 >= 0 and one.y + BOX_HEIGHT / 2 <= layout.height
        for other in layout.boxes[:i]:
            apart = abs(one.x - other.x) >= one.half + other.half - small or abs(one.y - other.y) >= BOX_HEIGHT - small
            assert apart
        for line in layout.corners():
            for (x0, y0), (x1, y1) in zip(line, line[1:], strict=False):
                in_x = max(x0, x1) > one.x - one.half + small and min(x0, x1) < one.x + one.half - small
                in_y = max(y0, y1) > one.y - BOX_HEIGHT / 2 + small and min(y0, y1) < one.y + BOX_HEIGHT / 2 - small
                assert not (in_x and in_y)


@pytest.fixture(scope="module")
def window(out, tmp_path_factory):
    if MISSING:
        pytest.skip(MISSING)
    with browser(tmp_path_factory.mktemp("browser") / "profile") as window:
        window.resize(1280)
        window.requests()
        window.open(out / "index.html")
        yield window


# The pictures of a sentence begin with the baseline, which has no phrases.
FIRST = "const figure = document.querySelectorAll('.attention')[1];"


def shown(window) -> tuple[list[float], list[str]]:
    """Opacity and number of every position in the first picture of a tree model."""
    script = (
        FIRST
        + """
    return [...figure.querySelectorAll('[data-p]')].map(
      (g) => [Number(g.querySelector('.fill').style.fillOpacity), g.querySelector('.share').textContent]);"""
    )
    return tuple(map(list, zip(*window.run(script), strict=True)))


def token(window, index: int) -> dict:
    return window.run(FIRST + "figure.scrollIntoView(); return figure.querySelector(`[data-t='${arguments[0]}']`);", index)


def choose(window, what: int, value: int) -> None:
    window.run(FIRST + """
    const select = figure.querySelectorAll('select')[arguments[0]];
    select.value = arguments[1];
    select.dispatchEvent(new Event('change'));""", what, value)  # fmt: skip


@pytest.fixture(scope="module")
def first_view(folder, out) -> View:
    """The first picture of a tree model on the page, computed anew."""
    example = json.loads((out / "report.json").read_text())["sentences"][1]
    assert example["run"] == "tree"
    return build_views(example["run"], load_run(folder / example["run"]), "test", [example["example_id"]])[0]


def assert_shows(window, shares: np.ndarray) -> None:
    opacities, numbers = shown(window)
    np.testing.assert_allclose(opacities, [shade(share) for share in shares], atol=3e-3)
    # A number is rounded from 16 bits: where that may change its last digit, either is right.
    for share, message in zip(shares, numbers, strict=True):
        assert message in {share_text(share - 1e-5), share_text(share), share_text(share + 1e-5)}


def test_in_a_browser_pointing_at_a_token_shades_what_it_attends_to(window, first_view):
    weights = first_view.weights
    window.run("window.scrollTo(0, 0)")
    assert_shows(window, weights.mean(axis=(0, 1, 2)))
    window.hover(token(window, 0))
    assert_shows(window, weights[:, :, 0].mean(axis=(0, 1)))
    last = weights.shape[2] - 1
    window.hover(token(window, last))
    assert_shows(window, weights[:, :, last].mean(axis=(0, 1)))
    window.hover(window.run(FIRST + "return figure.querySelector('h4');"))
    assert_shows(window, weights.mean(axis=(0, 1, 2)))


def test_in_a_browser_layer_and_head_are_chosen(window, first_view):
    weights = first_view.weights
    assert weights.shape[:2] == (2, 2)
    window.click(token(window, -1))
    window.hover(window.run(FIRST + "return figure.querySelector('h4');"))
    for layer in (-1, 0, 1):
        for head in (-1, 0, 1):
            choose(window, 0, layer)
            choose(window, 1, head)
            layers = weights if layer < 0 else weights[layer : layer + 1]
            heads = layers if head < 0 else layers[:, head : head + 1]
            assert_shows(window, heads.mean(axis=(0, 1, 2)))
            message = window.run(FIRST + "return figure.querySelector('.readout p').textContent;")
            assert (f", layer {layer + 1}" in message) == (layer >= 0) and (f", head {head + 1}" in message) == (head >= 0)
    choose(window, 0, -1)
    choose(window, 1, -1)


def test_in_a_browser_the_attention_of_the_encoder_is_shown(window, first_view):
    weights, positions = first_view.self_weights, len(first_view.leaves) + len(first_view.labels)
    assert weights.shape == (1, 2, positions, positions)
    window.click(token(window, -1))
    window.run(
        FIRST
        + """const select = figure.querySelector('select.source');
        select.value = 'encoder'; select.dispatchEvent(new Event('change'));"""
    )
    assert_shows(window, weights.mean(axis=(0, 1, 2)))
    options = "return [...figure.querySelector('select').options].map((option) => option.textContent);"
    assert window.run(FIRST + options) == ["mean", "1"]  # one encoder layer, two decoder layers
    for place in (0, positions - 1):
        window.click(token(window, place))
        window.hover(window.run(FIRST + "return figure.querySelector('h4');"))
        assert_shows(window, weights[:, :, place].mean(axis=(0, 1)))
    window.press("\ue012")  # arrow left
    assert_shows(window, weights[:, :, positions - 2].mean(axis=(0, 1)))
    window.run(FIRST + "figure.querySelector('[data-p]').dispatchEvent(new MouseEvent('click'));")  # the first leaf of the tree
    assert_shows(window, weights[:, :, 0].mean(axis=(0, 1)))
    window.run(
        FIRST
        + """const select = figure.querySelector('select.source');
        select.value = 'decoder'; select.dispatchEvent(new Event('change'));"""
    )
    assert_shows(window, first_view.weights.mean(axis=(0, 1, 2)))
    assert window.run(FIRST + options) == ["mean", "1", "2"]


def test_in_a_browser_the_keyboard_does_the_same(window, first_view):
    window.click(token(window, -1))
    window.hover(window.run(FIRST + "return figure.querySelector('h4');"))
    window.press("\ue014")  # arrow right
    window.press("\ue014")
    second = min(1, first_view.weights.shape[2] - 1)
    assert window.run("return document.activeElement.dataset.t;") == str(second)
    assert_shows(window, first_view.weights[:, :, second].mean(axis=(0, 1)))
    window.press("\ue010")  # end
    assert_shows(window, first_view.weights[:, :, -1].mean(axis=(0, 1)))
    checked = window.run(FIRST + "return [...figure.querySelectorAll('[aria-checked=true]')].map((b) => b.dataset.t);")
    assert checked == [str(first_view.weights.shape[2] - 1)]
    on_phrases = first_view.weights[:, :, -1, len(first_view.leaves) :].sum(axis=2).mean()
    message = window.run(FIRST + "return figure.querySelector('.readout').textContent;")
    assert "end of sentence" in message and any(f"{100 * on_phrases + d:.1f} %" in message for d in (0, 0.05, -0.05))


def test_in_a_browser_nothing_fails_nothing_is_loaded_and_no_text_runs(window, out):
    assert [entry for entry in window.log("browser") if entry["level"] != "INFO"] == []
    asked = [url for url in window.requests() if not url.startswith(("chrome:", "chrome-untrusted:", "data:"))]
    assert set(asked) == {(out / "index.html").as_uri()}
    assert window.run("return document.title;") == "A <i>title</i>"


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_in_a_browser_the_page_does_not_scroll_sideways(window, width):
    window.resize(width, 800, phone=width < 500)
    window.run("document.querySelectorAll('details').forEach((d) => d.open = true);")
    assert window.run("return document.documentElement.scrollWidth;") == width
    assert width > 500 or window.run("return [...document.querySelectorAll('.box')].some((b) => b.scrollWidth > b.clientWidth);")


def test_in_a_browser_numbers_and_titles_are_whole_on_a_phone(window):
    """At 400 pixels "2,990" was broken in the first column of a table, and the title of a chart was cut off."""
    window.resize(400, 800, phone=True)
    window.run("document.querySelectorAll('details').forEach((d) => d.open = true);")
    broken = window.run("""
        const cells = [...document.querySelectorAll('table:not(.named) tbody th')];
        const before = cells.map((cell) => cell.innerHTML);
        cells.forEach((cell) => { cell.textContent = '2,990'; cell.closest('.box').style.width = '120px'; });  // too little
        const found = [...document.querySelectorAll('td, th')].filter((cell) => /^[\\d,.]+$/.test(cell.textContent)
          && [...cell.childNodes].some((node) => { const r = document.createRange(); r.selectNodeContents(node);
            return new Set([...r.getClientRects()].map((one) => one.top)).size > 1; })).map((cell) => cell.textContent);
        cells.forEach((cell, place) => { cell.innerHTML = before[place]; cell.closest('.box').style.width = ''; });
        return [cells.length, found];
    """)
    assert broken[0] > 3 and broken[1] == []
    cut = window.run("""
        const inside = (text) => { const own = text.getBoundingClientRect();
          const all = text.closest('svg').getBoundingClientRect();
          return own.left >= all.left - 1 && own.right <= all.right + 1; };
        const texts = [...document.querySelectorAll('svg.narrow text')];
        return [texts.length, texts.filter((text) => !inside(text)).map((text) => text.textContent)];
    """)
    assert cut[0] > 9 and cut[1] == []


def edge_of(window, box: str, path: Path) -> np.ndarray:
    """The last columns of pixels of a box [height, 12, 3]."""
    window.screenshot(path, whole=False)
    left, top, width, height = window.run(box + "const r = box.getBoundingClientRect(); return [r.x, r.y, r.width, r.height];")
    bottom, right = int(min(top + height, 790)), math.ceil(left + width)
    return np.array(Image.open(path).convert("RGB"))[int(top) + 1 : bottom, right - 12 : right].astype(int)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_a_table_fits_or_shows_that_it_scrolls(window, scheme, tmp_path):
    """At 1280 pixels the last metric of the table of scores was cut off, and nothing said that the table scrolls."""
    window.prefer(scheme)
    window.resize(1280, 800)
    boxes = "const boxes = [...document.querySelectorAll('#scores > figure.table > .box')];"
    window.run(boxes + "boxes[0].querySelectorAll('tbody th').forEach((cell) => cell.textContent = 'tree_transformer_no_masks');")
    assert window.run(boxes + "return boxes.filter((b) => b.scrollWidth > b.clientWidth).map((b) => b.textContent);") == []
    window.resize(360, 800, phone=True)
    box = boxes + "const box = boxes.find((b) => b.scrollWidth > b.clientWidth + 40);"
    assert (
        window.run(
            box + "box.scrollIntoView({block: 'center'}); box.scrollLeft = 0; box.focus({preventScroll: true});"
            "return box === document.activeElement && box.tabIndex;"
        )
        == 0
    )  # the keyboard reaches it
    before = edge_of(window, box, tmp_path / "before.png")
    window.run(box + "box.scrollLeft = 10000;")
    after = edge_of(window, box, tmp_path / "after.png")
    page = np.median(after.reshape(-1, 3), axis=0)
    shade = np.abs(np.median(before, axis=0) - page).sum(axis=-1)  # [12], over the height
    assert shade[-1] > 60 and shade[-1] > shade[0]
    assert np.abs(np.median(after, axis=0) - page).sum(axis=-1).max() < 10
    made = "const box = document.getElementById('all') ?? document.body.appendChild(document.createElement('div'));"
    made += "box.id = 'all'; box.className = 'box'; box.style.width = '200.5px'; box.style.height = '40px';"
    window.run(made + "box.scrollIntoView({block: 'center'});")
    edge = edge_of(window, made, tmp_path / "all.png")  # the width of its content is a whole number, that of the box is not
    assert np.abs(np.median(edge, axis=0) - page).sum(axis=-1).max() < 10
    window.run(made + "box.remove();")
    window.prefer("light")


@pytest.mark.skipif(bool(NO_AXE), reason=NO_AXE)
@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser_axe_finds_nothing(window, width):
    assert violations(window, width) == []


def test_in_a_browser_both_schemes_are_legible(window):
    """Contrast of texts with what is behind them, by the rule of WCAG 2, in the lightest and the darkest box."""
    script = """
    const level = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map((x) => x / 255)
      .map((x) => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
    const paint = (name) => { const box = document.createElement('p'); box.style.color = `var(--${name})`;
      document.body.append(box); const found = level(getComputedStyle(box).color); box.remove(); return found; };
    const contrast = (a, b) => { const [x, y] = [paint(a), paint(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
    return {text: contrast('ink', 'page'), faint: contrast('faint', 'page'), warn: contrast('ink', 'warn-page'),
      leaf: contrast('ink', 'leaf'), node: contrast('ink', 'node'), faint_soft: contrast('faint', 'soft')};"""
    for scheme in ("light", "dark"):
        window.prefer(scheme)
        contrasts = window.run(script)
        assert min(contrasts.values()) >= 3 and min(contrasts["text"], contrasts["faint"]) >= 4.5, (scheme, contrasts)
