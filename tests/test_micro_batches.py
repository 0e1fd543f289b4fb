"""Micro-batches of a rank: where they are cut, what is computed again if memory runs out, and the seeds of an update."""

import itertools
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from toyruns import make_config

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.training.micro_batches import MicroBatches, RankBatch, StepSeeds
from treeproc.common.settings import UserError


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
    example = source.lengths["example_id"][rows[0]]
    with pytest.raises(
        UserError, match=rf"^example_id {example} of train \(\d+ leaves, \d+ nodes, \d+ target pieces\) does not fit"
    ):
        Memory(0).add_up(micro_batches, micro_batches.rank_batch(rows))
    in_step = cut_by(source, data, world_size=2, in_step=True)
    with pytest.raises(torch.OutOfMemoryError):  # the other rank waits for this one
        Memory(0).add_up(in_step, in_step.rank_batch(rows))


def test_seeds_follow_from_the_run_and_the_update():
    """They are written down, because a run continues to the last bit."""
    for r_drop, passes in ((0.0, [2279815838]), (0.5, [2279815838, 826849902])):
        seeds = StepSeeds.of(TrainConfig(data="x", seed=3, optimizer={"r_drop": r_drop}), 5)
        assert (seeds.generator, seeds.passes) == (3746004709, passes)
    with pytest.raises(FrozenInstanceError):
        seeds.generator = 1
