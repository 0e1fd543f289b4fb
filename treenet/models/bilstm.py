"""Bidirectional LSTM. Shapes: B batch, L leaves, D model."""

import torch
from torch import Tensor, nn

from treenet.config import ClassifierConfig, ModelConfig
from treenet.labelled import LabelledBatch
from treenet.layers.dropout import Dropout
from treenet.models.classifier import Classifier
from treenet.models.encoders import Memory, VocabSizes, build_embedding


class BiLSTMClassifier(Classifier):
    """`num_encoder_layers` layers of two directions, of d_model / 2 each; dropout before, between and after them.

    The class of an example is read from the last states of both directions.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        super().__init__()
        width = config.d_model
        self.piece_embedding = build_embedding(vocab.pieces, width)
        self.embedding_scale = width**0.5
        self.dropout = Dropout(config.dropout)
        self.forward_layers, self.backward_layers = (
            nn.ModuleList([nn.LSTM(width, width // 2, batch_first=True) for _ in range(config.num_encoder_layers)])
            for _ in range(2)
        )
        self.add_head(config, classifier, num_classes)

    def encode(self, batch: LabelledBatch) -> Memory:
        """Both directions side by side at every leaf."""
        # Padding comes last in both directions, where no real leaf sees it.
        turned = _reversed_order(batch.leaf_pad_mask)
        x = self.dropout(self.embedding_scale * self.piece_embedding(batch.leaf_pieces))
        for forward, backward in zip(self.forward_layers, self.backward_layers, strict=True):
            ahead, back = forward(x)[0], backward(_turn(x, turned))[0]
            x = self.dropout(torch.cat([ahead, _turn(back, turned)], dim=2))
        return Memory(x, batch.leaf_pad_mask)

    def summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """The last states [B, D]: forward at the last leaf, backward at the first."""
        ahead, back = memory.states.chunk(2, dim=2)
        last = (~batch.leaf_pad_mask).sum(1) - 1
        return torch.cat([ahead[torch.arange(len(last), device=last.device), last], back[:, 0]], dim=1)


def _reversed_order(pad_mask: Tensor) -> Tensor:
    """[B, L]: real positions from last to first, padding where it is."""
    positions = torch.arange(pad_mask.shape[1], device=pad_mask.device).expand(pad_mask.shape)
    lengths = (~pad_mask).sum(1, keepdim=True)
    return torch.where(pad_mask, positions, lengths - 1 - positions)


def _turn(x: Tensor, order: Tensor) -> Tensor:
    """x [B, L, D] with its positions in that order [B, L]."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
