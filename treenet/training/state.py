"""The training state: counters that a run keeps beside weights and optimiser, and the metrics that they give."""

import math
import time
from dataclasses import dataclass

from treenet.config import TrainConfig


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
