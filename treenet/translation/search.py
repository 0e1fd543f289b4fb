"""The search for translations, one loop for all methods.

At every step, the model gives the log-probabilities of the piece that follows each hypothesis. Restrictions forbid pieces
(`hypotheses.py`, `line_constraints.py`). A chooser extends the hypotheses (`beam.py`, `sampling.py`). The past of the
hypotheses is in a cache (`caches.py`).

Log-probabilities are float32, their sums float64. Shapes: B sentences of the batch, R decoded hypotheses, V vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.models.compiling import Compiled
from treenet.translation.beam import Beam, DiverseBeam
from treenet.translation.caches import Cache, Decodable, GrowingCache, StaticCache, Steps, choose_steps, decode
from treenet.translation.hypotheses import (
    Hypotheses,
    Hypothesis,
    Lengths,
    Restriction,
    check_num_best,
    normalise,
    restrictions_of,
)
from treenet.translation.line_constraints import BatchConstraints, RequiredPhrases, check_method
from treenet.translation.sampling import Samples
from treeproc.common.settings import UserError


class Chooser(Hypotheses, Protocol):
    """The hypotheses of a search, and the choice of their next pieces; see `Beam`."""

    @property
    def tokens(self) -> Tensor: ...

    def parts(self) -> Sequence[Hypotheses]:
        """Return the decoded hypotheses in parts, for which log-probabilities are computed one part after the other."""
        ...

    def propose(self, log_probs: Tensor, part: Any) -> Any: ...

    def choose(self, proposals: Sequence[Any]) -> Tensor: ...

    def has_ended(self, num_steps: int) -> bool: ...

    def found(self) -> list[list[Hypothesis]]: ...


class Search:
    """One search: its chooser, its restrictions, its cache, and the step of all."""

    def __init__(self, cache: Cache, chooser: Chooser, restrictions: Sequence[Restriction], compiled: bool = False):
        self.cache, self.chooser, self.restrictions = cache, chooser, restrictions
        self._extend = compiled_steps()[1] if compiled else extend

    def step(self) -> None:
        """Extend all hypotheses by one piece."""
        self._extend(self.cache.decode(self.chooser.tokens), self.chooser, self.restrictions, self.cache)

    def run(self, lengths: Lengths) -> list[list[Hypothesis]]:
        """Search to the end, and return the hypotheses of every sentence."""
        for number in range(1, lengths.longest + 2):
            self.cache.run(self.step)
            if self.chooser.has_ended(number):
                break
        return self.chooser.found()


def extend(decoded: Tensor, chooser: Chooser, restrictions: Sequence[Restriction], cache: Cache) -> None:
    """Extend hypotheses by one piece. `decoded` has a row of each of the R hypotheses, which gives logits [V]."""
    proposals = []
    for part in chooser.parts():
        log_probs = normalise(cache.logits(decoded[part.rows]))
        for restriction in restrictions:
            restriction.apply(log_probs, part)
        proposals.append(chooser.propose(log_probs, part))
    rows = chooser.choose(proposals)
    if len(rows):
        cache.select(rows)


@cache
def compiled_steps() -> tuple[Compiled, Compiled]:
    """Both parts of a step under torch.compile: few graphs for all models of a form and all sizes."""
    return Compiled(decode), Compiled(extend)


@torch.inference_mode()
def search_batch(
    model: Decodable,
    batch: TreeBatch,
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    constraints: BatchConstraints | None = None,
    steps: Steps | None = None,
) -> list[list[Hypothesis]]:
    """Find the `num_best` best hypotheses of every sentence of `batch`, best first, or so many samples in their order.

    A list is shorter only if fewer hypotheses exist, or meet the restrictions. The model must be in evaluation mode. `steps` of a
    plain beam search override the choice by device. Raises UserError if `num_best` exceeds the beam size, for required phrases
    with another method, and if a sentence without constraints has no hypothesis. Raises ValueError for steps with a static cache
    if the model has none.
    """
    check_num_best(num_best, decoding)
    if constraints and constraints.have_phrases:
        check_method(decoding)
    memory, lengths = model.encode(batch), Lengths(batch, decoding)
    restrictions = [*restrictions_of(decoding), *(constraints.restrictions if constraints else ())]
    if decoding.method == "beam":
        required = constraints.required(decoding.beam_size) if constraints else None
        found = begin_beam_search(model, memory, lengths, restrictions, decoding, num_best, required, steps).run(lengths)
    else:
        found = [[] for _ in range(len(batch))]
        for first in range(0, num_best, decoding.beam_size):
            numbers = range(first, min(first + decoding.beam_size, num_best))
            samples = Samples(lengths, decoding, batch.example_ids, numbers)
            drawn = Search(GrowingCache(model, memory), samples, [lengths, *restrictions]).run(lengths)
            for own, more in zip(found, drawn, strict=True):
                own += more
    if not all(found):
        # Only scores that are not finite leave a greedy search within limits of length without hypotheses.
        greedy = Search(GrowingCache(model, memory), Beam(lengths, 1, 1), [lengths]).run(lengths)
        _check_found(batch, found, greedy, decoding, constraints)
    return found


def begin_beam_search(
    model: Decodable,
    memory: object,
    lengths: Lengths,
    restrictions: Sequence[Restriction],
    decoding: DecodingConfig,
    num_best: int,
    required: RequiredPhrases | None = None,
    steps: Steps | None = None,
) -> Search:
    """Begin a beam search, plain or diverse, with `restrictions` beside `lengths`; see `search_batch`."""
    width = decoding.beam_size
    restrictions = [lengths, *restrictions, *([required] if required else ())]
    if (groups := decoding.diversity_groups) > 1:
        diverse = DiverseBeam(lengths, groups, width // groups, num_best, decoding.diversity_strength)
        growing = GrowingCache(model, memory)
        growing.select(diverse.sentences)
        return Search(growing, diverse, restrictions)
    steps = steps or choose_steps(model, lengths.most.device)
    whole, compiled = steps.is_static and all(one.on_device for one in restrictions), steps is Steps.COMPILED
    beam = Beam(lengths, width, num_best, steps, captured=whole, required=required)
    if not steps.is_static:
        return Search(GrowingCache(model, memory, None if steps is Steps.LIVE else width), beam, restrictions)
    decode_step = compiled_steps()[0] if compiled else decode
    cache = StaticCache(model, memory, width, lengths.longest + 1, lengths.most.device, whole, decode_step)
    return Search(cache, beam, restrictions, compiled=compiled and whole)


def _check_found(
    batch: TreeBatch,
    found: list[list[Hypothesis]],
    greedy: list[list[Hypothesis]],
    decoding: DecodingConfig,
    constraints: BatchConstraints | None,
) -> None:
    """Raise UserError for a sentence that has no hypothesis, except if its constraints are the reason.

    `greedy` are the hypotheses of a search without restrictions.
    """
    for row, own in enumerate(found):
        line = f"line {int(batch.example_ids[row]) + 1}"
        if not own and not greedy[row]:
            raise UserError(f"{line}: the model's scores are not finite; translate with an earlier checkpoint")
        if not own and not (constraints and constraints.constrained[row]):
            ways = ", or ".join(["lower decoding.min_length", *(one.way_out for one in restrictions_of(decoding))])
            raise UserError(f"{line}: no translation within the limits of length is allowed; {ways}")
