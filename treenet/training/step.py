"""One update: gradients of micro-batches, their sum over the ranks, the optimiser, the moving average.

The gradient of an update is the sum over all target tokens of the global batch, divided by their number. So neither the number of
ranks nor the micro-batches change it.

Forward and backward passes run without communication. One sum of a flat gradient follows. So a rank may compute its batch in
another way, compute it twice, or have an empty one; the other ranks never wait for it without end. Sharded weights are the
exception: their passes communicate.

An accelerator computes one update while the host reads and counts the one before.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.packing import send
from treenet.layers.backend import computing_in, resolve_precision, set_up_gpu
from treenet.layers.core import share_dropout_keys
from treenet.models.compiling import Compiled, check_tools
from treenet.tasks.base import Task
from treenet.tasks.losses import LossSums
from treenet.training.gradients import FlatGradient, MustRepeat, OverlappedSums, add_gradients_by_row
from treenet.training.micro_batches import MicroBatches, RankBatch, StepInputs, StepSeeds
from treenet.training.optimizer import (
    LossScale,
    MovingAverage,
    build_optimizer,
    freeze_parameters,
    learning_rate,
    rate_factors,
    set_rate,
)
from treenet.training.ranks import Ranks, TrainingFailed, recompute_layers
from treenet.training.state import REPEATS, PendingResult, StepResult, TrainState, is_unsound
from treeproc.common.settings import UserError

if TYPE_CHECKING:
    from treenet.training.sharded import ShardedGradient


class TrainStep:
    """Model, optimiser and moving average of one rank, and the methods that change them. The task gives the losses."""

    def __init__(self, model: nn.Module, task: Task, ranks: Ranks):
        config = task.config
        self.task, self.config, self.ranks = task, config, ranks
        freeze_parameters(config, model)
        factors = rate_factors(config, model)
        self._sum_dtype = torch.bfloat16 if config.gradient_sums == "bf16" else None
        self.is_sharded = config.shard_weights and ranks.world_size > 1
        self._gradients: FlatGradient | ShardedGradient
        if self.is_sharded:
            from treenet.training import sharded  # its import in PyTorch takes two seconds

            sharded.shard_model(model, ranks, task.output, self._sum_dtype)
            self._gradients = sharded.ShardedGradient(model)
            self._sums = None
        else:
            self._gradients = FlatGradient(model.to(ranks.device), tables_first=self.overlaps)
            self._sums = OverlappedSums(self._gradients, ranks, self._sum_dtype) if self.overlaps else None
        self.model = model
        self.optimizer: Any = build_optimizer(model, config.optimizer, factors)
        self.average = MovingAverage(model, config.ema_decay) if config.ema_decay else None
        forward = getattr(model, task.output)
        if config.compile:
            check_tools(ranks.device)
        self._forward = Compiled(forward) if config.compile else forward
        self._held = torch.zeros((), device=ranks.device)  # 1 while later updates wait for an update that must be repeated
        if ranks.device.type == "cpu" and not (config.compile or self.is_sharded or task.ties_embeddings):
            add_gradients_by_row(model)
        self._dropout_keys = share_dropout_keys(model)
        if config.checkpoint_activations:
            recompute_layers(model, self._dropout_keys, draws_numbers=config.model.attention_dropout > 0)
        self.precision = resolve_precision(config.precision, ranks.device)
        set_up_gpu(self.precision, ranks.device)
        self.loss_scale = LossScale(ranks.device) if self.precision == "fp16" else None

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """Return the divisor of gradients, [] float32, or None for 1. It scales a norm above `clip_norm` down to `clip_norm`."""
        clip = self.config.optimizer.clip_norm
        clipped = (norm / clip).clamp(min=1.0) if clip else None
        if self.loss_scale is None:
            return clipped
        return self.loss_scale.scale if clipped is None else self.loss_scale.scale * clipped

    @property
    def defers(self) -> bool:
        """Whether the host reads a result only later than its update, and does not wait for the device before."""
        return self.ranks.device.type != "cpu"

    @property
    def overlaps(self) -> bool:
        """Whether ranks begin to add their gradients while they compute them."""
        return self.ranks.world_size > 1 and self.defers and not self.is_sharded

    def release(self) -> None:
        """Let updates change the weights again, after an update that had to be repeated."""
        self._held.zero_()

    def allocate_state(self) -> None:
        """Allocate the optimiser's state, if there is none, as it is before the first update."""
        one = torch.ones((), device=self.ranks.device)
        self.optimizer.found_inf, self.optimizer.grad_scale = one, None
        self.optimizer.step()

    def update(
        self,
        rank_batch: RankBatch,
        micro_batches: MicroBatches,
        step: int,
        *,
        wants_stop: bool = False,
        failure: str | None = None,
        waited: float = 0.0,
        again: bool = False,
    ) -> PendingResult:
        """Make update number `step`, counted from 0, and combine flags, failures and seconds of waiting of all ranks.

        On a CPU, the update is complete on return, and a failure on any rank raises TrainingFailed on all ranks. On an
        accelerator, the update has only started, and the host does not wait. The device itself skips an update that is not
        finite, or in which a rank has a failure. It also skips an update that must be repeated, and all later ones until
        `release`. `again` marks the repetition.
        """
        rate = learning_rate(self.config.optimizer, step + 1)
        set_rate(self.optimizer, rate)
        sums: Tensor | float = 0.0
        must_repeat, overlapped = False, None if again else self._sums
        try:
            sums = self.compute_gradient(rank_batch, micro_batches, step, overlapped)
        except MustRepeat:
            must_repeat = True
        except UserError as error:
            failure = str(error)
        if overlapped:
            overlapped.finish()
        facts = [wants_stop, failure is not None, must_repeat, rank_batch.positions, rank_batch.padding, waited]
        totals = send(torch.tensor([0.0, 0.0, 0.0, *facts], dtype=torch.float64), self.ranks.device)
        totals[:3] += sums
        self.ranks.sum(totals)
        if not overlapped:
            self._gradients.sum(self.ranks, self._sum_dtype)
        norm = self._gradients.norm()
        if self.loss_scale:
            norm = norm / self.loss_scale.scale
        totals = torch.cat([totals, norm.double().view(1)])
        pending = PendingResult(
            totals, self.ranks, update=step + 1, learning_rate=rate, target_tokens=rank_batch.global_tokens, failure=failure
        )
        if not self.defers:
            if pending.read().updated:
                self._apply(step + 1, norm)
        else:
            self._apply(step + 1, norm, skip=self._skip(totals))
        return pending

    def _skip(self, totals: Tensor) -> Tensor:
        """Return 1 if an update may not change the weights, else 0: [] float32 on the device."""
        skip = is_unsound(totals)
        if not self._sums:
            return skip
        self._held.add_(totals[REPEATS]).clamp_(max=1.0)
        return torch.maximum(skip, self._held)

    def _apply(self, updates: int, norm: Tensor, skip: Tensor | None = None) -> None:
        """Change weights and average, unless `skip` [] float32 is 1. The device decides that, not the host."""
        # The fused optimiser reads both by the names of PyTorch's own scaler.
        self.optimizer.found_inf = skip
        self.optimizer.grad_scale = self._divisor(norm)
        self.optimizer.step()
        if self.loss_scale and skip is not None:
            self.loss_scale.update(skip)
        if self.average:
            self.average.update(updates, skip)

    def compute_gradient(
        self, rank_batch: RankBatch, micro_batches: MicroBatches, step: int, sums: OverlappedSums | None = None
    ) -> Tensor | float:
        """Add this rank's part of the gradient to `.grad`. Returns its sums of loss, nll and auxiliary loss, [3].

        With `sums`, this rank sends parts of the gradient before it is complete. Raises MustRepeat if memory runs out after that.

        Dropout is keyed by (seed, step, example). Only dropout of attention weights draws from PyTorch's generator, which is
        seeded by (seed, step, rank). So a step that runs again repeats itself. With another number of ranks, or other
        micro-batches, it drops other attention weights.
        """
        seeds = StepSeeds.of(self.config, step)

        def start() -> None:
            if sums:
                sums.begin()
            self._gradients.zero()
            torch.manual_seed(seeds.generator * 2**16 + self.ranks.rank)

        def compute(batch: TreeBatch | StepInputs, counts: bool = True) -> Tensor:
            found = self._objective(batch, seeds.passes)
            loss = found.loss / rank_batch.global_tokens if counts else found.loss * 0
            with self._gradients.collecting() if self.defers or sums else nullcontext():
                (loss * self.loss_scale.scale if self.loss_scale else loss).backward()
            return found.totals()

        if not sums:
            return micro_batches.add_up(rank_batch, compute, start, keep_pace=partial(compute, counts=False))
        return micro_batches.add_up(rank_batch, compute, start, sums.watch)

    def finish_passes(self) -> None:
        """End passes without backward."""
        self._gradients.finish_pass()

    def validate(self, batch: TreeBatch) -> Tensor:
        """Return the sums of a batch for a validation, float64: loss, nll, the task's own counts, and the model's own loss."""
        inputs = self._inputs(batch, None)
        with self._autocast():
            output = self._output(inputs.batch)
            losses = self.task.sum_losses(self.model, inputs.batch, output, counted=inputs.counted)
            sums = [losses.loss, losses.nll, *self.task.count_right(inputs.batch, output)]
        if losses.auxiliary is not None:
            sums.append(losses.auxiliary)
        return torch.stack([value.double() for value in sums])

    def _objective(self, batch: TreeBatch | StepInputs, seeds: list[int]) -> LossSums:
        """Return the sums of the training loss. R-Drop makes a second pass, with dropout from the second seed."""
        inputs = self._inputs(batch, seeds)
        with self._autocast():
            first, second = [*(self._output(inputs.batch, keys) for keys in inputs.dropout_keys), None][:2]
            return self.task.sum_losses(self.model, inputs.batch, first, second, inputs.counted)

    def _inputs(self, batch: TreeBatch | StepInputs, seeds: Sequence[int] | None) -> StepInputs:
        inputs = batch if isinstance(batch, StepInputs) else StepInputs.build(self.task, batch, seeds, self.ranks.device)
        return inputs.to(self.ranks.device)

    def _output(self, batch: TreeBatch, dropout_keys: Tensor | None = None) -> Any:
        if dropout_keys is not None:
            self._dropout_keys.set(dropout_keys)
        return self._forward(batch)

    def _autocast(self) -> AbstractContextManager:
        return computing_in(self.precision, self.ranks.device)


@dataclass(frozen=True)
class _Started:
    """An update that was started, and the arguments to start it again."""

    pending: PendingResult
    start: Callable[..., PendingResult]


class Updates:
    """Starts updates, and counts them in `state` when their results are known: at once on a CPU, one update later elsewhere."""

    def __init__(self, train_step: TrainStep, micro_batches: MicroBatches, state: TrainState):
        self._train_step, self._micro_batches, self.state = train_step, micro_batches, state
        self._pending: _Started | None = None  # the update that was started but is not yet counted
        self._result: StepResult | None = None  # of the update that was last counted
        self.wants_stop = False  # whether a rank has asked for a stop

    def start(self, rank_batch: RankBatch, *, waited: float, wants_stop: bool, failure: str | None) -> StepResult | None:
        """Start one update. Returns the result of the update that was last counted, if there is one."""
        start = partial(
            self._train_step.update, rank_batch, self._micro_batches, self.state.step,
            waited=waited, wants_stop=wants_stop, failure=failure,
        )  # fmt: skip
        before, self._pending = self._pending, _Started(start(), start)
        self.state.step += 1
        if before is not None:
            self._count(before)
        if not self._train_step.defers:
            self.settle()
        return self._result

    def settle(self) -> StepResult | None:
        """Wait for the update that was started last, and count it. Then `state` is that of its step. Returns its result."""
        if self._pending is not None:
            started, self._pending = self._pending, None
            self._count(started)
        return self._result

    def _read(self, started: _Started) -> StepResult:
        """Read the result of an update.

        All ranks repeat an update that asks for it, and then the one that was skipped after it.
        """
        result = started.pending.read()
        if not result.must_repeat:
            return result
        self._train_step.release()
        result = started.start(again=True).read()
        if self._pending is not None:
            self._pending = replace(self._pending, pending=self._pending.start())
        return result

    def _count(self, started: _Started) -> None:
        """Count an update in `state`. Raises TrainingFailed if too many updates in a row were skipped."""
        config, state = self._train_step.config, self.state
        self._result = result = self._read(started)
        self.wants_stop |= result.wants_stop
        state.positions += result.positions
        state.padding += result.padding
        state.waited += result.waited
        if result.updated:
            state.count_update(result.loss_sum, result.nll_sum, result.auxiliary_sum, result.target_tokens)
        else:
            state.count_skipped()
        if state.skipped_in_row >= config.max_skipped_updates:
            raise TrainingFailed(
                f"loss or gradient was not finite in {config.max_skipped_updates} updates in a row, up to step {result.update}; "
                f"lower optimizer.learning_rate = {config.optimizer.learning_rate} or raise optimizer.warmup_steps, and choose "
                "another --out"
            )
