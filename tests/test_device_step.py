"""An update on an accelerator: nothing in it waits for the device, few kernels, results that are read a step later."""

import math
from pathlib import Path

import pytest
import torch
from meta_device import DeviceOperations, stand_in_for_a_gpu
from toylabels import write_toy_labels
from toyruns import final_weights, losses, make_config, make_task, same

from treenet.runs.checkpoint import checkpoint_folders
from treenet.runs.metrics_log import read_metrics
from treenet.tasks import losses as task_losses
from treenet.tasks.base import build_task
from treenet.training.micro_batches import StepInputs
from treenet.training.ranks import Ranks, TrainingFailed
from treenet.training.step import TrainStep
from treenet.training.trainer import Trainer, train

CPU = torch.device("cpu")
RANK_0 = Ranks(0, 1, CPU)


@pytest.fixture
def deferred(monkeypatch) -> None:
    """Results are read late and the device skips updates, as on accelerators."""
    monkeypatch.setattr(TrainStep, "defers", True)


def poison(monkeypatch, *steps: int) -> None:
    """The loss of these updates, counted from 1, is not finite; the call before them is the check of memory."""
    true_loss, calls = task_losses.projected_nll, iter(range(1000))

    def loss(*arguments):
        sums = true_loss(*arguments)
        return sums._replace(loss=sums.loss * math.nan) if next(calls) in steps else sums

    monkeypatch.setattr(task_losses, "projected_nll", loss)


def train_in(folder: Path, task, **options):
    folder.mkdir(exist_ok=True)
    return train(task, folder, **options)


# Results that are read later.


def test_updates_that_are_read_late_equal_those_that_are_read_at_once(data, tmp_path, monkeypatch):
    """Weights to the last bit, losses, counters and validations, with updates that are skipped."""
    options = ["log_every=3", "validate_every=7", "max_steps=17", "checkpoint_every=5"]
    for name in ("now", "late"):
        with monkeypatch.context() as patch:
            patch.setattr(TrainStep, "defers", name == "late")
            poison(patch, 2, 4)
            train_in(tmp_path / name, make_task(data, *options))
    times = {"seconds", "elapsed", "tokens_per_s", "tokens_per_s_per_device", "data_wait", "memory_gib", "time"}
    now, late = (
        [{k: v for k, v in line.items() if k not in times} for line in read_metrics(tmp_path / n)] for n in ("now", "late")
    )
    assert now == late and any(line.get("skipped") == 2 for line in late)
    assert same(final_weights(tmp_path / "now"), final_weights(tmp_path / "late"))


def test_the_moving_average_skips_what_the_weights_skip(data, monkeypatch):
    averages = []
    for late in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(TrainStep, "defers", late)
            poison(patch, 2)
            trainer = Trainer(make_task(data, "ema_decay=0.9"), RANK_0)
            for rank_batch in list(trainer.rank_batches())[:4]:
                trainer.step(rank_batch)
            trainer.settle()
        assert trainer.state.skipped == 1
        averages.append(trainer.train_step.average.weights)
    for name, average in averages[0].items():
        torch.testing.assert_close(averages[1][name], average, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_a_stop_saves_a_state_that_continues_to_the_same_end(data, tmp_path, deferred):
    options = ["log_every=5", "validate_every=100"]
    train_in(tmp_path / "whole", make_task(data, *options))
    asked = iter([False, False, True, *[False] * 20])
    outcome = train_in(tmp_path / "cut", make_task(data, *options), should_stop=lambda: next(asked))
    assert (outcome.step, outcome.finished) == (4, False)  # a step later than it was asked for
    assert checkpoint_folders(tmp_path / "cut")[-1].name == "step_00000004"
    train_in(tmp_path / "cut", make_task(data, *options))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same(final_weights(tmp_path / "cut"), final_weights(tmp_path / "whole"))


def test_training_gives_up_after_as_many_skipped_updates_as_it_is_told(data, tmp_path, monkeypatch, deferred):
    poison(monkeypatch, *range(1, 100))
    with pytest.raises(TrainingFailed, match="not finite in 3 updates in a row, up to step 3"):
        train(make_task(data, "max_skipped_updates=3", "log_every=100", "checkpoint_every=100"), tmp_path)


def test_a_failure_is_heard_of_and_its_update_changes_nothing(data, deferred):
    trainer = Trainer(make_task(data), RANK_0)
    batches = list(trainer.rank_batches())
    trainer.step(batches[0])
    before = {name: value.clone() for name, value in trainer.train_step.model.state_dict().items()}
    trainer.step(batches[1], failure="the disk is full")
    assert same(before, trainer.train_step.model.state_dict())
    with pytest.raises(TrainingFailed, match="the disk is full"):
        trainer.settle()


def test_the_check_of_memory_has_the_optimiser_and_changes_nothing(data):
    trainer, other = (Trainer(make_task(data, "ema_decay=0.9"), RANK_0) for _ in range(2))
    trainer.check_memory()
    parameters = list(trainer.train_step.model.parameters())
    state = trainer.train_step.optimizer.state
    assert all(state[parameter]["exp_avg"].shape == parameter.shape for parameter in parameters)
    for one in (trainer, other):
        for rank_batch in list(one.rank_batches())[:3]:
            one.step(rank_batch)
    assert same(trainer.train_step.model.state_dict(), other.train_step.model.state_dict())
    assert same(trainer.train_step.average.weights, other.train_step.average.weights)


# Targets that count.


@pytest.mark.parametrize("options", [[], ["optimizer.r_drop=2"], ["task=masked_lm", "model.name=transformer"]], ids=str)
def test_places_of_targets_give_the_losses_of_masks(data, options):
    trainer = Trainer(make_task(data, "model.dropout=0", *options), RANK_0)
    batch = trainer.micro_batches.source.batch(trainer.plan.batch(0))
    step, sums, gradients = trainer.train_step, [], []
    for device in (CPU, torch.device("meta")):
        inputs = StepInputs.build(trainer.task, batch, [1, 2], device)
        assert (inputs.counted is None) == (device.type == "cpu")
        passes = [step._output(inputs.batch, keys) for keys in inputs.dropout_keys[: 1 + bool(step.config.optimizer.r_drop)]]
        losses = trainer.task.sum_losses(step.model, inputs.batch, *passes, counted=inputs.counted)
        step._gradients.flat.zero_()
        losses.loss.backward()
        sums.append(losses.totals())
        gradients.append(step._gradients.flat.clone())
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


# Kernels.


def count_update(data, monkeypatch, *options: str) -> DeviceOperations:
    """Operations of an update after the first, which allocates; on "meta", whatever would wait for data raises."""
    device = stand_in_for_a_gpu(monkeypatch)
    sizes = ["model.num_encoder_layers=6", "model.num_decoder_layers=6", "model.attention_dropout=0"]
    trainer = Trainer(build_task(make_config(data, *sizes, *options)), Ranks(0, 1, device))
    rank_batch = trainer.micro_batches.rank_batch(trainer.plan.batch(0))
    trainer.train_step.update(rank_batch, trainer.micro_batches, 0)
    with DeviceOperations() as seen:
        trainer.train_step.update(rank_batch, trainer.micro_batches, 1)
    return seen


# Kernels of an update of 6 + 6 layers, one micro-batch, as PyTorch's own operations; attention is composed of several on
# "meta". Lower is better: a change that raises one of them should say why.
KERNELS = {"transformer": 1002, "tree_transformer": 1692}


@pytest.mark.slow
@pytest.mark.parametrize("model", list(KERNELS))
def test_an_update_waits_for_nothing_and_launches_no_more_than_before(data, monkeypatch, model):
    seen = count_update(data, monkeypatch, f"model.name={model}")
    assert seen.kernels.total() <= KERNELS[model], seen.kernels.most_common(20)
    assert seen.copies.total() == 2  # the batch, and flags of this rank
    assert not {"nonzero", "masked_select", "index", "item", "_local_scalar_dense"} & set(seen.kernels)


CASES = {
    "R-Drop": ["optimizer.r_drop=1"],
    "micro-batches": ["batch.tokens_per_device=32"],
    "clipped, with a moving average": ["optimizer.clip_norm=1", "ema_decay=0.9"],
    "masked pieces": ["task=masked_lm", "model.name=transformer"],
    "tree regularisation": ["task=causal_lm", "model.name=causal_transformer", "model.tree_reg.weight=1"],
    "grammar": ["task=causal_lm", "model.name=transformer_grammar"],
    "relations": ["model.name=relation_transformer"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_no_update_and_no_validation_waits(data, monkeypatch, case):
    check_no_waits(data, monkeypatch, CASES[case])


def check_no_waits(data: Path, monkeypatch, options: list[str]) -> None:
    """One copy for each micro-batch, and one for the flags of this rank."""
    device = stand_in_for_a_gpu(monkeypatch)
    trainer = Trainer(build_task(make_config(data, "model.attention_dropout=0", *options)), Ranks(0, 1, device))
    rank_batch = trainer.micro_batches.rank_batch(trainer.plan.hardest_batch())
    with DeviceOperations() as seen:
        trainer.train_step.update(rank_batch, trainer.micro_batches, 0)
    assert seen.copies.total() == len(rank_batch.batches) + 1
    assert (len(rank_batch.batches) > 1) == ("batch.tokens_per_device=32" in options)
    trainer.train_step.model.eval()
    with DeviceOperations() as seen, torch.no_grad():
        trainer.train_step.validate(trainer.valid.source.batch([0, 1, 2]))
    assert seen.copies.total() == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tree_transformer", "transformer"])
@pytest.mark.parametrize("options", [[], ["optimizer.r_drop=1"], ["classifier.supervision=root"]], ids=str)
def test_no_update_and_no_validation_of_a_classifier_waits(tmp_path, monkeypatch, model, options):
    check_no_waits(write_toy_labels(tmp_path), monkeypatch, ["task=classification", f"model.name={model}", *options])
