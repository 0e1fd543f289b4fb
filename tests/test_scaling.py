"""Data-size studies end to end on toy data, with and without Ray, and what they report."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import main_of, run_here, without_times
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from pictures import pictures
from toydata import write_toy_data
from waiting import wait_for

from treenet.config import BatchConfig, ModelConfig
from treenet.data.examples import ExampleSource
from treenet.data.plan import BatchPlan
from treenet.data.splits import read_references
from treenet.evaluation.significance import ABOUT_SEEDS, ABOUT_WEIGHTS_OF_SEEDS, EXPLAINED, compare_over_seeds
from treenet.experiments import records
from treenet.experiments.comparable import READ_NO_TREES, check_one_study
from treenet.experiments.ledger import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Ledger
from treenet.experiments.recorded_study import report_records
from treenet.experiments.records import Recording, _is_chosen, read_curve, read_numbers, read_records, record_bytes
from treenet.experiments.results import Results
from treenet.experiments.scaling_report import FORM, LABELS, NLL, NLL_SCALE, TARGET_TOKENS, build_report, read_result, study_work
from treenet.experiments.scaling_table import describe_slopes, draw, format_table
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study import make_study, run_study, show_study
from treenet.experiments.study_grid import check_same_pieces, overlay, study_cells
from treenet.extras.tuning.trials import TuningConfig
from treenet.jobs.train_run import run_training
from treenet.models.registry import ARCHITECTURES
from treenet.report.report_inputs import read_report_inputs
from treenet.runs.averaging import average_checkpoints
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.translation_metrics import compute_scores
from treeproc.common.errors import CommandEnded
from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.shards.store import pieces_fingerprint, read_index

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent
STUDY = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 10},
    "batch": {"max_tokens": 64},
    "decoding": {"beam_size": 2},
    "max_steps": 9,
    "log_every": 1,
    "checkpoint_every": 3,
    "validate_every": 9,
    "workers": 0,
    "grid": {"fractions": [0.3, 1.0], "seeds": [1, 2], "bootstrap_samples": 100},
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def study(data, tmp_path_factory) -> list[str]:
    """The command of a study, without its --out."""
    config = tmp_path_factory.mktemp("config") / "study.yaml"
    config.write_text(json.dumps(STUDY))
    return [sys.executable, str(ROOT / "workflows" / "scaling.py"), "--config", str(config), f"data={data}"]


def make_config(data: Path, **grid) -> ScalingConfig:
    return load_settings(ScalingConfig, None, **{**STUDY, "grid": {**STUDY["grid"], **grid}}, data=data)


def run(command: list[str], out: Path, *overrides: str) -> subprocess.CompletedProcess:
    return run_here("scaling.py", *command[2:], "--out", out, *overrides)


@contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A driver that does not outlive a test that fails."""
    driver = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, **options)
    try:
        yield driver
    finally:
        driver.kill()


def statuses(out: Path) -> dict[str, str]:
    return {name: entry.status for name, entry in Ledger.read(out).entries.items()}


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder) if line["event"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(study, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    with pictures():
        done = run(study, out)
    assert done.returncode == 0, done.stderr
    assert f"stars mean: {EXPLAINED}" in done.stdout
    return out


# Subsets.


def chosen_ids(data: Path, fraction: float, seed: int = 1) -> set[int]:
    source = ExampleSource(data / "encoded", "train")
    batch = BatchConfig(max_tokens=64, fraction=fraction)
    plan = BatchPlan.build(source.lengths, batch, text_fingerprint="text", seed=seed)
    return {int(i) for step in range(plan.num_batches) for i in source.batch(plan.batch(step)).example_ids}


def test_subsets_of_shards_nest_and_depend_on_neither_seed_nor_shards(data, tmp_path):
    other_shards = write_toy_data(tmp_path, shards=5)
    sets = [chosen_ids(data, fraction) for fraction in (0.1, 0.3, 0.7, 1.0)]
    assert all(smaller < larger for smaller, larger in zip(sets, sets[1:], strict=False)) and len(sets[-1]) == 60
    assert chosen_ids(data, 0.3, seed=9) == sets[1] == chosen_ids(other_shards, 0.3)


@num_examples(40)
@given(st.permutations(range(40)), st.floats(0.1, 1.0))
def test_the_order_of_rows_does_not_change_the_subset(order, fraction):
    lengths = {"leaves": np.arange(40) % 7 + 1, "tgt_pieces": np.arange(40) % 5 + 1, "nodes": np.ones(40, dtype=int)}
    lengths["example_id"] = np.arange(40) * 3
    shuffled = {name: column[np.array(order)] for name, column in lengths.items()}
    batch = BatchConfig(max_tokens=60, fraction=fraction)
    ids = []
    for rows in (lengths, shuffled):
        try:
            plan = BatchPlan.build(rows, batch, text_fingerprint="text", seed=1)
        except UserError:
            ids.append(None)
            continue
        ids.append(sorted(rows["example_id"][plan.rows]))
    assert ids[0] == ids[1]


# The grid.


def test_cells_are_the_grid_over_one_training_configuration(data, tmp_path):
    cells = study_cells(make_config(data), tmp_path)
    assert [cell.name for cell in cells][:5] == [
        "tree_transformer-0.3-seed1", "transformer-0.3-seed1", "tree_transformer-1-seed1", "transformer-1-seed1",
        "tree_transformer-0.3-seed2",
    ]  # fmt: skip
    assert len({cell.folder for cell in cells}) == len(cells) == 8
    for cell in cells:
        config, labels = cell.config, cell.labels
        assert (config.model.name, config.batch.fraction, config.seed) == (labels["model"], labels["fraction"], labels["seed"])
        assert config.model.d_model == 16 and config.batch.max_tokens == 64


def test_metrics_of_words_that_do_not_fit_the_references_are_told(data, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("treenet.experiments.settings.read_references", lambda *of: ["我想知道湯姆住在哪裡。"])
    remedy = " set grid.metric=chrf, or grid.metric=bleu_tokenized and grid.target_language"
    for metric, language, told in (
        ("bleu", None, [remedy]), ("bleu", "zh", [remedy]), ("bleu_tokenized", None, [remedy]), ("bleu_tokenized", "zh", []),
        ("chrf", None, []),
    ):  # fmt: skip
        caplog.clear()
        study_cells(make_config(data, metric=metric, target_language=language), tmp_path)
        assert [line.partition(";")[2] for line in caplog.messages if "without blanks" in line] == told


def test_a_size_has_its_own_schedule_for_all_models(data, tmp_path):
    config = make_config(data, sizes={0.3: {"max_steps": 12, "optimizer": {"decay_steps": 12}}})
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    assert load_settings(ScalingConfig, tmp_path / "config.yaml") == config
    for cell in study_cells(config, tmp_path):
        small = cell.labels["fraction"] == 0.3
        assert (cell.config.max_steps, cell.config.optimizer.decay_steps) == ((12, 12) if small else (9, None))


def test_values_that_the_grid_would_replace_are_refused(data):
    for setting, wanted in (
        ("seed=5", r"set grid.seeds=\[5\] and seed=1"),
        ("batch.fraction=0.5", r"set grid.fractions=\[0.5\] and batch.fraction=1"),
    ):
        with pytest.raises(UserError, match=wanted):
            load_settings(ScalingConfig, None, [f"data={data}", setting])
        load_settings(ScalingConfig, None, [f"data={data}", setting, *wanted[4:].replace("\\", "").split(" and ")])
    for cls, systems in ((ScalingConfig, "grid.models"), (SeedsConfig, "grid.systems"), (TuningConfig, "tune.systems")):
        named = [f"data={data}", "model.name=bilstm"]
        with pytest.raises(UserError, match="line: model.name: every compared system has its own, and none is bilstm; "):
            load_settings(cls, None, named)
        for own in ("", "model: {name: bilstm}"):
            both = f"{{transformer: {{{own}}}, tree_transformer: {{model: {{name: transformer}}}}}}"
            load_settings(cls, None, [*named, f"{systems}={both}"])


def test_models_with_data_of_their_own_need_the_same_text_and_pieces(data, tmp_path):
    trees = write_toy_data(tmp_path / "trees")  # the same
    models = {"tree_transformer": {"data": str(trees)}, "transformer": {}}
    assert len(study_cells(make_config(data, models=models), tmp_path)) == 8

    def change(folder, **values):
        index = folder / "encoded" / "index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), **values}))

    change(trees, tree_settings={"side": "source"})  # the default
    assert len(study_cells(make_config(data, models=models), tmp_path)) == 8
    change(trees, tree_settings={"side": "target"})
    with pytest.raises(UserError, match="differ in side, but all models .* with the same tree.side"):
        study_cells(make_config(data, models=models), tmp_path)
    change(trees, vocab_fingerprint="another")
    with pytest.raises(UserError, match="differ in pieces"):
        study_cells(make_config(data, models=models), tmp_path)
    change(trees, text_fingerprint="another")
    with pytest.raises(UserError, match="differ in text, but"):
        study_cells(make_config(data, models=models), tmp_path)
    one = {**read_index(data / "encoded"), "classes": ["good", "bad"]}
    with pytest.raises(UserError, match=r"^b and a differ in text or classes \(bad, good and good, bad\), but"):
        check_same_pieces({Path("a"): one, Path("b"): {**one, "classes": ["bad", "good"], "text_fingerprint": "other"}})


def test_models_with_data_of_their_own_may_have_other_labels(tmp_path):
    """Those of binary trees, for example: the pieces alone must be the same."""
    pieces, labels = ({f"vocab/{name}": letter * 64} for name, letter in (("pieces.model", "a"), ("labels.txt", "b")))
    one, other = (write_toy_data(tmp_path / name) for name in ("one", "other"))
    for folder, files in ((one, pieces), (other, pieces | labels)):
        index = folder / "encoded" / "index.json"
        changed = {"files": files, "vocab_fingerprint": folder.name}
        index.write_text(json.dumps({**json.loads(index.read_text()), **changed}))
    models = {"tree_transformer": {"data": str(other)}, "transformer": {}}
    assert len(study_cells(make_config(one, models=models), tmp_path)) == 8


@pytest.mark.parametrize("subset", ["fixed", "by_seed"])
def test_both_models_of_a_pair_train_on_the_same_batches(data, tmp_path, subset):
    batches = {}
    for cell in study_cells(make_config(data).model_copy(update={"batch": BatchConfig(max_tokens=64, subset=subset)}), tmp_path):
        source = ExampleSource(data / "encoded", "train")
        plan = BatchPlan.build(source.lengths, cell.config.batch, text_fingerprint="text", seed=cell.config.seed)
        batches[tuple(cell.labels.values())] = [sorted(plan.batch(step)) for step in range(plan.num_batches)]
    for seed in (1, 2):
        for fraction in (0.3, 1.0):
            assert batches["tree_transformer", fraction, seed] == batches["transformer", fraction, seed]
    rows = [sorted(row for batch in batches["transformer", 0.3, seed] for row in batch) for seed in (1, 2)]
    assert (rows[0] == rows[1]) == (subset == "fixed")


def test_settings_record_the_subset_only_by_seed(data):
    config = make_config(data)
    assert "subset" not in config.model_dump()["batch"] and not any("subset" in key for key in config.lasting())
    drawn = load_settings(ScalingConfig, None, **{**STUDY, "batch": {"max_tokens": 64, "subset": "by_seed"}}, data=data)
    assert drawn.lasting()["batch.subset"] == "by_seed"


def test_overlay_is_key_by_key():
    assert overlay({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ({"decoder.*": 2.0}, [("decoder.*", 2.0), ("*norm*", 0.0), ("encoder.*", 0.5)]),
        ({"encoder.*": 0.1, "decoder.*": 2.0}, [("encoder.*", 0.1), ("decoder.*", 2.0), ("*norm*", 0.0)]),
        ({"encoder.*": None}, [("*norm*", 0.0)]),
        ({"encoder.*": 1.0, "*norm*": 0.0}, [("encoder.*", 1.0), ("*norm*", 0.0)]),
        ({}, []),
        (None, []),
    ],
)
def test_a_model_changes_and_takes_back_single_patterns_of_the_study(data, tmp_path, given, merged):
    """Its patterns stand before those of the study, because the first one that matches counts."""
    cells = study_cells(scaled(data, given), tmp_path)
    scales = {cell.labels["model"]: list(cell.config.lr_scale.items()) for cell in cells}
    assert scales == {"tree_transformer": [("*norm*", 0.0), ("encoder.*", 0.5)], "transformer": merged}


def scaled(data, given) -> ScalingConfig:
    models = {"tree_transformer": {"model": {"name": "tree_transformer"}}, "transformer": {"lr_scale": given}}
    values = {**STUDY, "lr_scale": {"*norm*": 0.0, "encoder.*": 0.5}, "grid": {**STUDY["grid"], "models": models}}
    return load_settings(ScalingConfig, None, **values, data=data)


# End to end.


def test_study_leaves_scores_translations_table_and_plot(undisturbed, data):
    assert set(statuses(undisturbed).values()) == {DONE}
    report = json.loads((undisturbed / "scaling.json").read_text())
    assert [(p["fraction"], p["model"]) for p in report["points"]] == [
        (0.3, "tree_transformer"), (0.3, "transformer"), (1.0, "tree_transformer"), (1.0, "transformer"),
    ]  # fmt: skip
    for point in report["points"]:
        assert point["pairs"] == len(chosen_ids(data, point["fraction"])) and point["seeds"] == [1, 2]
        assert point["bleu"]["mean"] == pytest.approx(sum(point["bleu"]["values"]) / 2)
        assert ("comparison" in point) == (point["model"] != "transformer")
    tested, baseline = report["points"][:2]
    found = tested["comparison"]
    assert found["difference"] == pytest.approx(tested["bleu"]["mean"] - baseline["bleu"]["mean"])
    assert (found["interval"], found["p_value"], found["seeds"]) == (None, None, 2)  # two seeds say nothing of others
    weights = found["weights"]
    assert found["about"] == ABOUT_SEEDS and weights["about"] == ABOUT_WEIGHTS_OF_SEEDS and weights["p_two_sided"] > 0
    facts = []
    for folder in (undisturbed / "cells").iterdir():
        assert len((folder / "translations.test.txt").read_text().split("\n")) == 8 + 1
        facts.append(json.loads((folder / "run.json").read_text()))
    assert len(facts) == 8 and len({(f["vocab_fingerprint"], f["data_fingerprint"], f["num_pieces"]) for f in facts}) == 1
    assert (undisturbed / "scaling.png").stat().st_size > 5000 and "transformer" in (undisturbed / "scaling.svg").read_text()


@pytest.mark.cluster
def test_study_killed_twice_ends_as_undisturbed(study, undisturbed, tmp_path):
    out = tmp_path / "study"
    for cell, steps, number in (("transformer-0.3-seed1", 15, signal.SIGKILL), ("transformer-1-seed2", 12, signal.SIGTERM)):
        with started([*study, "--out", str(out)], stdout=subprocess.DEVNULL) as driver:
            wait_for(lambda: len(losses(out / "cells" / cell)) >= steps, driver, pause=0.002)  # noqa: B023
            driver.send_signal(number)
            _, errors = driver.communicate(timeout=60)
        assert driver.returncode in (-signal.SIGKILL, 143)
        assert number == signal.SIGKILL or "the same command continues" in errors, errors
        assert statuses(out)[cell] == (RUNNING if number == signal.SIGKILL else INTERRUPTED)
    done = run(study, out)
    assert done.returncode == 0, done.stderr
    assert "transformer-0.3-seed1" not in done.stderr, "a finished cell ran again"
    for folder in (undisturbed / "cells").iterdir():
        assert losses(out / "cells" / folder.name) == losses(folder)
    assert without_times(out / "scaling.json") == without_times(undisturbed / "scaling.json")
    assert [entry.starts for entry in Ledger.read(out).entries.values()].count(2) == 2


@pytest.mark.cluster
def test_two_commands_of_which_one_is_killed_end_as_one_undisturbed(study, undisturbed, tmp_path):
    out = tmp_path / "study"
    command = [*study, "--out", str(out)]
    with started(command, stdout=subprocess.DEVNULL) as one, started(command, stdout=subprocess.DEVNULL) as other:
        wait_for(lambda: list(statuses(out).values()).count(RUNNING) == 2 if (out / "ledger.json").exists() else False, one)
        (name, *_) = [name for name, status in statuses(out).items() if status == RUNNING]
        wait_for(lambda: losses(out / "cells" / name), one, pause=0.002)
        one.send_signal(signal.SIGKILL)
        _, errors = other.communicate(timeout=250)
    assert other.returncode == 0, errors
    assert set(statuses(out).values()) == {DONE}
    assert sum(entry.starts for entry in Ledger.read(out).entries.values()) in (8, 9), "one between two cells lost nothing"
    for folder in (undisturbed / "cells").iterdir():
        assert losses(out / "cells" / folder.name) == losses(folder)
    assert without_times(out / "scaling.json") == without_times(undisturbed / "scaling.json")


def test_failing_cells_larger_grids_and_other_settings(study, undisturbed, tmp_path):
    out = tmp_path / "study"
    models = "{transformer: {}, broken: {batch: {max_tokens: 4}}}"
    first = run(study, out, f"grid.models={models}", "grid.seeds=[1]", "grid.fractions=[1.0]", "model.name=transformer")
    assert first.returncode == 1 and "broken-1-seed1 failed: batch.max_tokens must be at least" in first.stderr
    assert "1 of 2 cells failed" in first.stderr and statuses(out) == {"transformer-1-seed1": DONE, "broken-1-seed1": FAILED}
    assert losses(out / "cells" / "transformer-1-seed1") == losses(undisturbed / "cells" / "transformer-1-seed1")

    more = run(study, out, "grid.models={transformer: {}}", "grid.seeds=[1]", "model.name=transformer")
    assert more.returncode == 0 and statuses(out)["transformer-0.3-seed1"] == DONE, more.stderr
    assert "transformer-1-seed1:" not in more.stderr
    other = run(study, out, "grid.models={transformer: {}}", "grid.seeds=[1]", "model.name=transformer", "max_steps=31")
    assert other.returncode == 2 and "max_steps: 9 -> 31" in other.stderr and other.stderr.count("\n") == 1


def test_cells_of_other_weights_than_their_scores_are_refused_and_the_same_command_scores_them_again(data, tmp_path, capsys):
    grid = {"fractions": [1.0], "seeds": [1], "models": {"transformer": {"model": {"name": "transformer"}}}}
    steps = {"max_steps": 4, "checkpoint_every": 2, "validate_every": 4, "average_checkpoints": 2}
    config = load_settings(ScalingConfig, None, **{**STUDY, **steps, "grid": grid}, data=data)
    (cell,) = study_cells(config, tmp_path)

    whole = make_study(FORM, config, tmp_path, None)

    def study() -> bytes:
        run_study(whole)
        return (tmp_path / "scaling.json").read_bytes()

    first = study()
    (facts,) = json.loads(first)["cells"]
    assert facts["weights_sha256"] == file_sha256(cell.folder / "averaged" / "model.safetensors") and facts["software"]
    average_checkpoints(cell.folder, "last", 1)
    command = f"tree-attention average-checkpoints --out {cell.folder} last=2"
    with pytest.raises(UserError, match=rf"has the average of last=1, not of last=2; make it again with {command}, or remove"):
        show_study(whole)
    average_checkpoints(cell.folder, "last", 2)
    assert "transformer" in show_study(whole)
    average_checkpoints(cell.folder, "last", 1)
    grid = config.grid.model_copy(update={"split": "valid"})
    other = make_study(FORM, config.model_copy(update={"grid": grid}), tmp_path, None)
    with pytest.raises(UserError, match="has the average of last=1"):
        show_study(other)
    (report_study,) = read_report_inputs([str(tmp_path)], "test")[1]
    assert report_study.stale == (cell.name,)
    capsys.readouterr()
    assert study() == first  # the settings of the study say which average it is of
    warned = f"{cell.name}: its scores are not those of this study (test: weights "
    assert warned in capsys.readouterr().err
    assert [entry.starts for entry in Ledger.read(tmp_path).entries.values()] == [2] and study() == first

    average_checkpoints(cell.folder, "last", 1)
    score = study_work(config).score
    score(cell.folder)  # as its printed command does
    capsys.readouterr()
    assert study() == first and "(its average is of last=1, not of last=2)" in capsys.readouterr().err
    assert run_here("evaluate.py", "--out", str(cell.folder), "decoding.beam_size=1").returncode == 0
    capsys.readouterr()
    assert study() == first and "(decoding is another)" in capsys.readouterr().err

    with pytest.raises(UserError, match="no scores of valid; run the same command again without --dry-run$"):
        show_study(other)
    run_study(other)  # scores all cells on another split
    assert "(none of valid)" in capsys.readouterr().err and "transformer" in show_study(other)

    decoding = cell.config.decoding.model_copy(update={"beam_size": 1})
    run_training(cell.config.model_copy(update={"decoding": decoding}), cell.folder)
    score(cell.folder)
    with pytest.raises(UserError, match="translations of test have another decoding.beam_size than its settings; restore it, or"):
        study()
    run_training(cell.config, cell.folder)
    average_checkpoints(cell.folder, "last", 1)
    shutil.move(cell.folder / "checkpoints", tmp_path / "away")
    with pytest.raises(CommandEnded):
        study()
    assert "failed: " in capsys.readouterr().err
    assert "has the average of last=1, not of last=2; make it again with" in Ledger.read(tmp_path).entries[cell.name].error
    shutil.move(tmp_path / "away", cell.folder / "checkpoints")
    assert study() == first
    run_training(cell.config.model_copy(update={"max_steps": 8}), cell.folder)
    with pytest.raises(CommandEnded):
        study()
    assert "has 8 updates, but the study asks for 4; restore it, or remove the folder" in capsys.readouterr().err
    score(cell.folder)
    with pytest.raises(CommandEnded):
        study()


def change_scores(folder: Path, **values) -> None:
    scores = json.loads((folder / "scores.json").read_text())
    (folder / "scores.json").write_text(json.dumps(scores | {"test": scores["test"] | values}))


def test_a_study_scores_with_all_references_and_scores_again_when_they_change(data, tmp_path, capsys):
    models = {"transformer": {"model": {"name": "transformer"}}, "tree": {"model": {"name": "tree_transformer"}}}
    grid = {"fractions": [1.0], "seeds": [1], "models": models, "bootstrap_samples": 20}
    steps = {"max_steps": 2, "checkpoint_every": 2, "validate_every": 2, "average_checkpoints": 1}
    first = read_references(data, "test")
    second = [" ".join([*line.split()[:2], "other"]) for line in first]
    file = tmp_path / "second.txt"
    file.write_text("".join(line + "\n" for line in second))

    def run_with(**more) -> dict:
        config = load_settings(ScalingConfig, None, **{**STUDY, **steps, "grid": grid | more}, data=data)
        run_study(make_study(FORM, config, tmp_path / "study", tmp_path / "records", [second] if more else ()))
        return json.loads((tmp_path / "study" / "scaling.json").read_text())

    assert run_with()["bleu_signature"].startswith("nrefs:1|")
    capsys.readouterr()
    report = run_with(more_references=[str(file)])
    assert "(the files of grid.more_references are others)" in capsys.readouterr().err
    assert report["bleu_signature"].startswith("nrefs:2|")
    means = {}
    for cell in report["cells"]:
        lines = (tmp_path / "study" / "cells" / cell["cell"] / "translations.test.txt").read_text().splitlines()
        means[cell["model"]] = compute_scores(lines, first, more_references=[second])["bleu"]
        assert cell["bleu"] == means[cell["model"]]
    (found,) = [point["comparison"] for point in report["points"] if "comparison" in point]
    assert found["difference"] == pytest.approx(means["tree"] - means["transformer"])
    cell = tmp_path / "study" / "cells" / report["cells"][0]["cell"]
    shutil.copytree(cell, tmp_path / "other")
    change_scores(tmp_path / "other", references_fingerprint="other")
    config = load_settings(ScalingConfig, None, **{**STUDY, **steps, "grid": grid | {"more_references": [str(file)]}}, data=data)
    assert read_result(config, cell, [second])[0]["test"]["bleu"] == report["cells"][0]["bleu"]
    with pytest.raises(UserError, match=r"of test are stale \(its references are others\); run the same command again"):
        read_result(config, tmp_path / "other", [second])
    change_scores(cell, references_fingerprint="other")
    assert run_with(more_references=[str(file)])["cells"] == report["cells"]
    assert "(its references are others)" in capsys.readouterr().err
    record = next((tmp_path / "records").iterdir())
    of_two = {"more_references": [str(file)]}
    for settings, message in (
        ({}, "another number of references than nrefs:1"),
        (of_two, "more_references are others"),
    ):
        config = load_settings(ScalingConfig, None, **{**STUDY, **steps, "grid": grid | settings}, data=data)
        with pytest.raises(UserError, match=message):
            show_study(make_study(FORM, config, tmp_path / "new", tmp_path / "records", [second]))
        record.write_text(record.read_text().replace('"more_references_fingerprint": "', '"more_references_fingerprint": "0'))


def test_dry_run_shows_the_cells_and_writes_nothing(study, data, undisturbed, tmp_path, capsys):
    main = main_of("scaling.py")
    arguments = ["--config", study[3], f"data={data}", "--dry-run", "grid.seeds=[1,2,3]", "--out"]
    main([*arguments, str(tmp_path / "none")])
    printed = capsys.readouterr().out
    assert printed.count(": new\n") == 12 and "no cell is done yet" in printed and not (tmp_path / "none").exists()
    assert f"\nnote: share 0.3 of the training data: {len(chosen_ids(data, 0.3))} examples\n" in printed
    assert "an interval needs" not in printed and "share 1 of" not in printed
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    main([*arguments, str(undisturbed)])
    printed = capsys.readouterr().out
    assert printed.count(": done\n") == 8 and printed.count(": new\n") == 4 and "tok:13a" in printed
    with pytest.raises(UserError, match=r"holds cells with other settings \(.*label_smoothing: .* -> 0.3.*choose another --out"):
        main([*arguments, str(undisturbed), "optimizer.label_smoothing=0.3"])
    assert not capsys.readouterr().out  # no figures of other settings
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before
    main([*arguments[:4], "grid.seeds=[1,2]", "grid.fractions=[0.08,0.3]", "--out", str(tmp_path / "none")])
    printed = capsys.readouterr().out
    assert "\nnote: an interval needs 3 seeds, but this study has 2; a larger grid.seeds adds cells\n" in printed
    assert re.search(
        r"\nwarning: share 0\.08 of the training data: \d examples?; leave such small grid\.fractions out\n", printed
    )


def test_records_in_the_folder_of_the_study_are_refused_before_a_cell_is_trained(data, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("out", "link"):
        with pytest.raises(UserError, match=r"^--records must be another folder than --out, but both are .*/out$"):
            run_study(make_study(FORM, make_config(data), tmp_path / "out", tmp_path / name))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give settings as data=DATA, or --config FILE.yaml"),
        (["--sample"], "give --out DIR"),
        (["--sample", "--out", "x"], r"data: is missing \(data set that tree-attention preprocess wrote: a folder"),
        (["--sample", "--out", "x", "data=nowhere"], "nowhere is not a folder; give a data set"),
    ],
)
def test_scaling_says_in_one_line_what_it_needs(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main_of("scaling.py")(arguments)
    assert not (tmp_path / "x").exists()


@pytest.mark.timeout(600)
@pytest.mark.cluster
def test_cells_side_by_side_in_ray_stop_and_continue(study, tmp_path):
    """Two cells at a time, one worker each: SIGTERM saves both, and the same command brings all three to their end."""
    out = tmp_path / "study"
    models = "{tree_transformer: {}, transformer: {model: {name: transformer}}, broken: {batch: {max_tokens: 4}}}"
    command = [*study, "--out", str(out), "workers=1", "grid.fractions=[1.0]", "grid.seeds=[1]", f"grid.models={models}"]
    command += ["grid.parallel=2", "checkpoint_every=1000", "validate_every=1000", "max_steps=600"]
    first = [out / "cells" / f"{model}-1-seed1" for model in ("tree_transformer", "transformer")]
    with started(command) as driver:
        wait_for(lambda: all(len(read_metrics(folder)) > 2 for folder in first), driver, 250, pause=0.002)
        driver.send_signal(signal.SIGTERM)
        _, errors = driver.communicate(timeout=100)
    assert driver.returncode == 143 and "the same command continues" in errors, errors
    assert list(statuses(out).values()) == [INTERRUPTED, INTERRUPTED, WAITING]
    for folder in first:
        assert len(list((folder / "checkpoints").glob("step_*"))) == 1

    done = subprocess.run([*command, "log_every=100"], env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "broken-1-seed1 failed: batch.max_tokens must be at least" in done.stderr, done.stderr
    assert [(entry.status, entry.starts) for entry in Ledger.read(out).entries.values()] == [(DONE, 2), (DONE, 2), (FAILED, 1)]
    for folder in first:
        assert losses(folder)[-1][0] == 600 and (folder / "translations.test.txt").exists()
    assert len(json.loads((out / "scaling.json").read_text())["points"]) == 2


# Records.


@pytest.fixture
def recorded(undisturbed, data, tmp_path) -> Path:
    """Records of a study that is there."""
    folder = tmp_path / "records"
    recording = Recording(LABELS, partial(read_result, make_config(data)), folder)
    for name, entry in Ledger.read(undisturbed).entries.items():
        recording.write(undisturbed / "cells" / name, entry)
    return folder


def test_a_study_goes_on_from_its_records_alone(study, undisturbed, recorded, tmp_path):
    """Two cells without a record are trained; then all have records, and nothing is trained."""
    missing, second = ["transformer-0.3-seed2", "tree_transformer-1-seed2"], tmp_path / "second"
    for name in missing:
        (recorded / f"{name}.json").unlink()
    done = run([*study, "--records", str(recorded)], second)
    assert done.returncode == 0, done.stderr
    assert "seed1 (" not in done.stderr and sorted(path.name for path in (second / "cells").iterdir()) == missing
    assert len(list(recorded.iterdir())) == 8
    found, expected = (without_times(folder / "scaling.json") for folder in (second, undisturbed))
    assert found == expected, "the same table as of runs that are there"
    again = run([*study, "--records", str(recorded)], tmp_path / "third")
    assert again.returncode == 0 and not (tmp_path / "third" / "cells").exists()
    assert (tmp_path / "third" / "scaling.json").read_bytes() == (second / "scaling.json").read_bytes()


def test_the_folder_of_another_cell_or_its_log_gets_no_record(undisturbed, data, tmp_path):
    recording, entries = Recording(LABELS, partial(read_result, make_config(data))), Ledger.read(undisturbed).entries
    name, other = "transformer-1-seed1", "transformer-1-seed2"
    with pytest.raises(UserError, match=rf"cells/{other} has the run of another cell \(seed: 1 -> 2\); restore it, or remove"):
        recording.make(undisturbed / "cells" / other, entries[name])
    changed = replace(entries[name], data_fingerprint="0" * 16)
    with pytest.raises(UserError, match=r"another cell \(data fingerprint: 0000"):
        recording.make(undisturbed / "cells" / name, changed)
    mixed = shutil.copytree(undisturbed / "cells" / name, tmp_path / name)
    shutil.copy(undisturbed / "cells" / other / "metrics.jsonl", mixed)
    with pytest.raises(UserError, match=r"metrics.jsonl is of another run: its loss on valid at update \d+ is not that of"):
        recording.make(mixed, entries[name])
    shutil.copy(undisturbed / "cells" / name / "metrics.jsonl", mixed)
    shutil.rmtree(mixed / "averaged")
    shutil.copytree(undisturbed / "cells" / other / "averaged", mixed / "averaged")
    with pytest.raises(UserError, match=r"averaged has weights of another run \(seed: 1 -> 2\)"):
        recording.make(mixed, entries[name])


@pytest.mark.parametrize(
    ("change", "is_chosen"),
    [
        ("precision: 'auto' -> 'bf16'", True),
        ("precision: 'float32' -> 'bf16'", False),
        ("init: 'there/a' -> 'here/a'", True),
        ("init: 'a' -> None", False),
        ("init: None -> 'a'", False),
        ("model.pretrained.folder: 'a' -> 'b'", True),
        ("seed: 1 -> 2", False),
    ],
)
def test_a_run_may_choose_its_precision_and_name_folders_in_another_way(change, is_chosen):
    assert _is_chosen(change) is is_chosen


def test_seeds_of_one_system_have_the_same_settings(recorded):
    records = list(read_records(recorded).values())
    records[1]["settings"]["optimizer"]["learning_rate"] = 0.5
    one, other = records[0]["cell"], records[1]["cell"]
    said = rf"{one} and {other} are of one system, but not only their seeds differ: optimizer.learning_rate \(.*, not 0.5\)"
    with pytest.raises(UserError, match=said):
        report_records(records)


def test_records_of_other_text_are_of_two_studies(recorded):
    records = list(read_records(recorded).values())
    report_records(records)
    (scores,) = records[3]["scores"].values()
    scores["data"]["text_fingerprint"] = "other"
    with pytest.raises(UserError, match=rf"{records[0]['cell']} and {records[3]['cell']} are of data sets of other text"):
        report_records(records)
    scores["own_data"] = False  # of `evaluate data=OTHER`
    report_records(records)


def test_records_of_other_pieces_are_of_two_studies(recorded, data, tmp_path):
    """Also of the cells that a larger grid would add. Earlier records have the number of the pieces alone, or not even that."""
    records = list(read_records(recorded).values())
    facts = [record["facts"] for record in records]
    assert {one["pieces_fingerprint"] for one in facts} == {pieces_fingerprint(read_index(data / "encoded"))}
    report_records(records)
    for fact in ("pieces_fingerprint", "num_pieces"):
        facts[3][fact] = "other" if fact == "pieces_fingerprint" else 7
        said = rf"{records[0]['cell']} and {records[3]['cell']} are of data sets of other pieces, so they are of two studies"
        with pytest.raises(UserError, match=said):
            report_records(records)
        del facts[3][fact]
        report_records(records)
    records[0]["settings"]["task"] = records[1]["settings"]["task"] = "classification"
    facts[0]["pieces_fingerprint"] = facts[1]["pieces_fingerprint"] = "other"  # accuracy does not depend on them
    check_one_study(records[:1] + records[4:5], "model")
    config = make_config(data, seeds=[1, 2, 3])
    show_study(make_study(FORM, config, tmp_path / "study", recorded))
    for path in recorded.glob("*.json"):
        record = json.loads(path.read_text())
        record["facts"]["pieces_fingerprint"] = "other"
        path.write_text(json.dumps(record))
    for command in (show_study, run_study):
        with pytest.raises(UserError, match="are of data sets of other pieces"):
            command(make_study(FORM, config, tmp_path / "study", recorded))
    assert not (tmp_path / "study").exists()


def test_a_record_is_small_and_says_what_its_cell_was(recorded, undisturbed, data):
    paths = sorted(recorded.iterdir())
    assert len(paths) == 8
    for path in paths:
        text = path.read_text()
        record, folder = json.loads(text), undisturbed / "cells" / path.stem
        assert len(text) < 20_000 and len(text.splitlines()) < 20 and str(data) not in text and str(undisturbed) not in text
        scores = json.loads((folder / "scores.json").read_text())["test"]
        assert record["scores"] == {"test": scores} and scores["bleu_signature"] and scores["software"]
        nll, tokens = read_numbers(record, NLL, 10**9), read_numbers(record, TARGET_TOKENS)
        assert nll.sum() / NLL_SCALE == pytest.approx(scores["reference_nll"]["total"], abs=1e-4 * len(nll))
        assert tokens.sum() == scores["reference_nll"]["tokens"] and len(nll) == len(tokens) == scores["num_examples"]
        assert record["facts"]["parameters"] and record["settings"]["model"]["d_model"] == 16
        assert record["training"]["updates"] == 9 and record["training"]["tokens_per_s"] > 0
        assert record["training"]["machines"][0]["cores"] and record["training"]["packages"][0]["torch"]
        assert [*zip(record["curve"]["train"]["step"], record["curve"]["train"]["loss"], strict=True)] == [
            (step, pytest.approx(loss, abs=1e-5)) for step, loss in losses(folder)
        ]


def test_a_study_with_a_protocol_starts_only_if_git_has_it(data, undisturbed, tmp_path):
    """The records have the commit that changed the protocol last."""
    plan, out = tmp_path / "repository" / "plans" / "plan.md", tmp_path / "out"
    plan.parent.mkdir(parents=True)
    make = partial(make_study, FORM, make_config(data, protocol=plan), out, tmp_path / "records")

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=N", "-c", "user.email=N@example.org")
        return subprocess.run(
            ["git", *who, *arguments], cwd=plan.parent, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(message: str) -> str:
        git("add", "--all")
        git("commit", "--quiet", f"--message={message}")
        return git("rev-parse", "HEAD")

    def refusal() -> str:
        with pytest.raises(UserError) as refused:
            run_study(make())
        assert not out.exists()
        return str(refused.value)

    assert refusal() == f"{plan} is missing; give another file, or write it and commit it with git"
    plan.write_text("H1: trees help.\n")
    unknown = f"{plan} is in no commit of git; commit it, then run the same command again"
    assert refusal() == unknown
    git("init", "--quiet", "..")
    assert refusal() == unknown
    first = commit("Plan")
    plan.with_name("other").touch()
    commit("Other")
    name, entry = next(iter(Ledger.read(undisturbed).entries.items()))
    record = make().recording.make(undisturbed / "cells" / name, entry)
    assert record["protocol"] == {"file": "plans/plan.md", "commit": first}
    assert record["training"]["first_update"].startswith("20")
    plan.write_text("H1: trees hurt.\n")
    assert refusal() == f"{plan} is not as in the last commit of git; commit it, then run the same command again"
    second = commit("Plan")
    assert make().recording.protocol == {"file": "plans/plan.md", "commit": second} and second != first


def test_a_record_names_no_folder_of_its_machine():
    """A cell whose encoder or first run lies elsewhere is the same, and that of another name is not."""

    def settings(folder: str, encoder: str) -> dict:
        model = {"name": "tree_transformer", "pretrained": {"folder": f"{folder}/{encoder}"}}
        return {"data": f"{folder}/data", "init": f"{folder}/run", "model": model}

    before = settings("/here", "bert")
    kept = records._without_places({**before, "frozen_states": "/here/states"})
    assert "/" not in json.dumps(kept) and before == settings("/here", "bert")
    assert records._with_places(kept, settings("/there", "bert")) == settings("/there", "bert")
    assert records._with_places(kept, settings("/there", "roberta"))["model"]["pretrained"]["folder"] == "bert"


def test_models_are_compared_unpaired_by_bleu_and_nll(undisturbed, recorded):
    """Differences are those of the means of all seeds, at every size; the table prints them."""
    report = json.loads((undisturbed / "scaling.json").read_text())
    found = {(test["fraction"], test["metric"]): test for test in report["pooled"]}
    assert found.keys() == {(fraction, metric) for fraction in (0.3, 1.0) for metric in ("bleu", "nll")}
    for (fraction, metric), test in found.items():
        means = {}
        for model in ("tree_transformer", "transformer"):
            entries = [json.loads((recorded / f"{model}-{fraction:g}-seed{seed}.json").read_text()) for seed in (1, 2)]
            means[model] = np.mean([entry["scores"]["test"][metric] for entry in entries])
        assert test["difference"] == pytest.approx(means["tree_transformer"] - means["transformer"], abs=1e-4)
        assert test["interval"][0] <= test["difference"] <= test["interval"][1] and test["freedom"] == 2
        assert (test["model"], test["against"]) == ("tree_transformer", "transformer")
    assert "nll a token" in format_table(report) and "Dunnett's test of all systems of a size" in format_table(report)


def test_curves_are_thinned_with_both_ends_and_the_lowest_nll_on_valid(tmp_path):
    lines = [{"event": "train", "step": step, "loss": 1.0, "nll": None} for step in range(1, 1001)]
    nlls = {step: 2.0 + abs(step - 504) for step in range(1, 1001)} | {3: math.inf}
    lines += [{"event": "valid", "step": step, "nll": nll} for step, nll in nlls.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = read_curve(tmp_path)
    steps = curve["train"]["step"]
    assert len(steps) == 200 and steps[0] == 1 and steps[-1] == 1000 and max(np.diff(steps)) <= 6
    assert curve["valid"]["step"] == sorted({*steps, 504}) and 504 not in steps
    assert min(nll for nll in curve["valid"]["nll"] if nll is not None) == 2.0


def damage(record: dict, what: str) -> None:
    match what:
        case "settings":
            record["settings"]["max_steps"] = 31
        case "data":
            record["data_fingerprint"] = "other"
        case "label":
            record["labels"]["seed"] = "one"
        case "seed":
            record["labels"]["seed"] = 7
        case "nan":
            record["scores"]["test"]["bleu"] = math.nan
        case "sentences":
            record["sentences"]["nll"] = record["sentences"]["nll"].rpartition(" ")[0]
        case "version":
            record["version"] = 99
        case "name":
            record["cell"] = "other"
        case "form":
            record["scores"] = []
        case "numbers":
            record["sentences"]["bleu.length"] = record["sentences"]["bleu.length"].rpartition(" ")[0] + " -1"
        case "scores":
            record["scores"]["test"].pop("bleu")
        case "count":
            signature = record["scores"]["test"]["bleu_signature"]
            record["scores"]["test"]["bleu_signature"] = signature.replace("nrefs:1|", "nrefs:12|")
        case "references":
            record["sentences"]["bleu.reference_length"] = " ".join("9" * 8)


def test_a_record_that_its_reader_refuses_is_not_written(recorded):
    record = json.loads((recorded / "transformer-1-seed2.json").read_text())
    assert json.loads(record_bytes(record)) == record
    damage(record, "nan")
    with pytest.raises(UserError, match=r"score test\.bleu of the cell transformer-1-seed2 is not finite; remove its"):
        record_bytes(record)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", r"is a record with other settings \(max_steps: 31 -> 9\); choose another --records"),
        ("data", "data fingerprint: other -> "),
        ("label", "label seed is 'one'"),
        ("seed", r"is a record with other settings \(labels.seed: 7 -> 2\)"),
        ("nan", r"is damaged: the score test\.\w+ is not finite"),
        ("sentences", "have different numbers of sentences"),
        ("version", "of a later version"),
        ("name", "of another cell"),
        ("form", "is damaged: scores"),
        ("numbers", r"sentences\.bleu\.length must be a line of counts"),
        ("scores", "has no bleu of test"),
        ("count", "another number of references than nrefs:1 of grid.more_references; remove it"),
        ("references", "have scores against different references"),
    ],
)
def test_records_that_do_not_fit_are_refused(recorded, data, tmp_path, what, message):
    path = recorded / "transformer-1-seed2.json"
    record = json.loads(path.read_text())
    damage(record, what)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        show_study(make_study(FORM, make_config(data), tmp_path / "study", recorded))


def test_records_of_before_a_setting_came_have_its_default(recorded, data, tmp_path):
    path = recorded / "transformer-1-seed2.json"
    record = json.loads(path.read_text())
    del record["settings"]["ema_decay"]
    path.write_text(json.dumps(record))
    assert show_study(make_study(FORM, make_config(data), tmp_path / "study", recorded)).count(": recorded\n") == 8
    config = make_config(data).model_copy(update={"batch": BatchConfig(max_tokens=64, subset="by_seed")})
    with pytest.raises(UserError, match="batch.subset: None -> 'by_seed'"):
        show_study(make_study(FORM, config, tmp_path / "study", recorded))


def make_records(recorded: Path, grid: dict[str, dict[float, int]]) -> list[dict]:
    """Records of so many seeds of models and sizes; their translations are made up."""
    random, base = np.random.default_rng(0), json.loads((recorded / "transformer-1-seed1.json").read_text())
    records = []
    for model, sizes in grid.items():
        for fraction, seeds in sizes.items():
            for seed in range(1, seeds + 1):
                record = json.loads(json.dumps(base))
                matches = random.integers(1, 3 + (model != "transformer"), size=8)
                record["cell"] = f"{model}-{fraction:g}-seed{seed}"
                record["labels"] = {"model": model, "fraction": fraction, "seed": seed}
                record["facts"]["examples"] = round(60 * fraction)
                record["sentences"] |= {"bleu.length": "9 " * 8, "bleu.reference_length": "9 " * 8}
                record["sentences"] |= {f"bleu.matches_{n}": " ".join(str(m + 5 - n) for m in matches) for n in (1, 2, 3, 4)}
                records.append(record)
    return records


def test_primary_comparisons_and_other_systems_are_families_and_all_else_is_exploratory(recorded, data):
    models = ("tree", "transformer", "other", "third")
    config = make_config(data, models={name: {} for name in models}, fractions=[0.25, 1.0])
    pair = {0.25: 3, 0.5: 3, 1.0: 5}
    grid = {"tree": pair, "transformer": pair, "other": {0.5: 3, 1.0: 3}, "third": {1.0: 3}}
    report = build_report(config.grid, make_records(recorded, grid))
    compared = {(p["model"], p["fraction"]): p["comparison"] for p in report["points"] if "comparison" in p}
    compared |= {(slope["model"], "slope"): slope["comparison"] for slope in report["slopes"]}
    families = {place: (test["family"], test["against"], test["seeds"]) for place, test in compared.items()}
    assert families == {
        ("tree", 1.0): ("primary", "transformer", 5), ("tree", "slope"): ("primary", "transformer", 3),
        ("other", 1.0): ("systems", "tree", 3), ("third", 1.0): ("systems", "tree", 3),
        ("tree", 0.25): ("exploratory", "transformer", 3), ("tree", 0.5): ("exploratory", "transformer", 3),
        ("other", 0.5): ("exploratory", "tree", 3), ("other", "slope"): ("exploratory", "tree", 3),
    }  # fmt: skip
    for family in ("primary", "systems"):
        tests = sorted((test for test in compared.values() if test["family"] == family), key=lambda test: test["p_value"])
        assert tests[0]["holm_p_value"] == pytest.approx(min(1, 2 * tests[0]["p_value"]))
    assert all((test["holm_p_value"] is None) == (test["family"] == "exploratory") for test in compared.values())
    table = format_table(report)
    assert "slope of tree - transformer, 3 seeds, 3 sizes: " in table
    assert table.count(" exploratory") == 5  # of four tests, and in a message
    slope = report["slopes"][0] | {"comparison": asdict(compare_over_seeds([0.25, 0.5], 1e-4, 8)) | {"against": "transformer"}}
    (line,) = describe_slopes(report | {"slopes": [slope]})  # without an interval, there is no "95 % -, p -"
    assert line == "slope of tree - transformer, 2 seeds, 3 sizes: +0.38 BLEU a doubling; an interval needs 3 seeds"


def test_shares_of_equal_size_have_no_slope(recorded, data):
    """A small share of few examples may be as large as the next one."""
    config = make_config(data, models={"tree": {}, "transformer": {}}, fractions=[0.5, 1.0])
    records = make_records(recorded, {name: {0.5: 3, 1.0: 3} for name in ("tree", "transformer")})
    for record in records:
        record["facts"]["examples"] = 30
    report = build_report(config.grid, records)
    assert report["slopes"] == [] and len(report["points"]) == 4


def test_compared_cells_of_other_processors_packages_or_commits_are_named(recorded, data):
    """Only pairs that are compared count: seed 2 of one size has no partner."""
    config = make_config(data, models={"tree": {}, "transformer": {}})
    records = make_records(recorded, {"tree": {0.5: 2, 1.0: 3}, "transformer": {0.5: 1, 1.0: 3}})
    assert build_report(config.grid, records)["unlike"] == {"compared": 4, "device": [], "packages": [], "software": []}
    by_name = {record["cell"]: record["training"] for record in records}
    by_name["tree-0.5-seed2"]["machines"] = [{"processor": "other", "cores": 2, "gpu": None}]
    for seed in (1, 2):
        machine = by_name[f"tree-1-seed{seed}"]["machines"][0]
        by_name[f"tree-1-seed{seed}"]["machines"] = [{**machine, "cores": 64}]  # the kind is the same
    by_name["transformer-1-seed2"]["machines"][0]["gpu"] = "NVIDIA H200"
    by_name["transformer-1-seed3"]["machines"].append({"processor": "other", "cores": 2, "gpu": None})  # trained on two kinds
    by_name["transformer-0.5-seed1"]["packages"][0]["torch"] = "1.0"
    del by_name["tree-1-seed1"]["software"]
    report = build_report(config.grid, records)
    two = [["tree-1-seed2", "transformer-1-seed2"], ["tree-1-seed3", "transformer-1-seed3"]]
    assert report["unlike"] == {
        "compared": 4, "device": two, "packages": [["tree-0.5-seed1", "transformer-0.5-seed1"]], "software": [],
    }  # fmt: skip
    table = format_table(report)
    assert (
        "2 of 4 compared pairs of cells were trained with different kinds of device: tree-1-seed2 - transformer-1-seed2, "
        in table
    )
    assert "1 of 4 compared pairs of cells were trained with different versions of packages: tree-0.5-seed1 - " in table
    assert "commits" not in table


def test_compared_systems_that_differ_in_more_than_one_thing_are_named(recorded, data):
    """The sections of the tree go with the name of the model, and two systems without a second difference are not named."""
    config = make_config(data, models={"tree": {}, "transformer": {}, "wide": {}})
    records = make_records(recorded, {name: {0.5: 1, 1.0: 1} for name in ("tree", "transformer", "wide")})
    settings = {record["cell"]: record["settings"] for record in records}
    for name, found in settings.items():
        found["model"]["name"] = "transformer" if name.startswith("transformer") else "tree_transformer"
        found["model"] |= {} if name.startswith("transformer") else {"tree": {"subtree_mask": True}}
    report = build_report(config.grid, records)
    assert report["confounded"] == {} and "things" not in format_table(report)
    of_plain = [record for record in records if record["cell"].startswith("transformer")]
    for record in of_plain:
        record["data_fingerprint"] = "other"
    assert build_report(config.grid, records)["confounded"] == {}  # the plain model reads no trees
    for record in of_plain:
        record["settings"]["batch"]["budget_counts"] = "leaves_and_nodes"
    assert "the trees of the data" in build_report(config.grid, records)["confounded"]["tree - transformer"]
    for record in of_plain:
        record["data_fingerprint"] = records[0]["data_fingerprint"]
        record["settings"]["batch"]["budget_counts"] = "leaves"
    settings["tree-1-seed1"]["batch"]["max_tokens"] = 96
    settings["wide-0.5-seed1"]["clip_norm"] = 1.0  # a record leaves the default out
    for record in records:
        record["data_fingerprint"] = "other" if record["cell"].startswith("wide") else record["data_fingerprint"]
    table = format_table(build_report(config.grid, records))
    assert "\ntree - transformer: the two differ in 2 things, so the difference has no single cause: model.name (" in table
    assert "batch.max_tokens (96, not 64)" in table and "subtree_mask" not in table
    assert "\nwide - tree: the two differ in 3 things, so " in table
    assert "clip_norm (1.0, not None)" in table and ": the trees of the data, batch.max_tokens" not in table
    assert "\nsizes 0.5 and 1 of tree also differ in batch.max_tokens (64, not 96)\n" in table
    assert "\nsizes 0.5 and 1 of wide also differ in clip_norm (1.0, not None)" in table and "of transformer also" not in table
    for record in records:
        made = {"tree_source": "shuffled" if record["cell"].startswith("wide") else "parsed", "binarize": "none", "seed": 1}
        record["facts"]["tree_settings"] = made
    records[-1]["facts"]["tree_settings"]["binarize"] = "right"
    assert "binarize" not in format_table(build_report(config.grid, [*records[:-1]]))
    assert "tree.binarize (right, not none)" in format_table(build_report(config.grid, records))
    found = next(record for record in records if record["cell"] == "wide-1-seed1")
    found["data_fingerprint"] = "third"
    with pytest.raises(UserError, match=r"wide-0\.5-seed1 and wide-1-seed1 are of one system, but read other trees"):
        build_report(config.grid, records)


def test_the_models_without_trees_are_those_of_the_registry():
    kinds = {name: one.encoder.reads_with(ModelConfig()) for name, one in ARCHITECTURES.items() if name != "relation_transformer"}
    assert set(READ_NO_TREES) == {name for name, reads in kinds.items() if not (reads.constituents or reads.reads_arcs)}


def test_tokenised_bleu_is_compared_where_it_is_asked_for(undisturbed, data, tmp_path):
    config = make_config(data, metric="bleu_tokenized")
    recording = Recording(LABELS, partial(read_result, config))
    records = recording.read_all(Ledger.read(undisturbed), undisturbed)
    report = build_report(config.grid, records)
    for point in report["points"]:
        cells = [cell for cell in report["cells"] if (cell["model"], cell["fraction"]) == (point["model"], point["fraction"])]
        scores = [json.loads((undisturbed / "cells" / cell["cell"] / "scores.json").read_text())["test"] for cell in cells]
        assert point["bleu_tokenized"]["values"] == [one["bleu_tokenized"] for one in scores]
        assert point["bleu"]["values"] == [one["bleu"] for one in scores]
        if "comparison" in point:
            base = next(p for p in report["points"] if (p["model"], p["fraction"]) == ("transformer", point["fraction"]))
            difference = point["bleu_tokenized"]["mean"] - base["bleu_tokenized"]["mean"]
            assert point["comparison"]["difference"] == pytest.approx(difference)
    table = format_table(report)
    scores, differences = draw(report).axes
    assert "tokenised BLEU" in table and "tok:intl" in table and scores.get_ylabel() == "tokenised BLEU on test"
    (drawn,) = differences.containers
    compared = [point["comparison"] for point in report["points"] if "comparison" in point]
    assert list(drawn.lines[0].get_ydata()) == [one["difference"] for one in compared] and len(compared) > 1
    with pytest.raises(UserError, match="has no numbers of single sentences for grid.metric = bleu; give the metric of the"):
        build_report(make_config(data).grid, records)


def test_the_plot_of_a_single_size_has_a_line_for_each_model(undisturbed):
    report = json.loads((undisturbed / "scaling.json").read_text())
    points = [point for point in report["points"] if point["fraction"] == 1.0]
    scores, differences = draw({**report, "points": points}).axes
    assert [label.get_text() for label in scores.get_yticklabels()] == [point["model"] for point in points]
    assert [bar.lines[0].get_xdata()[0] for bar in scores.containers] == [point["bleu"]["mean"] for point in points]
    compared = [point["comparison"] for point in points if "comparison" in point]
    assert [bar.lines[0].get_xdata()[0] for bar in differences.containers] == [one["difference"] for one in compared]
    assert [label.get_text() for label in differences.texts] == [f"from {one['against']}" for one in compared]
    tested, baseline = points
    by_seed = [ours - theirs for ours, theirs in zip(tested["bleu"]["values"], baseline["bleu"]["values"], strict=True)]
    crosses = [line.get_xdata() for line in differences.lines if line.get_marker() == "x"]
    assert crosses == [pytest.approx(by_seed)] and any(by_seed)
    crosses = [line.get_xdata() for line in scores.lines if line.get_marker() == "x"]
    assert crosses == [pytest.approx(point["bleu"]["values"]) for point in points]


# The table.


def make_report(comparison: dict | None) -> dict:
    """A report of one size and two models, as scaling.json has it."""
    bleu = {"mean": 11.0, "half_interval": None, "values": [10.0, 12.0]}
    point = {"fraction": 1.0, "model": "tree", "pairs": 60.0, "seeds": [1, 2], "bleu": bleu, "chrf": bleu}
    point["comparison"] = comparison and {**comparison, "against": "plain"}
    base = {"baseline": "plain", "split": "test", "metric": "bleu", "num_examples": 8, "bleu_signature": "nrefs:1"}
    return {**base, "cells": [], "points": [point], "slopes": [], "pooled": [], "unlike": {}, "confounded": {}}


def test_a_star_needs_three_seeds_and_the_table_says_what_p_is_about():
    weights = {"weights": {"p_two_sided": 0.001, "about": ABOUT_WEIGHTS_OF_SEEDS}}
    lines = {}
    for seeds in (1, 2, 3):
        test = compare_over_seeds([2.0, 2.1, 1.9][:seeds], 1e-4, 500)
        lines[seeds] = format_table(make_report(asdict(test) | weights)).split("\n")
    for seeds in (1, 2):
        assert "*" not in lines[seeds][1] and " to " not in lines[seeds][1] and "12.7" not in lines[seeds][1]
        assert lines[seeds][1].split()[-4:] == ["–", "–", "–", "0.001"]
    assert "  plain  +1.75 to +2.25  < 0.001*  " in lines[3][1]
    message = "\n".join(lines[3][2:])
    assert f"stars mean: {EXPLAINED}" in message and max(len(line.split()) for line in lines[3][2:]) < 25


def test_the_long_table_selects_groups_and_pairs():
    """The cells are in the order of their names, in which seed 10 is before seed 2."""
    cells = [
        {"cell": f"{model}-{seed}", "model": model, "fraction": size, "seed": seed, "test.last.bleu": 100 * size + seed}
        for model, size, seed in (("a", 0.5, 10), ("a", 0.5, 2), ("a", 1, 2), ("b", 0.5, 10), ("b", 0.5, 3))
    ]
    table = Results.of(cells, "model")
    assert len(table) == 25 and list(table.by("system")) == ["a", "b"] and list(table.by("size")) == [0.5, 1]
    first, second = (table.where(system=name, size=0.5) for name in ("a", "b"))
    assert list(first.by_seed("bleu", "test.last").items()) == [(2, 52.0), (10, 60.0)] and not first.by_seed("bleu")
    assert first.paired(second, "cell") == [("a-10", "b-10")] and not first.paired(table.where(system="c"), "cell")
