"""Scores of given translations, by the conventions of `treenet.translation.search`.

A hypothesis that search found has the same score here. Teacher forcing gives the log-probabilities of its pieces and of EOS. The
normalisation includes pieces that search never produces. Log-probabilities are float32, their sums float64. Shapes: B batch, T
target positions with EOS, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.translation.hypotheses import Hypothesis, length_penalties
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
