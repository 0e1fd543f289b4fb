"""Activation checkpointing: a layer keeps its input alone, and backward computes the rest of it anew."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.layers.dropout import DropoutKeys


def recompute_layers(model: nn.Module, keys: DropoutKeys, draws_numbers: bool) -> None:
    """From now on, Transformer layers of `model` keep no activations for backward: same results, gradients and dropout.

    `draws_numbers`: layers draw from PyTorch's generator too, whose state is then kept with their input.
    """
    for module in model.modules():
        if isinstance(module, EncoderLayer | DecoderLayer):
            # The forward method alone: hooks and parameters stay where they are.
            module.forward = partial(_recomputed, module.forward, keys, draws_numbers)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], keys: DropoutKeys, draws_numbers: bool, *inputs: Any, **named_inputs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _as_before(keys, (keys.keys, keys.calls))

    options = {"use_reentrant": False, "preserve_rng_state": draws_numbers, "context_fn": contexts}
    return checkpoint(forward, *inputs, **options, **named_inputs)


@contextmanager
def _as_before(keys: DropoutKeys, state: tuple) -> Iterator[None]:
    """Dropout continues as from `state`: meanwhile other layers were called, or another pass began."""
    now = keys.keys, keys.calls
    keys.keys, keys.calls = state
    try:
        yield
    finally:
        keys.keys, keys.calls = now
