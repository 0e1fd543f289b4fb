"""The device "meta" in place of a GPU: it has shapes and no data, so whatever would make a GPU's host wait raises there.

PyTorch's fused optimisers and autocast do not know it. The list of devices with fused optimisers is given "meta" too, whose
kernels have shapes; autocast is left out.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import adam, adamw, optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treenet.layers import core

# They return a view or memory, and launch nothing.
_NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "new_empty", "detach", "lift_fresh", "set_"}


@torch.library.custom_op("tests::keyed_dropout", mutates_args=())
def _keyed_dropout(x: Tensor) -> Tensor:
    """A kernel, as `drop` is on a GPU, where it is compiled."""
    return torch.empty_like(x)


_keyed_dropout.register_fake(torch.empty_like)


class DeviceOperations(TorchDispatchMode):
    """Counts operations that would launch a kernel on the device "meta", and copies between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)}
        if given == {"cpu"} and "meta" in made:
            self.copies[name] += 1
        elif "meta" in given | made and not func.is_view and name not in _NO_KERNEL:
            self.kernels[name] += 1
        return out


def stand_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device "meta", where fused optimisers may work from now on."""
    true_autocast = torch.autocast

    def autocast(device_type: str, *arguments: Any, **options: Any) -> Any:
        return nullcontext() if device_type == "meta" else true_autocast(device_type, *arguments, **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(core, "_drop_on_gpu", lambda x, *arguments: _keyed_dropout(x))
    for module in (_foreach_utils, optimizer, adam, adamw):
        if hasattr(module, "_get_fused_kernels_supported_devices"):
            monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", "cuda", "meta"])
    return torch.device("meta")
