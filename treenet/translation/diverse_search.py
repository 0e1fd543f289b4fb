"""Diverse beam search (Vijayakumar et al., 2018) with Hamming diversity.

The beam is divided into groups, each a beam search. Within a step, the groups choose their extensions one after the other. For
each hypothesis of an earlier group that has chosen a piece at this step, the piece loses `diversity_strength` from its
log-probability. EOS counts as a piece. A loss stays with the hypothesis, as in the authors' code, but only the choice sees it.
Scores are those of plain search.

The search ends when all groups have found as many hypotheses as they have places. Equal hypotheses of several groups are one.

Shapes: B sentences, K beam size, G groups, C hypotheses of a sentence in a group, R decoded hypotheses, V vocabulary.
"""

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.translation.beam import Beam, Decodable, check_found, max_lengths
from treenet.translation.hypotheses import Finished, Hypothesis, check_num_best, length_penalties
from treenet.translation.line_constraints import BatchConstraints, check_method
from treenet.translation.next_pieces import allowed_log_probs, best_pieces
from treeproc.shards.schema import EOS_ID


class _Group:
    """The beam of one group, whose log-probabilities include losses, and its finished hypotheses."""

    def __init__(self, num_sentences: int, width: int, longest_limit: int, device: torch.device):
        self.beam = Beam.begin(num_sentences, device)
        self._width = width
        self._finished = Finished(num_sentences, width, longest_limit, device)
        self._lost = torch.zeros(num_sentences, 1, dtype=torch.float64, device=device)  # [B, C]

    def extend(self, log_probs: Tensor, counts: Tensor, strength: float, penalty: Tensor) -> Tensor:
        """Go on by one piece of probabilities `log_probs` [R, V]. Returns the rows of the new state in the old one.

        `counts` [B, V] is how often earlier groups have chosen each piece; the choices of this group are added.
        """
        sentences = self.beam.of_sentences(torch.arange(len(counts), device=counts.device))
        lowered = log_probs - strength * counts[sentences]
        extensions = self.beam.extend(*best_pieces(lowered, min(self._width, lowered.shape[1])))
        best, chosen, origin = (x[:, : self._width] for x in extensions)
        places = torch.arange(best.shape[1], device=best.device)
        kept = (places < (self._width - self._finished.count)[:, None]) & best.isfinite()
        lost = self._lost.gather(1, origin) + strength * counts.gather(1, chosen)
        counts.scatter_add_(1, chosen, kept.to(counts.dtype))

        ends = kept & (chosen == EOS_ID)
        prefixes = self.beam.prefixes(origin)
        self._finished.add(ends, prefixes[..., 1:], prefixes.shape[2] - 1, best + lost, penalty)
        pieces = torch.cat([prefixes, chosen[:, :, None]], dim=2)
        self.beam, rows = self.beam.follow(best.masked_fill(~kept | ends, -torch.inf), pieces, origin, whole=False)
        self._lost = lost
        return rows

    def found(self) -> list[list[Hypothesis]]:
        """Return the finished hypotheses of every sentence."""
        return self._finished.n_best(self._width)


@torch.inference_mode()
def diverse_search(
    model: Decodable,
    batch: TreeBatch,
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    constraints: BatchConstraints | None = None,
) -> list[list[Hypothesis]]:
    """Find up to `num_best` different hypotheses of every sentence, best first, as `beam_search` does.

    Raises UserError as `beam_search` does, and for required phrases.
    """
    check_num_best(num_best, decoding)
    if constraints and constraints.have_phrases:
        check_method(decoding)
    device, num_groups = batch.leaf_pieces.device, decoding.diversity_groups
    max_length = max_lengths(batch, decoding)
    longest_limit = int(max_length.max())
    penalties = length_penalties(longest_limit, decoding, device)
    groups = [_Group(len(batch), decoding.beam_size // num_groups, longest_limit, device) for _ in range(num_groups)]

    state = model.start_decoding(model.encode(batch))
    state = state.select(torch.arange(len(batch), device=device).repeat(num_groups))
    for step in range(longest_limit + 1):
        logits, state = model.decode_step(torch.cat([group.beam.last_pieces() for group in groups]), state)
        limits = torch.cat([group.beam.of_sentences(max_length) for group in groups])
        log_probs = allowed_log_probs(logits, step, decoding.min_length, limits)
        if constraints:
            numbers = torch.arange(len(batch), device=device)
            sentences = torch.cat([group.beam.of_sentences(numbers) for group in groups])
            constraints.restrict(log_probs, torch.cat([group.beam.decoded_pieces() for group in groups]), sentences)
        counts = log_probs.new_zeros(len(batch), log_probs.shape[1])
        sizes = [len(group.beam.places) for group in groups]
        rows, first = [], 0
        for group, own, size in zip(groups, log_probs.split(sizes), sizes, strict=True):
            rows.append(group.extend(own, counts, decoding.diversity_strength, penalties[step]) + first)
            first += size
        if not any(map(len, rows)):
            break
        state = state.select(torch.cat(rows))

    pooled = [[one for own in of_groups for one in own] for of_groups in zip(*(group.found() for group in groups), strict=True)]
    ranked = [sorted(own, key=lambda h: (-h.score, len(h.ids), h.ids)) for own in pooled]
    found = [_without_repeats(own)[:num_best] for own in ranked]
    check_found(batch, found, constraints)
    return found


def _without_repeats(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Keep the first of hypotheses with equal pieces; the last digits of their scores may differ."""
    first: dict[tuple[int, ...], Hypothesis] = {}
    for one in hypotheses:
        first.setdefault(one.ids, one)
    return list(first.values())
