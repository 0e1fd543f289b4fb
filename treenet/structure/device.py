"""Maps on the device of the model that reads them."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Maps = TypeVar("Maps")


def move(maps: Maps, device: torch.device | str) -> Maps:
    """A copy of `maps`, a dataclass of tensors, of such dataclasses and of numbers, whose tensors are on `device`."""
    assert is_dataclass(maps) and not isinstance(maps, type)
    moved: dict[str, Any] = {}
    for f in fields(maps):
        value = getattr(maps, f.name)
        if isinstance(value, Tensor):
            moved[f.name] = value.to(device)
        elif is_dataclass(value):
            moved[f.name] = move(value, device)
    return replace(maps, **moved)
