"""Adam with decoupled weight decay, and the learning rate of an update."""

import math

import torch
from torch import nn

from treenet.config import OptimizerConfig

WARMUP_START = 1e-7


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Return the rate of update number `update`, counted from 1.

    It is linear from 1e-7 to the peak. Then it is peak * sqrt(warmup / update), or linear to 0 at `decay_steps`.
    """
    if update <= config.warmup_steps:
        return WARMUP_START + (config.learning_rate - WARMUP_START) * update / config.warmup_steps
    if config.decay_steps is not None:
        return config.learning_rate * (config.decay_steps - update) / (config.decay_steps - config.warmup_steps)
    return config.learning_rate * math.sqrt(config.warmup_steps / update)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW.

    Parameters of two dimensions decay (matrices, tables, leaf weights [D, W]); vectors (biases, layer norms) do not.

    The released code trains with fairseq's Adam, in which all parameters decay. At its 1e-4 and schedule, decay would make a
    vector smaller by 0.12 % in 60,000 updates. The custom of the field is to exclude vectors.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.adam_eps, fused=True)
