"""The sum of the gradient over the ranks, in buckets that a rank sends while the backward pass still computes.

Buckets are ranges of the flat gradient, from its end to its start. That is about the order in which the backward pass completes
parameters. All ranks always send all buckets in this order. A rank without examples sends zeros. If memory runs out on a rank
after it sent a bucket, it sends the others as they are. The totals of the update then tell all ranks to compute it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treenet.training.gradients import FlatGradient
from treenet.training.ranks import Ranks, Sum

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
        """Begin a new update with a gradient of zero."""
        self._sent, self._watching = [], False

    @property
    def begun(self) -> bool:
        """Return whether this rank has sent a bucket."""
        return bool(self._sent)

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
