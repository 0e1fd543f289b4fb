"""What every masked language model shares beside the encoder (Devlin et al., 2019). Not a model itself.

Shapes: B batch, L leaves, D model, V pieces.
"""

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.models.encoders import Encoder, VocabSizes, tied_logits
from treeproc.shards.schema import PAD_ID


class MaskedLM(Encoder):
    """An encoder whose states predict the pieces of its leaves, with the table that it reads them by.

    The mask is no piece: the vocabulary of a data set stays as it is, and the mask's vector is a parameter of its own that
    stands where leaves have the id V, which is never predicted.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        self.mask_id = vocab.pieces
        self.mask_embedding = nn.Parameter(torch.randn(config.d_model) * config.d_model**-0.5)

    def embed_pieces(self, pieces: Tensor, first: int = 0) -> Tensor:
        """pieces [B, T], V where masked, at positions from `first` -> [B, T, D]."""
        masked = pieces == self.mask_id
        x = self.piece_embedding(pieces.masked_fill(masked, PAD_ID))
        x = torch.where(masked[..., None], self.mask_embedding, x)
        return self.positions(self.embedding_scale * x, first)

    def forward(self, batch: TreeBatch) -> Tensor:
        """The states [B, L, D] that the logits of the leaves are computed from."""
        return self.encode(batch).states[:, : batch.leaf_pieces.shape[1]]

    def compute_logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V] with the tied table; half precision becomes float32."""
        return tied_logits(x, self.piece_embedding)
