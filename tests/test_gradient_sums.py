"""Gradients that ranks begin to add while they compute them: same bits as afterwards, and nobody waits where one fails."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toyruns import final_weights, losses, make_config, make_task, same, train_ranks

from treenet.runs.metrics_log import read_metrics
from treenet.training import gradients as gradient_sums
from treenet.training.gradients import OverlappedSums
from treenet.training.ranks import Ranks
from treenet.training.step import TrainStep
from treenet.training.trainer import Trainer, train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BUCKET = 2000  # bytes: some twenty buckets of the tiny model


def _afterwards(rank: int) -> None:
    """Sum gradients as on accelerators, but with one sum after the backward pass."""
    TrainStep.defers, TrainStep.overlaps = True, False


def _overlapped(rank: int) -> None:
    TrainStep.defers, TrainStep.overlaps, gradient_sums.BUCKET_BYTES = True, True, BUCKET


def _overlapped_and_read_at_once(rank: int) -> None:
    _overlapped(rank)
    TrainStep.defers = False


def _fail_after_buckets(updates: set[int], note: Path | None = None, sent: int = 3) -> None:
    """Make memory run out in the backward pass of these updates, counted from 1, after so many buckets were `sent`.

    If it is noted, it happens once in each.
    """
    true_begin, true_complete, begun = OverlappedSums.begin, OverlappedSums._complete, [0]

    def begin(self) -> None:
        begun[0] += 1
        true_begin(self)

    def complete(self, number: int, parameter: torch.Tensor) -> None:
        true_complete(self, number, parameter)
        if self._watching and len(self._sent) >= sent and begun[0] in updates:
            if note:
                note.write_text(note.read_text() + "!" if note.exists() else "!")
                updates.discard(begun[0])
            raise torch.OutOfMemoryError("no memory for gradients")

    OverlappedSums.begin, OverlappedSums._complete = begin, complete


def _short_of_memory(defers: bool, sent: int, note: Path, rank: int) -> None:
    _overlapped(rank)
    TrainStep.defers = defers
    if rank == 1:
        _fail_after_buckets({3}, note, sent)


def _hopeless(rank: int) -> None:
    _overlapped(rank)
    if rank == 1:
        _fail_after_buckets(set(range(100)))


def test_buckets_leave_in_the_backward_pass(data, monkeypatch):
    """The first ones before the last parameters have their gradients, of the last micro-batch alone."""
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(TrainStep, "overlaps", True)
    trainer = Trainer(make_task(data, "batch.tokens_per_device=32"), Ranks(0, 1, CPU))
    train_step, batch = trainer.train_step, trainer.micro_batches.rank_batch(trainer.plan.hardest_batch())
    assert len(batch.batches) > 1
    train_step.compute_gradient(batch, trainer.micro_batches, 0)
    gradients, expected = train_step._gradients, [parameter.grad.clone() for parameter in train_step.model.parameters()]
    sums = OverlappedSums(gradients, train_step.ranks, torch.float32)
    sent, left, micro_batches = [], [], []
    monkeypatch.setattr(sums, "_send", lambda send=sums._send: (sent.append(len(micro_batches)), send()))
    true_objective = train_step._objective
    monkeypatch.setattr(train_step, "_objective", lambda *given: micro_batches.append(1) or true_objective(*given))
    gradients.parameters[0].register_post_accumulate_grad_hook(lambda _: left.append(len(sent)))
    train_step.compute_gradient(batch, trainer.micro_batches, 0, sums)
    assert set(sent) == {len(batch.batches)} and len(sums._buckets) - 3 <= left[-1] < len(sums._buckets)
    sums.finish()
    assert len(sent) == len(sums._buckets)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(train_step.model.parameters(), expected, strict=True))


@pytest.mark.parametrize("options", [[], ["batch.max_tokens=12"]], ids=["as ever", "ranks without examples"])
def test_sums_that_overlap_have_the_bits_of_sums_afterwards(data, tmp_path, options):
    config = make_config(data, "max_steps=5", "validate_every=5", *options)
    runs = {"after": _afterwards, "overlapped": _overlapped, "at once": _overlapped_and_read_at_once}
    for name, prepare in runs.items():
        assert train_ranks(2, config, tmp_path / name, prepare) == [None, None]
    for name in ("overlapped", "at once"):
        assert losses(tmp_path / name) == losses(tmp_path / "after")
        assert same(final_weights(tmp_path / name), final_weights(tmp_path / "after"))


SHORT = ("max_steps=6", "log_every=3")


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> list[tuple[int, float]]:
    """The losses of one process."""
    run_dir = tmp_path_factory.mktemp("alone")
    train(make_task(data, *SHORT), run_dir)
    return losses(run_dir)


@pytest.mark.parametrize(("defers", "sent"), [(True, 3), (False, 3), (True, 0)])
def test_a_rank_short_of_memory_computes_the_update_again(data, alone, tmp_path, defers, sent):
    """All ranks do so if it has sent buckets. Else it does so alone, and sends none before its last micro-batch."""
    config = make_config(data, *SHORT)
    assert train_ranks(2, config, tmp_path / "two", partial(_short_of_memory, defers, sent, tmp_path / "note")) == [None, None]
    assert (tmp_path / "note").read_text() == "!"
    np.testing.assert_allclose(losses(tmp_path / "two"), alone, rtol=1e-5)
    assert [line["skipped"] for line in read_metrics(tmp_path / "two") if line["event"] == "train"] == [0, 0]


def test_an_example_that_does_not_fit_alone_is_named_on_all_ranks(data, tmp_path):
    first, second = train_ranks(2, make_config(data), tmp_path / "run", _hopeless)
    assert first == second and first.startswith("example_id ")
    assert "leaves" in first and "does not fit into the memory" in first
    assert " of train (" in first and "even alone; lower batch.max_leaves and batch.max_target_pieces" in first


def test_sums_in_bf16_round_and_train_alike(data, tmp_path):
    for name, options in (("float32", []), ("bf16", ["gradient_sums=bf16"])):
        config = make_config(data, "max_steps=6", *options)
        assert train_ranks(2, config, tmp_path / name, _overlapped) == [None, None]
    exact, rounded = ([loss for _, loss in losses(tmp_path / name)] for name in ("float32", "bf16"))
    assert exact != rounded and np.allclose(exact, rounded, rtol=0.01)
    assert "gradient_sums" not in make_config(data).model_dump()
