"""Batched beam search over a model's cached decoding steps.

Shapes: B sentences of the batch, A sentences still searched, R live hypotheses of all of them,
K beam size, V vocabulary, T pieces so far.

A sentence owns K places. Every step extends its live hypotheses by one piece and keeps the most
probable extensions, one for each place; an extension by EOS is finished and holds its place until
the end. A sentence is done when all places are finished, or when no live hypothesis can enter its
n-best list any more: log-probabilities only fall, so a live hypothesis of log-probability p ends
at best with p at the maximum length, where the length penalty is mildest. With `gnmt` as with
`length`, stopping there never changes a result. Beam size 1 is greedy search.

PAD, BOS and UNK are never produced: UNK has no text of its own. Their probability stays in the
normalisation. Log-probabilities are float32, their sums float64.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

NEVER_PRODUCED = (PAD_ID, UNK_ID, BOS_ID)


class SearchState(Protocol):
    """The state of a model between steps, one row per live hypothesis."""

    def select(self, rows: Tensor) -> "SearchState":
        """The state of `rows` [R'], which may repeat, reorder and leave out rows."""
        ...


class Decodable(Protocol):
    """A model that can be searched."""

    reads: InputKind

    def encode(self, batch: TreeBatch): ...

    def start_decoding(self, memory) -> SearchState:
        """One row per sentence of the memory."""
        ...

    def decode_step(self, tokens: Tensor, state: SearchState) -> tuple[Tensor, SearchState]:
        """Logits [R, V] of the piece that follows `tokens` [R]."""
        ...


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation: pieces without EOS, penalised score, sum of log-probabilities with EOS; NaN of an empty line."""

    ids: tuple[int, ...]
    score: float
    log_prob: float


def length_penalties(max_length: int, decoding: DecodingConfig, device: torch.device | str = "cpu") -> Tensor:
    """Divisors [max_length + 1] of the log-probability by number of pieces, EOS not counted in the index.

    The length itself counts EOS: `length` is (pieces + 1)^a, `gnmt` is ((5 + pieces + 1) / 6)^a
    (Wu et al. 2016, eq 14, with beta = 0).
    """
    length = torch.arange(1, max_length + 2, dtype=torch.float64, device=device)
    base = length if decoding.length_penalty_form == "length" else (5 + length) / 6
    return base**decoding.length_penalty


def best_pieces(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best values and pieces [R, count] of every row; of equal finite values the lowest ids first.

    `topk` alone leaves open which of several equal values it returns.
    """
    most = min(count + 1, log_probs.shape[1])  # one more shows whether a tie was cut
    values, pieces = log_probs.topk(most, dim=1)
    tied = (values[:, count - 1] == values[:, most - 1]) & values[:, count - 1].isfinite() & (most > count)
    values, pieces = values[:, :count], pieces[:, :count]
    if tied.any():
        pieces[tied] = log_probs[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    pieces, order = pieces.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    pieces = pieces.gather(1, order)
    return values, pieces


class _Finished:
    """Finished hypotheses of all sentences of a batch, at most K a sentence."""

    def __init__(self, num_sentences: int, beam_size: int, max_length: int, device: torch.device):
        self.count = torch.zeros(num_sentences, dtype=torch.long, device=device)
        self.score = torch.full((num_sentences, beam_size), -torch.inf, dtype=torch.float64, device=device)
        self.log_prob = self.score.clone()
        self.length = torch.zeros((num_sentences, beam_size), dtype=torch.long, device=device)
        self.pieces = torch.full((num_sentences, beam_size, max_length), PAD_ID, device=device)

    def add(self, sentence: Tensor, place: Tensor, pieces: Tensor, log_prob: Tensor, penalty: Tensor) -> None:
        """Keep `pieces` [F, T] of `sentence` [F] at `place` [F]."""
        self.pieces[sentence, place, : pieces.shape[1]] = pieces
        self.length[sentence, place] = pieces.shape[1]
        self.log_prob[sentence, place] = log_prob
        self.score[sentence, place] = log_prob / penalty
        self.count.index_add_(0, sentence, torch.ones_like(sentence))

    def n_best(self, sentence: int, num_best: int) -> list[Hypothesis]:
        """Best first; equal scores by length, then by ids."""
        found = int(self.count[sentence])
        columns = (self.score, self.log_prob, self.length, self.pieces)
        rows = zip(*(column[sentence, :found].tolist() for column in columns), strict=True)
        hypotheses = [Hypothesis(tuple(pieces[:length]), score, log_prob) for score, log_prob, length, pieces in rows]
        return sorted(hypotheses, key=lambda h: (-h.score, len(h.ids), h.ids))[:num_best]


def max_lengths(batch: TreeBatch, decoding: DecodingConfig) -> Tensor:
    """Longest allowed hypothesis [B] of every sentence in pieces, a function of its own leaves alone."""
    num_leaves = (~batch.leaf_pad_mask).sum(1)
    return (num_leaves * decoding.max_length_factor).long() + decoding.max_length_offset


@torch.inference_mode()
def beam_search(model: Decodable, batch: TreeBatch, decoding: DecodingConfig, *, num_best: int = 1) -> list[list[Hypothesis]]:
    """The `num_best` best hypotheses of every sentence of `batch`, best first.

    A list is shorter than `num_best` only when there are not that many hypotheses. The model must
    be in evaluation mode. Raises UserError when `num_best` exceeds the beam size or the model's scores are not finite.
    """
    beam_size = decoding.beam_size
    if not 1 <= num_best <= beam_size:
        raise UserError(f"the number of best translations must be from 1 to beam_size = {beam_size}, but is {num_best}")
    device = batch.leaf_pieces.device
    max_length = max_lengths(batch, decoding)
    penalties = length_penalties(int(max_length.max()), decoding, device)
    finished = _Finished(len(batch), beam_size, int(max_length.max()), device)
    ranks = torch.arange(beam_size, device=device)

    state = model.start_decoding(model.encode(batch))
    sentence = torch.arange(len(batch), device=device)  # [R], ascending
    log_prob = torch.zeros(len(batch), dtype=torch.float64, device=device)  # [R]
    pieces = torch.full((len(batch), 1), BOS_ID, device=device)  # [R, 1 + T]
    for step in range(len(penalties)):
        logits, state = model.decode_step(pieces[:, -1], state)
        step_log_probs = _allowed_log_probs(logits, step, decoding, max_length[sentence])
        values, candidates = best_pieces(step_log_probs, min(beam_size, logits.shape[1]))

        # Extensions of one sentence side by side, the more probable hypothesis first: [A, K * K'].
        active, group, group_sizes = sentence.unique_consecutive(return_inverse=True, return_counts=True)
        slot = torch.arange(len(sentence), device=device) - (group_sizes.cumsum(0) - group_sizes)[group]
        extended = torch.full((len(active), beam_size, values.shape[1]), -torch.inf, dtype=torch.float64, device=device)
        extended[group, slot] = log_prob[:, None] + values
        origin = torch.zeros((len(active), beam_size), dtype=torch.long, device=device)
        origin[group, slot] = torch.arange(len(sentence), device=device)

        best, index = extended.flatten(1).sort(dim=1, descending=True, stable=True)
        best, index = best[:, :beam_size], index[:, :beam_size]
        rows = origin.gather(1, index // values.shape[1])  # [A, K]
        chosen = candidates[rows, index % values.shape[1]]
        free = (beam_size - finished.count[active])[:, None]
        kept = (ranks[: best.shape[1]] < free) & best.isfinite()

        ends = kept & (chosen == EOS_ID)
        which = ends.nonzero()[:, 0]
        place = (finished.count[active][:, None] + ends.cumsum(1) - 1)[ends]
        finished.add(active[which], place, pieces[rows[ends], 1:], best[ends], penalties[step])

        lives = kept & ~ends
        live_log_prob = best.masked_fill(~lives, -torch.inf)
        lives &= ~_decided(live_log_prob, finished.score[active], penalties[max_length[active]], num_best)[:, None]
        if not lives.any():
            break
        rows_kept = rows[lives]
        if not torch.equal(rows_kept, torch.arange(len(sentence), device=device)):
            state = state.select(rows_kept)
        sentence, log_prob = sentence[rows_kept], best[lives]
        pieces = torch.cat([pieces[rows_kept], chosen[lives][:, None]], dim=1)

    if not finished.count.all():
        line = int(batch.example_ids[finished.count.argmin()]) + 1
        raise UserError(f"line {line}: the model's scores are not finite; translate with an earlier checkpoint")
    return [finished.n_best(i, num_best) for i in range(len(batch))]


def _allowed_log_probs(logits: Tensor, step: int, decoding: DecodingConfig, max_length: Tensor) -> Tensor:
    """Log-probabilities [R, V], -inf where the piece must not follow `step` pieces."""
    log_probs = logits.float().log_softmax(dim=1)
    log_probs[:, NEVER_PRODUCED] = -torch.inf
    full = max_length == step
    if step < decoding.min_length:
        log_probs[~full, EOS_ID] = -torch.inf
    if full.any():
        log_probs[full] = log_probs[full].masked_fill(
            torch.arange(log_probs.shape[1], device=logits.device) != EOS_ID, -torch.inf
        )
    return log_probs


def _decided(live_log_prob: Tensor, finished_score: Tensor, mildest_penalty: Tensor, num_best: int) -> Tensor:
    """Whether no live hypothesis [A, K] of a sentence can enter its n-best list: [A].

    Equal scores do not enter: the finished hypothesis is shorter and goes first.
    """
    attainable = live_log_prob.max(dim=1).values / mildest_penalty
    return finished_score.sort(dim=1, descending=True).values[:, num_best - 1] >= attainable
