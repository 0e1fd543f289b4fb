"""Autocast on devices that have it. The device "meta", on which tests count operations, has none."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which operations compute in the types of their inputs."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with `x` is computed: that of autocast if it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
