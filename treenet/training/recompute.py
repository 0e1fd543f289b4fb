"""Activation checkpointing: a layer keeps only its input, and the backward pass computes the activations again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.layers.dropout import DropoutKeys


def recompute_layers(model: nn.Module, keys: DropoutKeys, draws_numbers: bool) -> None:
    """Make Transformer layers of `model` keep no activations for backward, with the same results, gradients and dropout.

    `draws_numbers`: layers also draw from PyTorch's generator. Then its state is kept with their input.
    """
    for module in model.modules():
        if isinstance(module, EncoderLayer | DecoderLayer):
            # Only the forward method is replaced: hooks and parameters stay as they are.
            module.forward = partial(_recomputed, module.forward, keys, draws_numbers)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], keys: DropoutKeys, draws_numbers: bool, *inputs: Any, **named_inputs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _as_before(keys, (keys.keys, keys.calls))

    options = {"use_reentrant": False, "preserve_rng_state": draws_numbers, "context_fn": contexts}
    return checkpoint(forward, *inputs, **options, **named_inputs)


@contextmanager
def _as_before(keys: DropoutKeys, state: tuple) -> Iterator[None]:
    """Continue dropout from `state`, because other layers or another pass have used it since."""
    now = keys.keys, keys.calls
    keys.keys, keys.calls = state
    try:
        yield
    finally:
        keys.keys, keys.calls = now
