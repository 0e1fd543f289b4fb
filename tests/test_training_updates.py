"""One update: micro-batches, memory that runs out, ranks, R-Drop, the moving average, what is logged."""

import ctypes
import itertools
import os
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import print_to, printed_by, returned_memory
from toyruns import losses, make_config, make_task, train_ranks

from treenet.data.examples import ExampleSource
from treenet.data.windows import example_costs
from treenet.layers.backend import keep_freed_memory
from treenet.models.compiling import Compiled
from treenet.runs.checkpoint import checkpoint_folders, is_complete
from treenet.runs.metrics_log import read_metrics
from treenet.tasks import losses as task_losses
from treenet.tasks.base import build_task
from treenet.training.micro_batches import MicroBatches
from treenet.training.ranks import Ranks, bound_kernel_cache
from treenet.training.trainer import Trainer, train
from treeproc.shards.schema import PAD_ID

pytestmark = pytest.mark.slow

RANK_0 = Ranks(0, 1, torch.device("cpu"))


def run(config, run_dir: Path) -> list[float]:
    run_dir.mkdir()
    train(build_task(config), run_dir)
    return [loss for _, loss in losses(run_dir)]


# Micro-batches.


@pytest.mark.parametrize("limit", [1, 9, 30, 64, 1000])
def test_micro_batches_cut_a_share_and_lose_no_example(data, limit):
    source = ExampleSource(data / "encoded", "train")
    config = make_config(data, f"batch.tokens_per_device={limit}").batch
    trainer = Trainer(make_task(data, "batch.max_tokens=200"), RANK_0)
    for number in range(trainer.plan.num_batches):
        rows = trainer.plan.batch(number)
        for rank in range(3):
            rank_batch = MicroBatches(source, config, rank, 3).rank_batch(rows)
            assert np.concatenate([*rank_batch.cuts, []]).tolist() == rows[rank::3].tolist() == rank_batch.rows.tolist()
            assert rank_batch.global_tokens == source.target_tokens(rows)
            for cut, batch in zip(rank_batch.cuts, rank_batch.batches, strict=True):
                width = int(example_costs({name: column[cut] for name, column in source.lengths.items()}).max())
                assert len(cut) == 1 or width * len(cut) <= limit
                assert batch.example_ids.tolist() == source.lengths["example_id"][cut].tolist()


@pytest.mark.parametrize("options", [[], ["optimizer.r_drop=2"]], ids=["one pass", "R-Drop"])
def test_micro_batches_change_no_loss(data, tmp_path, options):
    options = ["max_steps=8", *options]
    whole = run(make_config(data, *options), tmp_path / "whole")
    pieces = run(make_config(data, "batch.tokens_per_device=16", *options), tmp_path / "pieces")
    np.testing.assert_allclose(pieces, whole, rtol=1e-5)


def test_padding_is_counted_as_it_is(data, tmp_path):
    config = make_config(data, "max_steps=5", "log_every=5")
    trainer = Trainer(build_task(config), RANK_0)
    positions = padding = 0
    for number in range(5):
        batch = trainer.micro_batches.source.batch(trainer.plan.batch(number))
        for sizes in ((~batch.leaf_pad_mask).sum(1), (~batch.node_pad_mask).sum(1), (batch.tgt_out != PAD_ID).sum(1)):
            positions += len(sizes) * int(sizes.max())
            padding += len(sizes) * int(sizes.max()) - int(sizes.sum())
    torch.set_flush_denormal(False)
    train(build_task(config), tmp_path)
    assert torch.tensor(1e-39) * 1.0 == 0 or not torch.set_flush_denormal(True)  # these are slow on many processors
    line = next(line for line in read_metrics(tmp_path) if line["event"] == "train")
    assert line["padding"] == padding / positions > 0
    assert line["tokens_per_s_per_device"] == line["tokens_per_s"] > 0
    assert 0 <= line["data_wait"] < 1 and line["elapsed"] > 0


# Memory that is kept, and memory that runs out.


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_stays_with_the_process(tmp_path):
    assert int(printed_by(_free, tmp_path / "out")) < 10 * 2**20


def _free(place: Path) -> None:
    print_to(place)
    keep_freed_memory()
    print(returned_memory(), flush=True)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no products in bfloat16")
@pytest.mark.parametrize(("chosen", "kept"), [({}, 0), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "200"}, 1)])
def test_few_kernels_of_products_are_kept(tmp_path, chosen, kept):
    """After a hundred other shapes, the kernel of the first shape is made again, unless the user has chosen a larger cache."""
    lines = printed_by(_multiply, tmp_path / "out", chosen)
    assert lines.count("create:cache_miss") == 101 - kept and lines.count("create:cache_hit") == kept


def _multiply(place: Path, chosen: dict[str, str]) -> None:
    print_to(place)
    os.environ.update({"ONEDNN_VERBOSE": "profile_create", **chosen})
    bound_kernel_cache()
    for rows in [*range(33, 133), 33]:
        torch.ones(rows, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
    ctypes.CDLL(None).fflush(None)  # what oneDNN has written


def out_of_memory_above(examples: int) -> None:
    """Give this process memory for so many examples at once. A larger micro-batch fails in the middle of its backward pass."""
    true_loss = task_losses.projected_nll

    def loss(states, table, targets, *options):
        if len(targets) > examples and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no memory for validation")
        sums = true_loss(states, table, targets, *options)
        return sums._replace(loss=_Exhausting.apply(sums.loss)) if len(targets) > examples else sums

    task_losses.projected_nll = loss


class _Exhausting(torch.autograd.Function):
    """The identity, without memory for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("no memory for gradients")


def test_a_micro_batch_that_does_not_fit_is_halved_until_it_does(data, tmp_path, monkeypatch, capsys):
    config = make_config(data, "max_steps=8")
    expected = run(config, tmp_path / "whole")
    monkeypatch.setattr(task_losses, "projected_nll", task_losses.projected_nll)
    out_of_memory_above(3)
    np.testing.assert_allclose(run(config, tmp_path / "short"), expected, rtol=1e-5)
    assert "batch.tokens_per_device=" in capsys.readouterr().err
    valid = [[line["nll"] for line in read_metrics(tmp_path / name) if line["event"] == "valid"] for name in ("whole", "short")]
    np.testing.assert_allclose(valid[1], valid[0], rtol=1e-5)


def test_gradients_from_before_memory_ran_out_do_not_count(data):
    """The second micro-batch fails after the first has left its gradient: the rank's batch starts anew."""
    trainer = Trainer(make_task(data, "batch.tokens_per_device=32"), RANK_0)
    micro_batches, rows = trainer.micro_batches, trainer.plan.hardest_batch()
    rank_batch = micro_batches.rank_batch(rows)
    assert len(rank_batch.batches) >= 2
    trainer.train_step.compute_gradient(rank_batch, micro_batches, 0)
    expected = [parameter.grad.clone() for parameter in trainer.train_step.model.parameters()]
    calls, true_loss = itertools.count(), trainer.train_step._objective

    def failing(*arguments):
        if next(calls) == 1:
            raise torch.OutOfMemoryError
        return true_loss(*arguments)

    trainer.train_step._objective = failing
    trainer.train_step.compute_gradient(rank_batch, micro_batches, 0)
    assert micro_batches.limit < 32
    for parameter, grad in zip(trainer.train_step.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-7)


def _poor_rank(rank: int) -> None:
    if rank == 1:
        out_of_memory_above(1)


def test_one_rank_short_of_memory_goes_on_in_pieces_and_the_others_wait(data, tmp_path):
    config = make_config(data, "max_steps=10")
    expected = run(config, tmp_path / "one")
    assert train_ranks(2, config, tmp_path / "two", _poor_rank) == [None, None]
    np.testing.assert_allclose([loss for _, loss in losses(tmp_path / "two")], expected, rtol=1e-5)


# Failures that all ranks hear of.


def _full_disk(rank: int) -> None:
    def full(value, path):
        if value["state"]["step"] > 5:
            raise OSError(28, "No space left on device")
        true_save(value, path)

    true_save, torch.save = torch.save, full


def test_a_full_disk_stops_all_ranks_and_leaves_the_last_good_checkpoint(data, tmp_path):
    first, second = train_ranks(2, make_config(data, "checkpoint_every=5"), tmp_path / "run", _full_disk)
    assert first == second and "No space left on device; free space" in first and "step_00000010" in first
    assert [(folder.name, is_complete(folder)) for folder in checkpoint_folders(tmp_path / "run")] == [("step_00000005", True)]


# R-Drop.


def test_the_two_passes_drop_other_units(data):
    trainer = Trainer(make_task(data, "optimizer.r_drop=1", "model.dropout=0.3"), RANK_0)
    batch, seen = trainer.micro_batches.source.batch([0, 1]), []
    true_output = trainer.train_step._output
    trainer.train_step._output = lambda *arguments: seen.append(true_output(*arguments)) or seen[-1]
    trainer.train_step._objective(batch, [1, 2])
    assert len(seen) == 2 and not torch.allclose(*(states for states, _ in seen))


# The moving average.


def test_the_average_is_what_is_validated(data):
    trainer = Trainer(make_task(data, "ema_decay=0.9", "optimizer.learning_rate=0.05"), RANK_0)
    for rank_batch in itertools.islice(trainer.rank_batches(), 12):
        trainer.step(rank_batch)
    measured, own = trainer.validate()["nll"], trainer.train_step.average
    trainer.train_step.average = None
    assert trainer.validate()["nll"] != measured
    trainer.train_step.model.load_state_dict(own.weights, strict=False)
    assert trainer.validate()["nll"] == measured


# Compilation.


@pytest.mark.cluster
def test_a_compiled_model_trains_alike(data, monkeypatch):
    """With frozen parameters. Traced as for Inductor, which would take minutes, but run by the kernels of always.

    Updates of a plain model alone: the graphs of one example and of validation take ten seconds each, and `test_compiling.py`
    has those of trees.
    """
    true_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: true_compile(model, backend="eager", **options))
    frozen, found = ["freeze=[encoder.embedding.*, '*.layers.0.feed_forward.*']"], {}
    for compiled in ("false", "true"):
        trainer = Trainer(make_task(data, f"compile={compiled}", "model.name=transformer", "model.dropout=0.1", *frozen), RANK_0)
        assert isinstance(trainer.train_step._forward, Compiled) == (compiled == "true")
        results = [trainer.step(rank_batch) for rank_batch in itertools.islice(trainer.rank_batches(), 4)]
        found[compiled] = [(result.loss_sum, result.grad_norm) for result in results]
    np.testing.assert_allclose(found["true"], found["false"], rtol=1e-5)


def test_a_compiled_model_compiles_for_one_example_at_the_start(data, monkeypatch):
    """The hardest batch and one example are tried: later batches find their graphs."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for compiled in sizes:
        trainer = Trainer(make_task(data, f"compile={str(compiled).lower()}"), Ranks(0, 1, torch.device("cpu")))
        trainer.train_step.compute_gradient = lambda batch, *_, into=sizes[compiled]: into.append(len(batch.rows))
        trainer.check_memory()
    assert sizes == {True: [len(trainer.plan.hardest_batch()), 1], False: [len(trainer.plan.hardest_batch())]}
