"""The base of all structures: the inputs of an encoder beside pieces."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from treeproc.common.errors import UserError, quoted

Maps = TypeVar("Maps")


class Structure:
    """Base of the dataclasses that one forward pass shares between all layers."""

    positions_of_node: ClassVar[int] = 0  # how many positions the encoder computes for every node, also for padding

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Return a copy whose tensors are on `device`. Raises UserError if this machine has no such device."""
        with refusing_device(device):
            return _map_tensors(self, lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def cuda(self, device: torch.device | str | int = "cuda", *, non_blocking: bool = False) -> Self:
        """Return a copy whose tensors are on a GPU. Raises UserError if this machine has no such GPU."""
        return self.to(device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory, which a GPU reads while the host works on; as it is on a machine without a GPU."""
        return _map_tensors(self, Tensor.pin_memory) if torch.cuda.is_available() else self


@contextmanager
def refusing_device(device: torch.device | str | int) -> Iterator[None]:
    """Raise UserError if PyTorch refuses to move something to `device` because this machine has no such device."""
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise _no_device(device)  # PyTorch would take None for the present device
    try:
        yield
    except (AssertionError, RuntimeError):
        try:
            wanted = torch.device(device)
        except RuntimeError:
            raise _no_device(device) from None
        if wanted.type == "cuda" and (wanted.index or 0) >= (count := torch.cuda.device_count()):
            raise UserError(f"device must be one of this machine, where PyTorch finds {count} GPUs, but is {wanted}") from None
        raise


def _no_device(device: object) -> UserError:
    return UserError(f"device must be a device of PyTorch, such as 'cpu' or 'cuda:1', but is {quoted(device)}")


def _map_tensors(maps: Maps, change: Callable[[Tensor], Tensor]) -> Maps:
    """Change the tensors of `maps`, a dataclass of tensors, of such dataclasses and of plain values."""
    assert is_dataclass(maps) and not isinstance(maps, type)
    changed: dict[str, Any] = {}
    for field in fields(maps):
        value = getattr(maps, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif is_dataclass(value):
            changed[field.name] = _map_tensors(value, change)
    return replace(maps, **changed)
