"""Positions of a sequence: sinusoidal (Vaswani et al., 2017), learned (Gehring et al., 2017)."""

import math

import torch
from torch import Tensor, nn


def compute_sinusoids(length: int, d_model: int) -> Tensor:
    """[length, d_model] float32: sines in the even dimensions, cosines in the odd ones."""
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """Adds positions; the table is no parameter and grows with the longest sequence seen."""

    def __init__(self, d_model: int, length: int = 512):
        super().__init__()
        self.register_buffer("table", compute_sinusoids(length, d_model), persistent=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """x [B, T, D] at positions first, first + 1, ... -> [B, T, D]."""
        end = first + x.shape[1]
        if end > len(self.table):
            self.table = compute_sinusoids(2 * end, x.shape[2]).to(self.table)
        return x + self.table[first:end]


class LearnedPositions(nn.Module):
    """Adds a learned vector a position; positions beyond the table share its last row."""

    def __init__(self, rows: int, d_model: int, std: float):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, d_model).normal_(std=std))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """x [B, T, D] at positions first, first + 1, ... -> [B, T, D]."""
        rows = torch.arange(first, first + x.shape[1], device=x.device).clamp(max=len(self.table) - 1)
        return x + self.table[rows]
