"""Self-attention of an encoder: from every leaf and node of the source to those that it attends to.

The weights are computed again from the inputs of the encoder's attention modules, as those of the cross-attention are. Shapes:
A encoder layers, H heads, S positions: leaves, then nodes in pre-order (plain models: leaves alone).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import TreeBatch
from treenet.data.in_order import count_leaves, in_order
from treenet.layers.attention import SelfAttention
from treenet.models.composed import Seq2Seq
from treenet.structure import TreeStructure

_WINDOW = 256

Kept = TypeVar("Kept")
Keep = Callable[[np.ndarray, np.ndarray, int], Kept]


def has_self_attention(model: Seq2Seq) -> bool:
    """Return whether every layer of the encoder has self-attention whose weights can be computed here.

    Those of relation-aware attention and of what is not attention cannot.
    """
    layers = list(getattr(model.encoder, "layers", ()))
    return bool(layers) and all(type(getattr(layer, "self_attention", None)) is SelfAttention for layer in layers)


def compute_self_weights(
    module: SelfAttention,
    x: Tensor,
    attend_mask: Tensor | None = None,
    structure: TreeStructure | None = None,
    prior: Tensor | None = None,
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) of equations 12 to 18, for what `SelfAttention.forward` takes: [B, H, S, S]."""
    queries, keys, values = module.queries_keys_values(x).chunk(3, dim=2)
    if module.accumulation is not None and structure is not None:
        keys, _ = module.accumulation(x, keys, values, structure)
    attend_mask = _attend_mask(module, attend_mask, structure)
    queries, keys = module.split_heads(queries), module.split_heads(keys)
    scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
    if attend_mask is not None:
        scores = scores.masked_fill(~attend_mask, -torch.inf)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=3)
    return weights if prior is None else weights * prior[:, None]


def _attend_mask(module: SelfAttention, attend_mask: Tensor | None, structure: TreeStructure | None) -> Tensor | None:
    """Return the mask that the module attends by, of a form that expands to [B, H, S, S]; None if all may attend to all."""
    if attend_mask is None and module.accumulation is not None and structure is not None:
        return structure.attend_mask()[:, None]
    return attend_mask


def encode_examples(model: Seq2Seq, examples: Iterable[dict], *, max_tokens: int = 2048) -> Iterator[np.ndarray | None]:
    """Yield the weights [A, H, S, S] of every example, in order; None for one without leaves.

    The model must be in evaluation mode, and `has_self_attention` of it true.
    """
    return reduce_examples(model, examples, lambda weights, *_: weights, max_tokens=max_tokens)


def reduce_examples(
    model: Seq2Seq, examples: Iterable[dict], keep: Keep[Kept], *, max_tokens: int = 2048
) -> Iterator[Kept | None]:
    """Return what `keep` makes of every example.

    It gets the weights [A, H, S, S], where each position may attend to, [A, S, S] bool, and the number of leaves.
    Results are in order; None stands for an example without leaves. Weights are held for one batch alone, so a small result
    takes little memory. The model must be in evaluation mode, and `has_self_attention` of it true.
    """
    device = next(model.parameters()).device
    compute = partial(_encode_batch, model, keep)
    return in_order(compute, model.reads, examples, None, count_leaves, max_tokens, device, _WINDOW)


@torch.inference_mode()
def _encode_batch(model: Seq2Seq, keep: Keep[Kept], batch: TreeBatch) -> list[Kept | None]:
    recorded: list[Tensor] = []
    masks: list[Tensor] = []

    def record(module: SelfAttention, inputs: tuple, named: dict, _: Tensor) -> None:
        weights = compute_self_weights(module, *inputs, **named)
        recorded.append(weights)
        masks.append(_allowed(module, weights, *inputs[1:], **named))

    with ExitStack() as stack:
        for layer in model.encoder.layers:
            hook = layer.self_attention.register_forward_hook(record, with_kwargs=True)
            stack.callback(hook.remove)
        model.encode(batch)
    weights, allowed = torch.stack(recorded, dim=1), torch.stack(masks, dim=1)  # [B, A, H, S, S] and [B, A, S, S]
    real = ~batch.source_pad_mask()

    def part(values: Tensor, row: int) -> np.ndarray:
        return values[row][..., real[row], :][..., real[row]].numpy(force=True)

    leaves = (~batch.leaf_pad_mask).sum(dim=1).tolist()
    return [keep(part(weights, row), part(allowed, row), leaves[row]) for row in range(len(batch))]


def _allowed(
    module: SelfAttention,
    weights: Tensor,
    attend_mask: Tensor | None = None,
    structure: TreeStructure | None = None,
    prior: Tensor | None = None,
) -> Tensor:
    """Return [B, S, S] bool: where each position may attend to, which is the same for all heads."""
    mask = _attend_mask(module, attend_mask, structure)
    every = torch.ones_like(weights[:, 0], dtype=torch.bool)
    return every if mask is None else every & mask[:, 0]
