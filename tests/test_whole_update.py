"""One update and one validation, against sums that are written out; what a run of seven updates does at which step."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from meta_device import stand_in_for_a_gpu
from safetensors.torch import load_file
from toylabels import write_toy_labels
from toyruns import make_config, make_task, same

from treenet.layers.core import keys_of
from treenet.runs.checkpoint import (
    checkpoint_folders,
    checkpoint_step,
    latest_checkpoint,
    read_meta,
    take_snapshot,
    write_checkpoint,
)
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treenet.training import gradients as gradient_sums
from treenet.training.batch_stream import BatchStream
from treenet.training.gradients import OverlappedSums
from treenet.training.micro_batches import MicroBatches, StepInputs, StepSeeds
from treenet.training.optimizer import LossScale, learning_rate
from treenet.training.ranks import Ranks, TrainingFailed, peak_memory
from treenet.training.step import TrainStep
from treenet.training.trainer import Trainer, TrainOutcome, finished_outcome, train
from treeproc.common.settings import UserError
from treeproc.shards.rows import hash_ids

CPU = torch.device("cpu")
RANK_0 = Ranks(0, 1, CPU)
STILL = ["model.dropout=0", "model.attention_dropout=0"]


def trainer_of(data, *options: str, ranks: Ranks = RANK_0) -> Trainer:
    return Trainer(make_task(data, *options), ranks)


def whole_sums(trainer: Trainer, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and nll of rows, computed one row at a time."""
    step, sums = trainer.train_step, []
    for row in rows:
        batch = trainer.task.choose_targets(trainer.micro_batches.source.batch([row]), None)
        output = getattr(step.model, trainer.task.output)(batch)
        sums.append(trainer.task.sum_losses(step.model, batch, output)[:2])
    return sum(loss for loss, _ in sums), sum(nll for _, nll in sums)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("options", [[], ["batch.tokens_per_device=24"]], ids=["whole", "micro-batches"])
def test_a_gradient_is_that_of_the_mean_loss_of_a_target(data, monkeypatch, defers, options):
    monkeypatch.setattr(TrainStep, "defers", defers)
    trainer = trainer_of(data, *STILL, *options)
    rows, step = trainer.plan.hardest_batch(), trainer.train_step
    loss, nll = whole_sums(trainer, rows)
    parameters = list(step.model.parameters())
    rank_batch = trainer.micro_batches.rank_batch(rows)
    tokens = sum(int(trainer.micro_batches.source.lengths["tgt_pieces"][row]) + 1 for row in rows)
    expected = torch.autograd.grad(loss / tokens, parameters)
    for _ in range(2):  # a gradient begins anew
        sums = step.compute_gradient(rank_batch, trainer.micro_batches, 4)
        assert sums.tolist() == pytest.approx([loss.item(), nll.item(), 0], rel=1e-5)
        for parameter, grad in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-6)
    pending = step.update(rank_batch, trainer.micro_batches, 4, waited=0.25, wants_stop=True)
    result = pending.read()
    assert (result.loss_sum, result.nll_sum, result.auxiliary_sum) == pytest.approx((loss.item(), nll.item(), 0), rel=1e-5)
    norm = math.sqrt(sum(grad.square().sum().item() for grad in expected))
    assert (result.grad_norm, result.waited, result.wants_stop) == (pytest.approx(norm, rel=1e-4), 0.25, True)
    assert (result.positions, result.padding) == (rank_batch.positions, rank_batch.padding)
    assert (result.update, result.target_tokens, result.updated, result.must_repeat) == (5, tokens, True, False)
    assert result.learning_rate == learning_rate(trainer.config.optimizer, 5)
    plain = step.update(rank_batch, trainer.micro_batches, 5).read()
    assert (plain.wants_stop, plain.waited, plain.updated, plain.update) == (False, 0, True, 6)


def test_an_update_that_must_be_repeated_holds_all_later_ones(data, monkeypatch):
    monkeypatch.setattr(TrainStep, "defers", True)
    totals = torch.tensor([6.0, 5.0, 0.0, 0.0, 0.0, 0.0, 40.0, 8.0, 0.0, 3.0], dtype=torch.float64)
    repeats, failed = totals.clone(), totals.clone()
    repeats[5], failed[4] = 2, 1
    for overlaps in (False, True):
        monkeypatch.setattr(TrainStep, "overlaps", overlaps)
        step = trainer_of(data).train_step
        found = [float(step._skip(one)) for one in (totals, failed, totals, repeats, totals, failed)]
        assert found == [0, 1, 0, 1, float(overlaps), 1]
        step.release()
        assert step._skip(totals) == 0


def test_a_gradient_is_divided_by_the_scale_and_by_what_exceeds_the_clip(data):
    for clip, scale, norm, expected in (
        (0, None, 5.0, None), (2, None, 5.0, 2.5), (2, None, 2.0, 1.0), (2, None, 1.0, 1.0), (2, None, 2.5, 1.25),
        (0, 8.0, 5.0, 8.0), (2, 8.0, 5.0, 20.0), (2, 8.0, 1.0, 8.0),
    ):  # fmt: skip
        step = trainer_of(data, f"optimizer.clip_norm={clip}").train_step
        if scale:
            step.loss_scale = LossScale(CPU)
            step.loss_scale.load((scale, 0))
        assert step._divisor(torch.tensor(norm)) == expected


@pytest.mark.parametrize("defers", [False, True])
def test_a_scaled_loss_changes_no_bit_of_an_update(data, monkeypatch, defers):
    monkeypatch.setattr(TrainStep, "defers", defers)
    found = []
    for scaled in (False, True):
        trainer = trainer_of(data, "optimizer.clip_norm=0.5", "optimizer.adam_eps=0.01")
        step, rank_batch = trainer.train_step, trainer.micro_batches.rank_batch(trainer.plan.batch(0))
        step.loss_scale = LossScale(CPU) if scaled else None
        result = step.update(rank_batch, trainer.micro_batches, 0).read()
        found.append((result, step.model.state_dict()))
    assert found[0][0] == found[1][0] and found[0][0].grad_norm > 0.5 and same(found[0][1], found[1][1])
    assert step.loss_scale.state() == (65536.0, int(defers))


@pytest.mark.parametrize("short_of_memory", [2, 4])
def test_an_update_that_ran_out_of_memory_is_repeated_with_the_one_after_it(data, monkeypatch, short_of_memory):
    """Memory runs out once, after the first bucket of that update was sent."""
    monkeypatch.setattr(TrainStep, "defers", True)
    monkeypatch.setattr(TrainStep, "overlaps", True)
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 2000)
    true_complete, failures, found = OverlappedSums._complete, [], []

    def complete(self, number, parameter):
        true_complete(self, number, parameter)
        if self._watching and self._sent and trainer.state.step == short_of_memory - 1 and not failures:
            failures.append(number)
            raise torch.OutOfMemoryError

    for fails in (False, True):
        if fails:
            monkeypatch.setattr(OverlappedSums, "_complete", complete)
        trainer = trainer_of(data, "ema_decay=0.5", "optimizer.adam_eps=0.01", *STILL)
        for number in range(4):
            trainer.step(trainer.micro_batches.rank_batch(trainer.plan.batch(number)))
        trainer.settle()
        found.append((trainer.state, trainer.train_step.model.state_dict(), trainer.train_step.average.weights))
    assert failures and found[1][0].skipped == 0 and trainer.micro_batches.limit is not None
    assert found[1][0].loss_sum == pytest.approx(found[0][0].loss_sum, rel=1e-5) and found[1][0].tokens == found[0][0].tokens
    for place in (1, 2):
        torch.testing.assert_close(found[1][place], found[0][place], rtol=1e-3, atol=1e-5)


def test_examples_are_sampled_anew_in_each_epoch_of_training_alone(data):
    trainer = trainer_of(data, "sampling.bpe_dropout=0.9")
    rows = np.arange(6)
    pieces = [trainer.micro_batches.rank_batch(rows, epoch).batches[0].leaf_pieces for epoch in (0, 0, 1)]
    assert torch.equal(pieces[0], pieces[1]) and not torch.equal(pieces[0], pieces[2])
    plain = trainer_of(data)
    valid = [one.valid.rank_batch(rows).batches[0].leaf_pieces for one in (trainer, plain)]
    assert torch.equal(*valid) and not torch.equal(pieces[0], plain.micro_batches.rank_batch(rows).batches[0].leaf_pieces)


def test_keys_of_dropout_follow_from_pass_and_example(data):
    trainer = trainer_of(data)
    batch = trainer.micro_batches.source.batch([5, 9])
    inputs = StepInputs.build(trainer.task, batch, [7, 2], CPU)
    for keys, seed in zip(inputs.dropout_keys, (7, 2), strict=True):
        assert torch.equal(keys, keys_of(hash_ids(batch.example_ids.numpy() + seed * 2**31)))
    assert StepInputs.build(trainer.task, batch, None, CPU).dropout_keys == () and inputs.counted is None
    assert inputs.to(CPU) is inputs


def test_the_generator_is_seeded_by_run_update_and_rank(data):
    for rank in (0, 1):
        trainer = trainer_of(data, ranks=Ranks(rank, 2, CPU))
        trainer.train_step.compute_gradient(trainer.micro_batches.rank_batch(np.arange(2)), trainer.micro_batches, 6)
        assert torch.initial_seed() == StepSeeds.of(trainer.config, 6).generator * 65536 + rank


def test_micro_batches_that_keep_pace_have_no_part_in_the_gradient(data):
    trainer = trainer_of(data, *STILL, "batch.tokens_per_device=1", ranks=Ranks(1, 2, CPU))
    step, source, found = trainer.train_step, trainer.micro_batches.source, []
    for in_step in (False, True):
        micro_batches = MicroBatches(source, trainer.config.batch, 1, 2, in_step=in_step)
        rank_batch = micro_batches.rank_batch(np.arange(5))
        assert (len(rank_batch.cuts), len(rank_batch.batches)) == (2, 2 + in_step)
        sums = step.compute_gradient(rank_batch, micro_batches, 0)
        found.append((sums, step._gradients.flat.clone()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("failure", [None, "the disk is full"])
def test_a_failure_of_an_update_is_raised_and_changes_nothing(data, failure):
    trainer = trainer_of(data, "ema_decay=0.5")
    before = {name: value.clone() for name, value in trainer.train_step.model.state_dict().items()}
    rank_batch = trainer.micro_batches.rank_batch(trainer.plan.batch(0))
    if failure is None:
        trainer.step(rank_batch, failure=failure)
        assert not same(before, trainer.train_step.model.state_dict()) and trainer.state.step == 1
        return
    with pytest.raises(TrainingFailed, match=f"^{failure}$"):
        trainer.step(rank_batch, failure=failure)
    assert same(before, trainer.train_step.model.state_dict())


def test_an_update_is_counted_with_what_it_computed(data):
    trainer = trainer_of(data)
    assert trainer.settle() is None
    first, second = (trainer.micro_batches.rank_batch(trainer.plan.batch(number)) for number in (0, 1))
    results = [trainer.step(first, waited=0.5), trainer.step(second, waited=0.25, wants_stop=True)]
    state = trainer.state
    assert (state.step, state.skipped, state.waited, trainer.updates.wants_stop) == (2, 0, 0.75, True)
    assert (state.positions, state.padding) == (first.positions + second.positions, first.padding + second.padding)
    assert state.tokens == first.global_tokens + second.global_tokens
    assert state.loss_sum == pytest.approx(sum(result.loss_sum for result in results))
    assert state.nll_sum == pytest.approx(sum(result.nll_sum for result in results)) and trainer.settle() is results[1]


def test_ranks_of_accelerators_add_gradients_early_and_read_late(data, monkeypatch):
    device = stand_in_for_a_gpu(monkeypatch)
    for ranks, defers, overlaps in (
        (Ranks(0, 1, CPU), False, False),
        (Ranks(0, 2, CPU), False, False),
        (Ranks(0, 1, device), True, False),
        (Ranks(1, 2, device), True, True),
        (Ranks(0, 3, device), True, True),
    ):
        step = trainer_of(data, "model.attention_dropout=0", ranks=ranks).train_step
        assert (step.defers, step.overlaps, step._sums is not None, step.is_sharded) == (defers, overlaps, overlaps, False)


def test_tables_get_gradients_by_row_where_nothing_else_reads_them(data, tmp_path, monkeypatch):
    device, labels = stand_in_for_a_gpu(monkeypatch), write_toy_labels(tmp_path)
    still = ["task=classification", "model.attention_dropout=0"]
    for folder, options, ranks, sparse in (
        (labels, still, RANK_0, True),
        (data, [], RANK_0, False),  # the output reads the table too
        (labels, still, Ranks(0, 1, device), False),
    ):
        assert trainer_of(folder, *options, ranks=ranks).train_step.model.encoder.embedding.sparse == sparse


def test_an_average_is_kept_if_there_is_a_decay(data):
    assert trainer_of(data).train_step.average is None
    trainer = trainer_of(data, "ema_decay=0.5")
    before = trainer.train_step.average.weights["encoder.embedding.weight"].clone()
    trainer.step(trainer.micro_batches.rank_batch(trainer.plan.batch(0)))
    now = trainer.train_step.model.encoder.embedding.weight.detach()
    expected = 2 / 11 * before + 9 / 11 * now
    torch.testing.assert_close(trainer.train_step.average.weights["encoder.embedding.weight"], expected)


def test_initial_weights_follow_from_the_seed(data):
    states = [trainer_of(data, f"seed={seed}").train_step.model.state_dict() for seed in (1, 1, 2)]
    assert same(states[0], states[1]) and not same(states[1], states[2])


# Validation.


def test_a_validation_is_the_mean_over_the_targets_of_its_lines(data):
    trainer = trainer_of(data, "model.dropout=0.5", "batch.tokens_per_device=12", "batch.max_tokens=40")
    model, source = trainer.train_step.model, trainer.valid.source
    metrics = trainer.validate()
    assert model.training
    model.eval()
    training, trainer.micro_batches = trainer.micro_batches, trainer.valid
    loss, nll = whole_sums(trainer, np.arange(len(source.lengths["example_id"])))
    trainer.micro_batches = training
    tokens = int(np.asarray(source.lengths["tgt_pieces"]).sum()) + len(source.lengths["example_id"])
    assert (metrics["loss"], metrics["nll"]) == pytest.approx((loss.item() / tokens, nll.item() / tokens), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["nll"]), rel=1e-5)
    trainer.state.elapsed = 100.0
    metrics = trainer.validate()
    assert 0 < metrics["seconds"] < 60 and metrics["elapsed"] == pytest.approx(100 + metrics["seconds"])


def test_steps_at_which_a_validation_translates(data):
    settings = ["valid_metric=chrf", "validate_every=5", "valid_metric_every=3", "max_steps=32"]
    decoded = trainer_of(data, *settings).decoded
    assert [step for step in range(5, 33) if decoded.is_due(step) and (step % 5 == 0 or step == 32)] == [15, 30, 32]
    made = {name: trainer_of(data, f"valid_metric={name}").decoded for name in ("nll", "bleu", "chrf", "ter")}
    assert [name for name, decoded in made.items() if decoded is None] == ["nll"]


def test_ranks_translate_whole_batches_each_once_and_no_line_without_leaves(data):
    settings, found = ["valid_metric=chrf", "decoding.max_tokens=24"], []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        trainer = trainer_of(data, *settings, ranks=Ranks(rank, world_size, CPU))
        found.append(trainer.decoded._translate(trainer.train_step.model.eval()))
    assert len(found[0]) == 12 and 0 < len(found[1]) < 12 and not found[1].keys() & found[2].keys()
    assert found[0] == found[1] | found[2]
    trainer = trainer_of(data, *settings)
    leaves = np.array(trainer.valid.source.lengths["leaves"])
    leaves[[3, 5]] = 0, 1
    trainer.valid.source.lengths = {**trainer.valid.source.lengths, "leaves": leaves}
    assert trainer.decoded._translate(trainer.train_step.model.eval()).keys() == set(range(12)) - {3}


def test_failures_of_a_validation_are_told_and_training_goes_on(data):
    trainer = trainer_of(data, "valid_metric=chrf")
    with torch.no_grad():
        trainer.train_step.model.encoder.embedding.weight.fill_(math.nan)
    with pytest.raises(TrainingFailed, match="not finite"):
        trainer.decoded.score(trainer.train_step)
    assert trainer.train_step.model.training

    def exhausted(batch):
        raise torch.OutOfMemoryError

    trainer.train_step.validate = exhausted
    with pytest.raises(TrainingFailed, match="^example_id .* of valid .* even alone; take it out of split valid"):
        trainer.validate()
    assert trainer.train_step.model.training


# Steps of a run.


def test_updates_are_counted_before_whatever_reads_them(data):
    trainer = trainer_of(data, "log_every=3", "validate_every=4", "checkpoint_every=5", "max_steps=17")
    expected = [step for step in range(1, 18) if not (step % 3 and step % 4 and step % 5) or step == 17]
    assert [step for step in range(1, 18) if trainer._is_due(step)] == expected
    assert trainer._updates() == range(17)
    trainer.state.step = 5
    assert trainer._updates() == range(5, 17)


def test_a_metric_line_is_of_the_epoch_of_its_update(data):
    trainer = trainer_of(data)
    batches = trainer.plan.num_batches
    result = trainer.step(trainer.micro_batches.rank_batch(trainer.plan.batch(0)))
    for step, epoch in ((1, 0), (batches, 0), (batches + 1, 1), (2 * batches, 1)):
        trainer.state.step, trainer.state.elapsed = step, 7.0
        line = trainer._metrics(result)
        assert (line["epoch"], line["lr"], line["grad_norm"], line["elapsed"]) == (
            epoch, result.learning_rate, result.grad_norm, 7.0,
        )  # fmt: skip
        assert line["memory_gib"] == pytest.approx(peak_memory(CPU) / 2**30, rel=0.02)
    for norm in (math.inf, math.nan):
        assert trainer._metrics(replace(result, grad_norm=norm))["grad_norm"] is None


def test_a_model_that_does_not_fit_is_told_before_the_first_update(data):
    trainer = trainer_of(data)

    def exhausted(*arguments):
        raise torch.OutOfMemoryError

    trainer.train_step.compute_gradient = exhausted
    with pytest.raises(
        TrainingFailed, match="^the model with its gradients and optimiser does not fit into the memory of a worker"
    ):
        trainer.check_memory()


def test_a_run_is_finished_with_a_checkpoint_of_its_last_step(data, tmp_path):
    config, model = make_config(data, "max_steps=20", "patience=2"), torch.nn.Linear(2, 2)
    assert finished_outcome(config, tmp_path) is None
    optimizer = torch.optim.AdamW(model.parameters())

    def save(step: int, **meta: int) -> None:
        write_checkpoint(tmp_path, take_snapshot(step, model, optimizer, {"step": step}, meta), keep=9)

    save(5)
    assert finished_outcome(make_config(data, "max_steps=20", "patience=1"), tmp_path) is None
    save(10, validations_since_best=1)
    assert finished_outcome(config, tmp_path) is None
    save(15, validations_since_best=2)
    assert finished_outcome(config, tmp_path) == TrainOutcome(15, finished=True)
    save(20)
    found = finished_outcome(config, tmp_path)
    assert found == TrainOutcome(20, finished=True) and len({found, TrainOutcome(20, True)}) == 1
    (tmp_path / "checkpoints" / "step_00000020" / "model.safetensors").write_bytes(b"cut off")
    assert finished_outcome(config, tmp_path) == TrainOutcome(15, finished=True)
    longer = build_task(make_config(data, "max_steps=30", "patience=0")).config
    assert finished_outcome(longer, tmp_path) is None


SEVEN = ["max_steps=7", "log_every=2", "validate_every=3", "checkpoint_every=4", "ema_decay=0.9"]


def lines_of(run_dir, event: str) -> dict[int, dict]:
    return {line["step"]: line for line in read_metrics(run_dir) if line["event"] == event}


def metas_of(run_dir) -> dict[int, dict]:
    return {checkpoint_step(folder): read_meta(folder) for folder in checkpoint_folders(run_dir)}


def test_a_run_logs_validates_and_saves_when_it_should(data, tmp_path, monkeypatch, capsys):
    """Stopped after five updates and continued, it ends as one that was never stopped."""
    reads = itertools.count(1)
    monkeypatch.setattr(BatchStream, "waited", property(lambda stream: float(next(reads))))  # one second more at each look
    task, reported = make_task(data, *SEVEN), []
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    assert train(task, tmp_path / "whole", report=reported.append) == TrainOutcome(7, finished=True)
    assert "train: 7/7 steps" in capsys.readouterr().err
    whole, valid = lines_of(tmp_path / "whole", "train"), lines_of(tmp_path / "whole", "valid")
    assert list(whole) == [2, 4, 6] == [line["step"] for line in reported] and list(valid) == [3, 6, 7]
    assert [line["loss"] for line in reported] == [line["loss"] for line in whole.values()]
    assert all(line["data_wait"] * line["seconds"] == pytest.approx(2) for line in whole.values())
    assert 0 < whole[2]["seconds"] <= whole[2]["elapsed"] < whole[4]["elapsed"] < valid[6]["elapsed"] < valid[7]["elapsed"] < 300
    metas = metas_of(tmp_path / "whole")
    assert {step: meta["valid_nll"] for step, meta in metas.items()} == {4: None, 7: valid[7]["nll"]}
    assert all((meta["world_size"], meta["due"]) == (1, True) for meta in metas.values())
    epochs = Trainer(task, RANK_0).plan.epoch
    assert [meta["epoch"] for meta in metas.values()] == [epochs(4), epochs(7)]
    assert metas[4]["first_update"] == metas[7]["first_update"]

    asked = itertools.count(1)
    stopped = train(task, tmp_path / "halves", should_stop=lambda: next(asked) == 5, show_progress=False)
    assert stopped == TrainOutcome(5, finished=False) and "7 steps" not in capsys.readouterr().err
    assert {step: meta["due"] for step, meta in metas_of(tmp_path / "halves").items()} == {4: True, 5: False}
    assert train(task, tmp_path / "halves") == TrainOutcome(7, finished=True) == train(task, tmp_path / "halves")
    for event, lines in (("train", whole), ("valid", valid)):
        again = lines_of(tmp_path / "halves", event)
        assert {step: line["loss"] for step, line in again.items()} == {step: line["loss"] for step, line in lines.items()}
    assert list(metas_of(tmp_path / "halves")) == [4, 7]
    for name in ("model.safetensors", "ema.safetensors"):
        assert same(*(load_file(latest_checkpoint(tmp_path / run) / name) for run in ("whole", "halves")))


def test_a_run_that_improves_no_more_ends_with_a_checkpoint(data, tmp_path):
    settings = ["patience=1", "lr_scale={'*': 0}", "validate_every=2", "checkpoint_every=50"]
    assert train(make_task(data, *settings), tmp_path) == TrainOutcome(4, finished=True)
    assert {step: meta["validations_since_best"] for step, meta in metas_of(tmp_path).items()} == {4: 1}
    assert list(lines_of(tmp_path, "valid")) == [2, 4]


def test_a_run_that_cannot_be_saved_ends_at_once(data, tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError):
        train(make_task(data, *SEVEN), tmp_path)
    assert list(lines_of(tmp_path, "train")) == [2, 4]
