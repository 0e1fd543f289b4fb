"""Activation checkpointing, the deterministic mode, the allocator of CUDA: results stay, and memory or bits are kept."""

import os
from pathlib import Path

import pytest
import torch
from meta_device import DeviceOperations, stand_in_for_a_gpu
from toyruns import final_weights, gradient_and_kept, losses, make_config, make_task, same

from treenet.tasks.base import build_task
from treenet.training import ranks
from treenet.training.ranks import Ranks, deterministic_mode, expand_segments
from treenet.training.trainer import Trainer, train, use_gpu

CPU = torch.device("cpu")


def gradients(data: Path, *options: str) -> tuple[torch.Tensor, int]:
    """The gradient of a batch of several micro-batches, and the bytes that its forward passes keep for backward."""
    trainer = Trainer(make_task(data, "batch.tokens_per_device=32", *options), Ranks(0, 1, CPU))
    rank_batch = trainer.micro_batches.rank_batch(trainer.plan.hardest_batch())
    assert len(rank_batch.batches) > 1
    return gradient_and_kept(trainer, rank_batch)


@pytest.mark.parametrize("model", ["tree_transformer", "transformer"])
@pytest.mark.parametrize("dropout", [["model.dropout=0.3"], ["model.attention_dropout=0.2"], ["optimizer.r_drop=1"]], ids=str)
def test_layers_that_are_computed_again_give_the_same_gradient(data, model, dropout):
    """Gradients are equal to the last bit: with dropout by key, with PyTorch's, and with the two passes of R-Drop."""
    options = [f"model.name={model}", "model.num_encoder_layers=2", "model.num_decoder_layers=2", *dropout]
    (expected, kept), (found, kept_less) = (gradients(data, *options, f"checkpoint_activations={on}") for on in ("false", "true"))
    assert torch.equal(found, expected) and expected.any()
    assert kept_less < kept / 2


def test_layers_are_computed_again_on_accelerators_too(data, monkeypatch):
    """More kernels, of which none needs data."""
    device, kernels = stand_in_for_a_gpu(monkeypatch), []
    for on in ("false", "true"):
        options = [f"checkpoint_activations={on}", "model.attention_dropout=0", "model.dropout=0.1"]
        trainer = Trainer(build_task(make_config(data, *options)), Ranks(0, 1, device))
        rank_batch = trainer.micro_batches.rank_batch(trainer.plan.batch(0))
        with DeviceOperations() as seen:
            trainer.train_step.update(rank_batch, trainer.micro_batches, 0)
        kernels.append(seen.kernels["tests::keyed_dropout"])
    assert kernels[0] < kernels[1] < 2 * kernels[0]


def test_the_deterministic_mode_trains_alike_and_ends_with_the_training(data, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name, on in (("as ever", "false"), ("deterministic", "true")):
        (tmp_path / name).mkdir()
        train(make_task(data, "max_steps=6", f"deterministic={on}"), tmp_path / name)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert losses(tmp_path / "as ever") == losses(tmp_path / "deterministic")
    assert same(final_weights(tmp_path / "as ever"), final_weights(tmp_path / "deterministic"))


def test_the_deterministic_mode_refuses_what_is_not(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_mode(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    with deterministic_mode(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ranks._ALLOCATOR)
def test_the_allocator_is_set_unless_the_user_has_set_it(monkeypatch, name):
    for one in ranks._ALLOCATOR:
        monkeypatch.delenv(one, raising=False)
    expand_segments()
    assert os.environ.pop(ranks._ALLOCATOR[0]) == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    expand_segments()
    assert [os.environ.get(one) for one in ranks._ALLOCATOR if one != name] == [None]
    assert os.environ[name] == "max_split_size_mb:64"


def test_a_gpu_without_a_number_is_the_present_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    monkeypatch.setenv(ranks._ALLOCATOR[0], "")
    for name in ("cuda", "cuda:1"):
        use_gpu(torch.device(name))
    assert chosen == [1]
