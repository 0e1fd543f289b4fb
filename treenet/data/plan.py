"""The deterministic batch plan: which examples make up the global batch of every step.

A data set is cut into windows of consecutive shards (`windows.py`). An epoch goes through them in an order that it draws. Within
a window, examples are sorted by cost, the longer of leaves and target pieces with EOS, and cut so that padded width times count
stays within the budget. Ties are broken anew in every epoch. The sorted costs are the same in every epoch, and so are the cuts:
a step maps to (epoch, window, batch) by one division and one search. The numbers of batches of all windows follow from counts
of sizes, without the rows; a rank holds the rows of one window.

Nothing here knows of workers or models: a rank takes the slice `[rank::world_size]`, which is empty
for some ranks when a batch has fewer examples than there are ranks.
"""

from collections.abc import Iterator

import numpy as np

from treenet.config import BatchConfig
from treenet.data.batch import cut_batches
from treenet.data.hashed_sampling import Corpora
from treenet.data.windows import Lengths, ShardSizes, WindowFacts, WindowRows, Windows, example_costs
from treeproc.common.settings import UserError
from treeproc.shards.lengths import SizeCounts
from treeproc.shards.schema import WINDOW_ROWS
from treeproc.shards.store import fingerprint_of


class BatchPlan:
    """A pure function of lengths, text fingerprint, seed and BatchConfig. Steps and epochs count from 0.

    Rows are positions in the lengths that the plan was built from. Two threads may use a plan.
    """

    def __init__(self, windows: Windows, facts: list[WindowFacts], seed_key: int, only: WindowRows | None):
        self._windows, self._seed_key = windows, seed_key
        self._batches_of = np.array([window.num_batches for window in facts])
        self._hardest = int(np.argmax([window.score for window in facts]))
        self.num_batches = int(self._batches_of.sum())  # of one epoch, the same in every epoch
        fraction, length, weight = np.sum([window.left_out for window in facts], axis=0).tolist()
        # Rows not in use, by reason; weights of corpora below 1 leave out rows too.
        self.left_out = {"fraction": fraction, "length": length} | ({"weight": weight} if weight else {})
        self._only = only
        # Epoch and window that were asked for last, and what `_order` gives for them; of several windows nothing else is held.
        self._drawn: tuple[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    @classmethod
    def build(
        cls,
        lengths: Lengths,
        batch: BatchConfig,
        *,
        text_fingerprint: str,
        seed: int,
        shards: ShardSizes | None = None,
        corpora: Corpora | None = None,
    ) -> "BatchPlan":
        """Plan from the columns of `lengths.arrow`; without `shards` there is one window. `corpora` are those of `batch`.

        The vocabulary enters by the lengths alone, so that a control tree, whose labels differ, keeps the batches. With several
        windows and a budget of leaves and nodes, the rows of all windows are read once. Raises UserError when no example is
        left or one exceeds the budget.
        """
        if batch.corpora and corpora is None:
            raise ValueError("corpora is missing: a plan needs the examples of each file")
        windows = Windows(lengths, batch, seed, shards, corpora)
        only = windows.read(0) if len(windows) == 1 else None
        facts = [WindowFacts.of_rows(only)] if only else [windows.facts(number) for number in range(len(windows))]
        if not any(window.num_batches for window in facts):
            raise UserError(
                f"batch.fraction and the limits leave no training example of {len(lengths['leaves'])}; raise batch.fraction = "
                f"{batch.fraction}, batch.max_leaves = {batch.max_leaves} or batch.max_target_pieces = {batch.max_target_pieces}"
            )
        if (longest := max(window.longest for window in facts)) > batch.max_tokens:
            raise UserError(
                f"batch.max_tokens must be at least {longest}, the longest training example, but is {batch.max_tokens}; "
                "raise it, or lower batch.max_leaves and batch.max_target_pieces"
            )
        return cls(windows, facts, int(fingerprint_of(text_fingerprint, seed), 16), only)

    @property
    def rows(self) -> np.ndarray:
        """Return all rows in use [n], in the order of the data set. They are read window by window, and take 4 bytes each."""
        return np.concatenate([self._read(number).rows for number in range(len(self._windows))])

    def used_sizes(self) -> SizeCounts:
        """Return the counts of the sizes of all rows in use. In a share of several windows, nodes are means of rows of a size."""
        return SizeCounts.merge([self._windows.used_sizes(number) for number in range(len(self._windows))])

    def epoch(self, step: int) -> int:
        return step // self.num_batches

    def batch(self, step: int) -> np.ndarray:
        """Return the rows [B] of the global batch of `step`."""
        epoch, position = divmod(step, self.num_batches)
        window, position = self._find(epoch, position)
        rows, batches, starts = self._order(epoch, window)
        return rows[starts[batches[position]] : starts[batches[position] + 1]]

    def hardest_batch(self) -> np.ndarray:
        """Return the rows of the batch with the most attention scores, count * width^2: the one that needs the most memory."""
        window = self._read(self._hardest)
        number, starts = window.hardest()[1], window.starts
        return window.order(self._key(0, self._hardest))[0][starts[number] : starts[number + 1]]

    def next_rows(self, step: int) -> range:
        """Return the rows of the window that follows the one of `step`, in use or not: those that will be needed next."""
        epoch, position = divmod(step, self.num_batches)
        window, position = self._find(epoch, position)
        following = step + int(self._batches_of[window]) - position
        window, _ = self._find(*divmod(following, self.num_batches))
        return range(*self._windows.bounds[window : window + 2].tolist())

    def _find(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the window of a batch of an epoch, and its number among the batches of the window."""
        if len(self._windows) == 1:
            return 0, position
        order = np.random.default_rng([self._seed_key, epoch]).permutation(len(self._windows))
        ends = np.cumsum(self._batches_of[order])
        place = int(np.searchsorted(ends, position, side="right"))
        window = int(order[place])
        return window, position - int(ends[place] - self._batches_of[window])

    def _order(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a window by cost [n], its batches' order [num_batches] and their starts; the last ones are kept."""
        drawn = self._drawn
        if drawn is None or drawn[0] != (epoch, window):
            self._drawn = drawn = None  # or two windows were held for a while
            read = self._read(window)
            drawn = self._drawn = (epoch, window), (*read.order(self._key(epoch, window)), read.starts)
        return drawn[1]

    def _key(self, epoch: int, window: int) -> list[int]:
        return [self._seed_key, epoch] if len(self._windows) == 1 else [self._seed_key, epoch, window]

    def _read(self, window: int) -> WindowRows:
        """Return the rows of a window. Raises UserError when they are not those that were counted."""
        if self._only is not None:
            return self._only
        read = self._windows.read(window)
        if read.num_batches != self._batches_of[window]:
            raise UserError(
                f"the rows of window {window} make {read.num_batches} batches, but {self._batches_of[window]} by their "
                "counts: size_counts.arrow does not fit lengths.arrow; run tree-attention preprocess again"
            )
        return read


def plan_in_order(lengths: Lengths, max_tokens: int, window_rows: int = WINDOW_ROWS) -> Iterator[np.ndarray]:
    """Yield all rows once, in batches of similar length within the budget: to score or search. Sorts `window_rows` at a time."""
    count = len(lengths["leaves"])
    for first in range(0, count, window_rows):
        part = {name: lengths[name][first : first + window_rows] for name in ("leaves", "tgt_pieces")}
        costs = example_costs(part)
        order = np.argsort(costs, kind="stable")
        yield from np.split(order + first, cut_batches(costs[order], max_tokens)[1:-1])
