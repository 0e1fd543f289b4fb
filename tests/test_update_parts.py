"""The parts of an update, alone: results and counters, one rank, the flat gradient, buckets, micro-batches, seeds."""

import itertools
import math
import os
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toyruns import make_config

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.layers.core import DropoutKeys
from treenet.models.pretrained import PretrainedLeaves
from treenet.training import gradients as gradient_sums
from treenet.training import ranks as ranks_of_run
from treenet.training.batch_stream import MOST_WORKERS, OpenTraining, count_workers
from treenet.training.gradients import (
    BUCKET_BYTES,
    FlatGradient,
    MustRepeat,
    OverlappedSums,
    add_gradients_by_row,
    cut_buckets,
)
from treenet.training.micro_batches import MicroBatches, RankBatch, StepSeeds
from treenet.training.ranks import Ranks, TrainingFailed, flight_recorder, peak_memory
from treenet.training.state import PendingResult, Stopwatch, TrainState, is_finished, is_unsound
from treeproc.common.settings import UserError

CPU = torch.device("cpu")
RANK_0 = Ranks(0, 1, CPU)
GOOD = [6.0, 5.0, 0.5, 0.0, 0.0, 0.0, 40.0, 8.0, 0.25, 3.0]  # loss, nll, auxiliary, stops, failures, repeats, ..., norm


def totals_of(**changes: float) -> torch.Tensor:
    names = ("loss", "nll", "auxiliary", "stops", "failures", "repeats", "positions", "padding", "waited", "norm")
    return torch.tensor([changes.get(name, value) for name, value in zip(names, GOOD, strict=True)], dtype=torch.float64)


# Results and counters.

UNSOUND = [{"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}, {"norm": math.nan}, {"norm": math.inf}]
SOUND = [{}, {"stops": 1.0}, {"nll": math.nan}, {"loss": -6.0}, {"waited": 9.0, "norm": 0.0}, {"loss": 0.0}]


@pytest.mark.parametrize(
    "changes", [*UNSOUND, {"failures": 1.0}, {"repeats": 2.0}, {"loss": math.inf, "norm": -math.inf}, *SOUND]
)
def test_what_may_not_change_the_weights(changes):
    found = is_unsound(totals_of(**changes))
    assert found == (changes not in SOUND) and found.dtype == torch.float32 and found.ndim == 0


def read(failure: str | None = None, **changes: float):
    return PendingResult(totals_of(**changes), RANK_0, update=7, learning_rate=0.5, target_tokens=12, failure=failure).read()


def test_a_result_has_the_totals_by_their_names():
    found = read()
    assert (found.updated, found.must_repeat, found.wants_stop) == (True, False, False)
    assert (found.loss_sum, found.nll_sum, found.auxiliary_sum, found.grad_norm) == (6, 5, 0.5, 3)
    assert (found.positions, found.padding, found.waited) == (40, 8, 0.25)
    assert (found.update, found.learning_rate, found.target_tokens) == (7, 0.5, 12)
    assert read(stops=1.0).wants_stop and read(stops=3.0).wants_stop
    for repeats in (1.0, 2.0):
        assert (read(repeats=repeats).must_repeat, read(repeats=repeats).updated) == (True, False)
    assert all(read(**changes).updated for changes in SOUND) and not any(read(**changes).updated for changes in UNSOUND)
    with pytest.raises(TrainingFailed, match="^the disk is full$"):
        read("the disk is full", failures=1.0)
    assert read("of no rank").updated and len({found, replace(found)}) == 1


def test_counters_add_up_and_begin_anew_with_each_metric_line():
    state = TrainState()
    assert vars(state) == {
        "step": 0, "skipped": 0, "skipped_in_row": 0, "elapsed": 0.0, "best_nll": None, "best_step": 0,
        "validations_since_best": 0, "loss_sum": 0.0, "nll_sum": 0.0, "auxiliary_sum": 0.0, "tokens": 0, "positions": 0.0,
        "padding": 0.0, "waited": 0.0, "seconds": 0.0, "loss_scale": None,
    }  # fmt: skip
    state.elapsed, state.positions, state.padding, state.waited = 10.0, 50.0, 20.0, 3.0
    state.count_skipped()
    state.count_skipped()
    assert (state.skipped, state.skipped_in_row) == (2, 2)
    state.count_update(6.0, 4.0, 1.0, 8)
    state.count_update(2.0, 1.0, 0.5, 2)
    state.count_seconds(1.5)
    state.count_seconds(0.5)
    assert (state.skipped, state.skipped_in_row, state.elapsed) == (2, 0, 12)
    assert state.take_metrics(4, "tag_loss") == {
        "loss": 0.8, "nll": 0.5, "tag_loss": 0.15, "tokens_per_s": 5.0, "tokens_per_s_per_device": 1.25, "padding": 0.4,
        "data_wait": 0.375, "skipped": 2, "seconds": 2.0,
    }  # fmt: skip
    state.skipped = 0
    assert state == TrainState(elapsed=12.0)
    empty = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "padding", "data_wait", "skipped", "seconds"), 0)
    assert state.take_metrics(1) == {"loss": None, "nll": None, **empty}
    assert state.take_metrics(1, "tag_loss")["tag_loss"] is None
    state.count_update(2.0, 1.0, 0.5, 1)
    state.count_seconds(1e-10)  # a clock that is too coarse gives no rate beyond this
    assert state.take_metrics(1)["tokens_per_s"] == pytest.approx(1e9)
    state.count_update(4.0, 1.0, 0.5, 1)
    state.positions, state.padding = 1.0, 0.5
    assert (state.take_metrics(1)["loss"], state.positions, state.padding) == (4.0, 0, 0)


def test_the_best_validation_is_the_first_of_the_lowest():
    state = TrainState()
    for step, nll, best, since in (
        (1, math.nan, None, 1),
        (2, math.inf, None, 2),
        (3, 5.0, 3, 0),
        (4, 5.0, 3, 1),
        (5, 4.5, 5, 0),
    ):
        state.step = step
        state.count_validation(nll)
        assert (state.best_step if best else None, state.validations_since_best) == (best, since)
    assert (state.best_nll, state.best_step) == (4.5, 5)


@pytest.mark.parametrize(
    ("step", "patience", "since", "finished"),
    [
        (19, 0, 0, False), (20, 0, 0, True), (21, 0, 0, True), (5, 0, 0, False), (5, 0, 9, False), (5, 1, 0, False),
        (5, 1, 1, True), (5, 3, 2, False), (5, 3, 3, True), (5, 3, 4, True),
    ],
)  # fmt: skip
def test_when_a_run_is_finished(step, patience, since, finished):
    config = TrainConfig(data="x", max_steps=20, patience=patience)
    assert is_finished(config, step, since) is finished


def test_a_stopwatch_measures_from_lap_to_lap(monkeypatch):
    times = iter([10.0, 12.5, 12.75])
    monkeypatch.setattr("treenet.training.state.time.monotonic", lambda: next(times))
    watch = Stopwatch()
    assert [watch.lap(), watch.lap()] == [2.5, 0.25]


# One rank.


def test_one_rank_needs_no_others():
    assert [Ranks(rank, 3, CPU).leads for rank in range(3)] == [True, False, False]
    tensor = torch.tensor([1.0, 1 + 2**-12])
    assert RANK_0.sum(tensor) is tensor and RANK_0.from_leader("value") == "value" and RANK_0.gather("value") == ["value"]
    started = RANK_0.start_sum(tensor, torch.bfloat16)
    started.wait()
    assert started.tensor is started.rounded is tensor and tensor[1] > 1  # nothing was rounded
    with pytest.raises(FrozenInstanceError):
        started.work = None
    RANK_0.fail_together(None)
    with pytest.raises(TrainingFailed, match="^$"):
        RANK_0.fail_together("")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_is_its_peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    assert peak_memory(CPU) == pytest.approx(int(line.split()[1]) * 1024, rel=0.02)


def test_the_flight_recorder_writes_one_file_a_rank(tmp_path):
    found = flight_recorder(tmp_path)
    assert set(map(str, found.values())) == {"2000", "1", str(tmp_path / "nccl-rank-")} and len(found) == 4


def test_the_older_name_of_the_allocator_is_set(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    told = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append, raising=False)
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=in_use: answer)
        ranks_of_run.expand_segments()
        assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True" and "PYTORCH_ALLOC_CONF" not in os.environ
    assert told == ["expandable_segments:True"]
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    ranks_of_run.expand_segments()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")


def test_processes_of_the_loader_are_the_cores_that_ranks_leave(monkeypatch):
    gpu = torch.device("meta")  # stands for any accelerator
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, ranks, workers in ((8, 1, 4), (5, 1, 4), (4, 1, 3), (2, 1, 1), (1, 1, 0), (8, 3, 1), (2, 4, 0), (6, 2, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: range(cores), raising=False)
        assert count_workers(None, Ranks(0, ranks, gpu)) == workers
        assert (count_workers(None, Ranks(0, ranks, CPU)), count_workers(0, Ranks(0, ranks, gpu))) == (0, 0)
    assert MOST_WORKERS == 4
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, workers in ((None, 0), (1, 0), (4, 3)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert count_workers(None, Ranks(0, 1, gpu)) == workers
    with pytest.raises(FrozenInstanceError):
        OpenTraining(None, 0, 1, "cpu").rank = 1


class Leaves(PretrainedLeaves):
    """A pretrained encoder of one layer, which draws from PyTorch's generator."""

    def __init__(self, trained: bool):
        nn.Module.__init__(self)
        self.layer, self.trained = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5)), trained

    @property
    def is_trained(self) -> bool:
        return self.trained

    def layers(self) -> list[nn.Module]:
        return [self.layer]


@pytest.mark.parametrize("trained", [True, False])
def test_layers_of_a_pretrained_encoder_are_computed_again_with_their_dropout(trained):
    leaves, kept = Leaves(trained), []
    ranks_of_run.recompute_layers(nn.Sequential(nn.Linear(2, 2), leaves), DropoutKeys(), draws_numbers=False)
    x = torch.ones(1, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        out = leaves.layer(x)
    torch.rand(5)  # something else draws before the backward pass
    [grad] = torch.autograd.grad(out.sum(), [leaves.layer[0].weight])
    torch.testing.assert_close(grad, (out != 0).t() * 2.0 * x)
    assert (len(kept) == 1) == trained  # the input alone


def test_the_deterministic_mode_ends_and_fills_no_memory(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    for wanted in (False, True):
        with ranks_of_run.deterministic_mode(wanted):
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert settings.fill_uninitialized_memory == (before[1] and not wanted)
        assert (torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory) == before == (False, True)


# The gradient.


def small_model() -> nn.Sequential:
    """Sizes of parameters: 6, 2, 10, 8."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(5, 2), nn.Linear(2, 4, bias=False))
    model[0].weight.requires_grad_()
    return model


def loss_of(model: nn.Sequential, rows: list[int] = (1, 3)) -> torch.Tensor:
    x = model[0](torch.tensor([[1.0, -2.0, 0.5]])) + model[1](torch.tensor(rows)).sum(0)
    return model[2](x).square().sum()


def test_gradients_are_views_of_one_tensor_in_the_order_of_parameters():
    model = small_model()
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    model[2].weight.requires_grad_(False)
    flat = FlatGradient(model)
    assert flat.sizes == [6, 2, 10] and flat.flat.shape == (18,) and not flat.flat.any()
    loss_of(model).backward()
    torch.testing.assert_close(flat.flat, torch.cat([grad.flatten() for grad in expected[:3]]))
    assert flat.norm() == pytest.approx(math.sqrt(sum(grad.square().sum().item() for grad in expected[:3])))
    assert torch.equal(flat.part(0, 1), flat.flat[:6]) and torch.equal(flat.part(1, 3), flat.flat[6:18])
    assert flat.part(2, 2).numel() == 0 and flat.part(0, 3).data_ptr() == flat.flat.data_ptr()
    before = flat.flat.clone()
    flat.sum(RANK_0, None)
    flat.sum(RANK_0, torch.bfloat16)
    flat.finish_pass()
    assert torch.equal(flat.flat, before)
    flat.zero()
    assert not flat.flat.any() and all(p.grad.data_ptr() >= flat.flat.data_ptr() for p in list(model.parameters())[:3])


def test_tables_begin_the_tensor_if_asked():
    assert FlatGradient(small_model(), tables_first=True).sizes == [10, 6, 2, 8]
    assert FlatGradient(small_model(), tables_first=False).sizes == FlatGradient(small_model()).sizes == [6, 2, 10, 8]


def test_separate_gradients_of_a_pass_are_added_at_its_end():
    model = small_model()
    flat, expected = (
        FlatGradient(model),
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model), model.parameters())]),
    )
    for times in (1, 2):
        with flat.collecting():
            assert all(parameter.grad is None for parameter in model.parameters())
            loss_of(model).backward()
        torch.testing.assert_close(flat.flat, times * expected)
    with flat.collecting():
        model[2](torch.ones(1, 2)).sum().backward()  # the others have no gradient
    torch.testing.assert_close(flat.flat[-8:], 2 * expected[-8:] + 1)
    torch.testing.assert_close(flat.flat[:-8], 2 * expected[:-8])
    before = flat.flat.clone()
    with flat.collecting():
        pass  # nothing has a gradient
    with pytest.raises(KeyError), flat.collecting():
        loss_of(model).backward()
        raise KeyError
    assert torch.equal(flat.flat, before)
    loss_of(model).backward()  # the views are back
    torch.testing.assert_close(flat.flat, before + expected)


def test_embeddings_add_the_rows_that_were_read():
    model = small_model()
    flat = FlatGradient(model)
    loss_of(model).backward()
    expected = flat.flat.clone()
    add_gradients_by_row(model)
    table = model[1].weight
    for times in (2, 3):
        loss_of(model).backward()
        torch.testing.assert_close(flat.flat, times * expected)
    assert torch.autograd.grad(loss_of(model), table)[0].is_sparse


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 20))
def test_buckets_are_filled_from_the_end_up_to_the_limit(sizes, limit):
    expected, last = [], len(sizes)
    while last:
        first = last - 1
        while first and sum(sizes[first - 1 : last]) <= limit:
            first -= 1
        expected.append((first, last))
        last = first
    assert cut_buckets(sizes, limit) == expected
    assert cut_buckets([5, 3, 4, 9, 1, 1], 8) == [(4, 6), (3, 4), (1, 3), (0, 1)]


def overlapped(monkeypatch, limit: int = 10) -> tuple[nn.Sequential, FlatGradient, OverlappedSums, list[int]]:
    """Sums in buckets of up to `limit` numbers, and the first number of each part that is sent."""
    sent = []

    class Sender(Ranks):
        def start_sum(self, tensor, dtype):
            sent.append(tensor.storage_offset())
            assert dtype == torch.float32
            return super().start_sum(tensor, dtype)

    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 4 * limit + 3)
    model = small_model()
    flat = FlatGradient(model)
    return model, flat, OverlappedSums(flat, Sender(0, 1, CPU), None), sent


@pytest.mark.parametrize(("limit", "parts"), [(10, [18, 8, 0]), (9, [18, 8, 0]), (12, [18, 6, 0]), (18, [8, 0]), (26, [0])])
def test_parts_are_sent_in_the_last_pass_alone_each_once_and_in_order(monkeypatch, limit, parts):
    model, flat, sums, sent = overlapped(monkeypatch, limit)
    for _ in range(2):
        sums.begin()
        flat.zero()
        with flat.collecting():
            loss_of(model).backward()
        assert not sent and flat.flat.any()
        once = flat.flat.clone()
        sums.watch()
        with flat.collecting():
            loss_of(model).backward()
        assert sent == parts
        torch.testing.assert_close(flat.flat, 2 * once)
        sums.finish()
        assert sent == parts
        with flat.collecting():
            loss_of(model).backward()  # as for another update
        assert sent == parts
        sent.clear()


def test_a_rank_without_gradients_sends_all_parts_at_the_end(monkeypatch):
    model, flat, sums, sent = overlapped(monkeypatch)
    sums.begin()
    sums.finish()
    assert sent == [18, 8, 0]
    sums.watch()
    with flat.collecting():
        model[2](torch.ones(1, 2)).sum().backward()  # the last bucket alone is complete
    assert sent == [18, 8, 0, 18]
    with pytest.raises(MustRepeat):
        sums.begin()
    sums.finish()
    assert sent == [18, 8, 0] * 2
    sums.watch()
    sums.begin()  # memory ran out before a bucket was complete
    with flat.collecting():
        loss_of(model).backward()
    assert sent == [18, 8, 0] * 2


def test_buckets_are_as_large_as_those_of_pytorch():
    assert BUCKET_BYTES == 25 * 1024 * 1024


# Micro-batches.


@pytest.fixture(scope="module")
def source(data) -> ExampleSource:
    return ExampleSource(data / "encoded", "train")


def cut_by(source, data, *options: str, rank: int = 0, world_size: int = 1, in_step: bool = False) -> MicroBatches:
    return MicroBatches(source, make_config(data, *options).batch, rank, world_size, in_step=in_step)


def sizes_of(source: ExampleSource) -> dict[str, np.ndarray]:
    """The leaves, nodes, and target pieces with EOS of every row."""
    sizes = {name: np.asarray(source.lengths[name]).astype(int) for name in ("leaves", "nodes", "tgt_pieces")}
    return sizes | {"tgt_pieces": sizes["tgt_pieces"] + 1}


def by_cost(source: ExampleSource) -> np.ndarray:
    return np.argsort(np.maximum(sizes_of(source)["leaves"], sizes_of(source)["tgt_pieces"]), kind="stable")


def padded(source: ExampleSource, rows: np.ndarray) -> int:
    sizes = sizes_of(source)
    return len(rows) * max(sizes["leaves"][rows].max(), sizes["tgt_pieces"][rows].max())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_cuts_its_share_where_the_next_row_would_not_fit(data, source, ranks):
    rows = by_cost(source)[:20]
    for rank, limit in itertools.product(range(ranks), (None, 1, 11, 40)):
        own, cuts = rows[rank::ranks], []
        for row in own:
            if cuts and (limit is None or padded(source, np.array([*cuts[-1], row])) <= limit):
                cuts[-1].append(row)
            else:
                cuts.append([row])
        found = cut_by(source, data, f"batch.tokens_per_device={limit or 'null'}", rank=rank, world_size=ranks).rank_batch(rows)
        assert [cut.tolist() for cut in found.cuts] == cuts and found.rows.tolist() == own.tolist() and found.limit == limit
        assert [batch.example_ids.tolist() for batch in found.batches] == [
            source.lengths["example_id"][cut].tolist() for cut in cuts
        ]
        assert found.global_tokens == sizes_of(source)["tgt_pieces"][rows].sum() and found.epoch == 0
        positions = padding = 0
        for cut in cuts:
            for size in sizes_of(source).values():
                positions += len(cut) * int(size[cut].max())
                padding += len(cut) * int(size[cut].max()) - int(size[cut].sum())
        assert (found.positions, found.padding) == (positions, padding)


def test_ranks_in_step_have_equally_many_micro_batches(data, source):
    """Those that do not count are of the first row; nothing of them is in the sums of positions."""
    rows = by_cost(source)[[0, 59, 1, 58, 57]]
    found = [cut_by(source, data, "batch.tokens_per_device=1", rank=rank, world_size=2, in_step=True) for rank in (0, 1)]
    first, second = (one.rank_batch(rows, 3) for one in found)
    assert (len(first.cuts), len(second.cuts)) == (3, 2) and (first.epoch, second.epoch) == (3, 3)
    assert (len(first.batches), len(second.batches)) == (3, 3)
    assert second.batches[2].example_ids.tolist() == source.lengths["example_id"][rows[:1]].tolist()
    alone = cut_by(source, data, "batch.tokens_per_device=1", rank=1, world_size=2).rank_batch(rows)
    assert (second.positions, second.padding) == (alone.positions, alone.padding) and len(alone.batches) == 2
    assert len(cut_by(source, data, in_step=True).rank_batch(rows).batches) == 1
    computed, paced = [], []
    for keep_pace in (None, lambda batch: paced.append(batch) or torch.ones(())):
        total = found[1].add_up(second, lambda batch: computed.append(batch) or torch.tensor(2.0), keep_pace=keep_pace)
        assert total == 4
    assert list(map(id, computed)) == [id(batch) for batch in (*second.batches, *second.batches[:2])]
    assert list(map(id, paced)) == [id(second.batches[2])]


class Memory:
    """Computes the number of examples, if there are not too many at once, and records what was called."""

    def __init__(self, most: int):
        self.most, self.calls = most, []

    def compute(self, batch) -> torch.Tensor:
        count = len(batch.example_ids)
        self.calls.append(count)
        if count > self.most:
            raise torch.OutOfMemoryError
        return torch.tensor(float(count))

    def add_up(self, micro_batches: MicroBatches, rank_batch: RankBatch) -> torch.Tensor | float:
        return micro_batches.add_up(
            rank_batch, self.compute, lambda: self.calls.append("start"), lambda: self.calls.append("last")
        )


def test_a_batch_is_computed_again_in_halves_of_what_did_not_fit(data, source, capsys):
    rows = np.repeat(by_cost(source)[-1:], 12)
    width = padded(source, rows[:1])
    micro_batches = cut_by(source, data)
    rank_batch, memory = micro_batches.rank_batch(rows, 2), Memory(3)
    assert memory.add_up(micro_batches, rank_batch) == 12
    assert memory.calls == ["start", "last", 12, "start", 6, "start", 3, 3, 3, "last", 3]
    assert micro_batches.limit == 3 * width
    said = capsys.readouterr().err
    assert f"12 examples at once did not fit into the memory of rank 0, which continues with at most {6 * width} padded" in said
    memory.calls.clear()
    assert memory.add_up(micro_batches, micro_batches.rank_batch(rows[:3])) == 3 and memory.calls == ["start", "last", 3]
    memory.calls.clear()
    assert memory.add_up(micro_batches, rank_batch) == 12 and memory.calls == ["start", 3, 3, 3, "last", 3]  # cut before
    assert memory.add_up(micro_batches, micro_batches.rank_batch(rows[:0])) == 0


def test_an_odd_number_of_examples_is_halved_and_one_alone_is_told(data, source):
    rows = np.repeat(by_cost(source)[-1:], 3)
    width = padded(source, rows[:1])
    micro_batches = cut_by(source, data)
    memory = Memory(1)
    assert memory.add_up(micro_batches, micro_batches.rank_batch(rows)) == 3
    assert micro_batches.limit == 3 * width // 2 and memory.calls == ["start", "last", 3, "start", 1, 1, "last", 1]
    micro_batches = cut_by(source, data)
    assert Memory(3).add_up(micro_batches, micro_batches.rank_batch(by_cost(source)[[0, 30, 58, 59]])) == 4
    assert micro_batches.limit == 4 * width // 2  # the widest one decides
    line = int(source.lengths["example_id"][rows[0]]) + 1
    with pytest.raises(UserError, match=rf"^line {line} of train \(\d+ leaves, \d+ nodes, \d+ target pieces\) does not fit"):
        Memory(0).add_up(micro_batches, micro_batches.rank_batch(rows))
    in_step = cut_by(source, data, world_size=2, in_step=True)
    with pytest.raises(torch.OutOfMemoryError):  # the other rank waits for this one
        Memory(0).add_up(in_step, in_step.rank_batch(rows))


# Seeds.


def test_seeds_follow_from_the_run_and_the_update():
    """They are written down, because a run continues to the last bit."""
    for r_drop, passes in ((0.0, [2279815838]), (0.5, [2279815838, 826849902])):
        seeds = StepSeeds.of(TrainConfig(data="x", seed=3, optimizer={"r_drop": r_drop}), 5)
        assert (seeds.generator, seeds.passes) == (3746004709, passes)
    with pytest.raises(FrozenInstanceError):
        seeds.generator = 1
