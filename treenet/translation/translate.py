"""Encoded examples to text: beam search or sampling over batches of similar length. Results are in the order of the input."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from sentencepiece import SentencePieceProcessor
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import WINDOW, TreeBatch, count_leaves, in_order, in_order_with_rows, longer_side
from treenet.runs.loading import LoadedRun
from treenet.runs.precision import scoring
from treenet.translation.caches import choose_steps, has_static_cache
from treenet.translation.hypotheses import Hypothesis, check_num_best, length_penalties
from treenet.translation.line_constraints import BatchConstraints, PieceTexts, batch_constraints
from treenet.translation.reranking import check_attends, choose_by_risk, order_by_coverage
from treenet.translation.search import search_batch
from treenet.translation.settings import MUST_NOT_APPEAR
from treeproc.common.settings import UserError, build_settings
from treeproc.shards.schema import PAD_ID


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


def translate_examples(
    model: nn.Module,
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
        texts = piece_texts(processor) if any(row.get(MUST_NOT_APPEAR) for row in rows) and processor else None
        constraints = batch_constraints(rows, texts, batch.leaf_pieces.device)
        with scoring(model):
            return _decode_batch(model, batch, rows, decoding, num_best, constraints, processor, compiled)

    if decoding.coverage_penalty:
        check_attends(model)
    model.eval()
    empty = [Hypothesis((), math.nan, math.nan)]
    return in_order_with_rows(search, model.reads, examples, empty, count_leaves, decoding.max_tokens, device, window)


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
    options = {"num_best": num_best, "processor": run.processor, "device": device, "window": window, "compiled": compiled}
    return list(translate_examples(run.model, rows, decoding, **options))


def _decode_batch(
    model: nn.Module,
    batch: TreeBatch,
    rows: list[dict],
    decoding: DecodingConfig,
    num_best: int,
    constraints: BatchConstraints | None,
    processor: SentencePieceProcessor | None,
    compiled: bool,
) -> list[list[Hypothesis]]:
    check_num_best(num_best, decoding)
    steps = choose_steps(model, batch.leaf_pieces.device, compiled)
    search = partial(search_batch, model, batch, decoding, constraints=constraints, steps=steps)
    if decoding.method == "mbr":
        if processor is None:
            raise ValueError("minimum Bayes risk needs the processor of the vocabulary, because it compares texts")
        drawn = search(num_best=decoding.mbr_samples)
        return [choose_by_risk(own, [detokenize(processor, one) for one in own], num_best) for own in drawn]
    if decoding.coverage_penalty:
        found = search(num_best=decoding.beam_size)
        return order_by_coverage(model, rows, found, decoding, num_best, batch.leaf_pieces.device)
    return search(num_best=num_best)


def score_examples(
    model: nn.Module,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
) -> Iterator[ScoredTarget]:
    """Score the given target of every example under the model, in the order of `examples`; see `score_targets`.

    An example without leaves has the score NaN, with any target. The model is put into evaluation mode.
    """

    def score(batch: TreeBatch) -> list[ScoredTarget]:
        with scoring(model):
            return score_targets(model, batch, decoding)

    model.eval()
    empty = ScoredTarget((), math.nan, math.nan)
    return in_order(score, model.reads, examples, empty, longer_side, decoding.max_tokens, device, window)


def detokenize(processor: SentencePieceProcessor, hypothesis: Hypothesis) -> str:
    """Return the hypothesis as one line of text."""
    return " ".join(processor.decode(list(hypothesis.ids)).splitlines())
