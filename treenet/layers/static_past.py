"""Keys and values of self-attention in tensors of fixed shape: the past of hypotheses in a beam search on a GPU.

A sentence has M places for hypotheses. At every position, the hypothesis at a place writes its key and value there, and they
never move. When the beam is reordered, only a small table of paths changes. It tells at which place each hypothesis was at each
position. A hypothesis attends to all places of its sentence, and a mask hides those that are not on its path. So a step reads
the past once and writes one position.

Shapes: B sentences, M places of a sentence, C positions that the tensors can hold, H heads, K = D / H.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NOWHERE = -1


@dataclass
class StaticPast:
    """The past of one layer at one position."""

    keys: Tensor  # [B, H, M, C, K]
    values: Tensor  # [B, H, M, C, K]
    position: Tensor  # [1] int64
    attend_bias: Tensor  # [B, 1, M, M * C], see `as_bias`

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, M, K] of this position. Returns those of all positions [B, H, M * C, K]."""
        self.keys.index_copy_(3, self.position, keys[:, :, :, None])
        self.values.index_copy_(3, self.position, values[:, :, :, None])
        return self.keys.flatten(2, 3), self.values.flatten(2, 3)

    def distances(self) -> Tensor:
        """Return how far each key is from this position, [M * C]: 0 for the position itself, negative before it."""
        places, capacity = self.keys.shape[2:4]
        return (torch.arange(capacity, device=self.position.device) - self.position).repeat(places)


class Paths:
    """At which place of its sentence each hypothesis was at each position: [B, M, C] int64, and -1 from the next position on."""

    def __init__(self, num_sentences: int, beam_width: int, capacity: int, device: torch.device):
        self.table = torch.full((num_sentences, beam_width, capacity), _NOWHERE, device=device)

    def stay(self, position: Tensor) -> None:
        """Note that each hypothesis is at its own place at this `position` [1]."""
        own = torch.arange(self.table.shape[1], device=position.device)[:, None]
        self.table.index_copy_(2, position, own.expand(len(self.table), -1, -1))

    def select(self, rows: Tensor) -> None:
        """Go on with hypotheses `rows` [B * M] of all B * M, each of the sentence of its new place."""
        self.table.copy_(self.table.flatten(0, 1).index_select(0, rows).view_as(self.table))

    def attend_mask(self) -> Tensor:
        """Return [B, 1, M, M * C]: whether a hypothesis attends to what a place of its sentence has stored at a position."""
        places = torch.arange(self.table.shape[1], device=self.table.device)
        return (self.table[:, :, None] == places[:, None]).flatten(2)[:, None]

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions."""
        self.table = grown(self.table, 2, capacity, _NOWHERE)


def as_bias(attend_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to the scores of attention: 0 where `attend_mask` is True, else -inf. So no layer converts the mask."""
    return torch.zeros(attend_mask.shape, dtype=dtype, device=attend_mask.device).masked_fill_(~attend_mask, -torch.inf)


def grown(x: Tensor, dim: int, size: int, filling: int = 0) -> Tensor:
    """Copy `x` into a tensor with `size` entries along `dim`. The new entries are `filling`."""
    shape = list(x.shape)
    shape[dim] = size
    out = x.new_full(shape, filling)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
