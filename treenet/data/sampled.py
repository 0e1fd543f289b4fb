"""Training examples that every epoch samples anew: other pieces of words, and noise on source words. The trees follow.

All draws follow from (seed, epoch, example, side). They do not depend on batch-mates, ranks, loader processes or resume. The plan
of batches keeps the sizes of the data set. So all models share batches, and a batch of sampled examples may be larger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from treenet.config import SamplingConfig
from treenet.data.batch import TreeBatch, collate_rows
from treenet.data.examples import Examples, ExampleSource
from treenet.data.hashed_sampling import keys_of_examples, keys_of_parts
from treenet.data.input_kinds import ALWAYS, InputKind, RowLists
from treenet.data.noise import Merges, PieceTrees, WordDraws, add_noise, over_words
from treenet.structure.base import Ragged
from treeproc.common.storage import AnyPath
from treeproc.shards.rows import edges_of, take
from treeproc.shards.store import read_index

# The purposes of draws, which must differ for independent draws.
_SOURCE, _TARGET = 0, 1
_WORD_COLUMNS = ("words", "pos_tags")


class Sampler:
    """Samples the examples of a data set with the vocabulary folder `vocab`; `settings` are those of its trees.

    Raises UserError if a file of the vocabulary is missing or does not fit.
    """

    def __init__(self, vocab: AnyPath, settings: Mapping, config: SamplingConfig, seed: int):
        self.config, self._seed = config, seed
        self._merges = Merges.load(vocab / "pieces.model")
        self._trees = PieceTrees(vocab, settings)

    def source(self, rows: RowLists, epoch: int) -> RowLists:
        """Return the leaves and trees of an epoch, of rows that were read with words and tags. Other fields stay."""
        words = over_words(rows, every_word=self._trees.every_word)
        if self._divides("source"):
            pieces, counts = self._divide(rows, words.pieces, words.counts, words.words, epoch, _SOURCE)
            words = replace(words, pieces=pieces, counts=counts)
        if self.config.has_noise:
            draws = WordDraws(np.asarray(rows.example_ids), words.words, self._seed, epoch)
            fixed = self._merges.is_tag[words.pieces[edges_of(words.counts)[:-1]]]
            words = add_noise(words, self.config, draws, fixed)
        made = self._trees.over_pieces(words)
        return RowLists(**vars(rows) | {name: getattr(made, name) for name in (*ALWAYS[:-1], *_WORD_COLUMNS)})

    def targets(self, rows: RowLists, epoch: int) -> Ragged:
        """Return the target pieces of an epoch."""
        targets = Ragged.of(rows.targets)
        if not self._divides("target") or not len(targets.flat):
            return targets
        begins = self._merges.begins_word(targets.flat)
        edges = edges_of(targets.lengths)
        begins[edges[:-1][targets.lengths > 0]] = True
        first = np.append(np.flatnonzero(begins), len(begins))
        before = edges_of(begins.astype(np.int64))[edges]
        pieces, counts = self._divide(rows, targets.flat, np.diff(first), np.diff(before), epoch, _TARGET)
        return Ragged(pieces, np.diff(edges_of(counts)[before]))

    def _divides(self, side: str) -> bool:
        """Return whether the words of a side are divided anew."""
        return self.config.bpe_dropout > 0 and self.config.sides in ("both", side)

    def _divide(
        self, rows: RowLists, pieces: np.ndarray, counts: np.ndarray, words: np.ndarray, epoch: int, purpose: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divide the words of examples, with `words` [B] each, anew: (pieces of all words, pieces per word)."""
        keys = keys_of_examples(np.asarray(rows.example_ids), self._seed, epoch, purpose)
        return self._merges.divide(pieces, counts, keys_of_parts(keys, words), self.config.bpe_dropout)


class SampledSource(ExampleSource):
    """One split of DATA/encoded for training. `in_epoch` gives the examples of an epoch."""

    def __init__(self, folder: AnyPath, split: str, reads: InputKind, sampling: SamplingConfig, seed: int):
        super().__init__(folder, split, reads)
        self._sampler = Sampler(folder / "vocab", read_index(folder).get("tree_settings", {}), sampling, seed)

    def in_epoch(self, epoch: int) -> "EpochExamples":
        """Return the examples as an epoch samples them."""
        return EpochExamples(self, self._sampler, epoch)


class EpochExamples(Examples):
    """The examples of a source in one epoch. It holds those that were asked for last, so a part of them costs nothing."""

    def __init__(self, source: ExampleSource, sampler: Sampler, epoch: int):
        self._source, self._sampler, self._epoch = source, sampler, epoch
        self.lengths = source.lengths
        self._held: dict[str, tuple[np.ndarray, RowLists]] = {}

    def target_tokens(self, rows: np.ndarray) -> int:
        """Return the number of target pieces with EOS, which the loss of a batch is divided by."""
        return int(Ragged.of(self._take("target", rows).targets).lengths.sum()) + len(rows)

    def sizes(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the numbers [n] of leaves, nodes and target pieces of the rows."""
        source, target = self._take("source", rows), self._take("target", rows)
        lists = {"leaves": source.pieces, "nodes": source.labels, "tgt_pieces": target.targets}
        return {name: Ragged.of(column).lengths for name, column in lists.items()}

    def batch(self, rows: Sequence[int] | np.ndarray) -> TreeBatch:
        """Return the rows as one padded batch."""
        out = self._take("source", rows)
        out.targets = self._take("target", rows).targets
        return collate_rows(out, self._source.reads)

    def _take(self, side: str, rows: Sequence[int] | np.ndarray) -> RowLists:
        """Return one side of the rows, from those that are held if all are."""
        rows = np.asarray(rows)
        held, lists = self._held.get(side, (np.zeros(0, dtype=np.int64), RowLists()))
        if not np.isin(rows, held).all():
            held, lists = self._held[side] = rows, self._sample(side, rows)
        if np.array_equal(rows, held):
            return RowLists(**vars(lists))
        order = np.argsort(held, kind="stable")
        places = order[np.searchsorted(held[order], rows)]
        taken: dict = {"example_ids": np.asarray(lists.example_ids)[places]}
        for field in fields(RowLists)[1:]:
            if isinstance(ragged := getattr(lists, field.name), Ragged):
                taken[field.name] = Ragged(*take(ragged.flat, edges_of(ragged.lengths), places))
        return RowLists(**taken)

    def _sample(self, side: str, rows: np.ndarray) -> RowLists:
        if side == "target":
            read = self._source.row_lists(rows, ("targets",))
            read.targets = self._sampler.targets(read, self._epoch)
            return read
        names = {*ALWAYS, *self._source.reads.columns, *_WORD_COLUMNS} - {"targets"}
        return self._sampler.source(self._source.row_lists(rows, names), self._epoch)
