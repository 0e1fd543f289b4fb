"""Autocast, where a device has it: the device "meta", which tests count operations on, has none."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which operations compute in the types that they are given."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that a matrix product with `x` is computed in: that of autocast where it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
