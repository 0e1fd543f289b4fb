"""An exponential moving average of weights, and a way to compute with it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treenet.runs.sharded_tensors import local_part


class MovingAverage:
    """average <- d * average + (1 - d) * weights after every update.

    d is `decay`, or (1 + updates) / (10 + updates) while that is smaller. Without this start, the random initial weights would
    stay in the average for 1 / (1 - decay) updates.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        named = dict(model.named_parameters())
        self._parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        averages = dict(zip(map(id, self._parameters), self._averages, strict=True))
        # A frozen parameter is its own average.
        self.weights: dict[str, Tensor] = {name: averages.get(id(value), value.detach()) for name, value in named.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the present weights of the model."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def update(self, updates: int, skip: Tensor | None = None) -> None:
        """Add the weights of the model after `updates` updates. A `skip` [] float32 of 1, on their device, prevents it."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        averages = [local_part(average) for average in self._averages]
        parameters = [local_part(parameter) for parameter in self._parameters]
        if skip is None:
            torch._foreach_lerp_(averages, parameters, 1 - decay)
            return
        # PyTorch cannot interpolate lists by one weight on the device.
        steps = torch._foreach_sub(parameters, averages)
        torch._foreach_mul_(steps, (1 - decay) * (1 - skip))
        torch._foreach_add_(averages, steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the average inside this context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
