"""The optimiser and what belongs to it: chosen parameters, learning rates, the scale of losses, and a moving average."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from treenet.config import OptimizerConfig, TrainConfig
from treenet.runs.checkpoint import local_part
from treeproc.common.errors import quoted
from treeproc.common.settings import UserError

_MOST_NEAR = 3


def frozen_names(config: TrainConfig, model: nn.Module) -> set[str]:
    """Return the names of the parameters of `model` that `freeze` matches.

    Raises UserError for a pattern that matches no parameter, and if no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = set()
    for pattern in config.freeze:
        if not (found := _matching(pattern, names)):
            raise UserError(f"freeze: {_no_match(pattern, model)}")
        frozen.update(found)
    if len(frozen) == len(names):
        raise UserError("freeze: the patterns match all parameters, so there is nothing to train; leave one pattern out")
    return frozen


def rate_factors(config: TrainConfig, model: nn.Module) -> dict[str, float]:
    """Return the factors of `lr_scale` by the names of the trained parameters of `model` that a pattern matches.

    The first pattern that matches counts. Raises UserError for a pattern that decides about no parameter.
    """
    names, frozen = [name for name, _ in model.named_parameters()], frozen_names(config, model)
    factors: dict[str, float] = {}
    for pattern, factor in config.lr_scale.items():
        if not (found := _matching(pattern, names)):
            raise UserError(f"lr_scale: {_no_match(pattern, model)}")
        if not (chosen := [name for name in found if name not in frozen and name not in factors]):
            raise UserError(
                f"lr_scale: {quoted(pattern)} changes nothing: its parameters are frozen, or an earlier pattern matches them; "
                "remove it, or write it before that pattern"
            )
        factors |= dict.fromkeys(chosen, factor)
    return factors


def freeze_parameters(config: TrainConfig, model: nn.Module) -> None:
    """Let the parameters that `freeze` matches have no gradient. So they get no update, no decay and no optimiser state."""
    frozen = frozen_names(config, model)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def count_frozen(config: TrainConfig, model: nn.Module) -> int:
    """Return the number of frozen values of a model. Raises UserError as `frozen_names` and `rate_factors` do."""
    rate_factors(config, model)
    frozen = frozen_names(config, model)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name in frozen)


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(pattern: str, model: nn.Module) -> str:
    """Describe a pattern without a parameter, with the name that a shared parameter has, or with similar names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(name, pattern):
            return f"{quoted(pattern)} matches no parameter: {name} is shared and has the name {names[parameter]}"
    parts = {".".join(name.split(".")[:length]) for name in names.values() for length in range(1, name.count(".") + 2)}
    near = get_close_matches(pattern.rstrip(".*?"), sorted(parts), _MOST_NEAR, cutoff=0.0)
    return f"{quoted(pattern)} matches no parameter; similar names are {', '.join(near)}"


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

    Parameters of two or more dimensions decay: matrices, tables, leaf weights [D, W], the lengths [D, 1] of weight
    normalisation, and the biases [H, 1, K] of `DepthAttention`. Vectors (other biases, layer norms) do not. Parameters without a
    gradient are left out.

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


FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # as of torch.amp.GradScaler


class LossScale:
    """A factor on the device. It follows from the updates that were skipped, and the host does not wait for it."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self._updates = torch.zeros((), dtype=torch.int32, device=device)  # updates without a skip since it last changed

    def update(self, skipped: Tensor) -> None:
        """Count an update, which was skipped if `skipped` [] float32 is 1."""
        torch._amp_update_scale_(self.scale, self._updates, skipped, GROWTH, BACKOFF, INTERVAL)

    def state(self) -> tuple[float, int]:
        """Return the factor, and the updates since it last changed."""
        return self.scale.item(), int(self._updates.item())

    def load(self, state: tuple[float, int]) -> None:
        """Continue from `state`."""
        self.scale.fill_(state[0])
        self._updates.fill_(state[1])


class MovingAverage:
    """average <- d * average + (1 - d) * weights after every update.

    d is `decay`, or (1 + updates) / (10 + updates) while that is smaller. Without this start, the random initial weights would
    stay in the average for 1 / (1 - decay) updates.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        named = dict(model.named_parameters())
        self._parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        averages = dict(zip(map(id, self._parameters), self._averages, strict=True))
        # A frozen parameter is its own average.
        self.weights: dict[str, Tensor] = {name: averages.get(id(value), value.detach()) for name, value in named.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the present weights of the model."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def update(self, updates: int, skip: Tensor | None = None) -> None:
        """Add the weights of the model after `updates` updates. A `skip` [] float32 of 1, on their device, prevents it."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        averages = [local_part(average) for average in self._averages]
        parameters = [local_part(parameter) for parameter in self._parameters]
        if skip is None:
            torch._foreach_lerp_(averages, parameters, 1 - decay)
            return
        # PyTorch cannot interpolate lists by one weight on the device.
        steps = torch._foreach_sub(parameters, averages)
        torch._foreach_mul_(steps, (1 - decay) * (1 - skip))
        torch._foreach_add_(averages, steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the average inside this context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
