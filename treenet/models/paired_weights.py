"""Initial weights by name, for `model.paired_weights`.

By default, all initial weights come from PyTorch's generator, one after the other, so one more part changes the weights of all
later ones. Here each draw has its own seed, from the run's seed and from the name of its parameter. So two models of
one seed share every parameter that both have with the same name, shape and initialiser. What has another name is not shared, for
example the layers of the deeper one of two models.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from treenet.structure.base import tensors_of

# All functions by which parameters are drawn. Each one fills its first argument.
DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
_ModelT = TypeVar("_ModelT", bound=nn.Module)


def drawn_tensor(args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the tensor that a call of one of `DRAWS` fills."""
    return args[0] if args else kwargs["tensor"]


class _Trace(TorchFunctionMode):
    """Notes the draws of each memory, also where a parameter is computed from a drawn tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple] = []  # place in the memory, shape, function and numbers of each draw
        self._of_memory: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # memory that is freed would be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        made_by = set().union(*(self.draws_of(tensor) for tensor in tensors_of((args, list(kwargs.values())))))
        if func in DRAWS:
            target = drawn_tensor(args, kwargs)
            numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, int | float)]
            made_by.add(len(self.draws))
            self.draws.append((target.storage_offset(), tuple(target.shape), func.__name__, *numbers))
        for tensor in tensors_of(found) if made_by else ():
            self._of_memory.setdefault(_memory(tensor), set()).update(made_by)
            self._kept.append(tensor)
        return found

    def draws_of(self, tensor: Tensor) -> set[int]:
        """Return the numbers of the draws that made the memory of a tensor."""
        return self._of_memory.get(_memory(tensor), set())


class _Named(TorchFunctionMode):
    """Seeds each draw by its name."""

    def __init__(self, names: Iterator[str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS:
            _seed(int.from_bytes(hashlib.sha256(next(self._names).encode()).digest()[:7]))
        return func(*args, **(kwargs or {}))


def _seed(value: int) -> None:
    """Seed the draws on CPUs, where models are built. `torch.manual_seed` takes 10 ms, for other devices."""
    torch.default_generator.manual_seed(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def build_by_name(build: Callable[[], _ModelT]) -> _ModelT:
    """Return the model that `build` builds, with initial weights by their names, from PyTorch's seed.

    It is built twice: the names of parameters are known only when the whole model is there. Afterwards the generator is as after
    the seed.
    """
    seed = torch.initial_seed()
    names = _name_draws(build)
    try:
        with _Named(iter([f"{name} {seed}" for name in names])):
            return build()
    finally:
        _seed(seed)


def _name_draws(build: Callable[[], nn.Module]) -> list[str]:
    """Return for each draw the name of the first parameter that it makes, and the place in it."""
    trace = _Trace()
    with trace:
        model = build()
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        for number in trace.draws_of(parameter):
            names.setdefault(number, name)
    return [f"{names.get(number, '')} {draw[0]}" for number, draw in enumerate(trace.draws)]


def matrix_draws(build: Callable[[], nn.Module]) -> dict[str, tuple]:
    """Return the shape and the draws of each matrix by its name. With one seed, equal ones begin with equal values.

    Build the model in `only_shapes`.
    """
    trace, found = _Trace(), {}
    with trace:
        model = build()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            last = {trace.draws[number][:2]: trace.draws[number] for number in sorted(trace.draws_of(parameter))}
            found[name] = (tuple(parameter.shape), *last.values())
    return found
