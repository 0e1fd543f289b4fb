"""Beam search with steps that all have the same shapes, at the same addresses: a GPU replays them as a CUDA graph.

The model keeps keys and values in memory of fixed shape. The numbers of the step, its tables and the hypotheses are tensors that
a step changes in place. So a captured step is right for every later one. Only the capacity changes: it doubles when it is used
up, from FIRST_CAPACITY positions on. A search has one graph for each capacity.

Constraints read lists on the host. With them, only the step of the model is captured.

Shapes: B sentences, K beam size, C capacity, V vocabulary, L longest maximum length.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.layers.static_past import grown
from treenet.models.compiling import Compiled
from treenet.translation.beam import (
    END_TEST_EVERY,
    Decodable,
    SearchState,
    extensions,
    first_log_prob,
    keep_best,
    max_lengths,
    pieces_of,
)
from treenet.translation.captured import Captured
from treenet.translation.hypotheses import Finished, Hypothesis, length_penalties
from treenet.translation.next_pieces import allowed_log_probs_at, best_by_key
from treeproc.shards.schema import BOS_ID, PAD_ID


class StaticSearchState(SearchState, Protocol):
    """A state that steps and selections change in place."""

    @property
    def capacity(self) -> int: ...

    def grow(self) -> None: ...


class HasStaticCache(Decodable, Protocol):
    """A model whose search state has fixed shapes."""

    def start_static(self, memory: Any, beam_width: int, most_positions: int) -> StaticSearchState: ...

    def step_static(self, tokens: Tensor, state: Any) -> Tensor: ...


def has_static_cache(model: Any) -> bool:
    """Return whether a model can be searched with a static cache."""
    return getattr(model, "has_static_cache", False)


class StaticDecoder:
    """A model with a static cache, for searches that choose pieces on the host. Its grid has `beam_size` places from the start.

    Raises ValueError if the model has no static cache.
    """

    def __init__(self, model: Any, beam_size: int, most_positions: int, compiled: bool):
        if not has_static_cache(model):
            raise ValueError("the model has no static cache")
        self._model: HasStaticCache = model
        self._beam_size, self._most_positions = beam_size, most_positions
        self._decode = _compiled_steps()[0] if compiled else decode
        self._steps = 0

    def start_decoding(self, memory: Any) -> StaticSearchState:
        """Return the state of the empty hypotheses of all sentences."""
        self._state = self._model.start_static(memory, self._beam_size, self._most_positions)
        return self._state

    def decode_step(self, tokens: Tensor, state: StaticSearchState) -> tuple[Tensor, StaticSearchState]:
        """Return the logits [B * K, V] of the piece that follows `tokens` [B * K]. The next step overwrites them."""
        is_full = self._steps == state.capacity
        if is_full:
            state.grow()
        if self._steps == 0:
            self._tokens = torch.empty_like(tokens)
        if is_full or self._steps == 0:
            self._run = Captured(self._step, tokens.device)
        self._tokens.copy_(tokens)
        self._run()
        self._steps += 1
        return self._logits, state

    def _step(self) -> None:
        self._logits = self._decode(self._model, self._tokens, self._state)


@dataclass
class StaticBeam:
    """The hypotheses of all sentences. Steps change the tensors in place."""

    log_prob: Tensor  # [B, K] float64, -inf where a hypothesis is not live
    tokens: Tensor  # [B * K] the last piece
    pieces: Tensor  # [B, K, C] all pieces, without BOS
    step: Tensor  # [1] int64, number of pieces

    @classmethod
    def begin(cls, num_sentences: int, beam_size: int, capacity: int, device: torch.device) -> "StaticBeam":
        """Make one empty hypothesis per sentence."""
        return cls(
            first_log_prob(num_sentences, beam_size, device),
            torch.full((num_sentences * beam_size,), BOS_ID, device=device),
            torch.full((num_sentences, beam_size, capacity), PAD_ID, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
        )

    def follow(self, log_prob: Tensor, chosen: Tensor, prefixes: Tensor) -> None:
        """Go on to hypotheses `prefixes` [B, K, C] extended by `chosen` [B, K]."""
        self.log_prob.copy_(log_prob)
        self.tokens.copy_(chosen.flatten())
        self.pieces.copy_(prefixes)
        self.pieces.index_copy_(2, self.step, chosen[:, :, None])
        self.step.add_(1)


@dataclass
class Limits:
    """Limits of a search for the choice of pieces. They stay the same at all steps."""

    max_length: Tensor  # [B]
    penalties: Tensor  # [L + 1] by number of pieces
    mildest_penalty: Tensor  # [B]
    min_length: int
    num_best: int


def decode(model: HasStaticCache, tokens: Tensor, state: StaticSearchState) -> Tensor:
    """Return the logits [B * K, V] of the piece that follows `tokens` [B * K]."""
    return model.step_static(tokens, state)


def choose(logits: Tensor, beam: StaticBeam, state: StaticSearchState, finished: Finished, limits: Limits) -> None:
    """Extend every hypothesis by one piece, by `logits` [B * K, V], and keep the best."""
    grid = beam.log_prob.shape
    max_length = limits.max_length[:, None].expand(grid).flatten()
    log_probs = allowed_log_probs_at(logits, beam.step, limits.min_length, max_length)
    values, candidates = best_by_key(log_probs, min(grid[1], logits.shape[1]))
    found = extensions(beam.log_prob, values.view(*grid, -1), candidates.view(*grid, -1))
    best, chosen, origin = (x[:, : grid[1]] for x in found)
    prefixes = pieces_of(beam.pieces, origin)
    penalty = limits.penalties.index_select(0, beam.step)
    log_prob = keep_best(finished, best, chosen, prefixes, beam.step, penalty, limits.mildest_penalty, limits.num_best)
    first = torch.arange(grid[0], device=origin.device)[:, None] * grid[1]
    state.select((first + origin).flatten(), grid[1])
    beam.follow(log_prob, chosen, prefixes)


class StaticSearch:
    """One search: its tensors, and its step."""

    def __init__(self, model: Any, batch: TreeBatch, decoding: DecodingConfig, num_best: int, compiled: bool):
        if not has_static_cache(model):
            raise ValueError("the model has no static cache")
        device, beam_size = batch.leaf_pieces.device, decoding.beam_size
        max_length = max_lengths(batch, decoding)
        self.most_steps = int(max_length.max()) + 1
        penalties = length_penalties(self.most_steps - 1, decoding, device)
        self._model: HasStaticCache = model
        self._decode, self._choose = _compiled_steps() if compiled else (decode, choose)
        self._limits = Limits(max_length, penalties, penalties[max_length], decoding.min_length, num_best)
        self.state = model.start_static(model.encode(batch), beam_size, self.most_steps)
        self.beam = StaticBeam.begin(len(batch), beam_size, self.state.capacity, device)
        width = self.state.capacity
        while width < self.most_steps:
            width *= 2
        # One column more than any beam has: the compiler makes a separate graph for equal widths.
        self.finished = Finished(len(batch), beam_size, width + 1, device, skips=False)

    def step(self) -> None:
        """Extend all hypotheses by one piece."""
        logits = self._decode(self._model, self.beam.tokens, self.state)
        self._choose(logits, self.beam, self.state, self.finished, self._limits)

    def grow(self) -> None:
        """Double the capacity, in new memory."""
        self.state.grow()
        self.beam.pieces = grown(self.beam.pieces, 2, self.state.capacity, PAD_ID)

    def has_ended(self) -> bool:
        """Return whether no hypothesis is live. The host waits for the device."""
        return bool(self.beam.log_prob.isneginf().all())


def search_static(
    model: Any, batch: TreeBatch, decoding: DecodingConfig, num_best: int, compiled: bool
) -> list[list[Hypothesis]]:
    """Find the `num_best` best hypotheses of every sentence, as `beam_search` does. `compiled` fuses the operations of steps.

    Raises ValueError if the model has no static cache.
    """
    search = StaticSearch(model, batch, decoding, num_best, compiled)
    device = batch.leaf_pieces.device
    run = Captured(search.step, device)
    for step in range(search.most_steps):
        if step == search.state.capacity:
            search.grow()
            run = Captured(search.step, device)
        run()
        if (step + 1) % END_TEST_EVERY == 0 and search.has_ended():
            break
    return search.finished.n_best(num_best)


@cache
def _compiled_steps() -> tuple[Compiled, Compiled]:
    """Both parts of a step under torch.compile: few graphs for all models of a form and all sizes."""
    return Compiled(decode), Compiled(choose)
