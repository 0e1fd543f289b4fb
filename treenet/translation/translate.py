"""Encoded examples to text: beam search over batches of similar length. Results are in the order of the input."""

import math
from collections.abc import Iterable, Iterator

import torch
from sentencepiece import SentencePieceProcessor
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.data.in_order import WINDOW, count_leaves, in_order, longer_side
from treenet.runs.loading import LoadedRun
from treenet.runs.precision import scoring
from treenet.translation.forced import ScoredTarget, score_targets
from treenet.translation.hypotheses import Hypothesis
from treenet.translation.search import beam_search


def decoding_of(chosen: DecodingConfig, run: LoadedRun) -> DecodingConfig:
    """Return the run's decoding settings, changed by those that the user set."""
    chosen = {name: getattr(chosen, name) for name in chosen.model_fields_set}
    return run.config.decoding.model_copy(update=chosen)


def translate_examples(
    model: nn.Module,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
) -> Iterator[list[Hypothesis]]:
    """Return the hypotheses of every example, best first, in the order of `examples` (rows as from `Shard.row`).

    An example without leaves, from an empty line, has the empty translation. Its score is NaN, because no model gave it. The
    model is put into evaluation mode. Raises UserError as `beam_search` does.
    """

    def search(batch: TreeBatch) -> list[list[Hypothesis]]:
        with scoring(model):
            return beam_search(model, batch, decoding, num_best=num_best)

    model.eval()
    empty = [Hypothesis((), math.nan, math.nan)]
    return in_order(search, model.reads, examples, empty, count_leaves, decoding.max_tokens, device, window)


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
