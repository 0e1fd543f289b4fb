"""The result of an update, and the training state: counters that a run keeps beside weights and optimiser.

A result has sums over all ranks. A CPU reads it at once; an accelerator reads it later than it is made.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treenet.config import TrainConfig
from treenet.training.ranks import Ranks

# Places in the totals of an update, a vector float64. The first three are the sums of `LossSums.totals`.
LOSS, NLL, AUXILIARY, STOPS, FAILURES, REPEATS, POSITIONS, PADDING, WAITED, NORM = range(10)


@dataclass(frozen=True)
class StepResult:
    """Sums over all ranks. If `updated` is False, loss or gradient was not finite and the weights have not changed."""

    updated: bool
    must_repeat: bool  # memory ran out on a rank after others had begun to add: nothing was changed
    loss_sum: float
    nll_sum: float
    auxiliary_sum: float  # the model's own loss, a part of the loss
    grad_norm: float
    positions: float
    padding: float
    waited: float
    wants_stop: bool
    learning_rate: float
    target_tokens: int  # of the global batch
    update: int  # its number, counted from 1


def is_unsound(totals: Tensor) -> Tensor:
    """Return 1 if an update may not change the weights, else 0: [] float32 on the device of the totals."""
    return (~torch.isfinite(totals[LOSS] + totals[NORM]) | totals[FAILURES : REPEATS + 1].any()).float()


class PendingResult:
    """The totals of an update that has been started, on their way to the host.

    On CUDA, a copy to pinned memory follows the update on its stream. The reader waits for that copy, not for later updates.
    """

    def __init__(
        self,
        totals: Tensor,
        ranks: Ranks,
        *,
        update: int,
        learning_rate: float,
        target_tokens: int,
        failure: str | None,  # of this rank
    ):
        self._known: dict[str, Any] = {"update": update, "learning_rate": learning_rate, "target_tokens": target_tokens}
        self._failure, self._ranks, self._copied = failure, ranks, None
        if totals.device.type == "cuda":
            totals = torch.empty_like(totals, device="cpu", pin_memory=True).copy_(totals, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._totals = totals

    def read(self) -> StepResult:
        """Return the result. Raises TrainingFailed on all ranks if one of them had a failure."""
        if self._copied is not None:
            self._copied.synchronize()
        totals = self._totals.tolist()
        if totals[FAILURES]:
            self._ranks.fail_together(self._failure)
        return StepResult(
            updated=math.isfinite(totals[LOSS]) and math.isfinite(totals[NORM]) and not totals[REPEATS],
            must_repeat=totals[REPEATS] > 0,
            loss_sum=totals[LOSS],
            nll_sum=totals[NLL],
            auxiliary_sum=totals[AUXILIARY],
            grad_norm=totals[NORM],
            positions=totals[POSITIONS],
            padding=totals[PADDING],
            waited=totals[WAITED],
            wants_stop=totals[STOPS] > 0,
            **self._known,
        )


@dataclass
class TrainState:
    """Plain numbers, kept in every checkpoint. The sums are over all ranks, since the last metric line."""

    step: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    elapsed: float = 0.0  # seconds, with validations and checkpoints
    best_nll: float | None = None  # of the validations so far; the lowest criterion, where that is not the nll
    best_step: int = 0
    validations_since_best: int = 0
    loss_sum: float = 0.0
    nll_sum: float = 0.0
    auxiliary_sum: float = 0.0
    tokens: int = 0
    positions: float = 0.0
    padding: float = 0.0
    waited: float = 0.0  # seconds that ranks waited for data
    seconds: float = 0.0  # of training, without validations and checkpoints
    loss_scale: tuple[float, int] | None = None  # of `LossScale`, for fp16

    def count_seconds(self, seconds: float) -> None:
        """Add time of training, without validations and checkpoints."""
        self.seconds += seconds
        self.elapsed += seconds

    def count_update(self, loss_sum: float, nll_sum: float, auxiliary_sum: float, tokens: int) -> None:
        self.loss_sum += loss_sum
        self.nll_sum += nll_sum
        self.auxiliary_sum += auxiliary_sum
        self.tokens += tokens
        self.skipped_in_row = 0

    def count_skipped(self) -> None:
        self.skipped += 1
        self.skipped_in_row += 1

    def count_validation(self, nll: float) -> None:
        """Count a validation. One that is not finite never counts as better."""
        if nll < (math.inf if self.best_nll is None else self.best_nll):
            self.best_nll, self.best_step, self.validations_since_best = nll, self.step, 0
        else:
            self.validations_since_best += 1

    def take_metrics(self, world_size: int, auxiliary_loss: str = "") -> dict[str, float | None]:
        """Return means since the last line, with the model's own loss under its name. Then set the sums to 0."""
        seconds = max(self.seconds, 1e-9)
        rate = self.tokens / seconds
        metrics = {
            "loss": self.loss_sum / self.tokens if self.tokens else None,
            "nll": self.nll_sum / self.tokens if self.tokens else None,
            **({auxiliary_loss: self.auxiliary_sum / self.tokens if self.tokens else None} if auxiliary_loss else {}),
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / world_size,
            "padding": self.padding / self.positions if self.positions else 0.0,
            "data_wait": self.waited / (seconds * world_size),
            "skipped": self.skipped,
            "seconds": self.seconds,
        }
        self.loss_sum = self.nll_sum = self.auxiliary_sum = 0.0
        self.positions = self.padding = self.waited = self.seconds = 0.0
        self.tokens = 0
        return metrics


class Stopwatch:
    """Measures time from its creation."""

    def __init__(self) -> None:
        self._last_lap = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self._last_lap = self._last_lap, time.monotonic()
        return self._last_lap - before


def is_finished(config: TrainConfig, step: int, validations_since_best: int) -> bool:
    """Return whether a run at this point is finished: it made all steps, or validation did not improve for too long."""
    return step >= config.max_steps or 0 < config.patience <= validations_since_best
