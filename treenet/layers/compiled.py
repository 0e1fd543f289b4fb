"""A small function compiled for GPUs, where the model around it is not."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError


class CompiledOnGpu:
    """A function that runs on CUDA as `torch.compile` makes it, elsewhere as it is.

    Where the compiler is missing or fails, one line says so, and the function runs as it is from then on.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._failed = function, False
        self.__doc__, self.__name__ = function.__doc__, function.__name__

    def __call__(self, x: torch.Tensor, *arguments: Any) -> Any:
        """The function of `x`, whose device decides, and other arguments."""
        if torch.compiler.is_compiling() or x.device.type != "cuda" or self._failed:
            return self._function(x, *arguments)
        try:
            return compiled(self._function)(x, *arguments)
        except (TorchDynamoException, InductorError) as error:
            self._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"warning: {self.__name__} cannot be compiled and runs slower as it is: {reason}", file=sys.stderr)
            return self._function(x, *arguments)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by `torch.compile`, for all sizes."""
    return torch.compile(function, dynamic=True)
