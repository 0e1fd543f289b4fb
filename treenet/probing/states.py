"""States of a frozen encoder: of whole sentences and of single words, from any of its layers.

Shapes: B batch, L leaves, S positions, W words, D model, n sentences, k copies, w chosen words.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.probing.inputs import ProbeInputs
from treenet.runs.precision import scoring
from treeproc.common.settings import UserError

EMBEDDINGS = 0  # the layer below the first: the vectors of the pieces, without positions


@dataclass
class States:
    """States of one layer, float32 on the CPU."""

    sentences: dict[str, Tensor] = field(default_factory=dict)  # "mean" of the leaves, and "root" of tree models, [n + k, D]
    words: Tensor | None = None  # [w, D]


def num_layers(model: nn.Module) -> int:
    """Return the number of layers with states; 1 for encoders that do not keep their layers in a list."""
    return max(1, len(model.encoder.probed_layers()))


@contextmanager
def record_layers(model: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Return a dict that gets the output [B, S, D] of encoder layers, counted from 1, at every forward pass in this context."""
    recorded: dict[int, Tensor] = {}

    def recorder(layer: int) -> Callable:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            recorded[layer] = output[0] if isinstance(output, tuple) else output

        return record

    hooks = [model.encoder.probed_layers()[layer - 1].register_forward_hook(recorder(layer)) for layer in layers]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def encode_layers(model: nn.Module, batch: TreeBatch, layers: Sequence[int]) -> dict[int, Tensor]:
    """Compute states [B, S, D] of the layers; EMBEDDINGS are [B, L, D]."""
    last = num_layers(model)
    with record_layers(model, [layer for layer in layers if EMBEDDINGS < layer < last]) as states, scoring(model):
        memory = model.encoder(batch)
    for layer, found in states.items():
        if found.shape[:2] != memory.states.shape[:2]:
            raise UserError(f"layer: layer {layer} of this encoder has no state for each position; choose layer=last")
    states[EMBEDDINGS], states[last] = model.encoder.embedding.vectors(batch.leaf_pieces), memory.states
    return {layer: states[layer] for layer in layers}


def leaf_states(states: Tensor, reads: InputKind, num_leaves: int, words: Tensor) -> Tensor:
    """Return the states of leaves [B, L, D] from states of positions [B, S, D].

    If positions are words, which arcs join, a leaf has the state of its word, `words` [B, L]. Raises UserError if there are too
    few positions.
    """
    if reads.positions != "words":
        if states.shape[1] < num_leaves:
            raise UserError("this model cannot be probed: its encoder has no state for each leaf")
        return states[:, :num_leaves]
    return states.gather(1, words[..., None].expand(-1, -1, states.shape[2]))


def collect_states(
    model: nn.Module, inputs: ProbeInputs, layers: Sequence[int], word_state: str, advance: Callable[[int], None]
) -> dict[int, States]:
    """Collect states of every sentence, copy and chosen word of a split, by layer. The model must be in evaluation mode.

    `advance` is called after every batch with its number of sentences. Raises UserError for states that are not finite.
    """
    device = next(model.parameters()).device
    found = {layer: States() for layer in layers}
    for rows in inputs.batches():
        batch, words = inputs.batch(rows)
        batch, words = batch.to(device), words.to(device)
        states = encode_layers(model, batch, layers)
        real = ~batch.leaf_pad_mask
        place = torch.from_numpy(rows)
        word, leaf = map(torch.from_numpy, inputs.leaves_of_words(rows, real.shape[1], word_state))
        word, slot = word.unique(return_inverse=True)
        leaf, slot = leaf.to(device), slot.to(device)
        for layer, x in states.items():
            out, leaves = found[layer], x if layer == EMBEDDINGS else leaf_states(x, model.reads, real.shape[1], words)
            leaves = leaves.float()
            mean = (leaves * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            out.sentences["mean"] = _stored(out.sentences.get("mean"), place, mean, inputs.num_rows)
            if layer != EMBEDDINGS and model.reads.rooted:
                root = x[:, real.shape[1]].float()
                out.sentences["root"] = _stored(out.sentences.get("root"), place, root, inputs.num_rows)
            flat = leaves.flatten(0, 1)
            sums = flat.new_zeros(len(word), flat.shape[1]).index_add_(0, slot, flat.index_select(0, leaf))
            means = sums / slot.bincount(minlength=len(word))[:, None]
            out.words = _stored(out.words, word, means, len(inputs.words))
        advance(len(rows))
    for layer, out in found.items():
        if not all(x.isfinite().all() for x in (*out.sentences.values(), out.words)):
            raise UserError(f"the states of layer {layer} are not finite, so the model has diverged; choose another checkpoint")
    return found


def _stored(out: Tensor | None, place: Tensor, values: Tensor, rows: int) -> Tensor:
    """Write values to their places in `out` [rows, D], which is created if it is None."""
    out = torch.zeros(rows, values.shape[1]) if out is None else out
    out[place] = values.cpu()
    return out
