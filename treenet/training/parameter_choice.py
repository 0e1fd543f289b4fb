"""Parameters that settings choose by patterns of their names: frozen ones, and those with another learning rate."""

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from treenet.config import TrainConfig
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
