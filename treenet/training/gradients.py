"""The gradient of all parameters in one tensor. It needs one norm, and few sums over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treenet.training.ranks import Ranks


class FlatGradient:
    """One tensor. The gradients of all parameters are views of it."""

    def __init__(self, model: nn.Module, tables_first: bool = False):
        """With `tables_first`, the embeddings begin the tensor, because a backward pass completes their gradients last."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if tables_first:
            tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
            self.parameters.sort(key=lambda parameter: parameter not in tables)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = self.parameters[0].new_zeros(sum(self.sizes))
        parts = zip(self.parameters, self.flat.split(self.sizes), strict=True)
        self._views = [part.view_as(parameter) for parameter, part in parts]
        self._put_back()

    def zero(self) -> None:
        """Begin a new gradient."""
        self.flat.zero_()

    def sum(self, ranks: Ranks, dtype: torch.dtype | None) -> None:
        """Add the gradients of all ranks, rounded to `dtype` if it is given."""
        ranks.start_sum(self.flat, dtype or self.flat.dtype).wait()

    def norm(self) -> Tensor:
        """Return the norm [] of the gradient."""
        return torch.linalg.vector_norm(self.flat)

    def finish_pass(self) -> None:
        """End a pass without backward. Nothing needs to be done."""

    def part(self, first: int, last: int) -> Tensor:
        """Return the gradients of the parameters from `first` up to `last`, excluded."""
        start = sum(self.sizes[:first])
        return self.flat[start : start + sum(self.sizes[first:last])]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let a backward pass in this context make separate gradients, and add all of them at its end.

        Otherwise, every parameter adds its gradient alone. That is two hundred kernels in a base model, which is slow on a GPU.
        """
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
            self.collect(0, len(self.parameters))
        finally:
            self._put_back()

    def collect(self, first: int, last: int) -> None:
        """Add the gradients of these parameters that a backward pass has made, and drop them."""
        parameters, views = self.parameters[first:last], self._views[first:last]
        found = [(view, p.grad) for view, p in zip(views, parameters, strict=True) if p.grad is not None]
        if found:
            torch._foreach_add_(*map(list, zip(*found, strict=True)))
        for parameter in parameters:
            parameter.grad = None

    def _put_back(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


def add_gradients_by_row(model: nn.Module) -> None:
    """Let embeddings add only the rows that were read to the flat gradient, without a table of zeros.

    This holds where no other operation has a gradient for the table. It is for CPUs: GPUs would sort the rows and wait for that.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
