"""Weights in parts, one a rank: the same training, checkpoints that all runs read, and ranks that keep in step."""

from pathlib import Path

import pytest
import torch
from toyruns import final_weights, losses, make_config, make_task, train_ranks

from treenet.runs.metrics_log import read_metrics
from treenet.training.trainer import train

pytestmark = pytest.mark.slow

# Biases of keys have no gradient but rounding, which Adam without the large epsilon would enlarge.
BASE = ("optimizer.adam_eps=1e-3", "ema_decay=0.9", "validate_every=2", "checkpoint_every=2", "average=ema")


def train_whole(data: Path, run_dir: Path, *overrides: str) -> None:
    """Train in this process, with complete weights."""
    run_dir.mkdir(exist_ok=True)
    train(make_task(data, *overrides), run_dir)


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def valid_losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir) if line["event"] == "valid"]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ()),
        (
            3,
            (
                "model.name=transformer",
                "checkpoint_activations=true",
                "optimizer.clip_norm=0.5",
                "batch.max_tokens=16",
                "batch.tokens_per_device=12",
                "optimizer.r_drop=1",
            ),
        ),
    ],
    ids=["tree", "recomputed micro-batches"],
)
def test_sharded_ranks_train_as_one_process(data, tmp_path, ranks, overrides):
    """Two examples a batch and a rank that has none are among the batches of 16 tokens."""
    train_whole(data, tmp_path / "one", "max_steps=4", *BASE, *overrides)
    config = make_config(data, "max_steps=4", "shard_weights=true", *BASE, *overrides)
    assert train_ranks(ranks, config, tmp_path / "parts") == [None] * ranks
    for step, loss in losses(tmp_path / "one"):
        assert dict(losses(tmp_path / "parts"))[step] == pytest.approx(loss, rel=1e-5)
    assert valid_losses(tmp_path / "parts") == pytest.approx(valid_losses(tmp_path / "one"), rel=1e-5)
    assert_close(final_weights(tmp_path / "parts"), final_weights(tmp_path / "one"))


def test_a_run_goes_on_with_weights_in_parts_and_back_again(data, tmp_path):
    """Weights, moments of the optimiser and moving average are cut, and put together again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_whole(data, whole, "max_steps=6", *BASE)
    train_whole(data, parts, "max_steps=2", *BASE)
    assert train_ranks(2, make_config(data, "max_steps=4", "shard_weights=true", *BASE), parts) == [None, None]
    train_whole(data, parts, "max_steps=6", *BASE)
    assert dict(losses(parts)) == pytest.approx(dict(losses(whole)), rel=1e-5)
    assert_close(final_weights(parts), final_weights(whole))


@pytest.mark.parametrize("name", ["tree2seq", "lightconv"])
def test_other_architectures_train_in_parts(data, tmp_path, name):
    overrides = (f"model.name={name}", "max_steps=2", "validate_every=2", "model.num_encoder_layers=2")
    train_whole(data, tmp_path / "one", *overrides)
    assert train_ranks(2, make_config(data, "shard_weights=true", *overrides), tmp_path / "two") == [None, None]
    assert dict(losses(tmp_path / "two")) == pytest.approx(dict(losses(tmp_path / "one")), rel=1e-4)
