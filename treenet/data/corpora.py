"""Weights of corpora: how often each example of the training split occurs in an epoch."""

from collections.abc import Sequence

import numpy as np

from treenet.config import CorpusConfig
from treenet.data.draws import keys_of_examples
from treeproc.common.settings import UserError

# Keeps these draws apart from those of shares and of samples.
_PURPOSE = 0x636F70696573


def check_corpora(last_example: int, corpora: Sequence[CorpusConfig]) -> None:
    """Raise UserError if a corpus begins behind the last example, whose 0-based id is given: then the numbers must be wrong."""
    begin = 0
    for number, corpus in enumerate(corpora, start=1):
        if begin > last_example:
            raise UserError(
                f"batch.corpora: corpus {number} begins after {begin:,} examples, but train ends at {last_example + 1:,}; "
                "correct the numbers"
            )
        begin += corpus.examples or 0


def count_copies(example_ids: np.ndarray, corpora: Sequence[CorpusConfig], seed: int | None) -> np.ndarray:
    """Return the number of times [n] that each example occurs in an epoch: the whole part of its corpus's weight, or one more.

    The share of examples that occur once more is about the fraction of the weight. They follow from the ids and the seed. Raises
    UserError for an example behind the last corpus.
    """
    ends = np.cumsum([0, *(corpus.examples or 0 for corpus in corpora)])[1:]
    if corpora[-1].examples is None:
        ends[-1] = np.iinfo(np.int64).max
    of_example = np.searchsorted(ends, example_ids, side="right")
    if (of_example == len(corpora)).any():
        raise UserError(
            f"batch.corpora has {ends[-1]:,} examples, but train has example {int(np.max(example_ids)) + 1:,}; correct the "
            "numbers, or leave out examples of the last corpus"
        )
    weights = np.array([corpus.weight for corpus in corpora])[of_example]
    whole = np.floor(weights)
    drawn = (keys_of_examples(example_ids, _PURPOSE, 0 if seed is None else seed + 1) >> np.uint64(11)) / 2.0**53
    return (whole + (drawn < weights - whole)).astype(np.int64)
