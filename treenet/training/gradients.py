"""The gradient of all parameters in one tensor, and its sum over the ranks.

One tensor needs one norm, and few sums over the ranks. A rank can send it in buckets while the backward pass still computes.
Buckets are ranges of the flat gradient, from its end to its start. That is about the order in which the backward pass completes
parameters. All ranks always send all buckets in this order. A rank without examples sends zeros. If memory runs out on a rank
after it sent a bucket, it sends the others as they are. The totals of the update then tell all ranks to compute it again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from treenet.training.ranks import Ranks, Sum


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


BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel: large enough for the full rate of a network, small enough to overlap


class MustRepeat(Exception):
    """Memory ran out after this rank had sent buckets, so it cannot add a new result."""


@dataclass
class _Bucket:
    first: int  # of its parameters; they go up to `last`, excluded
    last: int
    part: Tensor  # of the flat gradient
    missing: int = 0  # parameters whose gradients are incomplete


class OverlappedSums:
    """Sums the gradient of every update over the ranks. The sum begins in the backward pass of the last micro-batch."""

    def __init__(self, gradients: FlatGradient, ranks: Ranks, dtype: torch.dtype | None):
        self._gradients, self._ranks, self._dtype = gradients, ranks, dtype or gradients.flat.dtype
        ranges = cut_buckets(gradients.sizes, BUCKET_BYTES // gradients.flat.element_size())
        self._buckets = [_Bucket(first, last, gradients.part(first, last)) for first, last in ranges]
        self._sent: list[Sum] = []
        self._watching = False
        for number, bucket in enumerate(self._buckets):
            for parameter in gradients.parameters[bucket.first : bucket.last]:
                parameter.register_post_accumulate_grad_hook(partial(self._complete, number))

    def begin(self) -> None:
        """Begin to compute the gradient of an update, for the first time or again.

        Raises MustRepeat if this rank has already sent a bucket of this update.
        """
        if self._sent:
            raise MustRepeat
        self._watching = False  # memory may have run out in a last micro-batch, before it completed a bucket

    def watch(self) -> None:
        """Make the next backward pass the last one: it sends each bucket as soon as it is complete."""
        self._watching = True
        for bucket in self._buckets:
            bucket.missing = bucket.last - bucket.first

    def finish(self) -> None:
        """Send the other buckets, and wait for all sums. On CUDA, the device waits and the host continues."""
        self._watching = False
        while len(self._sent) < len(self._buckets):
            self._send()
        for one in self._sent:
            one.wait()
        self._sent = []

    def _complete(self, number: int, _parameter: Tensor) -> None:
        if not self._watching:
            return
        self._buckets[number].missing -= 1
        while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
            bucket = self._buckets[len(self._sent)]
            self._gradients.collect(bucket.first, bucket.last)
            self._send()

    def _send(self) -> None:
        """Send the next bucket."""
        self._sent.append(self._ranks.start_sum(self._buckets[len(self._sent)].part, self._dtype))


def cut_buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return ranges of parameters of these sizes, the last ones first. A range has up to `limit` numbers, or one parameter."""
    ranges: list[tuple[int, int]] = []
    last, held = len(sizes), 0
    for first in reversed(range(len(sizes))):
        if held and held + sizes[first] > limit:
            ranges.append((first + 1, last))
            last, held = first + 1, 0
        held += sizes[first]
    return [*ranges, (0, last)]
