"""The weights of cross-attention in a translation model that runs with teacher forcing.

The layers attend by kernels that return no weights. Here an explicit softmax computes the weights again, from what goes into the
cross-attention modules. Shapes: B batch, A decoder layers, H heads, T target positions, S memory positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import TreeBatch
from treenet.layers.attention import CrossAttention, KeysValues
from treenet.layers.scaled_dot_product import attention_weights
from treenet.models.seq2seq import Seq2Seq
from treeproc.shards.schema import PAD_ID


def compute_weights(module: CrossAttention, x: Tensor, keys_values: KeysValues, attend_mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(K)) of equations 21, 22 and 24, for what `CrossAttention.forward` takes: [B, H, T, S]."""
    return attention_weights(module.split_heads(module.queries(x)), keys_values[0], attend_mask)


@contextmanager
def record_attention(model: Seq2Seq) -> Iterator[list[Tensor]]:
    """Yield a list that gets the weights [B, H, T, S] of every cross-attention that runs meanwhile, lowest layer first.

    For teacher forcing: in a search, hypotheses share the memory of their sentence.
    """
    recorded: list[Tensor] = []

    def record(module: CrossAttention, inputs: tuple, _: Tensor) -> None:
        recorded.append(compute_weights(module, *inputs[:3]))

    hooks = [layer.cross_attention.register_forward_hook(record) for layer in model.decoder.layers]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def attend_batch(model: Seq2Seq, batch: TreeBatch) -> list[np.ndarray]:
    """Return weights [A, H, T, L + N] of every example without its padding. A node's weight is that of all its positions."""
    with record_attention(model) as recorded:
        model(batch)
    weights = torch.stack(recorded, dim=1)  # [B, A, H, T, S]
    real_targets, real = batch.tgt_out != PAD_ID, ~batch.source_pad_mask()
    leaves = batch.leaf_pieces.shape[1]
    copies = 0 if batch.structure is None else batch.structure.positions_of_node
    if copies > 1:
        of_nodes = weights[..., leaves:].unflatten(-1, (-1, copies)).sum(-1)
        weights = torch.cat([weights[..., :leaves], of_nodes], dim=-1)
        real = torch.cat([real[:, :leaves], real[:, leaves::copies]], dim=1)
    return [weights[row][:, :, real_targets[row]][..., real[row]].numpy(force=True) for row in range(len(batch))]
