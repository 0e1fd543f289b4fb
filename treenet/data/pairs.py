"""Pairs of sentences with a score as batches of sentences. Shapes: P pairs, B = 2 P sentences: those of a pair are neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import SourceBatch
from treenet.data.examples import Examples, ExampleSource
from treenet.data.input_kinds import InputKind
from treenet.data.labelled import check_roots
from treenet.data.plan import BatchPlan
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import read_index


@dataclass
class PairBatch(SourceBatch):
    """A padded batch of sentences, and the scores of their pairs."""

    scores: Tensor  # [P] float64


class PairSource(Examples):
    """One split of a data set of pairs, in the form that a model reads; a row is a pair. All pairs make one window.

    Raises UserError when the data set has no scores, or pairs that have lost a sentence, or lacks what the model needs.
    """

    shards = None  # a pair may lie in two
    sentences = 2

    def __init__(self, folder: AnyPath, split: str, reads: InputKind):
        columns = read_index(folder).get("columns", [])
        if "score" not in columns:
            raise UserError(f"{folder} has no scores (its columns: {', '.join(columns)}); choose a data set of format sick")
        self._sentences = ExampleSource(folder, split, reads)
        lengths = {name: np.asarray(column) for name, column in self._sentences.lengths.items()}
        ids = lengths["example_id"]
        first, second = ids[: len(ids) // 2 * 2 : 2], ids[1::2]
        if len(ids) % 2 or (first % 2).any() or (second != first + 1).any():
            raise UserError(
                f"{folder}: a filter dropped one sentence of a pair of split {split}; preprocess again with larger "
                "filters.max_words and filters.max_word_chars, filters.drop_damaged=false and no filters.source_script"
            )
        self.lengths = {name: column[::2] for name, column in lengths.items()}
        # Both sentences of a pair are padded to the longest of the batch.
        self.lengths |= {name: 2 * np.maximum(lengths[name][::2], lengths[name][1::2]) for name in ("leaves", "nodes")}
        self.lengths["example_id"] = first // 2

    def __len__(self) -> int:
        return len(self.lengths["example_id"])

    def batch(self, rows: Sequence[int] | np.ndarray) -> PairBatch:
        """Return the pairs as one padded batch; `example_ids` are those of sentences."""
        rows = np.asarray(rows)
        sentences = (2 * rows[:, None] + np.arange(2)).ravel()
        picked = self._sentences.pick(sentences)
        if self._sentences.reads.rooted:
            check_roots(picked)
        batch = self._sentences.batch(sentences)
        return PairBatch(**vars(batch), scores=torch.from_numpy(picked.values("score")[::2].copy()))

    def target_tokens(self, rows: np.ndarray) -> int:
        """Return the number of scores to be predicted, which the loss of a batch is divided by."""
        return len(rows)

    def epoch_targets(self, plan: BatchPlan) -> int:
        """Return `target_tokens` of all rows in use."""
        return len(plan.rows)
