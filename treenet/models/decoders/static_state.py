"""The state of a beam search on a GPU: every step has the same shapes, in the same memory, until the next capacity.

Shapes: B sentences, M hypotheses of each, S memory positions, C positions that the state can hold, H heads, K = D / H.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treenet.layers.attention import KeysValues, padding_to_attend_mask
from treenet.layers.static_past import Paths, StaticPast, as_bias, grown

FIRST_CAPACITY = 32  # positions; then twice as many, whenever they are used up


@dataclass
class StaticState:
    """M hypotheses of each of B sentences, sentence after sentence. Steps and selections change it in place."""

    memory: list[KeysValues]  # per layer, [B, H, S, K]
    memory_bias: Tensor  # [B, 1, 1, S], -inf at padding, else 0
    past: list[KeysValues]  # per layer, [B, H, M, C, K]
    paths: Paths
    position: Tensor  # [1] int64, of the next step

    @classmethod
    def begin(cls, pad_mask: Tensor, memory: list[KeysValues], beam_width: int, dtype: torch.dtype) -> "StaticState":
        """Make `beam_width` empty hypotheses for each sentence. `pad_mask` [B, S] of the memory is True at padding.

        Self-attention has keys and values of type `dtype`.
        """
        capacity, device = FIRST_CAPACITY, pad_mask.device

        def empty(like: Tensor) -> Tensor:
            batch, heads, _, width = like.shape
            return torch.zeros(batch, heads, beam_width, capacity, width, dtype=dtype, device=device)

        past = [(empty(keys), empty(values)) for keys, values in memory]
        paths = Paths(len(pad_mask), beam_width, capacity, device)
        position = torch.zeros(1, dtype=torch.long, device=device)
        return cls(memory, as_bias(padding_to_attend_mask(pad_mask), dtype), past, paths, position)

    @property
    def beam_width(self) -> int:
        """Return M."""
        return self.paths.table.shape[1]

    @property
    def capacity(self) -> int:
        """Return C."""
        return self.paths.table.shape[2]

    def grow(self) -> None:
        """Double the capacity, in new memory. What is stored stays."""
        capacity = 2 * self.capacity
        self.past = [(grown(keys, 3, capacity), grown(values, 3, capacity)) for keys, values in self.past]
        self.paths.grow(capacity)

    def next_pasts(self) -> list[StaticPast]:
        """Return the past of each layer at the next position, before its keys and values are stored."""
        self.paths.stay(self.position)
        bias = as_bias(self.paths.attend_mask(), self.past[0][0].dtype)
        return [StaticPast(keys, values, self.position, bias) for keys, values in self.past]

    def select(self, rows: Tensor, beam_width: int | None = None) -> "StaticState":
        """Go on with hypotheses `rows` [B * M], each of the sentence of its new place. `beam_width` is always M."""
        self.paths.select(rows)
        return self
