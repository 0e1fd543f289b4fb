"""Restrictions of a search: each forbids pieces at every step, by a log-probability of -inf.

A decoding option that forbids pieces is a class here and a line in `restrictions_of`. It works with all choosers and both caches.

Shapes: B sentences, R decoded hypotheses, V vocabulary, T pieces of the longest translation.
"""

from typing import Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.translation.hypotheses import known_all_false, length_penalties
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

# Search never produces these: UNK has no text. Their probability stays in the normalisation.
NEVER_PRODUCED = (PAD_ID, UNK_ID, BOS_ID)


class Hypotheses(Protocol):
    """Hypotheses that the model has decoded at this step, as a restriction sees them.

    `step` is the number of their pieces so far, in a captured step a tensor [1]. `pieces` [R, T + 1] or [R, step] are without
    BOS, and have no meaning from `step` on. `sentences` [R] are rows in the batch. `rows` are their places among all that the
    model has decoded.
    """

    @property
    def rows(self) -> slice: ...

    @property
    def step(self) -> int | Tensor: ...

    @property
    def pieces(self) -> Tensor: ...

    @property
    def sentences(self) -> Tensor: ...


class Restriction(Protocol):
    """Forbids pieces. It must not read other hypotheses or padding."""

    on_device: bool  # whether steps can be captured: the host reads nothing, and `step` may be a tensor

    def apply(self, log_probs: Tensor, hypotheses: Hypotheses) -> None:
        """Set `log_probs` [R, V] to -inf for pieces that must not follow. Other values stay as they are."""
        ...


class OptionalRestriction(Restriction, Protocol):
    """A restriction that a setting asks for."""

    way_out: str  # what a user can do if it leaves no translation


class Lengths:
    """The limits of length, the pieces that are never produced, and the length penalties within the limits."""

    on_device = True

    def __init__(self, batch: TreeBatch, decoding: DecodingConfig):
        num_leaves = (~batch.leaf_pad_mask).sum(1)
        # [B] in pieces. The maximum depends only on the sentence's own leaves.
        self.most = (num_leaves * decoding.max_length_factor).long() + decoding.max_length_offset
        self.shortest, self.longest = torch.stack(self.most.aminmax()).tolist()  # of these maxima
        self.penalties = length_penalties(self.longest, decoding, self.most.device)  # [longest + 1]
        self.mildest_penalty = self.penalties[self.most]
        self._min_length = decoding.min_length

    def apply(self, log_probs: Tensor, hypotheses: Hypotheses) -> None:
        step = hypotheses.step
        for piece in NEVER_PRODUCED:
            log_probs[:, piece].fill_(-torch.inf)
        on_host = isinstance(step, int)
        if on_host and self._min_length <= step < self.shortest:
            return
        full = self.most.index_select(0, hypotheses.sentences) == step
        if self._min_length and not (on_host and step >= self._min_length):
            log_probs[:, EOS_ID].masked_fill_(~full & (step < self._min_length), -torch.inf)
        if not (on_host and known_all_false(full)):
            others = torch.arange(log_probs.shape[1], device=log_probs.device) != EOS_ID
            log_probs.masked_fill_(full[:, None] & others, -torch.inf)


class NoRepeatedNgrams:
    """Forbids pieces that would complete an n-gram which the hypothesis has already (Paulus et al., 2018)."""

    on_device = True
    way_out = "set decoding.no_repeat_ngram=0"

    def __init__(self, size: int):
        self._size = size

    def apply(self, log_probs: Tensor, hypotheses: Hypotheses) -> None:
        step, pieces, size = hypotheses.step, hypotheses.pieces, self._size
        if pieces.shape[1] < size:
            return
        ngrams = pieces.unfold(1, size, 1)  # [R, N, size] of which the first step - size + 1 are complete
        starts, places = (torch.arange(count, device=pieces.device) for count in (ngrams.shape[1], size - 1))
        last = pieces.index_select(1, (step - size + 1 + places).clamp(min=0))
        again = (ngrams[..., :-1] == last[:, None]).all(2) & (starts + size <= step)
        # What has no effect goes to PAD, which is forbidden anyway.
        log_probs.scatter_(1, torch.where(again, ngrams[..., -1], PAD_ID), -torch.inf)


def restrictions_of(decoding: DecodingConfig) -> list[OptionalRestriction]:
    """Return the restrictions beside `Lengths` that the settings ask for."""
    return [NoRepeatedNgrams(decoding.no_repeat_ngram)] if decoding.no_repeat_ngram else []
