"""The choosers of beam search and of diverse beam search: the hypotheses of all sentences, and the choice of their extensions.

A sentence owns K places. Every step extends its live hypotheses by one piece and keeps the most probable extensions, one for each
place. An extension by EOS is finished and holds its place until the end.

A sentence is finished when all its places are finished, or when no live hypothesis can still enter its n-best list. The second
test is exact, because log-probabilities only fall. The best end of a live hypothesis with log-probability p is p at the maximum
length, where the length penalty is mildest. So an early stop never changes a result, with `gnmt` and with `length`. Beam size 1
is greedy search.

Hypotheses stand in a grid [B, K]. If one is not live, its log-probability there is -inf. On CPUs, only live hypotheses are
decoded. Other devices decode the whole grid, because they would have to wait while the host counts the live ones. There, the host
checks every END_TEST_EVERY steps whether the search has ended.

Shapes: B sentences of the batch, K beam size, R decoded hypotheses, F best extensions of a hypothesis, V vocabulary. G groups,
W = K / G hypotheses of a group, T pieces of the longest translation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treenet.translation.caches import Steps
from treenet.translation.hypotheses import (
    Finished,
    Hypotheses,
    Hypothesis,
    Lengths,
    TakesAllAtOnce,
    best_by_key,
    best_pieces,
    sort_hypotheses,
)
from treenet.translation.line_constraints import RequiredPhrases
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID

END_TEST_EVERY = 8  # steps over whole grids; a search over live hypotheses checks every step
ROWS_OF_PART = 256  # so few that the log-probabilities of a part are small


@dataclass(frozen=True)
class _Part:
    """Some of the decoded hypotheses of a beam."""

    beam: "Beam"
    rows: slice
    places: Tensor  # [R'] flat in the grid

    @property
    def step(self) -> int | Tensor:
        return self.beam.step

    @property
    def pieces(self) -> Tensor:
        return self.decoded(self.beam._pieces)

    @property
    def sentences(self) -> Tensor:
        return self.decoded(self.beam._sentences)

    def decoded(self, grid: Tensor) -> Tensor:
        """See `Beam.decoded`."""
        return grid.flatten(0, 1).index_select(0, self.places)


class Beam:
    """The hypotheses of a beam search and those that are finished. Steps change the tensors in place.

    If `captured`, every step has the same operations at the same addresses, and the number of pieces is a tensor.
    """

    rows = slice(None)

    def __init__(
        self,
        lengths: Lengths,
        width: int,
        num_best: int,
        steps: Steps = Steps.LIVE,
        captured: bool = False,
        required: RequiredPhrases | None = None,
    ):
        self._lengths, self._num_best, self._required = lengths, num_best, required
        count, device = len(lengths.most), lengths.most.device
        self._numbers = torch.arange(count * width, device=device).view(count, width)
        self._sentences = self._numbers // width
        self._places_of_pieces = torch.arange(lengths.longest + 1, device=device)
        self.log_prob = torch.full((count, width), -torch.inf, dtype=torch.float64, device=device)  # -inf: not live
        self.log_prob[:, 0] = 0.0
        self._last = torch.full_like(self._numbers, BOS_ID)
        self._pieces = torch.full((count, width, lengths.longest + 1), PAD_ID, device=device)  # [B, K, T + 1] without BOS
        self.step: int | Tensor = torch.zeros(1, dtype=torch.long, device=device) if captured else 0  # number of pieces
        self.finished = Finished(count, width, lengths.longest + 1, device)
        self._whole = steps is not Steps.LIVE
        # [R] flat places of the decoded hypotheses; None for the whole grid.
        self._places = None if steps.is_static else self._numbers[:, 0].contiguous()

    @property
    def tokens(self) -> Tensor:
        """Return the last piece of every decoded hypothesis, [R]."""
        return self.decoded(self._last)

    @property
    def pieces(self) -> Tensor:
        """Return the pieces of every decoded hypothesis, [R, T + 1]. Those from `step` on have no meaning."""
        return self.decoded(self._pieces)

    @property
    def sentences(self) -> Tensor:
        """Return the sentence of every decoded hypothesis, [R]."""
        return self.decoded(self._sentences)

    def decoded(self, grid: Tensor) -> Tensor:
        """Return the rows [R, ...] of a grid [B, K, ...] that are decoded."""
        rows = grid.flatten(0, 1)
        return rows if self._places is None else rows.index_select(0, self._places)

    def parts(self) -> Sequence[Hypotheses]:
        """Return the decoded hypotheses in parts, whose log-probabilities are computed one part after the other."""
        if (places := self._places) is None or len(places) <= ROWS_OF_PART:
            return [self]
        cuts = (slice(first, first + ROWS_OF_PART) for first in range(0, len(places), ROWS_OF_PART))
        return [_Part(self, cut, places[cut]) for cut in cuts]

    def propose(self, log_probs: Tensor, part: "Beam | _Part") -> tuple[Tensor, Tensor]:
        """Return the values and pieces, each [R, F], by which the hypotheses of a part may be extended.

        `log_probs` [R, V] are those of all pieces.
        """
        best_of_rows = best_pieces if isinstance(self.step, int) else best_by_key
        values, candidates = best_of_rows(log_probs, min(self.log_prob.shape[1], log_probs.shape[1]))
        if self._required:
            return self._required.propose(log_probs, values, candidates, self._past(), part.decoded)
        return values, candidates

    def choose(self, proposals: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Extend every hypothesis by one of the pieces that are proposed for it, and keep the best.

        Returns, for each hypothesis that is decoded next, the row in [R] of the one that it extends.
        """
        best, chosen, origin = self._extend(proposals)
        return self._follow(best, chosen, origin, self._find_place(best), best)

    def has_ended(self, num_steps: int) -> bool:
        """Return whether no hypothesis is live after this number of steps. If the whole grid is decoded, it may be late."""
        if self._whole:
            return num_steps % END_TEST_EVERY == 0 and bool(self.log_prob.isneginf().all())
        return self._places is not None and not len(self._places)

    def found(self) -> list[list[Hypothesis]]:
        """Return the best hypotheses of every sentence, best first."""
        return self.finished.n_best(self._num_best)

    def _extend(self, proposals: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best K extensions of each sentence, best first; equal ones keep the order of the grid.

        They are three tensors [B, K]: the log-probability of the extended hypothesis, the piece, and the place of the hypothesis
        before.
        """
        width = self.log_prob.shape[1]
        values, candidates = proposals[0] if len(proposals) == 1 else map(torch.cat, zip(*proposals, strict=True))
        extended = self.log_prob[:, :, None] + self._in_grid(values)
        if self._places is None:
            extended.masked_fill_(self.log_prob.isneginf()[:, :, None], -torch.inf)
        best, candidates = extended.flatten(1), self._in_grid(candidates).flatten(1)
        if best.shape[1] == 1:  # greedy search
            return best, candidates, torch.zeros_like(candidates)
        best, index = best.sort(dim=1, descending=True, stable=True)
        found = best, candidates.gather(1, index), index // values.shape[1]
        if self._required:
            found = self._required.allocate(*found, self._past())
        best, chosen, origin = (x[:, :width] for x in found)
        return best, chosen, origin

    def _find_place(self, best: Tensor) -> Tensor:
        """Return which extensions [B, K] find a place beside the finished hypotheses."""
        ranks = torch.arange(best.shape[1], device=best.device)
        return (ranks < (best.shape[1] - self.finished.count)[:, None]) & (best > -torch.inf)

    def _follow(self, best: Tensor, chosen: Tensor, origin: Tensor, kept: Tensor, log_prob: Tensor) -> Tensor:
        """Go on to the extensions that are `kept`. Those that end are finished with `log_prob`. Returns rows as `choose`."""
        step, width = self.step, best.shape[1]
        prefixes = self._pieces
        if width > 1:
            prefixes = prefixes.gather(1, origin[:, :, None].expand(-1, -1, prefixes.shape[2]))
        ends = kept & (chosen == EOS_ID)
        self.finished.add(ends, prefixes, step, log_prob, self._lengths.penalties)
        live = best.masked_fill(kept == ends, -torch.inf)
        if self._num_best < width:  # else a sentence is decided when all its places are finished
            live = live.masked_fill(self._decided(live)[:, None], -torch.inf)
        if self._required:
            self._required.follow(chosen, origin, self._past())
        self.log_prob.copy_(live)
        self._last.copy_(chosen)
        if isinstance(step, int):
            prefixes[:, :, step] = chosen
            self._pieces = prefixes
        else:
            self._pieces.copy_(torch.where(self._places_of_pieces == step, chosen[:, :, None], prefixes))
        self.step += 1

        extended = (self._numbers[:, :1] + origin).flatten()  # their flat places
        if self._whole or self._places is None:
            rows = extended if self._places is None else extended // width  # at first, a sentence has one row
            self._places = None
            return rows
        going = (live > -torch.inf).flatten().nonzero().flatten()
        rows = torch.searchsorted(self._places, extended.index_select(0, going))
        self._places = going
        return rows

    def _decided(self, live: Tensor) -> Tensor:
        """Return [B]: whether no live hypothesis, of log-probabilities `live` [B, K], can enter the n-best list of its sentence.

        An equal score does not enter: the finished hypothesis is shorter and comes first.
        """
        attainable = live.max(dim=1).values / self._lengths.mildest_penalty
        return self.finished.score.sort(dim=1, descending=True).values[:, self._num_best - 1] >= attainable

    def _past(self) -> Tensor:
        """Return the pieces of the grid so far, [B, K, step]."""
        return self._pieces[:, :, : self.step]

    def _in_grid(self, rows: Tensor) -> Tensor:
        """Put rows [R, F] at their places: [B, K, F], 0 elsewhere."""
        if self._places is None:
            return rows.view(*self.log_prob.shape, -1)
        grid = rows.new_zeros(self.log_prob.numel(), rows.shape[1]).index_copy_(0, self._places, rows)
        return grid.unflatten(0, self.log_prob.shape)


class _Group(Beam):
    """The beam of one group, whose log-probabilities include losses."""

    def __init__(self, lengths: Lengths, width: int):
        super().__init__(lengths, width, num_best=width)
        self._lost = torch.zeros_like(self.log_prob)

    def choose_apart(self, log_probs: Tensor, counts: Tensor, strength: float) -> Tensor:
        """Choose as `choose`, and add the choices to `counts` [B, V]: how often earlier groups have chosen each piece."""
        proposals = self.propose(log_probs - strength * counts[self.sentences], self)
        best, chosen, origin = self._extend([proposals])
        kept = self._find_place(best)
        self._lost = self._lost.gather(1, origin) + strength * counts.gather(1, chosen)
        counts.scatter_add_(1, chosen, kept.to(counts.dtype))
        return self._follow(best, chosen, origin, kept, best + self._lost)


class DiverseBeam(TakesAllAtOnce):
    """Diverse beam search (Vijayakumar et al., 2018) with Hamming diversity: a beam in groups, each a beam search.

    Within a step, the groups choose their extensions one after the other. For each hypothesis of an earlier group that has chosen
    a piece at this step, the piece loses `strength` from its log-probability. EOS counts as a piece. A loss stays with the
    hypothesis, as in the authors' code, but only the choice sees it. Scores are those of plain search.

    The search ends when all groups have found as many hypotheses as they have places. Equal hypotheses of several groups are one.
    """

    def __init__(self, lengths: Lengths, num_groups: int, width: int, num_best: int, strength: float):
        self._groups = [_Group(lengths, width) for _ in range(num_groups)]
        self._num_best, self._strength = num_best, strength
        self._num_sentences = len(lengths.most)

    @property
    def step(self) -> int | Tensor:
        """Return the number of pieces."""
        return self._groups[0].step

    @property
    def tokens(self) -> Tensor:
        """Return the last pieces of decoded hypotheses, group by group, [R]."""
        return torch.cat([group.tokens for group in self._groups])

    @property
    def pieces(self) -> Tensor:
        """Return the pieces of decoded hypotheses, [R, T + 1]."""
        return torch.cat([group.pieces for group in self._groups])

    @property
    def sentences(self) -> Tensor:
        """Return the sentences of decoded hypotheses, [R]."""
        return torch.cat([group.sentences for group in self._groups])

    def choose(self, proposals: Sequence[Tensor]) -> Tensor:
        """Choose as `Beam.choose`, by the log-probabilities of the only part."""
        [log_probs] = proposals
        counts = log_probs.new_zeros(self._num_sentences, log_probs.shape[1])
        rows, first = [], 0
        for group, own in zip(self._groups, log_probs.split([len(group.tokens) for group in self._groups]), strict=True):
            rows.append(group.choose_apart(own, counts, self._strength) + first)
            first += len(own)
        return torch.cat(rows)

    def has_ended(self, num_steps: int) -> bool:
        """Return whether no hypothesis is live."""
        return all(group.has_ended(num_steps) for group in self._groups)

    def found(self) -> list[list[Hypothesis]]:
        """Return the best different hypotheses of every sentence, best first."""
        out = []
        for own in zip(*(group.found() for group in self._groups), strict=True):
            first: dict[tuple[int, ...], Hypothesis] = {}
            for one in sort_hypotheses([one for of_group in own for one in of_group]):
                first.setdefault(one.ids, one)  # the last digits of equal ones may differ
            out.append(list(first.values())[: self._num_best])
        return out
