"""The hypotheses of a beam search, and the choice among their extensions: what searches over any cache share.

Shapes: B sentences of the batch, K beam size, C hypotheses of a sentence now, R decoded hypotheses. F best extensions of a
hypothesis, T pieces so far.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.translation.hypotheses import Finished, Hypothesis
from treenet.translation.line_constraints import BatchConstraints
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID

END_TEST_EVERY = 8  # steps over whole grids; a search over live hypotheses checks every step


class Steps(Enum):
    """The ways to compute the steps of a beam search. All find the same translations, except for rounding."""

    LIVE = "live"  # decodes live hypotheses; the cache grows. The default on CPUs
    GRID = "grid"  # decodes the whole grid, so the host need not count; the cache grows
    STATIC = "static"  # decodes the whole grid over a static cache, on CUDA as a CUDA graph. The default on GPUs
    COMPILED = "compiled"  # the same, and torch.compile fuses the operations of a step


class SearchState(Protocol):
    """The state of a model between steps, one row per decoded hypothesis."""

    def select(self, rows: Tensor, beam_width: int | None = None) -> "SearchState":
        """Return the state of `rows` [R'], which may repeat, reorder and leave out rows.

        With `beam_width`, every sentence has this number of rows now, in the order of the batch. Then nothing needs to be looked
        up.
        """
        ...


class Decodable(Protocol):
    """A model that can be searched."""

    reads: InputKind

    def encode(self, batch: TreeBatch) -> Any: ...

    def start_decoding(self, memory: Any) -> SearchState:
        """Return the state for one row per sentence of the memory."""
        ...

    def decode_step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the logits [R, V] of the piece that follows `tokens` [R], and the new state."""
        ...


def max_lengths(batch: TreeBatch, decoding: DecodingConfig) -> Tensor:
    """Return the maximum length [B] of every sentence's hypotheses in pieces. It depends only on the sentence's own leaves."""
    num_leaves = (~batch.leaf_pad_mask).sum(1)
    return (num_leaves * decoding.max_length_factor).long() + decoding.max_length_offset


@dataclass
class Beam:
    """The hypotheses of all sentences in a grid [B, C]."""

    log_prob: Tensor  # [B, C] float64, -inf where a hypothesis is not live
    pieces: Tensor  # [B, C, 1 + T], BOS first
    places: Tensor  # [R] flat places in [B, C] of the hypotheses that the model decodes

    @classmethod
    def begin(cls, num_sentences: int, device: torch.device, width: int = 1) -> "Beam":
        """Make one empty hypothesis per sentence, in a grid with `width` places."""
        pieces = torch.full((num_sentences, width, 1), BOS_ID, device=device)
        return cls(first_log_prob(num_sentences, width, device), pieces, torch.arange(num_sentences * width, device=device))

    def last_pieces(self) -> Tensor:
        """Return the last piece of every decoded hypothesis, [R]."""
        return self.pieces[..., -1].flatten().index_select(0, self.places)

    def decoded_pieces(self) -> Tensor:
        """Return the pieces of every decoded hypothesis without BOS, [R, T]."""
        return self.pieces.flatten(0, 1).index_select(0, self.places)[:, 1:]

    def of_sentences(self, values: Tensor) -> Tensor:
        """Expand values of sentences [B] to values of decoded hypotheses [R]."""
        return values[:, None].expand(self.log_prob.shape).flatten().index_select(0, self.places)

    def extend(self, values: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Extend hypotheses by `candidates` [R, F] of log-probability `values`; see `extensions`."""
        return extensions(self.log_prob, self._in_grid(values), self._in_grid(candidates))

    def prefixes(self, origin: Tensor) -> Tensor:
        """Return the pieces of the hypotheses at places `origin` [B, C'] of each sentence: [B, C', 1 + T]."""
        return pieces_of(self.pieces, origin)

    def follow(self, log_prob: Tensor, pieces: Tensor, origin: Tensor, whole: bool) -> tuple["Beam", Tensor]:
        """Make the next beam, of hypotheses that extend those at `origin` [B, C'].

        Also returns, for each row of its state, the row in the state of this beam. It decodes the `whole` grid, or only live
        hypotheses.
        """
        decoded = torch.arange(len(self.places), device=self.places.device)
        rows = self._in_grid(decoded[:, None])[..., 0].gather(1, origin).flatten()
        places = torch.arange(len(rows), device=rows.device) if whole else log_prob.isfinite().flatten().nonzero()[:, 0]
        return Beam(log_prob, pieces, places), rows.index_select(0, places)

    def is_empty(self) -> Tensor:
        """Return whether no hypothesis is live, a scalar."""
        return self.log_prob.isneginf().all()

    def _in_grid(self, rows: Tensor) -> Tensor:
        """Put rows [R, F] at their places: [B, C, F], 0 elsewhere."""
        grid = rows.new_zeros(self.log_prob.numel(), rows.shape[1]).index_copy_(0, self.places, rows)
        return grid.unflatten(0, self.log_prob.shape)


def first_log_prob(num_sentences: int, width: int, device: torch.device) -> Tensor:
    """Return log-probabilities [B, width] at the start: the first place of each sentence has the empty hypothesis."""
    log_prob = torch.full((num_sentences, width), -torch.inf, dtype=torch.float64, device=device)
    log_prob[:, 0] = 0.0
    return log_prob


def extensions(log_prob: Tensor, values: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Extend hypotheses [B, C] by `candidates` [B, C, F] of log-probability `values`. Returns three tensors [B, C * F].

    They are the log-probability of the extended hypothesis, the piece, and the place in [C] of the hypothesis before. The best
    come first. Equal ones keep the order of the grid.
    """
    extended = (log_prob[:, :, None] + values).masked_fill_(log_prob.isneginf()[:, :, None], -torch.inf)
    best, index = extended.flatten(1).sort(dim=1, descending=True, stable=True)
    return best, candidates.flatten(1).gather(1, index), index // values.shape[2]


def pieces_of(pieces: Tensor, origin: Tensor) -> Tensor:
    """Return the rows of `pieces` [B, C, T] at places `origin` [B, C'] of each sentence: [B, C', T]."""
    return pieces.gather(1, origin[:, :, None].expand(-1, -1, pieces.shape[2]))


def keep_best(
    finished: Finished,
    best: Tensor,
    chosen: Tensor,
    prefixes: Tensor,
    length: int | Tensor,
    penalty: Tensor,
    mildest_penalty: Tensor,
    num_best: int,
) -> Tensor:
    """Keep the extensions of hypotheses `prefixes` [B, C, T] by `chosen` [B, C], of log-probability `best`, that find a place.

    Those that end become `finished`, with their first `length` pieces and the `penalty` of that length. Returns the
    log-probabilities [B, C] of the next beam, -inf for others and for sentences that are decided.
    """
    ranks = torch.arange(best.shape[1], device=best.device)
    kept = (ranks < (finished.beam_size - finished.count)[:, None]) & best.isfinite()
    ends = kept & (chosen == EOS_ID)
    finished.add(ends, prefixes, length, best, penalty)
    log_prob = best.masked_fill(~kept | ends, -torch.inf)
    decided = _decided(log_prob, finished.score, mildest_penalty, num_best)
    return log_prob.masked_fill(decided[:, None], -torch.inf)


def check_found(batch: TreeBatch, found: list[list[Hypothesis]], constraints: BatchConstraints | None) -> None:
    """Raise UserError if a sentence without constraints has no hypothesis, because the model's scores are not finite."""
    for row, hypotheses in enumerate(found):
        if not hypotheses and not (constraints and constraints.constrained[row]):
            line = int(batch.example_ids[row]) + 1
            raise UserError(f"line {line}: the model's scores are not finite; translate with an earlier checkpoint")


def _decided(live_log_prob: Tensor, finished_score: Tensor, mildest_penalty: Tensor, num_best: int) -> Tensor:
    """Return [B]: whether no live hypothesis [B, C] of a sentence can enter its n-best list.

    An equal score does not enter: the finished hypothesis is shorter and comes first.
    """
    attainable = live_log_prob.max(dim=1).values / mildest_penalty
    return finished_score.sort(dim=1, descending=True).values[:, num_best - 1] >= attainable
