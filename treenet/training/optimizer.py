"""Adam with decoupled weight decay, and the learning rate of an update."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from treenet.config import OptimizerConfig

WARMUP_START = 1e-7
FACTOR = "lr_scale"  # in a group of the optimiser whose rate is that of the schedule times a factor


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Return the rate of update number `update`, counted from 1.

    It is linear from 1e-7 to the peak. Then it is peak * sqrt(warmup / update), or linear to 0 at `decay_steps`.
    """
    if update <= config.warmup_steps:
        return WARMUP_START + (config.learning_rate - WARMUP_START) * update / config.warmup_steps
    if config.decay_steps is not None:
        return config.learning_rate * (config.decay_steps - update) / (config.decay_steps - config.warmup_steps)
    return config.learning_rate * math.sqrt(config.warmup_steps / update)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the schedule, times the factor of each group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)


def build_optimizer(model: nn.Module, config: OptimizerConfig, factors: Mapping[str, float] | None = None) -> torch.optim.AdamW:
    """Build AdamW. `factors` has factors of the learning rate by the names of parameters; all others have 1.

    Parameters of two dimensions decay (matrices, tables, leaf weights [D, W]); vectors (biases, layer norms) do not. Parameters
    without a gradient are left out.

    The released code trains with fairseq's Adam, in which all parameters decay. At its 1e-4 and schedule, decay would make a
    vector smaller by 0.12 % in 60,000 updates. The custom of the field is to exclude vectors.
    """
    factors = factors or {}
    groups = []
    for factor in dict.fromkeys([1.0, *factors.values()]):
        named = model.named_parameters()
        own = [p for name, p in named if p.requires_grad and factors.get(name, 1.0) == factor]
        scaled = {} if factor == 1 else {FACTOR: factor}
        groups.append({"params": [p for p in own if p.ndim >= 2], "weight_decay": config.weight_decay, **scaled})
        groups.append({"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, **scaled})
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.adam_eps, fused=True)
