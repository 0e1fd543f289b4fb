"""The batch of a rank, a part of the global batch, cut into micro-batches that fit into its memory, and the inputs of each.

The host makes all inputs of a forward pass before it sends anything. Shapes: B batch, M targets that count in the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treenet.config import BatchConfig, TrainConfig
from treenet.data.batch import TreeBatch, cut_batches
from treenet.data.examples import Examples
from treenet.data.packing import send_packed
from treenet.data.windows import example_costs
from treenet.layers.core import keys_of
from treenet.tasks.base import Task
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.shards.rows import hash_ids


@dataclass
class StepInputs:
    """A batch with its targets, and the random seeds drawn for it."""

    batch: TreeBatch
    dropout_keys: tuple[Tensor, ...]  # [B] int32 for every pass
    counted: Tensor | None  # [M] int64, the flat places of targets that count; None if they are looked up, or if all count

    @classmethod
    def build(cls, task: Task, batch: TreeBatch, seeds: Sequence[int] | None, device: torch.device) -> "StepInputs":
        """Build the inputs of a batch on the host, for a device.

        Each seed is one pass; without seeds it is a validation, without dropout.

        With a mask of targets, a GPU would wait for the number of those that count. So accelerators get their places.
        """
        batch = task.choose_targets(batch, seeds[0] if seeds else None)
        keys = tuple(keys_of(hash_ids(batch.example_ids.numpy() + (seed << 31))) for seed in seeds or ())
        return cls(batch, keys, None if device.type == "cpu" else task.counted_targets(batch))

    def to(self, device: torch.device) -> "StepInputs":
        """Return the inputs on `device`. An accelerator gets them in one copy, and the host does not wait for it."""
        return self if self.batch.leaf_pieces.device.type == device.type else send_packed(self, device)


@dataclass(frozen=True)
class StepSeeds:
    """The seeds of an update. They follow from (seed, step)."""

    generator: int  # for PyTorch's generator
    passes: list[int]  # for the keys of dropout in each forward pass; the first is also for the targets

    @classmethod
    def of(cls, config: TrainConfig, step: int) -> "StepSeeds":
        first, *others = np.random.SeedSequence([config.seed, step]).generate_state(3, np.uint32).tolist()
        return cls(first, others if config.optimizer.r_drop else others[:1])


@dataclass(frozen=True)
class RankBatch:
    """The part of a global batch that one rank computes. If there are more ranks than examples, some ranks have an empty one."""

    cuts: list[np.ndarray]  # rows of each micro-batch
    # The micro-batches; on an accelerator with all that its update reads. Those after `cuts` do not count.
    batches: Sequence[Any]  # TreeBatch or StepInputs
    rows: np.ndarray  # of all micro-batches
    limit: int | None  # most padded tokens of a micro-batch, when they were cut
    global_tokens: int  # target pieces with EOS of the global batch
    positions: int  # of source and target in all micro-batches
    padding: int  # number of padding positions
    epoch: int  # sampled examples differ between epochs


class MicroBatches:
    """Cuts this rank's batches, rows `[rank::world_size]` of the global ones from `source`, which is of `split`.

    `limit` is the most padded tokens of a micro-batch, in the units of batch.max_tokens. It shrinks if memory runs out. With
    `in_step`, every rank has the same number of micro-batches, because sharded layers wait for all ranks. Then the limit stays
    the same.
    """

    def __init__(
        self, source: Examples, config: BatchConfig, rank: int, world_size: int, *, in_step: bool = False, split: str = "train"
    ):
        self.source, self.limit, self._split = source, config.tokens_per_device, split
        self._budget_counts = config.budget_counts
        self._rank, self._world_size, self._in_step = rank, world_size, in_step and world_size > 1

    def rank_batch(self, rows: np.ndarray, epoch: int = 0) -> RankBatch:
        """Return this rank's batch of the global batch `rows` of an epoch, which are in the order of the plan."""
        examples = self.source.in_epoch(epoch)
        own, tokens = rows[self._rank :: self._world_size], examples.target_tokens(rows)
        if not self._in_step:
            return self._build(own, tokens, examples, epoch)
        most = max(len(self._cut(rows[rank :: self._world_size], examples)) for rank in range(self._world_size))
        return self._build(own, tokens, examples, epoch, [rows[:1]] * (most - len(self._cut(own, examples))))

    def add_up(
        self,
        rank_batch: RankBatch,
        compute: Callable[[Any], Tensor],
        start: Callable[[], None] = lambda: None,
        before_last: Callable[[], None] = lambda: None,
        keep_pace: Callable[[Any], Tensor] | None = None,
    ) -> Tensor | float:
        """Return the sum of `compute` over the micro-batches of a rank's batch; 0 for an empty batch.

        `before_last` is called before the last of them. If memory runs out, `start` is called again, and the complete batch is
        computed again in smaller micro-batches. Micro-batches that do not count go to `keep_pace`, by default to `compute`, and
        are not in the sum. Raises UserError if a single example does not fit.
        """
        while True:
            if rank_batch.limit != self.limit:
                examples = self.source.in_epoch(rank_batch.epoch)
                rank_batch = self._build(rank_batch.rows, rank_batch.global_tokens, examples, rank_batch.epoch)
            start()
            too_large = None
            total: Tensor | float = 0.0
            for rows, batch in zip(rank_batch.cuts, rank_batch.batches, strict=False):
                if rows is rank_batch.cuts[-1]:
                    before_last()
                try:
                    total = total + compute(batch)
                except torch.OutOfMemoryError:
                    if self._in_step:  # the other ranks wait for this one
                        raise
                    too_large = rows
                    break
            if too_large is None:
                for batch in rank_batch.batches[len(rank_batch.cuts) :]:
                    (keep_pace or compute)(batch)
                return total
            # Here the error is gone, and so are the tensors of the frames that it went through.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._shrink(too_large, self.source.in_epoch(rank_batch.epoch))

    def _shrink(self, rows: np.ndarray, examples: Examples) -> None:
        """Lower the limit to half of the micro-batch that did not fit."""
        if len(rows) == 1:
            example, sizes = int(self.source.lengths["example_id"][rows[0]]), examples.sizes(rows)
            leaves, nodes, targets = (int(sizes[name][0]) for name in ("leaves", "nodes", "tgt_pieces"))
            limits = "lower batch.max_leaves and batch.max_target_pieces"
            remedy = limits if self._split == "train" else f"take it out of split {self._split}"  # all others are read whole
            raise UserError(
                f"example_id {example} of {self._split} ({leaves} leaves, {nodes} nodes, {targets} target pieces) does not fit "
                f"into the memory of a worker, even alone; {remedy}, or choose a smaller model"
            )
        self.limit = max(1, len(rows) * int(self._costs(rows, examples)[-1]) // 2)
        warn(
            f"warning: {len(rows)} examples at once did not fit into the memory of rank {self._rank}, which continues with at "
            f"most {self.limit} padded tokens at once; set batch.tokens_per_device={self.limit} to begin with this limit"
        )

    def _costs(self, rows: np.ndarray, examples: Examples) -> np.ndarray:
        """Return the width [b] of a micro-batch that ends in each of the rows."""
        return np.maximum.accumulate(example_costs(examples.sizes(rows), self._budget_counts))

    def _cut(self, rows: np.ndarray, examples: Examples) -> list[np.ndarray]:
        """Return the rows of each micro-batch of these rows."""
        if self.limit is None or not len(rows):
            return [rows] if len(rows) else []
        starts = cut_batches(self._costs(rows, examples), self.limit)[1:-1]
        return [cut for cut in np.split(rows, starts) if len(cut)]

    def _build(
        self,
        rows: np.ndarray,
        global_tokens: int,
        examples: Examples,
        epoch: int,
        stand_ins: Sequence[np.ndarray] = (),
    ) -> RankBatch:
        """Build the rank's batch of `rows`. Micro-batches of the rows `stand_ins` follow, and do not count."""
        cuts = self._cut(rows, examples)
        batches = [examples.batch(cut) for cut in cuts]
        masks = [mask for batch in batches for mask in batch.pad_masks()]
        positions, padding = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
        batches += [examples.batch(cut) for cut in stand_ins]
        return RankBatch(cuts, batches, rows, self.limit, global_tokens, positions, padding, epoch)
