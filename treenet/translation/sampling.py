"""Sampling of translations, piece by piece, from a model's cached decoding steps.

The model's distribution over the pieces that may follow changes in this order. The logits are divided by the temperature. Only
the `top_k` most probable pieces stay. Of these, only the fewest most probable ones stay that have the share `top_p` (nucleus
sampling, Holtzman et al., 2020). Of equal pieces, the lowest ids stay.

Sample number n of a line depends on (seed, example id, n) alone: not on other lines, their order, the padding, or the number of
samples. Its log-probability is the model's own, as in beam search. It does not depend on temperature, `top_k` or `top_p`.

Shapes: B sentences, R live samples, V vocabulary, F pieces that stay.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.translation.beam import Decodable, check_found, max_lengths
from treenet.translation.gumbel import draw_keys, gumbel_noise
from treenet.translation.hypotheses import Hypothesis, length_penalties
from treenet.translation.line_constraints import BatchConstraints, check_method
from treenet.translation.next_pieces import allowed_log_probs, best_pieces
from treeproc.shards.schema import BOS_ID, EOS_ID

_NUCLEUS_WIDTHS = (64, 1024)  # pieces that are sorted before all are


@torch.inference_mode()
def draw_samples(
    model: Decodable, batch: TreeBatch, decoding: DecodingConfig, num_samples: int, constraints: BatchConstraints | None = None
) -> list[list[Hypothesis]]:
    """Draw `num_samples` translations of every sentence of `batch`, in the order of their numbers.

    `decoding.beam_size` samples of a sentence are drawn at a time. A list is empty if the `constraints` of its sentence cannot be
    met. The model must be in evaluation mode. Raises UserError for required phrases, and if the model's scores are not finite.
    """
    if constraints and constraints.have_phrases:
        check_method(decoding)
    memory = model.encode(batch)
    found: list[list[Hypothesis]] = [[] for _ in range(len(batch))]
    for first in range(0, num_samples, decoding.beam_size):
        numbers = range(first, min(first + decoding.beam_size, num_samples))
        for own, drawn in zip(found, _draw(model, memory, batch, decoding, numbers, constraints), strict=True):
            own += drawn
    check_found(batch, found, constraints)
    return found


def _draw(
    model: Decodable,
    memory: object,
    batch: TreeBatch,
    decoding: DecodingConfig,
    numbers: Sequence[int],
    constraints: BatchConstraints | None,
) -> list[list[Hypothesis]]:
    """Draw samples with these `numbers`. Those that cannot end are left out."""
    device = batch.leaf_pieces.device
    limits = max_lengths(batch, decoding)
    shortest_limit, longest_limit = torch.stack(limits.aminmax()).tolist()
    penalties = length_penalties(longest_limit, decoding).tolist()
    live = torch.arange(len(batch) * len(numbers), device=device)  # [R] samples that have not ended, sentence by sentence
    examples, of_rows = batch.example_ids.repeat_interleave(len(numbers)).cpu(), torch.tensor([*numbers] * len(batch))
    log_prob = torch.zeros(len(live), dtype=torch.float64, device=device)
    pieces = torch.zeros(len(live), 0, dtype=torch.long, device=device)  # [R, T]
    ended: dict[int, Hypothesis] = {}

    logits, state = model.decode_step(torch.full((len(batch),), BOS_ID, device=device), model.start_decoding(memory))
    rows = live // len(numbers)  # [R] of the state, which has one per sentence until the first pieces are drawn
    logits = logits[rows]
    for step in range(longest_limit + 1):
        if step:
            logits, state = model.decode_step(pieces[:, -1], state)
            rows = torch.arange(len(live), device=device)
        sentences = live // len(numbers)
        full = limits[sentences] if step >= shortest_limit else None
        log_probs = allowed_log_probs(logits, step, decoding.min_length, full)
        if constraints:
            constraints.restrict(log_probs, pieces, sentences)
        places = live.cpu()
        keys = draw_keys(decoding.seed, examples[places].numpy(), of_rows[places].numpy(), step).to(device)
        chosen = choose_pieces(log_probs, keys, decoding)
        log_prob = log_prob + log_probs.gather(1, chosen[:, None])[:, 0]
        pieces = torch.cat([pieces, chosen[:, None]], dim=1)

        going, ends = (log_prob.isfinite() & end for end in (chosen != EOS_ID, chosen == EOS_ID))
        for sample, total, ids in zip(live[ends].tolist(), log_prob[ends].tolist(), pieces[ends, :-1].tolist(), strict=True):
            ended[sample] = Hypothesis(tuple(ids), total / penalties[step], total)
        live, log_prob, pieces, kept = live[going], log_prob[going], pieces[going], rows[going]
        if not len(live):
            break
        state = state.select(kept)
    samples = [range(first, first + len(numbers)) for first in range(0, len(batch) * len(numbers), len(numbers))]
    return [[ended[sample] for sample in own if sample in ended] for own in samples]


def choose_pieces(log_probs: Tensor, keys: Tensor, decoding: DecodingConfig) -> Tensor:
    """Draw one piece [R] for each row of log-probabilities [R, V], with keys [R, 2] of its noise."""
    scaled, pieces = log_probs / decoding.temperature, torch.arange(log_probs.shape[1], device=log_probs.device)
    if decoding.top_k or decoding.top_p < 1:
        scaled, pieces = _nucleus(scaled, decoding.top_k or log_probs.shape[1], decoding.top_p)
    place = (scaled + gumbel_noise(keys, pieces)).argmax(1)
    return place if pieces.ndim == 1 else pieces.gather(1, place[:, None])[:, 0]


def _nucleus(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return log-weights and pieces, both [R, F], best first, that `top_k` and then `top_p` leave; -inf for others."""
    most = min(top_k, scaled.shape[1])
    if top_p == 1:
        return best_pieces(scaled, most)
    if most == scaled.shape[1]:
        log_mass = scaled.double().logsumexp(1, keepdim=True)
    else:
        log_mass = best_pieces(scaled, most)[0].double().logsumexp(1, keepdim=True)
    for width in (*(width for width in _NUCLEUS_WIDTHS if width < most), most):
        values, pieces = best_pieces(scaled, width)
        share = (values.double() - log_mass).exp()
        before = share.cumsum(1) - share
        if width == most or bool((before[:, -1] + share[:, -1] >= top_p).all()):
            break
    return values.masked_fill(before >= top_p, -torch.inf), pieces
