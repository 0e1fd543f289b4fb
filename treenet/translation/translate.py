"""Encoded examples to text: search or sampling over batches of similar length, in the order of the input; several models as one.

Of several models, the probability of a piece is the mean of theirs. Search and scoring treat them as a single model.

Shapes: B batch, R live hypotheses, T target positions, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn

from treenet.config import DecodingConfig
from treenet.data.batch import WINDOW, TreeBatch, count_leaves, in_order, longer_side
from treenet.data.input_kinds import LEAVES, InputKind
from treenet.layers.backend import scoring
from treenet.layers.core import Modules
from treenet.runs.loading import LoadedRun, load_run
from treenet.runs.run_folder import checkpoint_path
from treenet.translation.caches import Decodable, SearchState, StaticSearchState, choose_steps, has_static_cache
from treenet.translation.hypotheses import Hypothesis, check_num_best, length_penalties
from treenet.translation.line_constraints import PieceTexts, batch_constraints
from treenet.translation.reranking import check_attends, choose_by_risk, order_by_coverage
from treenet.translation.search import search_batch
from treenet.translation.settings import MUST_NOT_APPEAR
from treeproc.common.messages import warn
from treeproc.common.settings import UserError, build_settings
from treeproc.shards.schema import PAD_ID
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
        self.models: Modules[Any] = Modules(models)
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
    places = [checkpoint_path(run, checkpoint).resolve() for run, checkpoint in members]
    if twice := [member for number, member in enumerate(members) if places[number] in places[:number]]:
        raise UserError(f"an ensemble would count {twice[0][0]}, checkpoint {twice[0][1]}, twice; give each one once")
    loaded: list[LoadedRun] = [load_run(run, checkpoint=checkpoint, device=device) for run, checkpoint in members]
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
    if len(reads := {one.model.reads for one in loaded} - {LEAVES}) > 1:
        kinds = " and ".join(sorted(map(str, reads)))
        raise UserError(f"models that read {kinds} cannot form an ensemble; choose models that read the same, and plain ones")
    names = [f"{run.name}/{one.checkpoint}" for (run, _), one in zip(members, loaded, strict=True)]
    return replace(first, model=Ensemble([one.model for one in loaded]), checkpoint=" + ".join(names))


@dataclass(frozen=True)
class ScoredTarget(Hypothesis):
    """A given translation as a hypothesis, and the log-probability of each of its pieces, EOS last."""

    token_log_probs: tuple[float, ...] = ()


@torch.inference_mode()
def score_targets(model: nn.Module, batch: TreeBatch, decoding: DecodingConfig) -> list[ScoredTarget]:
    """Score the targets of `batch` under `model`, which must be in evaluation mode. Limits of length hold only for search."""
    logits = model(batch)
    lengths = (batch.tgt_out != PAD_ID).sum(1).tolist()
    penalties = length_penalties(max(lengths) - 1, decoding).tolist()
    out = []
    for row, length in enumerate(lengths):
        tokens = batch.tgt_out[row, :length]
        # One row at a time: the log-probabilities of all rows would double the memory of the logits.
        log_probs = logits[row, :length].float().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
        total = float(log_probs.double().sum())
        ids = tuple(tokens[:-1].tolist())
        out.append(ScoredTarget(ids, total / penalties[length - 1], total, tuple(log_probs.tolist())))
    return out


def decoding_of(chosen: DecodingConfig, run: LoadedRun) -> DecodingConfig:
    """Return the run's decoding settings, changed by those that the user set; see `change_decoding`."""
    return change_decoding(run.config.decoding, chosen)


def change_decoding(decoding: DecodingConfig, chosen: DecodingConfig) -> DecodingConfig:
    """Return `decoding` with the settings that were set in `chosen`. Raises UserError if they do not go together."""
    values = decoding.model_dump() | {name: getattr(chosen, name) for name in chosen.model_fields_set}
    decoding = build_settings(DecodingConfig, values, "decoding")
    try:
        decoding.check()
    except ValueError as error:
        raise UserError(f"decoding: {error}") from None
    return decoding


_USUAL_BEAM, _WIDE_BEAM = 5, 100


def warn_of_width(decoding: DecodingConfig, num_pieces: int) -> None:
    """Print a note of the cost of a very wide beam: its time grows with the hypotheses, its memory with their logits [V]."""
    if (width := decoding.beam_size) >= _WIDE_BEAM and decoding.method == "beam":
        mib = math.ceil(4 * width * num_pieces / 2**20)
        warn(
            f"note: decoding.beam_size = {width:,} searches {width / _USUAL_BEAM:,.0f} times as many hypotheses as the usual "
            f"{_USUAL_BEAM}, and takes at least {mib:,.0f} MiB for each line of a batch; a smaller decoding.max_tokens gives "
            "smaller batches"
        )


def translate_examples(
    model: Any,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    processor: SentencePieceProcessor | None = None,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
    compiled: bool = False,
) -> Iterator[list[Hypothesis]]:
    """Return the hypotheses of every example, best first, in the order of `examples` (rows as from `Shard.row`).

    Samples are in the order of their numbers. An example may have the columns of `LineConstraints`; without a hypothesis that
    meets them, its list is empty. An example without leaves, from an empty line, has the empty translation. Its score is NaN,
    because no model gave it.

    `processor` is needed for minimum Bayes risk, and for strings that must not appear. `compiled` fuses the operations of a step
    of plain beam search, if `can_compile`. The model is put into evaluation mode. Raises UserError as
    `search_batch` does.
    """
    piece_texts = cache(PieceTexts)

    def search(batch: TreeBatch, rows: list[dict]) -> list[list[Hypothesis]]:
        there = batch.leaf_pieces.device
        texts = piece_texts(processor) if any(row.get(MUST_NOT_APPEAR) for row in rows) and processor else None
        constraints, steps = batch_constraints(rows, texts, there), choose_steps(model, there, compiled)
        find = partial(search_batch, model, batch, decoding, constraints=constraints, steps=steps)
        with scoring(model):
            check_num_best(num_best, decoding)
            if decoding.method == "mbr":
                if processor is None:
                    raise ValueError("minimum Bayes risk needs the processor of the vocabulary, because it compares texts")
                drawn = find(num_best=decoding.mbr_samples)
                return [choose_by_risk(own, [detokenize(processor, one) for one in own], num_best) for own in drawn]
            if decoding.coverage_penalty:
                return order_by_coverage(model, rows, find(num_best=decoding.beam_size), decoding, num_best, there)
            return find(num_best=num_best)

    if decoding.coverage_penalty:
        check_attends(model)
    model.eval()
    empty = [Hypothesis((), math.nan, math.nan)]
    return in_order(search, model.reads, examples, empty, count_leaves, decoding.max_tokens, device, window)


def can_compile(model: nn.Module, decoding: DecodingConfig) -> bool:
    """Return whether searches by these settings have steps that can be compiled."""
    return decoding.method == "beam" and decoding.diversity_groups == 1 and has_static_cache(model)


def translate_rows(
    run: LoadedRun,
    rows: Sequence[dict],
    decoding: DecodingConfig,
    num_best: int,
    device: torch.device | str = "cpu",
    compiled: bool = False,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of the rows of some lines, which are batched together; see `translate_examples`."""
    window = max(1, len(rows))
    found = translate_examples(
        run.model, rows, decoding, num_best=num_best, processor=run.processor, device=device, window=window, compiled=compiled
    )
    return list(found)


def score_examples(
    model: Any,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
) -> Iterator[ScoredTarget]:
    """Score the given target of every example under the model, in the order of `examples`; see `score_targets`.

    An example without leaves has the score NaN, with any target. The model is put into evaluation mode.
    """

    def score(batch: TreeBatch, _: list[dict]) -> list[ScoredTarget]:
        with scoring(model):
            return score_targets(model, batch, decoding)

    model.eval()
    empty = ScoredTarget((), math.nan, math.nan)
    return in_order(score, model.reads, examples, empty, longer_side, decoding.max_tokens, device, window)


def detokenize(processor: SentencePieceProcessor, hypothesis: Hypothesis) -> str:
    """Return the hypothesis as one line of text."""
    return " ".join(processor.decode(list(hypothesis.ids)).splitlines())
