"""Windows of shards, and the costs of their examples.

A window is a run of consecutive shards. A rank holds one window at a time. Bounds follow from the numbers of rows of the shards,
which all stages of a text share. So control trees and all models have the same windows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from treenet.config import BatchConfig
from treenet.data.batch import cut_batches, cut_runs
from treenet.data.hashed_sampling import Corpora, choose_fraction, choose_in_cells, share_of_cells
from treeproc.common.errors import check_choice
from treeproc.shards.lengths import Column, SizeCounts
from treeproc.shards.rows import edges_of, window_bounds


def example_costs(lengths: Mapping[str, np.ndarray | Column], budget_counts: str = "leaves") -> np.ndarray:
    """Return the padded positions of one row [n]: the longer of the source and the target with BOS or EOS."""
    check_choice("budget_counts", budget_counts, ("leaves", "leaves_and_nodes"))
    source = np.asarray(lengths["leaves"])
    if budget_counts == "leaves_and_nodes":
        source = source + np.asarray(lengths["nodes"])
    return np.maximum(source, np.asarray(lengths["tgt_pieces"]) + 1)


def batch_widths(costs: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the highest cost [num_batches] in each batch of `cut_runs`."""
    return costs[np.searchsorted(np.cumsum(counts), starts[1:] - 1, side="right")].astype(np.int64)


Lengths = Mapping[str, np.ndarray | Column]
_ROWS_AT_ONCE = 1 << 20  # so that reading a window takes little memory beside what is kept


@dataclass(frozen=True)
class ShardSizes:
    """What the windows of a split follow from."""

    rows: np.ndarray  # [shards]
    count: Callable[[int, int], SizeCounts]  # of the rows of the shards from the first number to the second, without that


@dataclass(frozen=True)
class WindowRows:
    """The rows of a window that are in use. Cuts are over their sorted costs."""

    rows: np.ndarray  # [n] int32 (int64 in splits of more than 2^31 rows), in the order of the data set
    costs: np.ndarray  # [n] int32 or int16
    starts: np.ndarray  # [num_batches + 1]
    left_out: np.ndarray  # [3] rows left out for the fraction, for their length, for the weight of their corpus

    @property
    def num_batches(self) -> int:
        return len(self.starts) - 1

    def hardest(self) -> tuple[int, int]:
        """Return the attention scores, count * width^2, of the batch that has most, and its number; (0, 0) without rows."""
        return _hardest(self.starts, np.sort(self.costs, kind="stable")[self.starts[1:] - 1].astype(np.int64))

    def order(self, key: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows in an order of ascending cost [n], and an order of the batches [num_batches], both drawn by `key`."""
        random = np.random.default_rng(key)
        shuffled = np.arange(len(self.rows), dtype=np.int32)
        random.shuffle(shuffled)
        batches = random.permutation(self.num_batches)
        shuffled = shuffled[np.argsort(self.costs[shuffled], kind="stable")]
        return self.rows[shuffled], batches


@dataclass(frozen=True)
class WindowFacts:
    """What a plan holds of each window."""

    num_batches: int
    score: int  # attention scores of the batch that has most
    longest: int  # highest cost of a row in use
    left_out: np.ndarray  # [3], see WindowRows

    @classmethod
    def of_rows(cls, window: WindowRows) -> "WindowFacts":
        """Build the facts from the rows themselves."""
        longest = int(window.costs.max(initial=0))
        return cls(window.num_batches, window.hardest()[0], longest, window.left_out)

    @classmethod
    def of_counts(cls, counts: SizeCounts, taken: np.ndarray, batch: BatchConfig) -> "WindowFacts":
        """Build from the counts of all rows, when `taken` [cells] are drawn from each cell; the budget must count leaves."""
        fits = sizes_fit(counts.leaves, counts.tgt_pieces, batch)
        used = fits & (taken > 0)
        costs, place = np.unique(example_costs(vars(counts[used])), return_inverse=True)
        of_cost = np.bincount(place, taken[used], minlength=len(costs)).astype(np.int64)
        starts = cut_runs(costs, of_cost, batch.max_tokens)
        score = _hardest(starts, batch_widths(costs, of_cost, starts))[0]
        left_out = np.array([int((counts.rows - taken).sum()), int(taken[~fits].sum()), 0])
        return cls(len(starts) - 1, score, int(costs.max(initial=0)), left_out)


class Windows:
    """The windows of a split under the settings of a run; without `shards` there is one."""

    def __init__(
        self, lengths: Lengths, batch: BatchConfig, seed: int, shards: ShardSizes | None, corpora: Corpora | None = None
    ):
        self._lengths, self._batch, self._shards, self._corpora = lengths, batch, shards, corpora
        self._seed = seed if batch.subset == "by_seed" else None  # of shares; None if all runs draw the same
        self._cuts = window_bounds(shards.rows, batch.window_rows) if shards else np.array([0, 1])
        self.bounds = edges_of(shards.rows)[self._cuts] if shards else np.array([0, len(lengths["leaves"])])  # rows [windows + 1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def counted(self) -> bool:
        """Return whether facts come of counts. One window needs its rows anyway. The counts know neither nodes nor corpora."""
        return len(self) > 1 and self._batch.budget_counts == "leaves" and self._corpora is None

    def read(self, window: int) -> WindowRows:
        """Read the rows in use of a window."""
        lengths, batch, (first, last) = self._lengths, self._batch, self.bounds[window : window + 2].tolist()
        chosen = self._choose(window, first, last)
        dtype = np.int32 if last <= 2**31 else np.int64
        left_out = np.array([len(chosen) - np.count_nonzero(chosen), 0, 0])
        rows, costs = [np.zeros(0, dtype)], [np.zeros(0, np.int16)]
        names = ["leaves", "tgt_pieces", *(["nodes"] if batch.budget_counts == "leaves_and_nodes" else [])]
        for start in range(first, last, _ROWS_AT_ONCE):
            part = {name: lengths[name][start : min(last, start + _ROWS_AT_ONCE)] for name in names}
            drawn = chosen[start - first : start - first + _ROWS_AT_ONCE]
            fits = sizes_fit(part["leaves"], part["tgt_pieces"], batch)
            left_out[1] += np.count_nonzero(drawn & ~fits)
            used = np.flatnonzero(drawn & fits)
            if self._corpora is not None:
                ids = np.asarray(lengths["example_id"][start : start + len(fits)])
                copies = self._corpora.count_copies(ids[used], self._seed)
                left_out[2] += np.count_nonzero(copies == 0)
                used = np.repeat(used, copies)
            rows.append((used + start).astype(dtype))
            cost = example_costs(part, batch.budget_counts)[used]
            short = cost.max(initial=0) <= np.iinfo(np.int16).max  # NumPy sorts 16 bits by radix, ten times as fast
            costs.append(cost.astype(np.int16 if short else np.int32))
        every = np.concatenate(costs)  # int32 where one part is
        return WindowRows(np.concatenate(rows), every, cut_batches(np.sort(every, kind="stable"), batch.max_tokens), left_out)

    def _choose(self, window: int, first: int, last: int) -> np.ndarray:
        """Return a mask [last - first] of the rows that a run's share has.

        A share of one window takes each example by its id; a share of several takes a number of each size from each.
        """
        lengths, fraction = self._lengths, self._batch.fraction
        if fraction >= 1:
            return np.ones(last - first, dtype=bool)
        ids = lengths["example_id"][first:last]
        if len(self) == 1:
            return choose_fraction(ids, fraction, self._seed)
        sizes = lengths["leaves"][first:last], lengths["tgt_pieces"][first:last]
        return choose_in_cells(*sizes, ids, fraction, window, self._seed)

    def facts(self, window: int) -> WindowFacts:
        """Return what the plan holds of a window, from its counts where that is possible."""
        if not self.counted:
            return WindowFacts.of_rows(self.read(window))
        counts, taken = self._draw(window)
        return WindowFacts.of_counts(counts, taken, self._batch)

    def used_sizes(self, window: int) -> SizeCounts:
        """Return the counts of the rows in use. In a share of several windows, nodes are those of as many mean rows per size."""
        if not self.counted:
            rows = self.read(window).rows
            return SizeCounts.of(*(np.asarray(self._lengths[name][rows]) for name in ("leaves", "tgt_pieces", "nodes")))
        counts, taken = self._draw(window)
        used = counts.take(taken)
        return used[sizes_fit(used.leaves, used.tgt_pieces, self._batch)]

    def _draw(self, window: int) -> tuple[SizeCounts, np.ndarray]:
        """Return the counts of all rows of a window, and how many rows [cells] of each size its share has."""
        if self._shards is None:
            raise ValueError("there are no counts without shards")
        counts = self._shards.count(*self._cuts[window : window + 2].tolist())
        return counts, share_of_cells(counts, self._batch.fraction, window, self._seed)


def sizes_fit(leaves: np.ndarray, tgt_pieces: np.ndarray, batch: BatchConfig) -> np.ndarray:
    """Return a mask [n] of the sizes within the limits."""
    return (leaves >= 1) & (leaves <= batch.max_leaves) & (tgt_pieces <= batch.max_target_pieces)


def _hardest(starts: np.ndarray, widths: np.ndarray) -> tuple[int, int]:
    scores = np.diff(starts) * widths**2
    number = int(np.argmax(scores)) if len(scores) else 0
    return (int(scores[number]) if len(scores) else 0), number
