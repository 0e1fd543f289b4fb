"""Frozen parameters and factors of the learning rate: by patterns of names, to the bit, and on any number of ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toyruns import final_weights, losses, make_config, make_task, same, train_ranks

from treenet.config import TrainConfig
from treenet.jobs.train_job import check_job
from treenet.jobs.train_run import check_same_run, describe_run, run_training
from treenet.runs.averaging import average_checkpoints
from treenet.runs.checkpoint import latest_checkpoint
from treenet.tasks.base import build_task
from treenet.training.optimizer import FACTOR, frozen_names, learning_rate, rate_factors
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import UserError, dump_settings

pytestmark = pytest.mark.slow

SHORT = ["max_steps=4", "checkpoint_every=4", "validate_every=4", "optimizer.warmup_steps=1"]
FREEZE = "freeze=[encoder.embedding.*, '*.layers.0.feed_forward.*']"


def initial_weights(task) -> dict[str, torch.Tensor]:
    trainer = Trainer(task, Ranks(0, 1, torch.device("cpu")))
    return {name: value.detach().clone() for name, value in trainer.train_step.model.named_parameters()}


def moved(before: dict, after: dict) -> set[str]:
    return {name for name in after if not torch.equal(before[name], after[name])}


def run_of(data: Path, folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    train(make_task(data, *SHORT, *overrides), folder)
    return final_weights(folder)


def test_the_default_settings_leave_no_trace(data):
    """Records do not have them, and the optimiser has two groups."""
    config = make_config(data)
    assert not {"init", "freeze", "lr_scale"} & config.model_dump(mode="json").keys() and "freeze" not in dump_settings(config)
    assert not {"init", "freeze", "lr_scale"} & config.lasting().keys()
    groups = Trainer(build_task(config), Ranks(0, 1, torch.device("cpu"))).train_step.optimizer.param_groups
    assert len(groups) == 2 and not any(FACTOR in group for group in groups)
    assert {"freeze", "lr_scale"} <= make_config(data, "freeze=[a]", "lr_scale={a: 2}").model_dump(mode="json").keys()


@pytest.mark.parametrize("more", [[], ["ema_decay=0.9"], ["checkpoint_activations=true"], ["optimizer.weight_decay=0.1"]])
def test_frozen_parameters_keep_their_bits_and_all_others_move(data, tmp_path, more):
    task = make_task(data, FREEZE, *SHORT, *more)
    before, after = initial_weights(task), run_of(data, tmp_path / "run", FREEZE, *more)
    frozen = {name for name in before if name == "encoder.embedding.weight" or "layers.0.feed_forward." in name}
    assert len(frozen) == 9 and frozen == frozen_names(task.config, task.build_model(Trainer(task, CPU).meta))
    assert moved(before, after) == before.keys() - frozen
    state = torch.load(latest_checkpoint(tmp_path / "run") / "trainer.pt", weights_only=True)["optimizer"]["state"]
    assert len(state) == len(before) - len(frozen)


CPU = Ranks(0, 1, torch.device("cpu"))


def test_a_moving_average_holds_frozen_parameters_too(data, tmp_path):
    weights = run_of(data, tmp_path / "run", FREEZE, "ema_decay=0.9")
    average = load_file(latest_checkpoint(tmp_path / "run") / "ema.safetensors")
    assert average.keys() == weights.keys()
    assert torch.equal(average["encoder.embedding.weight"], weights["encoder.embedding.weight"])
    config = make_config(data, *SHORT, FREEZE, "ema_decay=0.9")
    (tmp_path / "run" / "config.yaml").write_text(dump_settings(config))
    (tmp_path / "run" / "run.json").write_text("{}")
    folder = average_checkpoints(tmp_path / "run", "ema", 1)
    assert same(load_file(folder / "model.safetensors"), average)


@pytest.mark.parametrize("more", [[], ["ema_decay=0.9", "lr_scale={'*norm*': 0.5, 'decoder.*': 3}"]])
def test_a_run_with_frozen_parameters_continues_to_the_bit(data, tmp_path, more):
    asked = iter(range(1, 100))
    settings = [FREEZE, *more, "max_steps=6", "checkpoint_every=3", "optimizer.warmup_steps=1"]
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
    train(make_task(data, *settings), tmp_path / "once")
    train(make_task(data, *settings), tmp_path / "twice", should_stop=lambda: next(asked) == 2)
    assert latest_checkpoint(tmp_path / "twice").name == "step_00000002"
    train(make_task(data, *settings), tmp_path / "twice")
    for name in ("model.safetensors", *(["ema.safetensors"] if more else [])):
        assert same(*(load_file(latest_checkpoint(tmp_path / run) / name) for run in ("once", "twice")))


def test_the_rate_is_that_of_the_schedule_times_the_factor_of_the_first_pattern(data):
    """One update, with AdamW written out: lr * (m / (sqrt(v) + eps)) and decay by lr, m and v corrected for the first step."""
    overrides = ["lr_scale={'encoder.layers.*': 0.25, '*.bias': 2, 'encoder.*': 0.5}", "optimizer.weight_decay=0.3"]
    config = make_config(data, *overrides)
    trainer = Trainer(build_task(config), CPU)
    before = {name: value.detach().clone() for name, value in trainer.train_step.model.named_parameters()}
    trainer.step(next(iter(trainer.rank_batches())))
    rate, eps = learning_rate(config.optimizer, 1), config.optimizer.adam_eps
    for name, parameter in trainer.train_step.model.named_parameters():
        factor = 0.25 if name.startswith("encoder.layers") else 2 if name.endswith("bias") else 0.5 if "encoder" in name else 1
        decay = 0.3 if parameter.ndim >= 2 else 0
        gradient = parameter.grad.to_dense().double()
        expected = before[name].double() * (1 - factor * rate * decay) - factor * rate * gradient / (gradient.abs() + eps)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-9)
    assert rate_factors(config, trainer.train_step.model)["decoder.layers.0.feed_forward.inner.bias"] == 2


def test_a_factor_of_zero_equals_freezing(data, tmp_path):
    """Also with decay, which the learning rate scales. The norm of the gradient differs, so there is no clipping here."""
    factor = run_of(data, tmp_path / "factor", "lr_scale={'decoder.*': 0}", "optimizer.weight_decay=0.1")
    frozen = run_of(data, tmp_path / "frozen", "freeze=[decoder.*]", "optimizer.weight_decay=0.1")
    assert same(factor, frozen) and not same(frozen, run_of(data, tmp_path / "all", "optimizer.weight_decay=0.1"))


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_have_the_losses_of_one(data, tmp_path, sharded):
    overrides = [*SHORT, FREEZE, "lr_scale={'*norm*': 0.5}", "ema_decay=0.9", f"shard_weights={str(sharded).lower()}"]
    (tmp_path / "one").mkdir()
    train(make_task(data, *overrides), tmp_path / "one")
    assert train_ranks(2, make_config(data, *overrides), tmp_path / "two") == [None, None]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)
    frozen = initial_weights(make_task(data, *overrides))["encoder.embedding.weight"]
    for name in ("model.safetensors", "ema.safetensors"):
        assert torch.equal(load_file(latest_checkpoint(tmp_path / "two") / name)["encoder.embedding.weight"], frozen)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("freeze=[encoder.layer.*]", r"freeze: 'encoder.layer.\*' matches no parameter; similar names are encoder.layers,"),
        ("freeze=[decoder.embedding.*]", "decoder.embedding.weight is shared and has the name encoder.embedding.weight"),
        ("freeze=['*']", "the patterns match all parameters"),
        ("lr_scale={decodr.*: 2}", r"lr_scale: 'decodr.\*' matches no parameter; similar names are decoder,"),
        ("lr_scale={encoder.*: 2, encoder.layers.*: 3}", r"'encoder.layers.\*' changes nothing: .* earlier pattern"),
        ("lr_scale={encoder.*: -1}", "lr_scale.*greater than or equal to 0"),
        ("lr_scale={encoder.*: true}", "lr_scale: .*but is true"),
    ],
)
def test_a_pattern_that_chooses_nothing_is_refused_before_training(data, override, message):
    with pytest.raises(UserError, match=message):
        check_job(make_config(data, override))


def test_a_factor_of_frozen_parameters_is_refused(data):
    with pytest.raises(UserError, match=r"'encoder.\*' changes nothing: its parameters are frozen"):
        check_job(make_config(data, "freeze=[encoder.*]", "lr_scale={encoder.*: 2}"))


def test_the_summary_and_run_json_count_frozen_parameters(data, tmp_path):
    summary = run_training(make_config(data, *SHORT, "freeze=[encoder.layers.*]", "average_checkpoints=1"), tmp_path)
    model = build_task(make_config(data)).build_model(Trainer(make_task(data), CPU).meta)
    frozen = sum(value.numel() for name, value in model.named_parameters() if name.startswith("encoder.layers."))
    assert f"parameters ({frozen:,} of them frozen), 4 of 4 updates" in describe_run(summary)


def test_another_order_of_patterns_is_another_run(data, tmp_path):
    """The first pattern that matches counts, so the order is a setting."""
    values = ["lr_scale={'encoder.*': 0.5, '*norm*': 2}", "lr_scale={'*norm*': 2, 'encoder.*': 0.5}"]
    first, second = (TrainConfig.model_validate(make_config(data, *SHORT, value).model_dump()) for value in values)
    run_training(first, tmp_path)
    check_same_run(tmp_path, first.with_absolute_paths(), check_job(first).facts, tmp_path)
    with pytest.raises(UserError, match="lr_scale: another order of the same patterns"):
        check_same_run(tmp_path, second.with_absolute_paths(), check_job(second).facts, tmp_path)
