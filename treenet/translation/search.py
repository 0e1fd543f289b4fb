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
checks every END_TEST_EVERY steps whether the search has ended. Transformer decoders have a static cache there
(`treenet/translation/static_search.py`).

Log-probabilities are float32, their sums float64.
"""

from typing import Any

import torch

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.translation.beam import END_TEST_EVERY, Beam, Decodable, Steps, check_found, keep_best, max_lengths
from treenet.translation.hypotheses import Finished, Hypothesis, check_num_best, length_penalties
from treenet.translation.line_constraints import BatchConstraints
from treenet.translation.next_pieces import allowed_log_probs, best_pieces
from treenet.translation.static_search import StaticDecoder, has_static_cache, search_static
from treeproc.shards.schema import EOS_ID


@torch.inference_mode()
def beam_search(
    model: Decodable,
    batch: TreeBatch,
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    constraints: BatchConstraints | None = None,
    steps: Steps | None = None,
) -> list[list[Hypothesis]]:
    """Find the `num_best` best hypotheses of every sentence of `batch`, best first.

    A list is shorter than `num_best` only if fewer hypotheses exist, or meet the `constraints`. The model must be in evaluation
    mode. `steps` overrides the choice by device. Raises UserError if `num_best` exceeds the beam size, or if the model's scores
    are not finite, and ValueError for steps with a static cache if the model has none.
    """
    beam_size = decoding.beam_size
    check_num_best(num_best, decoding)
    device = batch.leaf_pieces.device
    steps = steps or choose_steps(model, device)
    is_static = steps in (Steps.STATIC, Steps.COMPILED)
    if is_static and not constraints:
        found = search_static(model, batch, decoding, num_best, compiled=steps is Steps.COMPILED)
        check_found(batch, found, constraints)
        return found
    whole_grid = steps is not Steps.LIVE
    max_length = max_lengths(batch, decoding)
    shortest_limit, longest_limit = torch.stack(max_length.aminmax()).tolist()
    penalties = length_penalties(longest_limit, decoding, device)
    mildest_penalty = penalties[max_length]
    finished = Finished(len(batch), beam_size, longest_limit, device)
    width = beam_size if is_static else 1
    required = constraints.required(width) if constraints else None
    decoder: Any = model
    if is_static:
        decoder = StaticDecoder(model, beam_size, longest_limit + 1, compiled=steps is Steps.COMPILED)

    state = decoder.start_decoding(model.encode(batch))
    beam = Beam.begin(len(batch), device, width)
    for step in range(longest_limit + 1):
        logits, state = decoder.decode_step(beam.last_pieces(), state)
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
        prefixes = beam.prefixes(origin)
        log_prob = keep_best(finished, best, chosen, prefixes[..., 1:], step, penalties[step], mildest_penalty, num_best)

        if required:
            required.follow(chosen, origin, beam.pieces)
        decoded = len(beam.places)
        beam, rows = beam.follow(log_prob, torch.cat([prefixes, chosen[:, :, None]], dim=2), origin, whole_grid)
        if (not whole_grid or (step + 1) % END_TEST_EVERY == 0) and beam.is_empty():
            break
        if whole_grid:
            state = state.select(rows, log_prob.shape[1])
        elif not torch.equal(rows, torch.arange(decoded, device=device)):
            state = state.select(rows)

    found = finished.n_best(num_best)
    check_found(batch, found, constraints)
    return found


def choose_steps(model: Decodable, device: torch.device, compiled: bool = False) -> Steps:
    """Return the steps for a model on this device, with a static cache on GPUs if the model has one.

    `compiled` asks for compiled steps, on any device. They need a static cache.
    """
    if has_static_cache(model) and (compiled or device.type != "cpu"):
        return Steps.COMPILED if compiled else Steps.STATIC
    return Steps.LIVE if device.type == "cpu" else Steps.GRID
