"""Multi-head attention: self-attention of encoders, causal self-attention, cross-attention; plain or over trees.

Shapes: B batch, T queries, S keys, D model, H heads, K = D / H. An `attend_mask` broadcasts to
[B, H, T, S]. It is bool, True where a query may attend, or a bias: numbers that are added to the scores, -inf where it may not.
The equations (`reference`) and `attend_related` take only bool masks.

A beam search on a GPU has keys and values of self-attention in tensors of fixed shape. A sentence has M places for hypotheses. At
every position, the hypothesis at a place writes its key and value there, and they never move. When the beam is reordered, only a
small table of paths changes. It tells at which place each hypothesis was at each position. A hypothesis attends to all places of
its sentence, and a mask hides those that are not on its path. So a step reads the past once and writes one position. C are the
positions that the tensors can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treenet.layers import reference
from treenet.layers.accumulation import HierarchicalAccumulation
from treenet.layers.core import ATTENTION_GAIN, build_linear
from treenet.layers.scaled_dot_product import attend, attend_subtrees, merge_heads, split_heads
from treenet.structure import TreeStructure

if TYPE_CHECKING:
    from treenet.config import TreeAttentionConfig


_NOWHERE = -1


@dataclass
class StaticPast:
    """The past of one layer at one position."""

    keys: Tensor  # [B, H, M, C, K]
    values: Tensor  # [B, H, M, C, K]
    position: Tensor  # [1] int64
    attend_bias: Tensor  # [B, 1, M, M * C], see `scaled_dot_product.as_bias`

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, M, K] of this position. Returns those of all positions [B, H, M * C, K]."""
        self.keys.index_copy_(3, self.position, keys[:, :, :, None])
        self.values.index_copy_(3, self.position, values[:, :, :, None])
        return self.keys.flatten(2, 3), self.values.flatten(2, 3)

    def distances(self) -> Tensor:
        """Return how far each key is from this position, [M * C]: 0 for the position itself, negative before it."""
        places, capacity = self.keys.shape[2:4]
        return (torch.arange(capacity, device=self.position.device) - self.position).repeat(places)


@dataclass
class GrowingPast:
    """The past of one layer, which is in new memory after each step."""

    keys: Tensor  # [R', H, T, K]
    values: Tensor  # [R', H, T, K]
    rows: Tensor | None = None  # [R] hypotheses that go on, of R'; None: all, in order
    attend_bias = None

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the hypotheses that go on, and of their next position [R, H, 1, K], as [R, H, T + 1, K]."""
        return self._append(self.keys, keys), self._append(self.values, values)

    def distances(self) -> Tensor:
        """Return how far each key is from the next position, [T + 1]."""
        return torch.arange(-self.keys.shape[2], 1, device=self.keys.device)

    def _append(self, old: Tensor, new: Tensor) -> Tensor:
        if self.rows is None:
            return torch.cat([old, new.contiguous()], dim=2)  # fast, because both parts are contiguous
        if torch.is_grad_enabled() or not old.shape[2]:
            return torch.cat([old.index_select(0, self.rows), new], dim=2)
        out = old.new_empty(len(new), old.shape[1], old.shape[2] + 1, old.shape[3])  # one copy instead of two
        torch.index_select(old, 0, self.rows, out=out[:, :, :-1])
        out[:, :, -1:] = new
        return out


Past = GrowingPast | StaticPast


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


def grown(x: Tensor, dim: int, size: int, filling: int = 0) -> Tensor:
    """Copy `x` into a tensor with `size` entries along `dim`. The new entries are `filling`."""
    shape = list(x.shape)
    shape[dim] = size
    out = x.new_full(shape, filling)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


KeysValues = tuple[Tensor, Tensor]  # both [B, H, S, K]


def padding_to_attend_mask(pad_mask: Tensor) -> Tensor:
    """Map pad_mask [B, S], True = padding -> attend_mask [B, 1, 1, S]. A row of padding alone keeps its first key: no NaN."""
    attend = ~pad_mask
    attend[:, 0] |= pad_mask.all(dim=1)
    return attend[:, None, None, :]


@dataclass
class BeamLayout:
    """Layout of a beam search: R hypotheses, as queries over the memories of A sentences, in a padded grid [A, M].

    M is the largest number of hypotheses of a sentence. The memory of a sentence is kept once for all its hypotheses.
    """

    num_slots: int  # A * M
    beam_width: int  # M
    slot: Tensor | None  # [R] flat position in [A, M]; None when the hypotheses fill the grid in this order

    @classmethod
    def full(cls, num_sentences: int, beam_width: int) -> BeamLayout:
        """Build a layout with as many hypotheses of every sentence, sentence after sentence."""
        return cls(num_sentences * beam_width, beam_width, None)

    @classmethod
    def build(cls, sentence: Tensor, counts: Tensor) -> BeamLayout:
        """Build from `sentence` [R], the index of the memory of a hypothesis, and the number [A] of hypotheses of each memory."""
        num_sentences, beam_width = len(counts), int(counts.max())
        order = sentence.argsort(stable=True)
        rank = torch.empty_like(sentence)
        rank[order] = torch.arange(len(sentence), device=sentence.device) - (counts.cumsum(0) - counts)[sentence[order]]
        slot = sentence * beam_width + rank
        full = num_sentences * beam_width == len(sentence) and torch.equal(slot, torch.arange(len(slot), device=slot.device))
        return cls(num_sentences * beam_width, beam_width, None if full else slot)

    def pad(self, x: Tensor) -> Tensor:
        """Map [R, 1, D] -> [A, M, D], padded with 0 where a sentence has fewer than M hypotheses."""
        if self.slot is None and self.beam_width == 1:
            return x
        if self.slot is not None:
            x = x.new_zeros(self.num_slots, *x.shape[1:]).index_copy(0, self.slot, x)
        return x.reshape(-1, self.beam_width, x.shape[2])

    def unpad(self, x: Tensor) -> Tensor:
        """Map [A, M, D] -> [R, 1, D], without the padding."""
        if self.slot is None and self.beam_width == 1:
            return x
        x = x.flatten(0, 1)[:, None]
        return x if self.slot is None else x.index_select(0, self.slot)


class _Attention(nn.Module):
    """Base class of attention layers: heads, dropout, the output projection."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, bias: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.output = build_linear(d_model, d_model, bias=bias)

    @property
    def dropout_p(self) -> float:
        """Return the probability with which an attention weight is dropped now."""
        return self.dropout if self.training else 0.0

    def split_heads(self, x: Tensor) -> Tensor:
        """Map [B, S, D] -> [B, H, S, K]."""
        return split_heads(x, self.num_heads)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attend_mask: Tensor | None = None,
        causal: bool = False,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax(Q K^T / sqrt(K)) V W^O (equations 1, 2): [B, H, T, K] and keys, values [B, H, S, K] -> [B, T, D]."""
        return self.output(merge_heads(attend(queries, keys, values, attend_mask, self.dropout_p, causal, prior)))


class SelfAttention(_Attention):
    """Encoder self-attention; with `tree`, equations 12 to 18 over leaves and nodes."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, tree: TreeAttentionConfig | None = None, bias: bool = True):
        super().__init__(d_model, num_heads, dropout, bias)
        self.queries_keys_values = build_linear(d_model, d_model, num_blocks=3, gain=ATTENTION_GAIN, bias=bias)
        self.accumulation = HierarchicalAccumulation(d_model, num_heads, tree) if tree else None

    def project(self, x: Tensor, structure: TreeStructure | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x, all [B, S, D]; those of nodes accumulated."""
        queries, keys, values = self.queries_keys_values(x).chunk(3, dim=2)
        if self.accumulation is not None:
            keys, values = self.accumulation(x, keys, values, structure)
        return queries, keys, values

    def forward(
        self,
        x: Tensor,
        attend_mask: Tensor | None = None,
        structure: TreeStructure | None = None,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Map x [B, S, D] -> [B, S, D].

        `structure` is required when the attention is over trees; without an `attend_mask`, positions then attend by the
        trees (equation 11). Without trees, None attends to all positions. A `prior` [B, S, S] multiplies the weights of every
        head, and needs an `attend_mask`.
        """
        queries, keys, values = self.project(x, structure)
        if self.accumulation is not None and structure is not None:
            trees = queries, keys, values, structure, self.num_heads, self.dropout_p
            if self.accumulation.by_equations:
                return self.output(reference.attend_within(*trees, masked=attend_mask is None))
            if attend_mask is None:
                return self.output(attend_subtrees(*trees))
        queries, keys, values = map(self.split_heads, (queries, keys, values))
        return self.attend(queries, keys, values, attend_mask, prior=prior)


class PrefixAttention(SelfAttention):
    """Self-attention of language models: every position attends to itself and to earlier ones. It keeps no past."""

    def forward(self, x: Tensor, attend_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # no trees
        """Map x [B, T, D] -> [B, T, D]. Padding that comes last needs no mask. With an `attend_mask`, that decides alone."""
        queries, keys, values = map(self.split_heads, self.project(x))
        return self.attend(queries, keys, values, attend_mask, causal=attend_mask is None)


class CausalSelfAttention(_Attention):
    """Decoder self-attention over the past, with a key/value cache for decoding."""

    def __init__(self, d_model: int, num_heads: int, dropout: float):
        super().__init__(d_model, num_heads, dropout)
        self.queries_keys_values = build_linear(d_model, d_model, num_blocks=3, gain=ATTENTION_GAIN)

    def start(self, like: Tensor) -> KeysValues:
        """Return the `past` before the first position, for `like` [B, H, S, K]."""
        return like[:, :, :0], like[:, :, :0]

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, KeysValues]:
        """Map x [B, T, D] -> [B, T, D], and return all keys and values so far. With `past`, x is the one next position (T = 1).

        With a `StaticPast`, x [B, M, D] is the next position of M hypotheses per sentence.
        """
        projected = self.queries_keys_values(x)
        if past is None:
            queries, keys, values = map(self.split_heads, projected.chunk(3, dim=2))
            return self.attend(queries, keys, values, causal=True), (keys, values)
        # Fewer operations, but a slower gradient.
        queries, keys, values = split_heads(projected, 3 * self.num_heads).chunk(3, dim=1)
        stored = past.write(keys, values)
        return self.attend(queries, *stored, past.attend_bias), stored


class CrossAttention(_Attention):
    """Decoder cross-attention; with `tree`, equations 21 to 24. No subtree mask: queries are not part of the tree."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, tree: TreeAttentionConfig | None = None, bias: bool = True):
        super().__init__(d_model, num_heads, dropout, bias)
        self.queries = build_linear(d_model, d_model, gain=ATTENTION_GAIN, bias=bias)
        self.keys_values = build_linear(d_model, d_model, num_blocks=2, gain=ATTENTION_GAIN, bias=bias)
        self.accumulation = HierarchicalAccumulation(d_model, num_heads, tree) if tree else None

    def project_memory(self, memory: Tensor, structure: TreeStructure | None = None) -> KeysValues:
        """Project memory [B, S, D] to keys and values [B, H, S, K]. They depend on the source alone: compute them once."""
        keys, values = self.keys_values(memory).chunk(2, dim=2)
        if self.accumulation is not None:
            keys, values = self.accumulation(memory, keys, values, structure)
        return self.split_heads(keys), self.split_heads(values)

    def forward(
        self,
        x: Tensor,
        keys_values: KeysValues,
        attend_mask: Tensor | None = None,
        layout: BeamLayout | None = None,
        structure: TreeStructure | None = None,
    ) -> Tensor:
        """Let x [B, T, D] attend to projected memory -> [B, T, D]; with `layout`, x is [R, 1, D], the memory of A sentences.

        The reference implementation needs the `structure`, whose number of leaves parts leaves from nodes. Raises ValueError
        without one.
        """
        queries = self.queries(x)
        if layout is not None:
            queries = layout.pad(queries)
        heads = self.split_heads(queries), *keys_values, attend_mask
        if self.accumulation is not None and self.accumulation.by_equations:
            if structure is None:
                raise ValueError("cross-attention with implementation=reference needs the trees; give it the structure")
            attended = merge_heads(reference.attend_across(*heads, structure.num_leaves, self.dropout_p))
        else:
            attended = merge_heads(attend(*heads, self.dropout_p))
        return self.output(attended if layout is None else layout.unpad(attended))
