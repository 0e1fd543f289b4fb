"""Batched beam search over a model's cached decoding steps.

Shapes: B sentences of the batch, K beam size, C hypotheses of a sentence now (1, then K), R decoded hypotheses.
F best extensions of a hypothesis, V vocabulary, T pieces so far.

A sentence owns K places. Every step extends its live hypotheses by one piece and keeps the most probable extensions, one for each
place. An extension by EOS is finished and holds its place until the end.

A sentence is finished when all its places are finished, or when no live hypothesis can still enter its n-best list. The second
test is exact, because log-probabilities only fall. The best end of a live hypothesis with log-probability p is p at the maximum
length, where the length penalty is mildest. So an early stop never changes a result, with `gnmt` and with `length`. Beam size 1
is greedy search.

Hypotheses stand in a grid [B, C]. If one is not live, its log-probability there is -inf. On CPUs, only live hypotheses are
decoded. Other devices decode the whole grid, because they would have to wait while the host counts the live ones. There, the host
checks every END_TEST_EVERY steps whether the search has ended.

Log-probabilities are float32, their sums float64.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.translation.hypotheses import Finished, Hypothesis, check_num_best, length_penalties
from treenet.translation.line_constraints import BatchConstraints
from treenet.translation.next_pieces import allowed_log_probs, best_pieces
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID

END_TEST_EVERY = 8  # steps; a CPU checks every step


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

    def encode(self, batch: TreeBatch): ...

    def start_decoding(self, memory) -> SearchState:
        """Return the state for one row per sentence of the memory."""
        ...

    def decode_step(self, tokens: Tensor, state: SearchState) -> tuple[Tensor, SearchState]:
        """Return the logits [R, V] of the piece that follows `tokens` [R]."""
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
    def begin(cls, num_sentences: int, device: torch.device) -> "Beam":
        """Make one empty hypothesis per sentence."""
        log_prob = torch.zeros(num_sentences, 1, dtype=torch.float64, device=device)
        pieces = torch.full((num_sentences, 1, 1), BOS_ID, device=device)
        return cls(log_prob, pieces, torch.arange(num_sentences, device=device))

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
        """Extend hypotheses by `candidates` [R, F] of log-probability `values`. Returns three tensors [B, C * F], best first.

        They are the log-probability of the extended hypothesis, the piece, and the place in [C] of the hypothesis before. Equal
        ones keep the order of the grid.
        """
        extended = (self.log_prob[:, :, None] + self._in_grid(values)).masked_fill_(self._dead()[:, :, None], -torch.inf)
        best, index = extended.flatten(1).sort(dim=1, descending=True, stable=True)
        return best, self._in_grid(candidates).flatten(1).gather(1, index), index // values.shape[1]

    def prefixes(self, origin: Tensor) -> Tensor:
        """Return the pieces of the hypotheses at places `origin` [B, C'] of each sentence: [B, C', 1 + T]."""
        return self.pieces.gather(1, origin[:, :, None].expand(-1, -1, self.pieces.shape[2]))

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
        return self._dead().all()

    def _dead(self) -> Tensor:
        return self.log_prob.isneginf()

    def _in_grid(self, rows: Tensor) -> Tensor:
        """Put rows [R, F] at their places: [B, C, F], 0 elsewhere."""
        grid = rows.new_zeros(self.log_prob.numel(), rows.shape[1]).index_copy_(0, self.places, rows)
        return grid.unflatten(0, self.log_prob.shape)


@torch.inference_mode()
def beam_search(
    model: Decodable,
    batch: TreeBatch,
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    constraints: BatchConstraints | None = None,
    whole_grid: bool | None = None,
) -> list[list[Hypothesis]]:
    """Find the `num_best` best hypotheses of every sentence of `batch`, best first.

    A list is shorter than `num_best` only if fewer hypotheses exist, or meet the `constraints`. The model must be in evaluation
    mode. `whole_grid` overrides the choice by device: decode the whole grid, or only live hypotheses. Raises UserError if
    `num_best` exceeds the beam size, or if the model's scores are not finite.
    """
    beam_size = decoding.beam_size
    check_num_best(num_best, decoding)
    device = batch.leaf_pieces.device
    whole_grid = device.type != "cpu" if whole_grid is None else whole_grid
    max_length = max_lengths(batch, decoding)
    shortest_limit, longest_limit = torch.stack(max_length.aminmax()).tolist()
    penalties = length_penalties(longest_limit, decoding, device)
    mildest_penalty = penalties[max_length]
    finished = Finished(len(batch), beam_size, longest_limit, device)
    ranks = torch.arange(beam_size, device=device)
    required = constraints.required() if constraints else None

    state = model.start_decoding(model.encode(batch))
    beam = Beam.begin(len(batch), device)
    for step in range(longest_limit + 1):
        logits, state = model.decode_step(beam.last_pieces(), state)
        limits = beam.of_sentences(max_length) if step >= shortest_limit else None
        log_probs = allowed_log_probs(logits, step, decoding.min_length, limits)
        if constraints:
            constraints.restrict(log_probs, beam.decoded_pieces(), beam.of_sentences(torch.arange(len(batch), device=device)))
        if required:
            log_probs[:, EOS_ID].masked_fill_(required.unmet().flatten().index_select(0, beam.places), -torch.inf)
        proposals = best_pieces(log_probs, min(beam_size, logits.shape[1]))
        if required:
            proposals = required.propose(log_probs, *proposals, beam.places, beam.pieces)
        extensions = beam.extend(*proposals)
        if required:
            extensions = required.allocate(*extensions, beam.pieces)
        best, chosen, origin = (x[:, :beam_size] for x in extensions)
        kept = (ranks[: best.shape[1]] < (beam_size - finished.count)[:, None]) & best.isfinite()

        ends = kept & (chosen == EOS_ID)
        prefixes = beam.prefixes(origin)
        finished.add(ends, prefixes[..., 1:], best, penalties[step])
        log_prob = best.masked_fill(~kept | ends, -torch.inf)
        decided = _decided(log_prob, finished.score, mildest_penalty, num_best)
        log_prob = log_prob.masked_fill(decided[:, None], -torch.inf)

        if required:
            required.follow(chosen, origin, beam.pieces)
        width = len(beam.places)
        beam, rows = beam.follow(log_prob, torch.cat([prefixes, chosen[:, :, None]], dim=2), origin, whole_grid)
        if (not whole_grid or (step + 1) % END_TEST_EVERY == 0) and beam.is_empty():
            break
        if whole_grid:
            state = state.select(rows, log_prob.shape[1])
        elif not torch.equal(rows, torch.arange(width, device=device)):
            state = state.select(rows)

    found = finished.n_best(num_best)
    check_found(batch, found, constraints)
    return found


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
