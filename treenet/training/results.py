"""The result of an update: sums over all ranks. A CPU reads it at once; an accelerator reads it later than it is made."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
        self._known = {"update": update, "learning_rate": learning_rate, "target_tokens": target_tokens}
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
