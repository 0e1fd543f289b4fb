"""Results and counters of updates, one rank without others, and its modes."""

import math
import os
import resource
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from treenet.config import TrainConfig
from treenet.layers.core import DropoutKeys
from treenet.models.pretrained import PretrainedLeaves
from treenet.training import ranks as ranks_of_run
from treenet.training.batch_stream import MOST_WORKERS, OpenTraining, count_workers
from treenet.training.ranks import Ranks, TrainingFailed, begin_peak, flight_recorder, peak_memory
from treenet.training.state import PendingResult, Stopwatch, TrainState, is_finished, is_unsound

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


def test_two_ranks_ask_each_other(monkeypatch):
    """Processes that train together, in slow tests, show what they get."""
    asked = []
    for name in ("all_reduce", "broadcast_object_list", "all_gather_object"):
        monkeypatch.setattr(ranks_of_run.dist, name, lambda *values, name=name, **options: asked.append((name, options)))
    ranks = Ranks(1, 2, CPU)
    ranks.sum(torch.ones(1))
    assert ranks.start_sum(torch.ones(1), torch.bfloat16).rounded.dtype == torch.bfloat16
    ranks.from_leader(0)
    assert len(ranks.gather(0)) == 2
    assert asked == [
        ("all_reduce", {}),
        ("all_reduce", {"async_op": True}),
        ("broadcast_object_list", {"src": 0, "device": CPU}),
        ("all_gather_object", {}),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_is_its_peak(monkeypatch):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    assert peak_memory(CPU) == pytest.approx(int(line.split()[1]) * 1024, rel=0.02)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))  # a system without these files
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=PermissionError))
    begin_peak(CPU)
    assert peak_memory(CPU) == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: [range(cores)][process])
        assert count_workers(None, Ranks(0, ranks, gpu)) == workers
        assert (count_workers(None, Ranks(0, ranks, CPU)), count_workers(0, Ranks(0, ranks, gpu))) == (0, 0)
    assert MOST_WORKERS == 4
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
