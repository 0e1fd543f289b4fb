"""One update: gradients of micro-batches, their sum over the ranks, the optimiser, the moving average.

The gradient of an update is the sum over all target tokens of the global batch divided by their number, so neither the
number of ranks nor the micro-batches change it. Forward and backward passes run without communication, and one sum of a
flat gradient follows: a rank may compute its batch in its own way, twice, or have none, and no other rank waits for ever.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.plan import hash_ids
from treenet.layers.dropout import share_dropout_keys
from treenet.tasks.base import Task
from treenet.tasks.losses import LossSums
from treenet.training.ema import MovingAverage
from treenet.training.micro_batches import MicroBatches, RankBatch
from treenet.training.optimizer import build_optimizer, learning_rate
from treenet.training.ranks import Ranks
from treeproc.common.settings import UserError


@dataclass(frozen=True)
class StepResult:
    """Sums over all ranks. Without `updated`, loss or gradient was not finite and the weights are as before."""

    updated: bool
    loss_sum: float
    nll_sum: float
    auxiliary_sum: float  # the model's own loss, a part of the loss
    grad_norm: float
    learning_rate: float
    positions: float
    padding: float
    waited: float
    wants_stop: bool


class TrainStep:
    """Model, optimiser and moving average of one rank, and what changes them; the losses are those of the task."""

    def __init__(self, model: nn.Module, task: Task, ranks: Ranks):
        config = task.config
        self.model, self.task, self.config, self.ranks = model, task, config, ranks
        self.optimizer = build_optimizer(model, config.optimizer)
        self.average = MovingAverage(model, config.ema_decay) if config.ema_decay else None
        forward = getattr(model, task.output)
        self._forward = torch.compile(forward, dynamic=True) if config.compile else forward
        self._gradient = _flat_gradient(model)
        if ranks.device.type == "cpu" and not config.compile and not task.ties_embeddings:
            _add_gradients_by_row(model)
        self._dropout_keys = share_dropout_keys(model)

    def update(
        self,
        rank_batch: RankBatch,
        micro_batches: MicroBatches,
        step: int,
        *,
        wants_stop: bool = False,
        failure: str | None = None,
        waited: float = 0.0,
    ) -> StepResult:
        """Update number `step`, counted from 0. Flags, failures and seconds of waiting of all ranks are put together.

        Raises TrainingFailed on all ranks when one has a failure.
        """
        rate = learning_rate(self.config.optimizer, step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums: Tensor | float = 0.0
        try:
            sums = self.compute_gradient(rank_batch, micro_batches, step)
        except UserError as error:
            failure = str(error)
        facts = [wants_stop, failure is not None, rank_batch.positions, rank_batch.padding, waited]
        totals = torch.tensor([0.0, 0.0, 0.0, *facts], dtype=torch.float64, device=self.ranks.device)
        totals[:3] += sums
        self.ranks.sum(totals)
        self.ranks.sum(self._gradient)
        norm = torch.linalg.vector_norm(self._gradient)
        totals = torch.cat([totals, norm.double().view(1)])
        loss_sum, nll_sum, auxiliary_sum, stops, failures, positions, padding, waited, norm = totals.tolist()
        if failures:
            self.ranks.fail_together(failure)
        updated = math.isfinite(loss_sum) and math.isfinite(norm)
        if updated:
            self.optimizer.step()
            if self.average:
                self.average.update(step + 1)
        sums = loss_sum, nll_sum, auxiliary_sum
        return StepResult(updated, *sums, norm, rate, positions, padding, waited, stops > 0)

    def compute_gradient(self, rank_batch: RankBatch, micro_batches: MicroBatches, step: int) -> Tensor | float:
        """This rank's part of the gradient, into `.grad`. Returns its sums of loss, nll and auxiliary loss, [3].

        Dropout is keyed by (seed, step, example). What draws from PyTorch's generator, as dropout of attention weights and
        all dropout on GPUs, is seeded by (seed, step, rank): a step that runs again repeats itself, but with another number
        of ranks, or in other micro-batches, it drops other units.
        """
        seeds = np.random.SeedSequence([self.config.seed, step]).generate_state(3, np.uint32).tolist()

        def start() -> None:
            self._gradient.zero_()
            torch.manual_seed(seeds[0] * 2**16 + self.ranks.rank)

        def compute(batch: TreeBatch) -> Tensor:
            sums = self._objective(batch, seeds[1:])
            (sums.loss / rank_batch.global_tokens).backward()
            return sums.totals()

        return micro_batches.add_up(rank_batch, compute, start)

    def validate(self, batch: TreeBatch) -> Tensor:
        """The sums of a batch for a validation, float64: loss, nll, the task's own counts, and the model's own loss."""
        batch = self.task.choose_targets(self.model, batch, None).to(self.ranks.device)
        with self._autocast():
            output = self._output(batch)
            losses = self.task.sum_losses(self.model, batch, output)
            sums = [losses.loss, losses.nll, *self.task.count_right(batch, output)]
        if losses.auxiliary is not None:
            sums.append(losses.auxiliary)
        return torch.stack([value.double() for value in sums])

    def _objective(self, batch: TreeBatch, seeds: list[int]) -> LossSums:
        """Sums of the training loss; R-Drop takes a second pass, with dropout from the second seed."""
        keys = [hash_ids(batch.example_ids.numpy() + (seed << 31)) for seed in seeds]
        batch = self.task.choose_targets(self.model, batch, seeds[0]).to(self.ranks.device)
        passes = keys if self.config.optimizer.r_drop else keys[:1]
        with self._autocast():
            return self.task.sum_losses(self.model, batch, *(self._output(batch, key) for key in passes))

    def _output(self, batch: TreeBatch, dropout_keys: np.ndarray | None = None) -> Any:
        if dropout_keys is not None:
            self._dropout_keys.set(dropout_keys)
        return self._forward(batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")


def _flat_gradient(model: nn.Module) -> Tensor:
    """One tensor that the gradients of all parameters are views into: one sum over the ranks, no copies."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _add_gradients_by_row(model: nn.Module) -> None:
    """Embeddings add the rows that were read to the flat gradient, not a table of zeros beside them, where nothing else has a
    gradient for the table. On CPUs: GPUs would sort the rows and wait for that."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
