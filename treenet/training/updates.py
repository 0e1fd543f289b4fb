"""Updates in flight: an accelerator computes one update while the host reads and counts the one before."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from treenet.training.micro_batches import MicroBatches, RankBatch
from treenet.training.ranks import TrainingFailed
from treenet.training.results import PendingResult, StepResult
from treenet.training.state import TrainState
from treenet.training.step import TrainStep


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

    def start(
        self, rank_batch: RankBatch, *, waited: float = 0.0, wants_stop: bool = False, failure: str | None = None
    ) -> StepResult | None:
        """Start one update. Returns the result of the update that was last counted, if there is one."""
        facts = {"waited": waited, "wants_stop": wants_stop, "failure": failure}
        start = partial(self._train_step.update, rank_batch, self._micro_batches, self.state.step, **facts)
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
