"""Positions: sinusoids of the place in the sentence or of the depth in its dependency tree, and learned vectors.

Sources: Vaswani et al. (2017), Wang et al. (2019) for depths, Gehring et al. (2017) for learned vectors.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.linear import build_linear


def compute_sinusoids(length: int, d_model: int) -> Tensor:
    """Return [length, d_model] float32: sines in the even dimensions, cosines in the odd ones."""
    if torch.get_default_device().type == "meta":
        return torch.empty(length, d_model)  # only the shape is wanted, and the rest would load PyTorch's compiler
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """Adds positions. The table is not a parameter, and grows with the longest sequence so far."""

    def __init__(self, d_model: int, length: int = 512):
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", compute_sinusoids(length, d_model), persistent=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Add positions first, first + 1, ... to x [B, T, D] -> [B, T, D]."""
        return x + self.rows(first + x.shape[1])[first:]

    def at(self, x: Tensor, position: Tensor) -> Tensor:
        """Add the one `position` [1] to all of x [B, M, D]. It must be in the table: call `rows` first."""
        return x + self.table.index_select(0, position)

    def rows(self, length: int) -> Tensor:
        """Return positions 0 to length - 1: [length, D]."""
        if length > len(self.table):
            with torch.inference_mode(False):  # a table of a search may be trained with later
                self.table = compute_sinusoids(2 * length, self.table.shape[1]).to(self.table)
        return self.table[:length]


class StructuralPositions(nn.Module):
    """Adds absolute structural positions: the sinusoid of a word's depth, fused with that of its place in the sentence.

    The formula is tanh(W_a PE(place) + W_b PE(depth) + b).
    """

    def __init__(self, sinusoids: SinusoidalPositions, fused: bool):
        super().__init__()
        self.sinusoids = sinusoids
        d_model = sinusoids.table.shape[1]
        self.place, self.depth = (build_linear(d_model, d_model) for _ in range(2)) if fused else (None, None)

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        """Add them to x [B, L, D], with depth [B, L] below L -> [B, L, D]."""
        table = self.sinusoids.rows(x.shape[1])
        if self.place is None:
            return x + F.embedding(depth, table)
        return x + torch.tanh(self.place(table) + F.embedding(depth, self.depth(table)))


class LearnedPositions(nn.Module):
    """Adds a learned vector per position. Positions beyond the table share its last row."""

    def __init__(self, rows: int, d_model: int, std: float):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, d_model).normal_(std=std))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Add positions first, first + 1, ... to x [B, T, D] -> [B, T, D]."""
        rows = torch.arange(first, first + x.shape[1], device=x.device).clamp(max=len(self.table) - 1)
        return x + self.table[rows]
