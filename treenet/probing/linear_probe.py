"""The probe: multinomial logistic regression on frozen states.

Shapes: m examples, D width of the states, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """States and classes of a split. A probe never predicts the class UNSEEN (-1)."""

    x: Tensor  # [m, D]
    y: Tensor  # [m] int64


@dataclass(frozen=True)
class ProbeScore:
    """Accuracies of the probe with the best penalty on valid."""

    test: float
    valid: float
    train: float
    l2: float


def fit(train: Examples, l2: float, max_iterations: int, start: Tensor) -> Tensor:
    """Return weights [D + 1, C], biases last, that minimise mean cross-entropy + l2 / 2 |weights|^2. Biases have no penalty.

    It runs L-BFGS over all examples at once, from `start`. The problem is convex, and there is no learning rate to choose.
    """
    table = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [table], max_iter=max_iterations, tolerance_grad=1e-5, tolerance_change=1e-6, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(scores(table, train.x), train.y) + 0.5 * l2 * table[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return table.detach()


def scores(table: Tensor, x: Tensor) -> Tensor:
    """Return logits [m, C] of x [m, D]."""
    return torch.addmm(table[-1], x, table[:-1])


def accuracy(table: Tensor, examples: Examples) -> float:
    return float((scores(table, examples.x).argmax(1) == examples.y).double().mean())


def train_probe(
    train: Examples, valid: Examples, test: Examples, num_classes: int, strengths: Sequence[float], max_iterations: int
) -> ProbeScore:
    """Fit on train, choose the penalty on valid (the strongest of equal ones), and score on test.

    States are standardised by mean and deviation of train. The strongest penalty is fitted first. Each fit starts from the one
    before.
    """
    mean, deviation = train.x.mean(0), train.x.std(0, correction=0)
    deviation = torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)  # a constant column carries no information
    train, valid, test = (Examples((one.x - mean) / deviation, one.y) for one in (train, valid, test))
    table = train.x.new_zeros(train.x.shape[1] + 1, num_classes)
    best, chosen, chosen_table = -1.0, 0.0, table
    for l2 in sorted(set(strengths), reverse=True):
        table = fit(train, l2, max_iterations, table)
        if (found := accuracy(table, valid)) > best:
            best, chosen, chosen_table = found, l2, table
    return ProbeScore(accuracy(chosen_table, test), best, accuracy(chosen_table, train), chosen)
