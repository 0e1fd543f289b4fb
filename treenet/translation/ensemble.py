"""Several models as one: the probability of a piece is the mean of theirs. Search and scoring treat it as a single model.

Shapes: B batch, R live hypotheses, T target positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import LEAVES, InputKind
from treenet.runs.loading import LoadedRun, load_run
from treenet.translation.caches import Decodable, SearchState, StaticSearchState, has_static_cache
from treeproc.common.settings import UserError
from treeproc.shards.store import read_index


@dataclass(frozen=True)
class EnsembleState:
    """One state per model, with the same hypotheses in the same order."""

    states: tuple[SearchState, ...]

    def select(self, rows: Tensor, beam_width: int | None = None) -> "EnsembleState":
        """See `DecoderState.select`."""
        return EnsembleState(tuple(state.select(rows, beam_width) for state in self.states))


@dataclass(frozen=True)
class StaticEnsembleState:
    """One static state per model, with the same hypotheses at the same places."""

    states: tuple[StaticSearchState, ...]

    @property
    def capacity(self) -> int:
        """Return the positions that each state can hold."""
        return self.states[0].capacity

    def grow(self) -> None:
        """Double the capacity of every state."""
        for state in self.states:
            state.grow()

    def select(self, rows: Tensor, beam_width: int | None = None) -> "StaticEnsembleState":
        """See `StaticState.select`."""
        for state in self.states:
            state.select(rows, beam_width)
        return self


class Ensemble(nn.Module):
    """Models of one vocabulary that search can decode. Its logits are log-probabilities, float32."""

    def __init__(self, models: Sequence[Decodable]):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.reads: InputKind = next((model.reads for model in models if model.reads is not LEAVES), LEAVES)

    def encode(self, batch: TreeBatch) -> list:
        """Return one memory per model."""
        return [model.encode(batch) for model in self.models]

    def start_decoding(self, memories: list) -> EnsembleState:
        return EnsembleState(tuple(model.start_decoding(m) for model, m in zip(self.models, memories, strict=True)))

    def decode_step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """Return the log-probabilities [R, V] of the piece that follows `tokens` [R]."""
        steps = [model.decode_step(tokens, s) for model, s in zip(self.models, state.states, strict=True)]
        return _mean_log_probs([logits for logits, _ in steps]), EnsembleState(tuple(s for _, s in steps))

    @property
    def has_static_cache(self) -> bool:
        """Whether all models have one."""
        return all(map(has_static_cache, self.models))

    def start_static(self, memories: list, beam_width: int, most_positions: int) -> StaticEnsembleState:
        """Return the state of `beam_width` empty hypotheses per sentence."""
        started = zip(self.models, memories, strict=True)
        return StaticEnsembleState(tuple(model.start_static(memory, beam_width, most_positions) for model, memory in started))

    def step_static(self, tokens: Tensor, state: StaticEnsembleState) -> Tensor:
        """Return the log-probabilities [R, V] of the piece that follows `tokens` [R]. Changes `state` in place."""
        steps = zip(self.models, state.states, strict=True)
        return _mean_log_probs([model.step_static(tokens, one) for model, one in steps])

    def forward(self, batch: TreeBatch) -> Tensor:
        """Compute log-probabilities [B, T, V] of `tgt_out` with teacher forcing."""
        return _mean_log_probs([model(batch) for model in self.models])


def _mean_log_probs(logits: Sequence[Tensor]) -> Tensor:
    """Return log(mean of softmax) over the models."""
    return reduce(torch.logaddexp, (x.float().log_softmax(dim=-1) for x in logits)) - math.log(len(logits))


def load_ensemble(runs: Sequence[Path], checkpoints: Sequence[str], *, device: torch.device | str = "cpu") -> LoadedRun:
    """Load every checkpoint of every run as one model. Settings, vocabulary and data set are those of the first run.

    Raises UserError as `load_run` does, and if the runs' vocabularies differ. It also does so if the runs' trees are made in
    different ways: a line is parsed once for all models.
    """
    members = list(product(runs, checkpoints))
    loaded = [load_run(run, checkpoint=checkpoint, device=device) for run, checkpoint in members]
    first, index = loaded[0], read_index(loaded[0].data / "encoded")
    for (run, _), other in zip(members, loaded, strict=True):
        theirs = read_index(other.data / "encoded")
        names = ["vocab_fingerprint"]
        if other.model.reads is not LEAVES:
            names += ["parser_settings", "tree_settings"]
        for name in names:
            if index.get(name) != theirs.get(name):
                raise UserError(
                    f"{run} and {runs[0]} cannot form an ensemble: {name} of their data sets must be the same, but is "
                    f"{theirs.get(name)} and {index.get(name)}; choose runs on the same data set"
                )
    if len(loaded) == 1:
        return first
    if len(kinds := {one.model.reads for one in loaded} - {LEAVES}) > 1:
        kinds = " and ".join(sorted(map(str, kinds)))
        raise UserError(f"models that read {kinds} cannot form an ensemble; choose models that read the same, and plain ones")
    names = [f"{run.name}/{one.checkpoint}" for (run, _), one in zip(members, loaded, strict=True)]
    return replace(first, model=Ensemble([one.model for one in loaded]), checkpoint=" + ".join(names))
