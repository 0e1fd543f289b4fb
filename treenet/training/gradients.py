"""The gradient of all parameters in one tensor: one norm, and one sum over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class FlatGradient:
    """One tensor that the gradients of all parameters are views into."""

    def __init__(self, model: nn.Module):
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in self._parameters]
        self.flat = self._parameters[0].new_zeros(sum(sizes))
        parts = zip(self._parameters, self.flat.split(sizes), strict=True)
        self._views = [part.view_as(parameter) for parameter, part in parts]
        self._put_back()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Backward passes in this context leave the gradients where they made them; at its end all are added in one go.

        Otherwise, every parameter adds its own gradient: two hundred kernels of a base model, which is much on a GPU.
        """
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
            pairs = zip(self._views, self._parameters, strict=True)
            found = [(view, parameter.grad) for view, parameter in pairs if parameter.grad is not None]
            if found:
                torch._foreach_add_(*map(list, zip(*found, strict=True)))
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def add_gradients_by_row(model: nn.Module) -> None:
    """Embeddings add the rows that were read to the flat gradient, not a table of zeros beside them, where nothing else has a
    gradient for the table. On CPUs: GPUs would sort the rows and wait for that."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
