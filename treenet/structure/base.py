"""The base of all structures: the inputs of an encoder beside pieces."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

Maps = TypeVar("Maps")


class Structure:
    """Base of the dataclasses that one forward pass shares between all layers."""

    positions_of_node: ClassVar[int] = 0  # how many positions the encoder computes for every node, also for padding

    def to(self, device: torch.device | str) -> Self:
        """Return a copy whose tensors are on `device`."""
        return move(self, device)


def move(maps: Maps, device: torch.device | str) -> Maps:
    """Move the tensors of `maps` to `device`. `maps` is a dataclass of tensors, of such dataclasses and of plain values."""
    assert is_dataclass(maps) and not isinstance(maps, type)
    moved: dict[str, Any] = {}
    for field in fields(maps):
        value = getattr(maps, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif is_dataclass(value):
            moved[field.name] = move(value, device)
    return replace(maps, **moved)
