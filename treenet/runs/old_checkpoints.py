"""Checkpoints from before encoders and decoders became modules: their names and the order of their parameters."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

Value = TypeVar("Value")

_MARK = "piece_embedding.weight"  # every such checkpoint has it, and no newer one
_NEW_PREFIXES = {
    "piece_embedding.": "encoder.embedding.",
    "mask_embedding": "encoder.embedding.mask",
    "encoder_layers.": "encoder.layers.",
    "decoder_layers.": "decoder.layers.",
    "source_positions.": "encoder.positions.",
    "target_positions.": "decoder.positions.",
    "encoder_input.": "encoder.input.",
    "encoder_output.": "encoder.output.",
    "decoder_input.": "decoder.input.",
    "decoder_output.": "decoder.output.",
    "pooling.": "decoder.pooling.",
    "cross_attention.": "decoder.cross_attention.",
    "combine.": "decoder.combine.",
    "head.": "head.",
}


def rename_weights(weights: dict[str, Value]) -> dict[str, Value]:
    """Return weights under their present names. Most weights already have them."""
    return {_rename(name): value for name, value in weights.items()} if is_old(weights) else weights


def reorder_optimizer(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state of the optimiser of an old checkpoint, in the present order of the model's parameters.

    The state names parameters by their position among those of the optimiser, group by group: matrices, then vectors.
    """
    names = {name: parameter.ndim for name, parameter in model.named_parameters() if parameter.requires_grad}
    before, after = (
        [name for is_vector in (False, True) for name in order if (names[name] < 2) == is_vector]
        for order in (_old_order(names), list(names))
    )
    place = {name: place for place, name in enumerate(before)}
    entries = state["state"]
    moved = {new: entries[place[name]] for new, name in enumerate(after) if place[name] in entries}
    return {**state, "state": moved}


def is_old(weights: Mapping[str, object]) -> bool:
    """Return whether the names are those of an old checkpoint."""
    return _MARK in weights


def _rename(name: str) -> str:
    for old, new in _NEW_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return f"encoder.{name}"


def _old_order(names: Mapping[str, object]) -> list[str]:
    """Return the present names in the order of the old modules."""
    recurrent = any(name.startswith("decoder.layers.") and "weight_ih" in name for name in names)
    convolutional = any(name.startswith("encoder.input.") for name in names)

    def rank(name: str) -> int:
        if name == "encoder.embedding.mask" or (
            name.startswith("encoder.") and name.count(".") == 1
        ):  # parameters of the model itself
            return 0
        if name == "encoder.embedding.weight":
            return 1
        if convolutional:
            return 2
        if recurrent:
            return 2 if name.startswith("decoder.") else 3
        room = [place for place, prefix in enumerate(("encoder.layers.", "decoder.", "encoder."), 2) if name.startswith(prefix)]
        return room[0] if room else 5

    return sorted(names, key=rank)
