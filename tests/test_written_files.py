"""Every file that one command writes and another reads: written by the real writer, read by every reader."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from commands import run_here
from test_relatedness import COLUMNS as OF_PAIRS
from test_relatedness import pair_rows
from toydata import with_given_trees, write_toy_data
from toylabels import write_labelled, write_toy_labels
from toyprobes import write_probe_data
from toyruns import TINY_RUN, make_config

from treenet.cli.evaluate import main as evaluate
from treenet.cli.synthetic_pairs import MadeFiles
from treenet.config import TrainConfig
from treenet.evaluation.buckets import format_buckets
from treenet.evaluation.classify import score_run
from treenet.evaluation.evaluate import evaluate_run, format_signatures
from treenet.evaluation.language_models import score_splits
from treenet.evaluation.settings import EvaluateSettings, ParseSettings
from treenet.evaluation.unsupervised_parse import parse_run
from treenet.experiments import scaling_report, seeds_report
from treenet.experiments.ledger import DONE, Ledger
from treenet.experiments.recorded_study import report_records
from treenet.experiments.records import read_records
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study import make_study, read_fresh_scores, run_study
from treenet.jobs.train_run import run_training
from treenet.loggers.content import RunReader, identify, read_identity
from treenet.probing.probe_results import format_probes, read_probes
from treenet.probing.probe_run import probe_run
from treenet.probing.settings import ProbeSettings
from treenet.report.build import write_report
from treenet.report.report_inputs import read_report_inputs
from treenet.report.settings import ReportSettings
from treenet.runs.exported_run import export_run
from treenet.runs.loading import load_model, load_run
from treenet.runs.result_entries import PROBES, SCORES, add_entry, read_scores
from treenet.runs.result_provenance import RunState
from treenet.runs.run_folder import read_facts
from treenet.runs.run_results import read_nll, read_system, stale_scores, warn_of_stale_results
from treenet.tasks.scores import format_scores
from treenet.tasks.translation_metrics import METRICS, OF_STUDIES, choose_tokenizer
from treeproc.common.settings import UserError, load_settings
from treeproc.stages.inputs import InputCounts, read_cached_counts, write_cached_counts

pytestmark = [pytest.mark.slow, pytest.mark.long]

SHORT = ("max_steps=2", "checkpoint_every=1", "validate_every=1", "average_checkpoints=2", "decoding.beam_size=2")
SHORT += ("decoding.max_length_factor=0.5",)
LANGUAGES = (None, "de", "ja", "zh", "th")
SMALL_PROBES = ProbeSettings(train_sentences=20, eval_sentences=10, train_words=40, eval_words=20, l2=(0.1,), max_iterations=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two translation runs of two updates beside their data set."""
    folder = tmp_path_factory.mktemp("translation")
    write_toy_data(folder / "data", train=20, valid=6, test=8)
    for name in ("a", "b"):
        run_training(make_config(folder / "data", *SHORT, f"seed={ord(name)}"), folder / name)
    return folder


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def read_with_all(run: Path, result: str = "test") -> dict:
    """The entry of a result, after every reader of scores.json has read the file."""
    entry = read_scores(run)[result]
    assert read_fresh_scores((result,), run)[result] == entry and stale_scores(run) == {}
    warn_of_stale_results(run)
    assert read_system(run, result).scores == entry and not RunState(run).check(entry).changed
    assert any(score.name.startswith(f"{result}/") for score in RunReader(run).read().scores)
    return entry


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_into_every_language_are_scored_twice_compared_and_reported(runs, language, capsys):
    asked = [] if language is None else [f"target_language={language}"]
    for run in (runs / "a", runs / "b", runs / "a"):
        evaluate(["--out", str(run), *asked])
    entry = read_with_all(runs / "a")
    assert {*METRICS, *(f"{name}_signature" for name in METRICS)} <= entry.keys() and read_nll(runs / "a", "test")
    assert format_scores({"test": entry}) and format_signatures(entry) and format_buckets(entry["buckets"])
    evaluate(["--compare", str(runs / "a"), str(runs / "b"), "--out", str(runs / "ab"), *asked])
    assert json.loads((runs / "ab" / "comparison.json").read_text())["metrics"].keys() >= {"bleu", "chrf"}
    found = read_report_inputs([str(runs / "a"), str(runs / "b")], "test").runs
    assert [run.scores["test"]["chrf"] for run in found] == [read_scores(runs / name)["test"]["chrf"] for name in ("a", "b")]


def test_languages_without_blanks_whose_words_no_tokenizer_knows_are_scored_alike():
    assert {choose_tokenizer(tokenized=False, language=language) for language in ("km", "lo", "my", "th")} == {"char"}


def test_a_run_with_scores_of_a_language_without_blanks_is_exported_and_continued(runs):
    evaluate_run(runs / "a", EvaluateSettings(target_language="ja"))
    for _ in range(2):  # the second one reads the export.json of the first
        export_run(load_run(runs / "a"), runs / "exported")
        assert "chrF" in (runs / "exported" / "README.md").read_text()
    evaluate(["--out", str(runs / "exported"), f"data={load_run(runs / 'a').data}", "target_language=ja"])
    config = load_settings(TrainConfig, runs / "a" / "config.yaml")
    run_training(config.model_copy(update={"max_steps": 3}), runs / "a")
    assert stale_scores(runs / "a").keys() == {"test"}


def pairs_of_scores(folder: Path) -> Path:
    splits = {split: pair_rows(count, seed) for seed, (split, count) in enumerate({"train": 20, "valid": 6, "test": 6}.items())}
    return write_labelled(folder, splits, columns=OF_PAIRS, num_classes=None)


def given_trees(folder: Path) -> Path:
    return with_given_trees(write_toy_data(folder, train=20, valid=6, test=8))


OF_CLASSES = ("model.name=tree_lstm", "optimizer.label_smoothing=0")
TASKS = {
    "classification": (write_toy_labels, score_run, ("test", "test.last", "valid"), ("task=classification", *OF_CLASSES)),
    "relatedness": (pairs_of_scores, score_run, ("test", "test.last", "valid"), ("task=relatedness", *OF_CLASSES)),
    "causal_lm": (given_trees, score_splits, ("test", "valid"), ("task=causal_lm", "model.name=causal_transformer")),
    "grammar": (given_trees, score_splits, ("test",), ("task=causal_lm", "model.name=transformer_grammar")),
    "masked_lm": (given_trees, score_splits, ("test",), ("task=masked_lm", "model.name=constituent_transformer")),
}


@pytest.mark.parametrize("task", TASKS)
def test_scores_of_every_task_are_read_by_every_reader(tmp_path, task, capsys):
    write, score, results, settings = TASKS[task]
    data, run = write(tmp_path / "data"), tmp_path / "run"
    config = load_settings(TrainConfig, None, [*SHORT, *settings], **copy.deepcopy(TINY_RUN), data=data)
    run_training(config, run)
    score(run)
    for result in results:
        entry = read_with_all(run, result)
        assert entry["num_examples"] > 0
    if task == "classification":  # a data set that is called as a checkpoint
        before = read_scores(run)
        index = Path(shutil.copytree(data, tmp_path / "last")) / "encoded" / "index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "fingerprint": "another"}))
        evaluate(["--out", str(run), f"data={tmp_path / 'last'}"])
        assert read_scores(run).keys() - before.keys() == {"test.data-last"} and read_scores(run).items() >= before.items()
    evaluate(["--compare", str(run), str(run), "--out", str(tmp_path / "same")])
    assert json.loads((tmp_path / "same" / "comparison.json").read_text())
    if task == "masked_lm":
        name, entry = parse_run(run, ParseSettings(parsing={"min_layer": 0}))
        assert read_scores(run)[f"unsupervised_parse-{name}"] == entry and stale_scores(run) == {}


def test_probes_are_read_by_every_reader(tmp_path):
    data = write_probe_data(tmp_path / "data", train=40, valid=12, test=12)
    run_training(make_config(data, *SHORT, "model.num_encoder_layers=2"), tmp_path / "run")
    name, entry = probe_run(tmp_path / "run", SMALL_PROBES)
    assert probe_run(tmp_path / "run", SMALL_PROBES) == (name, entry) == (name, read_probes(tmp_path / "run")[name])
    warn_of_stale_results(tmp_path / "run")
    assert format_probes(name, entry) and read_report_inputs([str(tmp_path / "run")], "test").runs[0].probes == entry


def grid_of(trained: Path, **grid) -> ScalingConfig:
    values = {**copy.deepcopy(TINY_RUN), "max_steps": 2, "checkpoint_every": 1, "validate_every": 1, "average_checkpoints": 2}
    values |= {"decoding": {"beam_size": 2, "max_length_factor": 0.5}}
    grid = {"seeds": [1], "fractions": [1.0], "bootstrap_samples": 20, **grid}
    return load_settings(ScalingConfig, None, **values, grid=grid, data=trained / "data")


def test_studies_of_every_metric_are_read_by_every_reader(trained, tmp_path):
    """The cells are trained once. Each grid scores them again if it needs other tokens."""
    out, updates = tmp_path / "study", set()
    for metric in OF_STUDIES:
        for language in (None, "ja", "zh"):
            config, records = grid_of(trained, metric=metric, target_language=language), tmp_path / f"{metric}.{language}"
            study = make_study(scaling_report.FORM, config, out, records)
            run_study(study)
            assert {entry.status for entry in Ledger.read(out).entries.values()} == {DONE}
            kept = read_records(records)
            assert kept.keys() == {"transformer-1-seed1", "tree_transformer-1-seed1"}
            updates |= {(out / "cells" / name / "metrics.jsonl").read_bytes() for name in kept}
            ((_, found),) = [(one.name, one) for one in read_report_inputs([str(out)], "test").studies]
            assert {point["model"] for point in found.report["points"]} == {"transformer", "tree_transformer"}
            tokens = {"ja": "ja-mecab-", "zh": "zh|", None: "intl|"}[language]
            if metric == "bleu_tokenized":
                assert f"|tok:{tokens}" in found.report["bleu_tokenized_signature"]
            assert report_records(list(kept.values()), None, None)["points"]
            make_study(scaling_report.FORM, config, tmp_path / "other", records)  # on another machine: nothing is left to train
            assert study.recording.kept(study.cells).keys() == kept.keys()
    assert len(updates) == 2, "no cell was trained again"
    mixed = tmp_path / "bleu_tokenized.ja" / "transformer-1-seed1.json"
    shutil.copy(tmp_path / "bleu_tokenized.zh" / mixed.name, mixed)
    study = make_study(
        scaling_report.FORM, grid_of(trained, metric="bleu_tokenized", target_language="ja"), tmp_path / "new", mixed.parent
    )
    with pytest.raises(UserError, match=r"record of transformer-1-seed1 has other scores \(grid.target_language is another\)"):
        run_study(study)
    with pytest.raises(UserError, match="bleu_tokenized over different tokens: ja-mecab, zh; give grid.target_language"):
        report_records(list(read_records(mixed.parent).values()), None, None)


def test_a_comparison_over_seeds_is_read_by_every_reader(tmp_path):
    data = write_toy_labels(tmp_path / "data", train=20)
    values = {**copy.deepcopy(TINY_RUN), "task": "classification", "max_steps": 2, "checkpoint_every": 1, "validate_every": 1}
    values |= {"optimizer": {"label_smoothing": 0.0}, "classifier": {"neutral_class": 1}}
    systems = {"trees": {"model": {"name": "tree_lstm"}}, "words": {"model": {"name": "bilstm"}}}
    grid = {"systems": systems, "baseline": "words", "seeds": [1], "peak_on_test": True}
    config = load_settings(SeedsConfig, None, **values, grid=grid, data=data)
    run_study(make_study(seeds_report.FORM, config, tmp_path / "study", tmp_path / "records"))
    assert len(Ledger.read(tmp_path / "study").entries) == len(read_records(tmp_path / "records")) == 2
    ((found,),) = [read_report_inputs([str(tmp_path / "study")], "test").studies]
    assert {row["system"] for row in found.report["systems"]} == {"trees", "words"}


def test_the_small_files_of_commands_are_read_back(trained, tmp_path):
    run = Path(shutil.copytree(trained / "a", tmp_path / "run"))
    config, facts = load_settings(TrainConfig, run / "config.yaml"), read_facts(run)
    identify(run, run, config, facts["data_fingerprint"])
    assert read_identity(run).name == "run"
    (tmp_path / "lines").write_text("a\n")
    MadeFiles(tmp_path).add("step", [tmp_path / "lines"], "of these")
    assert MadeFiles(tmp_path).has("step", [tmp_path / "lines"], "of these")
    known = InputCounts({"train": 1}, {"train": "ab"})
    write_cached_counts(tmp_path, "stamps", known)
    assert read_cached_counts(tmp_path, "stamps") == known
    assert load_model(run).weights_sha256 and write_report(ReportSettings(runs=(str(run),)), tmp_path / "page")
    assert write_report(ReportSettings(runs=(str(run),)), tmp_path / "page"), "it reads its own report.json"


@pytest.mark.parametrize(
    ("file", "entry"),
    [
        (SCORES, {"buckets": {"words": [{"from": 0, "to": None, "num_examples": 1}]}}),
        (SCORES, {"buckets": {"words": [{"from": 0, "to": None, "num_examples": 1, "bleu": "1"}]}}),
        (SCORES, {"accuracy": float("nan")}),
        (SCORES, {"steps": []}),
        (PROBES, {"settings": {}, "data": {}}),
    ],
)
def test_no_command_writes_what_it_could_not_read(tmp_path, file, entry):
    good = {SCORES: {"chrf": 1.0}, PROBES: {"settings": {}, "data": {}, "tasks": {}}}[file]
    add_entry(tmp_path / file, "test", good)
    before = (tmp_path / file).read_bytes()
    with pytest.raises(ValueError, match="Field required|Needs one of|valid number|finite number|at least 1 item"):
        add_entry(tmp_path / file, "other", entry)
    assert (tmp_path / file).read_bytes() == before


def test_the_advice_for_a_damaged_file_of_results_loses_none(runs):
    evaluate_run(runs / "a", EvaluateSettings())
    good = (runs / "a" / SCORES).read_text()
    (runs / "a" / SCORES).write_text(good.replace('"words": [', '"words": [3, ', 1))
    done = run_here("evaluate.py", "--out", runs / "a")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "restore it, or move it away and run the same command again" in done.stderr
    (runs / "a" / SCORES).rename(runs / "moved.json")
    assert run_here("evaluate.py", "--out", runs / "a").returncode == 0
    assert (runs / "a" / SCORES).read_text() == good and (runs / "moved.json").exists()
