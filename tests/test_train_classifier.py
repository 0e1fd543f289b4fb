"""Training classifiers end to end on toy labels: the workflow, resume, what is chosen and scored, comparisons over seeds."""

import json
import re
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Started, run_here
from matplotlib import image
from torch import nn
from toylabels import make_rows, write_labelled, write_toy_labels
from toyruns import check_stop_and_resume, losses, train_ranks
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.data.input_kinds import BINARY_TREES
from treenet.data.labelled import LabelledSource, PhraseSource
from treenet.evaluation.classify import classify_run, score_run
from treenet.evaluation.settings import ClassifySettings
from treenet.evaluation.significance import ABOUT_SEEDS, EXPLAINED, compare_examples
from treenet.experiments.ledger import Entry, Ledger
from treenet.experiments.records import Recording, read_curve
from treenet.experiments.seeds import MEASURES, SCORED, SeedsConfig
from treenet.experiments.seeds_report import FORM, LABELS, build_report, draw, format_table, read_result
from treenet.experiments.study import make_study, read_fresh_scores, run_study
from treenet.experiments.study_grid import study_cells
from treenet.jobs.train_run import run_training
from treenet.runs.averaging import average_checkpoints, choose_checkpoints
from treenet.runs.checkpoint import (
    checkpoint_folders,
    checkpoint_step,
    read_meta,
    take_snapshot,
    validation_criterion,
    write_checkpoint,
)
from treenet.runs.loading import load_run, load_trained
from treenet.runs.metrics_log import best_validation, read_metrics
from treenet.runs.run_results import warn_of_stale_results
from treenet.tasks.base import build_task
from treenet.tasks.tables import number
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.files import file_sha256, read_json
from treeproc.common.settings import UserError, load_settings

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "task": "classification",
    "model": {"name": "tree_lstm", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1},
    "classifier": {"neutral_class": 1},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 10, "label_smoothing": 0.0},
    "batch": {"max_tokens": 64},
    "max_steps": 24,
    "log_every": 1,
    "checkpoint_every": 4,
    "validate_every": 4,
    "keep_checkpoints": 1,
    "average": "best",
    "average_checkpoints": 1,
    "workers": 0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_toy_labels(tmp_path_factory.mktemp("labels"))


def make_config(data: Path, *overrides: str) -> TrainConfig:
    return load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(TINY)), data=data)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    run_training(make_config(data), run)
    return run


def valid_lines(run: Path) -> list[dict]:
    return [line for line in read_metrics(run) if line["event"] == "valid"]


def test_the_best_validation_accuracy_is_chosen_and_the_last_checkpoint_is_kept(finished):
    lines = valid_lines(finished)
    best = max(lines, key=lambda line: line["accuracy"])
    assert read_json(finished / "averaged" / "meta.json")["averaged_steps"] == [best["step"]]
    assert [folder.name for folder in checkpoint_folders(finished)][-1] == "step_00000024"
    assert lines[-1]["nll"] < lines[0]["nll"] and best["accuracy"] > 0.45
    assert {"accuracy", "binary_accuracy", "phrase_accuracy"} <= best.keys()


def test_checkpoints_are_kept_and_chosen_by_accuracy_not_by_nll(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for step, (nll, error) in enumerate([(3.0, 0.5), (2.0, 0.4), (1.0, 0.6), (1.5, 0.4), (1.2, 0.5)], start=1):
        meta = {"valid_nll": nll, "valid_criterion": error}
        write_checkpoint(tmp_path, take_snapshot(step, model, optimizer, {}, meta), keep=1, best=True)
    assert [checkpoint_step(folder) for folder in checkpoint_folders(tmp_path)] == [2, 5]  # the first of the best, the latest
    assert [checkpoint_step(folder) for folder in choose_checkpoints(tmp_path, "best", 1).folders] == [2]


def test_a_diverged_model_has_no_scores_and_its_validations_are_never_the_best(data, tmp_path):
    run_training(make_config(data, "optimizer.learning_rate=1e15", "max_skipped_updates=99", "average=last"), tmp_path)
    lines = valid_lines(tmp_path)
    assert all(np.isnan(line["nll"]) and line["accuracy"] > 0 for line in lines)  # NaN is read as the first class
    assert validation_criterion(read_meta(checkpoint_folders(tmp_path)[-1])) is None
    assert best_validation(lines, build_task(make_config(data)).criterion) is None
    assert set(read_curve(tmp_path)["valid"]["nll"]) == {None}
    with pytest.raises(UserError, match="no checkpoint with a finite validation"):
        average_checkpoints(tmp_path, "best", 1)
    with pytest.raises(UserError, match="the predictions of the model are not finite, because its training diverged"):
        score_run(tmp_path)
    assert not list(tmp_path.glob("predictions.*")) and not (tmp_path / "scores.json").exists()


@pytest.mark.parametrize(("neutral", "side"), [(0, "below"), (2, "above")])
def test_two_classes_are_not_scored_without_classes_on_both_sides(data, tmp_path, capsys, neutral, side):
    run_training(make_config(data, f"classifier.neutral_class={neutral}", "max_steps=4"), tmp_path / "run")
    assert f"note: classifier.neutral_class = {neutral}: of the 3 classes of {data}, none is {side} it" in capsys.readouterr().err
    scores = score_run(tmp_path / "run")
    assert "accuracy" in scores["test"] and not any(
        "binary_accuracy" in one for one in [*scores.values(), *valid_lines(tmp_path / "run")]
    )


def test_scores_are_those_of_the_predictions(data, finished):
    scores = score_run(finished)
    assert list(scores) == ["valid", "valid.last", "test", "test.last"]
    by_step = {line["step"]: line for line in valid_lines(finished)}
    for name in ("valid", "valid.last"):
        line = by_step[scores[name]["steps"][-1]]
        for metric in ("accuracy", "binary_accuracy", "phrase_accuracy"):
            assert scores[name][metric] == pytest.approx(line[metric])
    assert scores["test.last"]["checkpoint"] == "step_00000024"
    lines = (finished / "predictions.test.tsv").read_text().splitlines()
    assert lines[0] == "example_id\tlabel\tpredicted\tp0\tp1\tp2"
    rows, model = make_rows(12, seed=2), load_trained(finished)[1]
    assert [line.split("\t")[:2] for line in lines[1:]] == [[str(row["example_id"]), str(row["label"])] for row in rows]
    batch = LabelledSource(data / "encoded", "test", BINARY_TREES, phrases=True).batch(range(12))
    predicted = [int(line.split("\t")[2]) for line in lines[1:]]
    assert predicted == model(batch).examples.argmax(-1).tolist()
    assert scores["test"]["accuracy"] == pytest.approx(
        np.mean([p == row["label"] for p, row in zip(predicted, rows, strict=True)])
    )
    before = (finished / "predictions.test.tsv").stat().st_mtime_ns
    assert score_run(finished) == scores and (finished / "predictions.test.tsv").stat().st_mtime_ns == before


def test_scores_of_other_weights_are_made_anew_and_in_comparisons_refused_until_then(data, finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = score_run(run)
    assert all(len(entry["weights_sha256"]) == 64 and entry["software"] for entry in before.values())
    assert read_fresh_scores(SCORED, run) == before
    run_training(make_config(data, "max_steps=28", "average=last"), run)
    warn_of_stale_results(run)
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.partition("scores.json, ")[2].partition(" is stale: ")[0] for line in message] == list(before)
    command = f"tree-attention evaluate --out {run} split="
    asked = ["valid", "valid checkpoint=last", "test", "test checkpoint=last"]
    assert all(line.endswith(f"; to renew it: {command}{one}") for line, one in zip(message, asked, strict=True))
    with pytest.raises(
        UserError, match=rf"scores of valid are stale: the run has changed since then \(weights .*; to renew it: {command}valid$"
    ):
        read_fresh_scores(SCORED, run)
    after = score_run(run)
    for name, folder in (("test", "averaged"), ("test.last", "checkpoints/step_00000028")):
        assert after[name]["weights_sha256"] == file_sha256(run / folder / "model.safetensors") != before[name]["weights_sha256"]
    assert read_fresh_scores(SCORED, run) == after


def test_other_data_of_the_vocabulary_gets_scores_of_its_own(finished, tmp_path):
    other = write_labelled(tmp_path / "more", {"test": make_rows(9, seed=9)})
    name, scores = classify_run(finished, ClassifySettings(data=other, checkpoint="last"))
    assert (name, scores["num_examples"]) == ("test.last.data-more", 9)
    with pytest.raises(UserError, match="is a run of classification, which cannot translate"):
        load_run(finished)
    strange = write_labelled(tmp_path / "strange", {"test": make_rows(9)}, vocab_fingerprint="other")
    with pytest.raises(UserError, match="the vocabulary must be vocab, which .* but is other"):
        classify_run(finished, ClassifySettings(data=strange))


@pytest.mark.parametrize("name", ["tree_transformer", "bilstm", "child_sum_tree_lstm"])
def test_stopped_and_resumed_equals_uninterrupted(data, tmp_path, name):
    config = make_config(data, f"model.name={name}", "max_steps=10", "model.dropout=0.3")
    check_stop_and_resume(config, tmp_path, 6)
    accuracies = [[line["accuracy"] for line in valid_lines(tmp_path / run)] for run in ("whole", "halves")]
    assert accuracies[0] == accuracies[1]


def test_two_ranks_learn_and_count_as_one(data, tmp_path):
    config = make_config(data, "model.dropout=0.3", "max_steps=8")
    (tmp_path / "one").mkdir()
    train(build_task(config), tmp_path / "one")
    assert train_ranks(2, config, tmp_path / "two") == [None, None]
    one, two = (valid_lines(tmp_path / run) for run in ("one", "two"))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-4)
    assert [line["accuracy"] for line in one] == [line["accuracy"] for line in two]
    first, second = ([loss for _, loss in losses(tmp_path / run)] for run in ("one", "two"))
    assert first == pytest.approx(second, rel=1e-4)


def test_sequence_models_learn_phrases_and_are_validated_on_examples(data):
    task = build_task(make_config(data, "model.name=transformer"))
    assert isinstance(task.open("train", training=True), PhraseSource)
    assert isinstance(task.open("valid"), LabelledSource) and len(task.open("valid")) == 16
    task = build_task(make_config(data, "model.name=transformer", "classifier.supervision=root"))
    assert isinstance(task.open("train", training=True), LabelledSource)


def test_r_drop_and_smoothing_are_taken(data, tmp_path):
    config = make_config(data, "optimizer.r_drop=1", "optimizer.label_smoothing=0.1", "max_steps=4", "model.dropout=0.3")
    train(build_task(config), tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["event"] == "train"]
    assert all(line["loss"] > line["nll"] for line in lines)


@pytest.mark.parametrize("options", [[], ["optimizer.r_drop=2"]], ids=["one pass", "R-Drop"])
def test_gradients_of_embeddings_by_row_are_those_of_whole_tables(data, options):
    trainer = Trainer(build_task(make_config(data, "model.name=tree_transformer", *options)), Ranks(0, 1, torch.device("cpu")))
    model, rank_batch = trainer.train_step.model, trainer.micro_batches.rank_batch(trainer.plan.hardest_batch())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert len(tables) == 2 and all(table.sparse for table in tables)
    gradients = []
    for by_row in (True, False):
        for table in tables:
            table.sparse = by_row
        trainer.train_step.compute_gradient(rank_batch, trainer.micro_batches, 0)
        assert not any(parameter.grad.is_sparse for parameter in model.parameters())
        gradients.append(trainer.train_step._gradients.flat.clone())
    torch.testing.assert_close(*gradients)
    assert gradients[0].count_nonzero() > 0


@pytest.mark.parametrize(
    ("facts", "overrides", "message"),
    [
        ({}, ["classifier.neutral_class=3"], "neutral_class must be one of the 3 classes"),
        ({"num_classes": 1}, ["classifier.neutral_class=null"], "has one class, and a classifier needs two"),
        ({"tree_settings": {"binarize": "none"}}, [], "trees that need not be binary.*tree.binarize=right"),
        ({}, ["model.name=lstm"], "model.name must be one of bilstm, child_sum"),
        ({"columns": ["leaves", "nodes", "spans"]}, [], "has no classes"),
        ({}, ["classifier.neutral_class=null"], "average: best needs validations, but .*data has no split valid; .*average=last"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(tmp_path, facts, overrides, message):
    data = write_labelled(tmp_path / "data", {"train": make_rows(4)}, **facts)
    with pytest.raises(UserError, match=message):
        run_training(make_config(data, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_command_trains_and_scores_a_classifier_and_refuses_data_without_the_task(data, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({**TINY, "data": str(data), "max_steps": 8}))
    run = tmp_path / "my run"
    command = ("train_classifier.py", "--config", tmp_path / "config.yaml")
    done = run_here(*command, "--out", run, "model.name=transformer")
    assert done.returncode == 0, done.stderr
    again = (*command[1:], "--out", run, "model.name=transformer")
    by_other_names = [run_here(name, *again) for name in ("train.py", "train_wmt.py", "train_lm.py")]
    assert {one.returncode for one in by_other_names} == {0}
    assert {one.stdout.partition("result")[2] for one in by_other_names} == {done.stdout.partition("result")[2]}
    assert "accuracy" in done.stdout and "\ntest.last" in done.stdout and "classes/s" in done.stdout
    assert f"tree-attention classify --out '{run}' input=FILE" in done.stdout  # as a shell takes it
    assert set(read_json(run / "scores.json")) == {"valid", "valid.last", "test", "test.last"}
    refused = run_here(*command, "--out", tmp_path / "other", "task=translation")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "model.name" in refused.stderr


def test_training_without_valid_and_test_ends_without_scores(tmp_path):
    data = write_labelled(tmp_path / "data", {"train": make_rows(40)})
    (tmp_path / "config.yaml").write_text(json.dumps({**TINY, "data": str(data), "max_steps": 4, "average": "last"}))
    done = run_here("train.py", "--config", tmp_path / "config.yaml", "--out", tmp_path / "run")
    assert done.returncode == 0 and (tmp_path / "run" / "averaged" / "model.safetensors").exists(), done.stderr
    assert "there are no scores, because the data set has neither valid nor test" in done.stdout
    done = run_here("train.py", "--config", tmp_path / "config.yaml", "--out", tmp_path / "best", "average=best")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: "), done.stderr


def test_a_study_of_translation_refuses_a_classifier(data, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({**TINY, "data": str(data)}))
    done = run_here("scaling.py", "--out", tmp_path / "out", "--config", tmp_path / "config.yaml", "model.name=transformer")
    assert done.returncode == 2 and "classification" in done.stderr and not (tmp_path / "out").exists()


def test_messages_about_a_missing_checkpoint_name_the_command_that_trains(data, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({**TINY, "data": str(data)}))
    with pytest.raises(UserError, match="run tree-attention train "):
        average_checkpoints(tmp_path, "last", 1)


# Over seeds.

SYSTEMS = {"trees": {}, "words": {"model": {"name": "bilstm"}}}
GRID = {"systems": SYSTEMS, "seeds": [1, 2], "baseline": "trees", "fewer_seeds": {"words": 1}}


def test_a_comparison_continues_after_a_kill_and_reports_all_seeds(data, tmp_path, rendered):
    settings = {**TINY, "data": str(data), "max_steps": 60, "log_every": 4, "grid": {**GRID, "peak_on_test": True}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    out = tmp_path / "out"
    command = ["compare_seeds.py", "--config", tmp_path / "config.yaml", "--out", out]
    killed = Started(tmp_path / "log", *command)
    wait_for(lambda: checkpoint_folders(out / "cells" / "trees-seed1"), killed, log=tmp_path / "log", pause=0.01)
    killed.kill()
    killed.join()
    done = run_here(*command)
    assert done.returncode == 0, done.stderr
    entries = Ledger.read(out).entries
    assert {name: entry.status for name, entry in entries.items()} == dict.fromkeys(
        ("trees-seed1", "words-seed1", "trees-seed2"), "done"
    )
    assert entries["trees-seed1"].starts == 2 and entries["words-seed1"].starts == 1
    report = read_json(out / "comparison.json")
    accuracies = {cell["cell"]: cell["test.accuracy"] for cell in report["cells"]}
    for name in entries:
        scores = read_json(out / "cells" / name / "scores.json")
        assert accuracies[name] == scores["test"]["accuracy"]
        kept, peak = checkpoint_folders(out / "cells" / name), scores["test.peak"]
        assert peak["accuracy"] >= scores["test.last"]["accuracy"] and peak["chosen_from"] == len(kept) > 1
        assert peak["checkpoint"] in [folder.name for folder in kept]
    trees, words = report["systems"]
    assert trees["test.accuracy"]["mean"] == pytest.approx((accuracies["trees-seed1"] + accuracies["trees-seed2"]) / 2)
    assert (trees["seeds"], words["seeds"]) == ([1, 2], [1])
    test = words["tests"]["test.accuracy"]
    assert test["difference"] == pytest.approx(accuracies["words-seed1"] - accuracies["trees-seed1"])
    assert (test["seeds"], test["interval"], test["p_value"], test["about"]) == (1, None, None, ABOUT_SEEDS)
    assert "peak on test!" in done.stdout and "chosen on test itself" in done.stdout
    assert "trees " in done.stdout and " ± " in done.stdout
    assert image.imread(out / "comparison.png").shape[2] == 4
    axes = draw(report).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trees", "words"]
    assert axes.lines[0].get_xdata() == pytest.approx([100 * value for value in trees["test.accuracy"]["values"]])
    config, records = load_settings(SeedsConfig, tmp_path / "config.yaml"), tmp_path / "records"
    for name in entries:  # as if peak_on_test came later: the same command scores the checkpoints of cells that are done
        scores = read_json(out / "cells" / name / "scores.json")
        scores.pop("test.peak")
        (out / "cells" / name / "scores.json").write_text(json.dumps(scores))
    for _ in range(2):  # records are made of the runs that are there, then they are all there is
        run_study(make_study(FORM, config, out, records))
        assert read_json(out / "comparison.json") == report and len(list(records.iterdir())) == 3
        shutil.rmtree(out)


def test_cells_are_compared_on_the_same_examples(data, tmp_path):
    for what, facts in {
        "text": {"text_fingerprint": "other"},
        "pieces": {"vocab_fingerprint": "other"},
        "num_classes": {"num_classes": 9},
    }.items():
        other = write_labelled(tmp_path / what, {"train": make_rows(4)}, **facts)
        grid = {"systems": {"a": {}, "b": {"data": str(other)}}, "baseline": "a"}
        config = load_settings(SeedsConfig, None, **TINY, data=data, grid=grid)
        with pytest.raises(UserError, match=f"differ in {what}"):
            study_cells(config, tmp_path)


def test_a_comparison_on_data_without_classes_is_refused_at_its_start(tmp_path):
    unlabelled = write_labelled(tmp_path / "data", {"train": make_rows(4)}, columns=["leaves", "nodes", "spans"])
    config = load_settings(SeedsConfig, None, ["model.name=transformer"], **TINY, data=unlabelled)
    with pytest.raises(UserError, match="tree_transformer-seed1: .* has no classes"):
        run_study(make_study(FORM, config, tmp_path / "out", None))
    assert not (tmp_path / "out").exists()


def test_a_comparison_without_a_test_split_says_so_and_has_provenance(tmp_path, capfd):
    splits = {"train": make_rows(40), "valid": make_rows(9, seed=1)}
    grid = {"systems": {"trees": {}}, "seeds": [1], "baseline": "trees"}
    values = {**TINY, "max_steps": 4, "data": str(write_labelled(tmp_path / "data", splits)), "grid": grid}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    done = run_here("compare_seeds.py", "--config", tmp_path / "config.yaml", "--out", tmp_path / "out")
    assert done.returncode == 0 and "has no split test, so the study has scores on valid alone" in done.stderr, done.stderr
    assert "without provenance" not in done.stdout
    refused = run_here(
        "compare_seeds.py", "--config", tmp_path / "config.yaml", "--out", tmp_path / "o", "grid.peak_on_test=true"
    )
    assert refused.returncode == 2 and "has no split test; leave peak_on_test out" in refused.stderr
    (cell,) = read_json(tmp_path / "out" / "comparison.json")["cells"]
    assert len(cell["weights_sha256"]) == 64 and cell["best_step"] is None


def test_accuracies_are_tested_over_paired_seeds_and_shared_sentences(tmp_path):
    """The cells as compare_seeds.py leaves them, their predictions made up."""
    random, sentences, entries, right = np.random.default_rng(1), 400, {}, {}
    for system, share in (("trees", 0.5), ("words", 0.7)):
        for seed in (1, 2, 3, 4) if system == "trees" else (1, 2, 3):
            folder = tmp_path / "cells" / f"{system}-seed{seed}"
            folder.mkdir(parents=True)
            (folder / "averaged").mkdir()
            (folder / "averaged" / "meta.json").write_text('{"step": 3}')
            (folder / "config.yaml").write_text("data: d\n")
            (folder / "run.json").write_text('{"parameters": 1}')
            (folder / "metrics.jsonl").write_text('{"event": "valid", "step": 3, "elapsed": 1.0, "nll": 1.0}\n')
            right[system, seed] = random.random(sentences) < share
            rows = [f"{number}\t1\t{int(value)}\t0.5\t0.5\n" for number, value in enumerate(right[system, seed])]
            for name in ("test", "test.last"):
                (folder / f"predictions.{name}.tsv").write_text("".join(["example_id\tlabel\tpredicted\tp0\tp1\n", *rows]))
            score = {"accuracy": float(right[system, seed].mean()), "steps": [3]}
            score["predictions_sha256"] = file_sha256(folder / "predictions.test.tsv")
            (folder / "scores.json").write_text(json.dumps(dict.fromkeys(("valid", "test", "test.last"), score)))
            labels = {"system": system, "seed": seed}
            entries[folder.name] = Entry(
                labels=labels, settings={"data": "d", "max_steps": 100}, data_fingerprint="", status="done"
            )
    config = load_settings(SeedsConfig, None, **TINY, data=tmp_path, grid={"systems": SYSTEMS, "baseline": "trees"})
    recording = Recording(LABELS, partial(read_result, MEASURES["classification"]))
    records = recording.read_all(Ledger(tmp_path / "ledger.json", entries), tmp_path)
    cell = tmp_path / "cells" / "trees-seed2" / "scores.json"
    before = cell.read_text()
    cell.write_text(re.sub(r'"predictions_sha256": "\w+"', '"predictions_sha256": "other"', before))
    with pytest.raises(UserError, match=r"trees-seed2/predictions.test.tsv has changed since .*; run .* --out .*trees-seed2"):
        recording.read_all(Ledger(tmp_path / "ledger.json", entries), tmp_path)
    cell.write_text(before)
    report = build_report(config.task, config.grid, records)
    differences = np.array([right["words", seed].astype(float) - right["trees", seed] for seed in (1, 2, 3)])
    test, expected = report["systems"][1]["tests"]["test.accuracy"], compare_examples(differences)
    assert test == asdict(replace(expected, family="systems", holm_p_value=expected.p_value))  # one comparison
    assert test["difference"] == pytest.approx(differences.mean()) and test["sentences_error"] > 0
    table = format_table(report).split("\n")
    assert table[2].startswith("words") and "*" in table[2] and f"seen, p, p, Holm and stars: {EXPLAINED}" in table
    assert "read as two classes" not in "".join(table)  # without such a column
    low, high = (number(100 * end, "+.2f") for end in expected.interval)
    assert f"[{low}, {high}]" in table[2]
    assert report["unlike"] == {"compared": 3, "device": [], "packages": [], "software": []}
    for record, processor in zip(records, "xxyxxzx", strict=True):  # four cells of trees, three of words
        record["training"]["machines"] = [{"processor": processor, "cores": 2, "gpu": None}]
    report = build_report(config.task, config.grid, records)
    assert report["unlike"]["device"] == [["words-seed2", "trees-seed2"], ["words-seed3", "trees-seed3"]]
    assert "2 of 3 compared pairs of cells were trained with different kinds of device: words-seed2 - " in format_table(report)
    records[0]["settings"] = {"optimizer": {"learning_rate": 0.1, "clip_norm": 1.0}}
    words = {"optimizer": {"learning_rate": 0.2}}
    for record in records:
        record["settings"] = words if record["cell"].startswith("words") else records[0]["settings"]
    report = build_report(config.task, config.grid, records)
    two = ["optimizer.learning_rate (0.2, not 0.1)", "optimizer.clip_norm (0.0, not 1.0)"]
    assert report["confounded"] == {"words - trees": two}
    message = f"words - trees: the two differ in 2 things, so the difference has no single cause: {', '.join(two)}"
    assert message in format_table(report).split("\n")
    for counts in ((20,) * 7, (5, 20, 20, 20, 20, 20, 20)):
        for record, count in zip(records, counts, strict=True):
            record["scores"]["test.peak"] = {"accuracy": 0.5, "chosen_from": count}
        report = build_report(config.task, config.grid, records)
        noted = [line for line in format_table(report).split("\n") if line.startswith("peak on test!: cells chose")]
        assert [line.partition(" checkpoints,")[0] for line in noted] == ["peak on test!: cells chose from 5, 20"][: 5 in counts]
    report["systems"][0]["valid.accuracy"]["mean"] = 123456789.0  # numbers of any length stay apart, such as perplexities
    assert " 12345678900.00 ± " in format_table(report)
