"""A small function that is compiled for GPUs, inside a model that is not compiled."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from treenet.layers.autocast import without_autocast
from treeproc.common.messages import warn

# Graphs of one function: types of numbers, with nodes or without, sizes of one.
_MOST_GRAPHS = 32
_OPTIONS: dict[str, Any] = {"dynamic": True}
if "recompile_limit" in inspect.signature(torch.compile).parameters:
    _OPTIONS["recompile_limit"] = _MOST_GRAPHS
else:  # PyTorch 2.11 has one limit for all functions
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS


class CompiledOnGpu:
    """A function that runs compiled on CUDA and uncompiled elsewhere. It has no gradient.

    If the compiler is missing or fails, it prints one line, and the function runs uncompiled from then on.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._failed = function, False

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """Call the function on `x`, whose device decides, and other arguments."""
        if self._failed or torch.compiler.is_compiling() or not _is_gpu(x.device):
            return self._function(x, *arguments)
        try:
            # Forward and backward passes, with or without autocast, would have separate graphs.
            with torch.no_grad(), without_autocast(x.device):
                return compiled(self._function)(x, *arguments)
        except TorchDynamoException as error:
            self._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warn(f"warning: {self._function.__name__} runs slower, because it is not compiled: {reason}")
            return self._function(x, *arguments)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `torch.compile`, for all sizes."""
    return torch.compile(function, **_OPTIONS)
