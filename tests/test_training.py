"""The training loop: losses, schedule, resume bit for bit, refusals."""

import errno
import io
import mmap
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import PROCESSES, Started, run_here
from safetensors.torch import load_file
from test_progress import wait_for_lines
from toydata import write_toy_data
from toyruns import final_weights, losses, make_config, make_task, same
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource, Prefetcher
from treenet.data.input_kinds import LEAVES, TREES
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import checkpoint_folders, latest_checkpoint
from treenet.runs.loading import load_trained
from treenet.runs.metrics_log import MetricLog, read_metrics
from treenet.tasks import losses as task_losses
from treenet.tasks.base import build_task
from treenet.training.ranks import peak_memory
from treenet.training.trainer import train
from treeproc.common.files import locked
from treeproc.common.messages import Progress
from treeproc.common.settings import UserError, dump_settings

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    torch.set_num_threads(1)
    train(make_task(data), run_dir)
    return run_dir


# Data.


def test_batches_hold_the_rows_asked_for(data):
    source = ExampleSource(data / "encoded", "train")
    rows = [59, 0, 31]
    batch = source.batch(rows)
    assert batch.example_ids.tolist() == source.lengths["example_id"][rows].tolist()
    assert (~batch.leaf_pad_mask).sum(dim=1).tolist() == source.lengths["leaves"][rows].tolist()
    assert batch.num_target_tokens == source.target_tokens(np.array(rows))


def test_models_without_trees_get_the_same_batch_without_maps(data):
    with_trees, without = (ExampleSource(data / "encoded", "train", reads).batch([59, 0, 31]) for reads in (TREES, LEAVES))
    assert without.structure is None and with_trees.structure is not None
    for name in set(vars(without)) - {"structure", "leaf_states"}:
        assert torch.equal(getattr(with_trees, name), getattr(without, name))
    assert without.to("cpu").structure is None


def test_prefetcher_keeps_order_raises_errors_and_ends_with_its_consumer():
    def items():
        yield from range(20)
        raise ValueError("from the thread")

    seen = []
    with pytest.raises(ValueError, match="from the thread"), Prefetcher(items()) as stream:
        seen.extend(stream)
    assert seen == list(range(20))
    before = threading.active_count()
    with Prefetcher(iter(range(10**9))) as stream:
        assert next(iter(stream)) == 0
    assert threading.active_count() == before


def test_progress_writes_a_line_while_nothing_advances():
    stream = io.StringIO()
    with Progress("parse", 10, unit="rows", interval=0.05, stream=stream) as progress:
        progress.update(3, postfix="2 failed")
        wait_for_lines(stream, 3)
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("parse: 3/10 rows (30.0%)") and lines[-1].endswith("2 failed")


# Resume.


@pytest.mark.parametrize("stop_at", [7, 10])
def test_stopped_and_resumed_equals_uninterrupted(data, uninterrupted, tmp_path, stop_at):
    asked = iter(range(1, 100))
    outcome = train(make_task(data), tmp_path, should_stop=lambda: next(asked) >= stop_at)
    assert (outcome.step, outcome.finished) == (stop_at, False)
    assert train(make_task(data), tmp_path).finished
    assert losses(tmp_path) == losses(uninterrupted)
    assert [line["step"] for line in read_metrics(tmp_path) if line["event"] == "valid"] == [10, 20]
    assert same(final_weights(tmp_path), final_weights(uninterrupted))


def train_slowly(config: TrainConfig, run_dir: Path) -> None:
    train(build_task(config), run_dir, should_stop=lambda: time.sleep(0.15) or False)


def test_killed_and_resumed_equals_uninterrupted(data, uninterrupted, tmp_path):
    (tmp_path / "run").mkdir()
    process = PROCESSES.Process(target=train_slowly, args=(make_config(data), tmp_path / "run"))
    process.start()
    wait_for(lambda: checkpoint_folders(tmp_path / "run"), process)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 5 <= int(checkpoint_folders(tmp_path / "run")[-1].name.removeprefix("step_")) < 20
    assert train(make_task(data), tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert same(final_weights(tmp_path / "run"), final_weights(uninterrupted))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system forbids to begin a new peak")
def test_the_memory_of_a_run_is_not_that_of_an_earlier_one(data, tmp_path):
    with mmap.mmap(-1, 400 * 2**20) as held:
        for place in range(0, len(held), mmap.PAGESIZE):
            held[place] = 1
        before = peak_memory(torch.device("cpu")) / 2**30
    train(make_task(data), tmp_path)
    assert max(line["memory_gib"] for line in read_metrics(tmp_path) if line["event"] == "train") < before - 0.1


def test_metrics_of_steps_that_run_again_are_dropped(tmp_path):
    with MetricLog(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write("train", step, loss=0.5 * step, nll=None)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "st')
    with MetricLog(tmp_path, 2) as log:
        log.write("train", 3, loss=9.0, nll=None)
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 0.5), (2, 1.0), (3, 9.0)]


def test_a_board_that_cannot_be_flushed_hides_no_error(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def close(board) -> None:
        raise full

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", close)
    with pytest.raises(UserError, match="no checkpoint"), MetricLog(tmp_path, 0):
        raise UserError("no checkpoint")
    with pytest.raises(OSError, match="No space left"), MetricLog(tmp_path, 0):
        pass


def test_training_learns(data, tmp_path):
    config = make_config(data, "max_steps=90", "log_every=30", "checkpoint_every=90", "model.dropout=0")
    train(build_task(config), tmp_path)
    first, *_, last = losses(tmp_path)
    assert last[1] < first[1] - 0.7


# The run folder.


def test_a_finished_run_returns_at_once_with_its_average(data, tmp_path, monkeypatch):
    config = make_config(data, "average_checkpoints=2")
    summary = run_training(config, tmp_path / "run")
    assert summary.finished and summary.averaged == tmp_path / "run" / "averaged"
    before = (summary.averaged / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr("treenet.jobs.train_job.train", lambda *a, **k: pytest.fail("trained again"))
    again = run_training(config, tmp_path / "run")
    assert again == summary and (summary.averaged / "model.safetensors").stat().st_mtime_ns == before
    loaded, model = load_trained(tmp_path / "run")
    assert loaded.model == config.model and not model.training
    weights = load_file(summary.averaged / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


def test_changed_settings_and_changed_data_are_refused_by_name(data, tmp_path):
    run_training(make_config(data, "max_steps=2"), tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.d_ff: 32 -> 64; seed: 1 -> 2"):
        run_training(make_config(data, "max_steps=2", "seed=2", "model.d_ff=64"), tmp_path / "run")
    other = write_toy_data(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="data fingerprint"):
        run_training(make_config(other, "max_steps=2"), tmp_path / "run")
    longer = run_training(make_config(data, "max_steps=4", "log_every=2", "keep_checkpoints=7"), tmp_path / "run")
    assert longer.step == 4


def test_two_runs_in_one_folder_and_relative_paths_in_a_job_are_refused(data, tmp_path, monkeypatch):
    with locked(tmp_path), pytest.raises(UserError, match="another process is writing"):
        run_training(make_config(data), tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UserError, match="--out must be an absolute path"):
        run_training(make_config(data), Path("runs/x"))


def test_updates_that_are_not_finite_are_skipped_and_twenty_in_a_row_stop(data, tmp_path, monkeypatch):
    true_loss, calls = task_losses.projected_nll, iter(range(1000))

    def poisoned(*arguments):
        sums = true_loss(*arguments)
        call = next(calls)  # call 0 checks the memory
        return sums._replace(loss=sums.loss * float("nan")) if call == 3 or call > 5 else sums

    monkeypatch.setattr(task_losses, "projected_nll", poisoned)
    with pytest.raises(UserError, match="not finite in 20 updates in a row, up to step 25"):
        train(make_task(data, "max_steps=40", "validate_every=100", "checkpoint_every=4"), tmp_path)
    lines = read_metrics(tmp_path)
    assert [line["skipped"] for line in lines[:6]] == [0, 0, 1, 1, 1, 2]
    assert lines[2]["loss"] is None and lines[4]["loss"] is not None
    assert all(bool(torch.isfinite(value).all()) for value in final_weights(tmp_path).values())


def test_sigterm_saves_a_checkpoint_and_the_same_command_finishes(data, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(dump_settings(make_config(data, "max_steps=3000", "checkpoint_every=3000", "validate_every=3000")))
    command, log = ["train_wmt.py", "--config", config, "--out", tmp_path / "run"], tmp_path / "log"
    process = Started(log, *command)
    wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 3, process, log=log)
    process.terminate()
    process.join(100)
    assert process.exitcode == 143 and "the same command continues" in log.read_text()
    step = int(latest_checkpoint(tmp_path / "run").name.removeprefix("step_"))
    done = run_here(*command, f"max_steps={step + 2}")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run") if line["event"] == "train"] == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give settings as data=DATA, or --config FILE.yaml"),
        (["--sample"], "give --out DIR"),
        (["--sample", "--out", "x"], "data: is missing (data set that tree-attention preprocess wrote: a folder"),
        (["--sample", "--out", "x", "data=nowhere"], "nowhere is not a folder; give a data set"),
    ],
)
def test_train_wmt_says_in_one_line_what_it_needs(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_wmt.py", *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "workflows" / "train_wmt.py"), run_name="__main__")
    errors = capsys.readouterr().err
    assert left.value.code == 2
    assert message in errors and errors.count("\n") == 1
