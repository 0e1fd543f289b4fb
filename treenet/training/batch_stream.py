"""The batches of a rank. A thread or processes make them some updates ahead of the training, and send them to the device."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource, Prefetcher
from treenet.data.hashed_sampling import Corpora, read_corpora
from treenet.data.labelled import PairSource
from treenet.data.loader_processes import LoaderProcesses
from treenet.data.packing import Packed, Sender, pack
from treenet.data.plan import BatchPlan
from treenet.tasks.base import Task
from treenet.training.micro_batches import MicroBatches, RankBatch, StepInputs, StepSeeds
from treenet.training.ranks import Ranks
from treeproc.common.cache import CopiesAhead
from treeproc.shards.store import read_index

# One process makes batches of trees faster than a GPU computes them. More help if an update has many small batches.
MOST_WORKERS = 4


class TrainingData:
    """The training examples of a rank, and the plan of their batches."""

    def __init__(self, task: Task, rank: int, world_size: int, device: torch.device):
        self._task, self._device = task, device
        config, source = task.config, task.open("train", training=True, device=device)
        self.plan = plan_batches(config, source)
        self._source, self._ahead, self._copies = source, range(0), CopiesAhead()
        self.micro_batches = MicroBatches(source, config.batch, rank, world_size, in_step=config.shard_weights)

    def rank_batch(self, step: int) -> RankBatch:
        """Return the rank's batch of update `step`, counted from 0."""
        self._fetch_ahead(step)
        return self.micro_batches.rank_batch(self.plan.batch(step), self.plan.epoch(step))

    def _fetch_ahead(self, step: int) -> None:
        """Begin to copy the shards of the next window, where they are objects, when a window begins."""
        if (
            isinstance(self._source, ExampleSource)
            and self._source.shards is not None
            and (rows := self.plan.next_rows(step)) != self._ahead
        ):
            self._ahead = rows
            self._copies.begin((self._source.folder / record.name, record.sha256) for record in self._source.records(rows))

    def close(self) -> None:
        """Begin no more copies."""
        self._copies.close()

    def rank_batches(self, steps: range) -> Iterator[RankBatch]:
        """Return the rank's batches of these updates."""
        return map(self.rank_batch, steps)

    def prepared(self, step: int) -> RankBatch:
        """Return `rank_batch` on the host, with everything that an update on the device reads."""
        rank_batch, seeds = self.rank_batch(step), StepSeeds.of(self._task.config, step).passes
        inputs = [StepInputs.build(self._task, batch, seeds, self._device) for batch in rank_batch.batches]
        return replace(rank_batch, batches=inputs)

    def packed(self, steps: range) -> Iterator[Packed[RankBatch]]:
        """Return the `prepared` batches of these updates, each in one buffer. For CUDA, the buffer is pinned."""
        for step in steps:
            packed = pack(self.prepared(step))
            yield replace(packed, buffer=packed.buffer.pin_memory()) if self._device.type == "cuda" else packed


def plan_batches(config: TrainConfig, source: ExampleSource | PairSource) -> BatchPlan:
    """Return the plan of a run over its training examples."""
    fingerprint, corpora = read_index(config.data / "encoded")["text_fingerprint"], weighted_files(config, source)
    return BatchPlan.build(
        source.lengths, config.batch, text_fingerprint=fingerprint, seed=config.seed, shards=source.shards, corpora=corpora
    )


def weighted_files(config: TrainConfig, source: ExampleSource | PairSource) -> Corpora | None:
    """Return the files of train with their weights; None if the run gives none."""
    return read_corpora(config.data, config.batch.corpora, source.sentences)


@dataclass(frozen=True)
class OpenTraining:
    """Opens the training examples in a process of the loader, and returns the function that makes a batch."""

    task: Task
    rank: int
    world_size: int
    device: str  # its type

    def __call__(self) -> Callable[[int, int | None], RankBatch]:
        data = TrainingData(self.task, self.rank, self.world_size, torch.device(self.device))

        def make(step: int, limit: int | None) -> RankBatch:
            data.micro_batches.limit = limit
            return data.prepared(step)

        return make


class BatchStream:
    """A rank's batches of the updates `steps`, in order. `waited` is the time in seconds that the training waited for them.

    Each batch goes to an accelerator in one copy, during the computation of an earlier batch.
    """

    def __init__(self, task: Task, ranks: Ranks, data: TrainingData, steps: range):
        on_cpu, workers = ranks.device.type == "cpu", count_workers(task.config.loader_workers, ranks)
        self._data, self._sender = data, None if on_cpu else Sender(ranks.device)
        self._source: LoaderProcesses[RankBatch] | Prefetcher[Packed[RankBatch]] | Prefetcher[RankBatch]
        if workers:
            open_training = OpenTraining(task, ranks.rank, ranks.world_size, ranks.device.type)
            self._source = LoaderProcesses(
                open_training,
                steps,
                workers,
                options=lambda: {"limit": data.micro_batches.limit},
                pin_memory=ranks.device.type == "cuda",
            )
        else:
            self._source = Prefetcher(data.rank_batches(steps)) if on_cpu else Prefetcher(data.packed(steps))

    def __enter__(self) -> "BatchStream":
        self._source.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._source.__exit__(*exception)
        self._data.close()

    def __iter__(self) -> Iterator[RankBatch]:
        for item in self._source:
            if isinstance(item, Packed):
                yield self._sender.send(item) if self._sender else item.unpack()
            else:
                yield item

    @property
    def waited(self) -> float:
        return self._source.waited


def count_workers(asked: int | None, ranks: Ranks) -> int:
    """Return the number of loader processes: the number in the settings, else 0 for a CPU and some for an accelerator.

    The cores of a CPU compute the updates, so further processes would slow it down.
    """
    if asked is not None:
        return asked
    if ranks.device.type == "cpu":
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))  # ranks of this machine
    return min(MOST_WORKERS, max(0, len(os.sched_getaffinity(0)) // here - 1))
