"""Hypotheses of a search: restrictions of their pieces, scores of those that are finished, and the most probable next pieces.

A restriction forbids pieces at every step, by a log-probability of -inf. A decoding option that forbids pieces is a class here
and a line in `restrictions_of`. It works with all choosers and both caches.

Shapes: B sentences, K beam size, R decoded hypotheses, V vocabulary, T pieces of the longest translation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treeproc.common.errors import UserError
from treeproc.shards.schema import EOS_ID, PAD_ID


class TakesAllAtOnce:
    """A chooser that takes the log-probabilities of all decoded hypotheses, in one part; see `Chooser`."""

    rows = slice(None)

    def parts(self) -> list[Self]:
        return [self]

    def propose(self, log_probs: Tensor, part: Self) -> Tensor:
        """Return the log-probabilities [R, V] as they are."""
        return log_probs


def normalise(logits: Tensor) -> Tensor:
    """Return log-probabilities [R, V] of logits, in float32. On CPUs, they overwrite logits of this type."""
    logits = logits.float()
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return logits.log_softmax(dim=1)
    return torch.log_softmax(logits, dim=1, out=logits)


def best_pieces(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best values and pieces of rows [R, V] of float32, each [R, count].

    Of equal finite values, the lowest ids come first.

    `topk` alone does not define which of several equal values it returns.
    """
    if log_probs.device.type != "cpu":
        return best_by_key(log_probs, count)
    most = min(count + 1, log_probs.shape[1])  # one value more shows whether the cut divides equal values
    values, pieces = _largest(log_probs, most)
    if not values.diff(dim=1).all():
        pieces = _in_order(log_probs, values, pieces, count)
        values = log_probs.gather(1, pieces)
    return values[:, :count], pieces[:, :count]


def _in_order(log_probs: Tensor, values: Tensor, pieces: Tensor, count: int) -> Tensor:
    """Return the best pieces in the order of `best_pieces`, from the `count + 1` largest values, descending, and their pieces.

    All are [R, F].
    """
    tied = (values[:, count - 1] == values[:, -1]) & values[:, count - 1].isfinite() & (values.shape[1] > count)
    values, pieces = values[:, :count], pieces[:, :count]
    if tied.any():
        pieces[tied] = log_probs[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    pieces, order = pieces.sort(dim=1)
    return pieces.gather(1, values.gather(1, order).sort(dim=1, descending=True, stable=True).indices)


_BLOCK = 64  # columns
_FEW = 2**16  # values, of which `topk` alone finds the largest sooner


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of rows [R, V], descending, and their columns.

    `topk` looks at one value after the other. The maxima of blocks come from vectors of values, and the largest values are in the
    blocks of the largest maxima.
    """
    rows, columns = x.shape
    blocks = columns // _BLOCK
    if blocks < 4 * count or x.numel() < _FEW:
        return x.topk(count, dim=1)
    in_blocks = x.unfold(1, _BLOCK, _BLOCK)
    best = in_blocks.amax(2).topk(count, dim=1, sorted=False).indices
    candidates = in_blocks[torch.arange(rows)[:, None], best].flatten(1)
    if rest := columns - blocks * _BLOCK:
        candidates = torch.cat([candidates, x[:, -rest:]], dim=1)
        best = F.pad(best, (0, 1), value=blocks)
    values, places = candidates.topk(count, dim=1)
    return values, best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK


def best_by_key(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `best_pieces` without reading the values on the host. Integer keys order them as floats are ordered, then by ids.

    On CPUs, it takes at least three times as long.
    """
    bits = log_probs.view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    keys = torch.where(bits < 0, -magnitude, magnitude) << 32
    keys -= torch.arange(log_probs.shape[1], device=log_probs.device)
    pieces = keys.topk(count, dim=1).indices
    return log_probs.gather(1, pieces), pieces


def known_all_false(mask: Tensor) -> bool:
    """Return whether a mask is known to be False everywhere. On other devices than CPUs nothing is known: the host would wait."""
    return mask.device.type == "cpu" and not mask.any()


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation: pieces without EOS, penalised score, sum of log-probabilities with EOS; NaN of an empty line."""

    ids: tuple[int, ...]
    score: float
    log_prob: float


def length_penalties(max_length: int, decoding: DecodingConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return divisors [max_length + 1] of the log-probability by number of pieces, EOS not counted in the index.

    The length itself counts EOS: `length` is (pieces + 1)^a, `gnmt` is ((5 + pieces + 1) / 6)^a (Wu et al. 2016, eq 14, with beta
    = 0).
    """
    length = torch.arange(1, max_length + 2, dtype=torch.float64, device=device)
    base = length if decoding.length_penalty_form == "length" else (5 + length) / 6
    return base**decoding.length_penalty


def check_num_best(num_best: int, decoding: DecodingConfig, name: str = "the number of best translations") -> None:
    """Raise UserError if a search by these settings does not find so many translations of a line."""
    most = decoding.most_translations
    if num_best < 1 or (most is not None and num_best > most):
        limit = f"from 1 to {'beam_size' if decoding.method == 'beam' else 'mbr_samples'} = {most}" if most else "at least 1"
        raise UserError(f"{name} must be {limit}, but is {num_best}")


class Finished:
    """Finished hypotheses of all sentences of a batch, at most K for each sentence. Column K takes those that are not kept."""

    def __init__(self, num_sentences: int, beam_size: int, max_length: int, device: torch.device):
        self.count = torch.zeros(num_sentences, dtype=torch.long, device=device)
        self._score = torch.full((num_sentences, beam_size + 1), -torch.inf, dtype=torch.float64, device=device)
        self._log_prob = self._score.clone()
        self._length = torch.zeros((num_sentences, beam_size + 1), dtype=torch.long, device=device)
        self._pieces = torch.full((num_sentences, beam_size + 1, max_length), PAD_ID, device=device)

    @property
    def score(self) -> Tensor:
        """Return the scores [B, K], -inf where there is no hypothesis yet."""
        return self._score[:, :-1]

    def add(self, ends: Tensor, pieces: Tensor, length: int | Tensor, log_prob: Tensor, penalties: Tensor) -> None:
        """Keep the first `length` of `pieces` [B, K, T] where `ends` [B, K] is True, with scores by `penalties` of lengths.

        In a captured step, the length is a tensor [1]. Other steps in which no hypothesis ends are skipped on CPUs.
        """
        if isinstance(length, int) and known_all_false(ends):
            return
        place = torch.where(ends, self.count[:, None] + ends.cumsum(1) - 1, self.score.shape[1])
        self._pieces.scatter_(1, place[:, :, None].expand(-1, -1, pieces.shape[2]), pieces)
        self._length.scatter_(1, place, length if isinstance(length, int) else length.expand(place.shape))
        self._log_prob.scatter_(1, place, log_prob)
        self._score.scatter_(1, place, log_prob / penalties[length])
        self.count += ends.sum(1)

    def n_best(self, num_best: int) -> list[list[Hypothesis]]:
        """Return the `num_best` best hypotheses of every sentence, best first."""
        lengths = self._length.tolist()
        pieces = self._pieces[:, :, : max(map(max, lengths))].tolist()
        columns = zip(self.count.tolist(), self._score.tolist(), self._log_prob.tolist(), lengths, pieces, strict=True)
        best = []
        for count, *own in columns:
            found = islice(zip(*own, strict=True), count)
            best.append(sort_hypotheses([Hypothesis(tuple(ids[:end]), *scores) for *scores, end, ids in found])[:num_best])
        return best


def sort_hypotheses(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return hypotheses, best first. Equal scores are ordered by length, then by ids."""
    return sorted(hypotheses, key=lambda h: (-h.score, len(h.ids), h.ids))


# Search never produces these: UNK has no text. Their probability stays in the normalisation.
NEVER_PRODUCED = slice(PAD_ID, EOS_ID)


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
        log_probs[:, NEVER_PRODUCED].fill_(-torch.inf)
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
