"""Masked language models (Devlin et al., 2019): an encoder whose states predict the pieces of its leaves.

Shapes: B batch, L leaves, D model, V pieces.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.models.encoders.base import Encoder, PieceEmbedding
from treeproc.shards.schema import PAD_ID


class MaskedPieceEmbedding(PieceEmbedding):
    """The table of pieces, and the vector of the mask. A leaf with the id V gets that vector.

    The mask is not a piece. So the vocabulary of a data set stays the same, and a model never predicts the mask.
    """

    def __init__(self, pieces: int, d_model: int):
        super().__init__(pieces, d_model)
        self.mask_id = pieces
        self.mask = nn.Parameter(torch.randn(d_model) * d_model**-0.5)

    def forward(self, pieces: Tensor) -> Tensor:
        """Embed pieces [..., T], V for the mask -> [..., T, D]."""
        masked = pieces == self.mask_id
        x = F.embedding(pieces.masked_fill(masked, PAD_ID), self.weight)
        return self.scale * torch.where(masked[..., None], self.mask, x)


class MaskedLM(nn.Module):
    """An encoder with a `MaskedPieceEmbedding`. The output softmax uses the same table.

    `mask_id` is the id of the mask among the pieces of leaves.
    """

    def __init__(self, encoder: Encoder, mask_id: int):
        super().__init__()
        self.encoder = encoder
        self.mask_id = mask_id

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the encoder."""
        return self.encoder.reads

    def forward(self, batch: TreeBatch) -> Tensor:
        """Return the states [B, L, D] that give the logits of the leaves."""
        return self.encoder(batch).states[:, : batch.leaf_pieces.shape[1]]

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits [..., D] -> [..., V] with the tied table. Half precision becomes float32."""
        return self.encoder.embedding.logits(x)
