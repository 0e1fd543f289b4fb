"""Runs that are cut off, continue, change their number of workers, end early: what is computed stays the same."""

import itertools
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toyruns import final_weights, losses, make_config, make_task, same, train_ranks

from treenet.jobs.train_run import run_training
from treenet.runs import checkpoint_io
from treenet.runs.checkpoint import checkpoint_folders, latest_checkpoint, take_snapshot
from treenet.runs.checkpoint_io import CheckpointWriter
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, finished_outcome, train
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

EVERYTHING = [
    "ema_decay=0.9",
    "patience=4",
    "optimizer.r_drop=0.5",
    "batch.tokens_per_device=24",
    "model.attention_dropout=0.1",
    "sampling.bpe_dropout=0.3",
    "validate_every=4",
    "log_every=3",
    "max_steps=17",
]


class Cut(Exception):
    """Stands for a power cut."""


def cut_after(steps: int):
    """A `should_stop` that ends the process before it is asked once more."""
    asked = itertools.count()

    def should_stop() -> bool:
        if next(asked) == steps:
            raise Cut
        return False

    return should_stop


def stop_after(steps: int):
    """A `should_stop` that says yes in the last of so many steps."""
    asked = itertools.count(1)
    return lambda: next(asked) == steps


def lines(run_dir: Path) -> list[dict]:
    """Metrics but for times and memory."""
    measured = {"elapsed", "seconds", "tokens_per_s", "tokens_per_s_per_device", "data_wait", "memory_gib"}
    return [{name: value for name, value in line.items() if name not in measured} for line in read_metrics(run_dir)]


def trainer_state(run_dir: Path) -> dict:
    state = torch.load(latest_checkpoint(run_dir) / "trainer.pt", weights_only=True)["state"]
    return {name: value for name, value in state.items() if name not in {"elapsed", "waited", "seconds"}}


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train(make_task(data, *EVERYTHING), run_dir)
    return run_dir


def test_cut_off_again_and_again_a_run_equals_an_undisturbed_one(data, undisturbed, tmp_path):
    """Everything is restored: weights, optimiser, moving average, patience, sums of metrics."""
    config = make_config(data, *EVERYTHING, "checkpoint_every=5")  # between two lines of the metrics, and two validations
    starts = []
    while not finished_outcome(config, tmp_path):
        starts.append(latest_checkpoint(tmp_path))
        try:
            train(build_task(config), tmp_path, should_stop=cut_after(6))
        except Cut:
            continue
    assert len(starts) >= 4 and len(set(starts)) == len(starts)
    assert lines(tmp_path) == lines(undisturbed)
    assert trainer_state(tmp_path) == trainer_state(undisturbed)
    assert same(final_weights(tmp_path), final_weights(undisturbed))
    averages = [load_file(latest_checkpoint(folder) / "ema.safetensors") for folder in (tmp_path, undisturbed)]
    assert same(*averages) and not same(averages[0], final_weights(tmp_path))


@pytest.mark.parametrize(("world_size", "dropout", "sampled"), [(2, 0.1, 0.3), (4, 0, 0)])
def test_any_number_of_workers_has_the_losses_of_one(data, tmp_path, world_size, dropout, sampled):
    """Batches of two to six examples: some of four workers have nothing to do. With dropout too, since masks go by example."""
    settings = ["max_steps=14", "batch.max_tokens=20", "checkpoint_every=14", f"sampling.bpe_dropout={sampled}"]
    config = make_config(data, f"model.dropout={dropout}", *settings)
    (tmp_path / "one").mkdir()
    train(build_task(config), tmp_path / "one")
    assert train_ranks(world_size, config, tmp_path / "more") == [None] * world_size
    one, more = losses(tmp_path / "one"), losses(tmp_path / "more")
    assert [step for step, _ in more] == list(range(1, 15))
    np.testing.assert_allclose([loss for _, loss in more], [loss for _, loss in one], rtol=1e-5)
    valid = [[line["nll"] for line in read_metrics(tmp_path / name) if line["event"] == "valid"] for name in ("one", "more")]
    np.testing.assert_allclose(valid[1], valid[0], rtol=1e-5)


def test_a_run_continues_on_another_number_of_workers(data, tmp_path):
    train(make_task(data), tmp_path, should_stop=stop_after(7))
    assert train_ranks(2, make_config(data, "max_steps=14"), tmp_path) == [None, None]
    train(make_task(data), tmp_path)
    (tmp_path / "one").mkdir()
    train(make_task(data), tmp_path / "one")
    np.testing.assert_allclose([loss for _, loss in losses(tmp_path)], [loss for _, loss in losses(tmp_path / "one")], rtol=1e-5)


def test_a_resumed_run_prepares_no_batch_that_it_has_done(data, tmp_path):
    train(make_task(data), tmp_path)
    trainer, asked = Trainer(make_task(data, "max_steps=30"), Ranks(0, 1, torch.device("cpu"))), []
    object.__setattr__(trainer.plan, "batch", lambda step: asked.append(step) or np.arange(3))
    trainer.resume(tmp_path)
    next(iter(trainer.rank_batches()))
    assert asked == [20]


# Early stopping.


def test_patience_ends_a_run_that_improves_no_more(data, tmp_path, monkeypatch):
    nlls = iter([3.0, 2.0, 2.5, math.nan, 2.0])
    others = dict.fromkeys(("loss", "perplexity", "seconds", "elapsed"), 1.0)
    monkeypatch.setattr(Trainer, "validate", lambda self: {**others, "nll": next(nlls)})
    config = make_config(data, "validate_every=2", "patience=3", "max_steps=100", "average_checkpoints=1")
    assert run_training(config.model_copy(update={"max_steps": 6}), tmp_path).step == 6
    summary = run_training(config, tmp_path)  # knows the best validation of the first part
    assert (summary.step, summary.finished) == (10, True)
    state = trainer_state(tmp_path)
    assert (state["best_nll"], state["best_step"], state["validations_since_best"]) == (2.0, 4, 3)
    monkeypatch.setattr("treenet.jobs.train_job.train", lambda *a, **k: pytest.fail("trained again"))
    assert run_training(config, tmp_path).step == 10
    monkeypatch.undo()
    assert run_training(make_config(data, "validate_every=2", "max_steps=12", "average_checkpoints=1"), tmp_path).step == 12


# Checkpoints beside training.


def snapshot(step: int):
    model = torch.nn.Linear(2, 2)
    return take_snapshot(step, model, torch.optim.AdamW(model.parameters()), {"step": step}, {}), model


def test_a_snapshot_stays_while_training_goes_on():
    taken, model = snapshot(1)
    before = {name: value.clone() for name, value in taken.weights.items()}
    with torch.no_grad():
        model.weight.zero_()
    assert same(before, taken.weights) and before["weight"].any()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    true_write, allowed, threads = checkpoint_io.write_checkpoint, threading.Event(), []

    def slow(*arguments, **options):
        threads.append(threading.current_thread())
        assert allowed.wait(20)
        return true_write(*arguments, **options)

    monkeypatch.setattr(checkpoint_io, "write_checkpoint", slow)
    with CheckpointWriter(tmp_path, keep=5, best=False) as writer:
        writer.write(snapshot(1)[0])
        assert writer.failure is None and not checkpoint_folders(tmp_path)
        allowed.set()
        writer.write(snapshot(2)[0])
        writer.wait()
        assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step_00000001", "step_00000002"]
    assert threading.main_thread() not in threads


def test_after_a_failure_nothing_more_is_written_and_it_is_not_forgotten(tmp_path, monkeypatch):
    written = []

    def full(run_dir, snapshot, **options):
        written.append(snapshot.step)
        raise UserError("the disk is full")

    monkeypatch.setattr(checkpoint_io, "write_checkpoint", full)
    with CheckpointWriter(tmp_path, keep=5, best=False) as writer:
        for step in (1, 2):
            writer.write(snapshot(step)[0])
        writer.wait()
        assert writer.failure == "the disk is full"
    assert written == [1]
