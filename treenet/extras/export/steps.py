"""The encoder and the decoder step of a model as functions of tensors alone, for graphs that run without this project.

Shapes: B sentences, L leaves, N nodes, S memory positions (L, or L + N), R hypotheses, T pieces so far, Y decoder layers,
H heads, K = D / H, V pieces.
"""

import copy

import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.layers.attention import BeamLayout, padding_to_attend_mask
from treenet.layers.positions import SinusoidalPositions, compute_sinusoids
from treenet.models.composed import Seq2Seq
from treenet.models.decoders.base import DecoderState
from treenet.models.encoders.base import Memory
from treenet.structure import TreeStructure
from treenet.structure.branches import Depths
from treeproc.shards.schema import PAD_ID

Encoded = tuple[Tensor, Tensor, Tensor]


class PlainEncoderStep(nn.Module):
    """Leaves to the keys and values that the decoder attends to."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(self, leaves: Tensor) -> Encoded:
        """Map leaves [B, L] int64, PAD_ID where padded, to keys and values [Y, B, H, S, K] and a mask [B, S].

        The mask is True where the decoder may attend.
        """
        return self._project(self._batch(leaves))

    def _batch(self, leaves: Tensor) -> TreeBatch:
        none = leaves[:, :0]
        return TreeBatch(leaves[:, 0], leaves, leaves == PAD_ID, none, none == PAD_ID, None, none, none)

    def _project(self, batch: TreeBatch) -> Encoded:
        memory: Memory = self.model.encode(batch)
        layers = self.model.decoder.layers
        projected = [layer.cross_attention.project_memory(memory.states, memory.structure) for layer in layers]
        keys, values = (torch.stack(part) for part in zip(*projected, strict=True))
        return keys, values, padding_to_attend_mask(memory.pad_mask)[:, 0, 0]


class TreeEncoderStep(PlainEncoderStep):
    """The same for models that read trees."""

    def forward(self, leaves: Tensor, labels: Tensor, spans: Tensor) -> Encoded:
        """Map leaves [B, L] and nodes to keys and values [Y, B, H, S, K] and a mask [B, S].

        `labels` [B, N] int64 are those of nodes in pre-order. `spans` [B, N, 3] int64 are their start, end and subtree_end; all 0
        where padded.
        """
        batch = self._batch(leaves)
        start, end, subtree_end = spans.unbind(2)
        batch.node_labels, batch.node_pad_mask = labels, end == 0
        batch.structure = TreeStructure(
            start, end, subtree_end, batch.leaf_pad_mask, batch.node_pad_mask, _find_depths(leaves, spans), attention=None
        )
        return self._project(batch)


class DecoderStep(nn.Module):
    """One piece of every hypothesis to the probabilities of the next one."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(
        self,
        pieces: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        memory_mask: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
    ) -> Encoded:
        """Map the last pieces [R] int64 to log-probabilities [R, V], and keys and values of all positions [Y, R, H, T + 1, K].

        `memory_...` are rows of the encoder's outputs, one for each hypothesis: [Y, R, H, S, K] and [R, S]. `past_...` are those
        that the step before returned, [Y, R, H, T, K]; T = 0 at first, where `pieces` are BOS.
        """
        memory, past = (list(zip(*pair, strict=True)) for pair in ((memory_keys, memory_values), (past_keys, past_values)))
        state = DecoderState(
            sources=pieces,
            active=pieces,
            layout=BeamLayout.full(pieces.shape[0], beam_width=1),
            memory=memory,
            memory_attend_mask=memory_mask[:, None, None],
            past=past,
            step=past_keys.shape[3],
        )
        logits, state = self.model.decode_step(pieces, state)
        keys, values = (torch.stack(part) for part in zip(*state.past, strict=True))
        return logits.log_softmax(dim=1), keys, values


def with_positions(model: Seq2Seq, count: int) -> Seq2Seq:
    """Return a copy of a model whose tables of sinusoids have `count` rows, so that none grows."""
    model = copy.deepcopy(model).eval()
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):
            part.table = compute_sinusoids(count, part.table.shape[1])
    return model


def _find_depths(leaves: Tensor, spans: Tensor) -> Depths:
    """Count the ancestors of nodes and leaves. No leaf has more of them than there are nodes."""
    start, end, subtree_end = (x[..., None] for x in spans.unbind(2))
    node, leaf = (torch.arange(count, device=spans.device) for count in (spans.shape[1], leaves.shape[1]))
    below = (node[:, None] < node) & (node < subtree_end)
    over = (start <= leaf) & (leaf < end)
    return Depths(below.sum(1), over.sum(1), spans.shape[1])
