"""The results of a training: the summary, the picture, the averaged model of the chosen kind."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import image
from pictures import pictures
from safetensors.torch import load_file
from toyruns import make_config

from treenet.jobs.train_run import RunSummary, describe_run, run_training
from treenet.runs.averaging import average_checkpoints
from treenet.runs.checkpoint import AVERAGE, checkpoint_folders, checkpoint_step, latest_checkpoint
from treenet.runs.loading import load_run, load_trained
from treenet.runs.metrics_log import read_metrics
from treeproc.common.files import read_json
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "optimizer.learning_rate=3e-2", "optimizer.warmup_steps=5", "max_steps=24", "log_every=4", "checkpoint_every=4",
    "validate_every=4", "keep_checkpoints=3", "average_checkpoints=2", "average=best", "ema_decay=0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def summary(data, tmp_path_factory) -> RunSummary:
    """A finished run. Its learning rate is high, so that validations go up and down."""
    config = make_config(data, *SETTINGS)
    with pictures():
        return run_training(config, tmp_path_factory.mktemp("runs") / "run")


def average(run_dir: Path, monkeypatch, capsys, *overrides: str) -> str:
    monkeypatch.setattr(sys, "argv", ["average_checkpoints.py", "--out", str(run_dir), *overrides])
    runpy.run_path(str(ROOT / "workflows" / "average_checkpoints.py"), run_name="__main__")
    return capsys.readouterr().out


def test_the_summary_tells_the_numbers_of_the_run(summary):
    text, lines = describe_run(summary), read_metrics(summary.run_dir)
    valid = {line["step"]: line["nll"] for line in lines if line["event"] == "valid"}
    best = min(valid, key=valid.get)
    assert f"{summary.parameters:,} parameters, 24 of 24 updates, " in text and " target tokens/s (median), " in text
    assert f"nll {valid[24]:.3f}, perplexity " in text
    assert ("the best so far" if best == 24 else f"best {valid[best]:.3f} at {best}") in text
    kept = sorted(sorted(valid, key=valid.get)[:2])
    assert f"averaged/model.safetensors, of the checkpoints at {kept[0]}, {kept[1]}" in text
    assert "skipped" not in text
    assert image.imread(summary.run_dir / "curves.png").shape[2] in (3, 4) and str(summary.curves) in text


def test_the_best_checkpoints_are_kept_and_averaged(summary):
    valid = {line["step"]: line["nll"] for line in read_metrics(summary.run_dir) if line["event"] == "valid"}
    best = sorted(valid, key=valid.get)
    folders = checkpoint_folders(summary.run_dir)
    assert {*best[:3], 24} == {checkpoint_step(folder) for folder in folders}
    assert read_json(summary.averaged / "meta.json")["averaged_steps"] == sorted(best[:2])


def test_each_kind_of_average_on_request(data, summary, monkeypatch, capsys, caplog):
    run_dir, steps = summary.run_dir, [checkpoint_step(folder) for folder in checkpoint_folders(summary.run_dir)]
    assert average(run_dir, monkeypatch, capsys, "last=2").endswith(f"mean of the last checkpoints, steps {steps[-2]}, 24\n")
    assert "moving average at step 24\n" in average(run_dir, monkeypatch, capsys, "ema=true")
    _, model = load_trained(run_dir)
    moving = load_file(latest_checkpoint(run_dir) / AVERAGE)
    assert moving and all(torch.equal(model.state_dict()[name], value) for name, value in moving.items())
    assert "mean of the best checkpoints, steps " in average(run_dir, monkeypatch, capsys)  # as RUN/config.yaml says
    config = make_config(data, *SETTINGS)
    run_training(config, run_dir)
    assert "replaces" not in caplog.text
    average(run_dir, monkeypatch, capsys, "last=2")
    run_training(config, run_dir)
    command = f"tree-attention average-checkpoints --out {run_dir} last=2"
    assert f"note: this replaces the average of last=2 by that of best=2; to have it back: {command}\n" in caplog.text
    with pytest.raises(SystemExit):
        average(run_dir, monkeypatch, capsys, "last=2", "best=1")
    assert "choose one of last, best and ema, but not last and best together" in capsys.readouterr().err


def test_an_average_of_fewer_than_asked_for_is_refused_or_said(summary, monkeypatch, capsys):
    kept = len(checkpoint_folders(summary.run_dir))
    with pytest.raises(SystemExit) as left:
        average(summary.run_dir, monkeypatch, capsys, "best=20")
    message = capsys.readouterr().err
    assert left.value.code == 2 and f"has fewer validated checkpoints than best=20: {kept} (steps" in message
    message = average(summary.run_dir, monkeypatch, capsys, "best=20", "allow_fewer=true")
    assert message.endswith(f" ({kept} of the 20 asked for)\n")
    average(summary.run_dir, monkeypatch, capsys)


def test_a_short_run_ends_with_the_checkpoints_that_it_has_and_says_so(data, tmp_path):
    done = run_training(make_config(data, *SETTINGS, "max_steps=4"), tmp_path / "run")
    assert "averaged/model.safetensors, of the checkpoints at 4 (1 of the 2 asked for)" in describe_run(done)
    assert read_json(done.averaged / "meta.json")["averaged_asked"] == 2
    fewer = describe_run(run_training(make_config(data, *SETTINGS, "max_steps=2"), done.run_dir)).splitlines()
    assert " parameters, 4 updates" in fewer[0] and " of " not in fewer[0].partition(", in ")[0].partition("parameters")[2]
    assert "  max_steps = 2 changes nothing, because the run already has 4 updates" in fewer


def test_a_trained_model_without_its_checkpoints_is_not_replaced(data, tmp_path):
    config = make_config(data, *SETTINGS, "max_steps=4")
    done = run_training(config, tmp_path / "run")
    assert run_training(config, done.run_dir).finished
    fewer = make_config(data, *SETTINGS, "max_steps=2")
    assert run_training(fewer, done.run_dir).finished  # config.yaml then has the smaller number
    shutil.rmtree(done.run_dir / "checkpoints")
    with pytest.raises(UserError, match=r"of other settings \(max_steps: 4 -> 2\)"):
        run_training(fewer, done.run_dir)
    before = (done.averaged / "model.safetensors").read_bytes()
    for other, changed in (
        ("seed=9", "seed: 1 -> 9"),
        ("max_steps=2", "max_steps: 4 -> 2"),
        ("max_steps=8", "max_steps: 4 -> 8"),
    ):
        with pytest.raises(UserError, match=rf"of other settings \({changed}\), without .* or remove .*/run/averaged$"):
            run_training(make_config(data, *SETTINGS, "max_steps=4", other), done.run_dir)
    with pytest.raises(UserError, match=r"^init: .*/run is of the run itself, .* choose another --out$"):
        run_training(make_config(data, *SETTINGS, f"init={done.run_dir}"), done.run_dir)
    assert (done.averaged / "model.safetensors").read_bytes() == before and not (done.run_dir / "checkpoints").exists()
    assert run_training(config, done.run_dir).finished  # the same training gives the same model
    assert (done.averaged / "model.safetensors").read_bytes() == before
    for name in ("averaged", "checkpoints"):
        shutil.rmtree(done.run_dir / name)
    assert run_training(make_config(data, *SETTINGS, "max_steps=4", "seed=9"), done.run_dir).finished
    shutil.rmtree(done.averaged)
    config = make_config(data, *SETTINGS, "max_steps=4", f"init={done.run_dir}", "freeze=[encoder.*]")
    average_checkpoints(done.run_dir, "last", 1)
    frozen = run_training(config, tmp_path / "frozen")
    shutil.rmtree(frozen.run_dir / "checkpoints")
    with pytest.raises(UserError, match="a trained model with frozen weights, without its checkpoints"):
        run_training(config, frozen.run_dir)
    assert load_trained(frozen.run_dir)


def test_training_that_ends_with_a_damaged_checkpoint_names_it_and_keeps_the_others(data, tmp_path, monkeypatch, capsys):
    config = make_config(data, *SETTINGS, "max_steps=8", "average=last")
    done = run_training(config, tmp_path / "run")
    shutil.rmtree(done.averaged)
    first, last = checkpoint_folders(done.run_dir)
    (first / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot average .*step_00000004: .* allow_fewer=true averages the complete ones"):
        run_training(config, done.run_dir)
    assert checkpoint_folders(done.run_dir) == [first, last] and latest_checkpoint(done.run_dir) == last
    message = average(done.run_dir, monkeypatch, capsys, "allow_fewer=true")
    assert "steps 8 (1 of the 2 asked for); left out: step_00000004 (model.safetensors has another size" in message


def test_an_average_whose_meta_was_changed_is_not_opened(data, tmp_path):
    done = run_training(make_config(data, *SETTINGS, "max_steps=4"), tmp_path / "run")
    meta = read_json(done.averaged / "meta.json")
    (done.averaged / "meta.json").write_text(json.dumps({**meta, "averaged_steps": [2, 4]}))
    with pytest.raises(UserError, match=r"averaged is damaged \(meta.json is damaged\); run tree-attention average-checkpoints"):
        load_trained(done.run_dir)
    with pytest.raises(UserError, match="averaged is damaged"):
        load_run(done.run_dir)


def test_a_picture_that_was_lost_comes_back(summary, data, rendered):
    summary.curves.unlink()
    config = make_config(data, *SETTINGS)
    assert run_training(config, summary.run_dir).curves.stat().st_size > 5000


def test_a_run_that_stopped_to_improve_says_so(data, tmp_path):
    changes = ["patience=1", "optimizer.learning_rate=0.9", "max_steps=400"]
    config = make_config(data, *SETTINGS, *changes)
    text = describe_run(run_training(config, tmp_path / "run"))
    assert " of 400 updates, " in text and "  finished early: 1 validations in a row without a better result\n" in text
