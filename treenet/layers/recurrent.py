"""Recurrent layers of one direction: the plain LSTM or the ON-LSTM, alone or with residual and layer norm.

Shapes: B batch, T steps, D model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treenet.layers.dropout import Dropout
from treenet.layers.on_lstm import OnLSTM
from treeproc.common.arguments import check_choice

if TYPE_CHECKING:
    from treenet.config import RecurrentCell


class LSTM(nn.LSTM):
    """One layer of PyTorch's LSTM. It computes at least in float32, as the ON-LSTM does."""

    def __init__(self, d_input: int, d_hidden: int):
        super().__init__(d_input, d_hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] to hidden states [B, T, D]."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight_hh_l0.dtype))[0]


def build_recurrence(cell: RecurrentCell, d_input: int, d_hidden: int, chunk_size: int) -> LSTM | OnLSTM:
    """Build a map [B, T, d_input] -> [B, T, d_hidden]. Raises UserError if the chunks of an ON-LSTM do not fill its states."""
    check_choice("cell", cell, ("on_lstm", "lstm"))
    return LSTM(d_input, d_hidden) if cell == "lstm" else OnLSTM(d_input, d_hidden, chunk_size)


class RecurrentLayer(nn.Module):
    """A recurrence with dropout, residual and layer norm around it, like the other sub-layers (post-norm)."""

    def __init__(self, cell: RecurrentCell, d_model: int, chunk_size: int, dropout: float):
        super().__init__()
        self.recurrence = build_recurrence(cell, d_model, d_model, chunk_size)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] -> [B, T, D]."""
        return self.norm(x + self.dropout(self.recurrence(x)))
