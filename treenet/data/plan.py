"""The deterministic batch plan: which examples make up the global batch of every step.

Examples are sorted by cost, the longer of leaves and target pieces with EOS, and cut so that padded width
times count stays within the budget. Ties are broken anew in every epoch; since the sorted costs are
the same in every epoch, so are the cuts, and a step maps to (epoch, batch) by one division.

Nothing here knows of workers or models: a rank takes the slice `[rank::world_size]`, which is empty
for some ranks when a batch has fewer examples than there are ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from treenet.config import BatchConfig
from treeproc.common.settings import UserError
from treeproc.shards.store import fingerprint_of


def hash_ids(example_ids: np.ndarray) -> np.ndarray:
    """splitmix64 of the ids as uint64 [n]: spread evenly, the same on every machine and in every run."""
    with np.errstate(over="ignore"):
        mixed = example_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def choose_fraction(example_ids: np.ndarray, fraction: float, seed: int | None = None) -> np.ndarray:
    """Mask [n] of about `fraction` of the examples; a smaller fraction chooses a subset of a larger one with the same `seed`.

    Two seeds draw independently of each other; None draws as ever.
    """
    if fraction >= 1:
        return np.ones(len(example_ids), dtype=bool)
    hashes = hash_ids(example_ids)
    if seed is not None:
        hashes = hash_ids(hashes ^ hash_ids(np.array([seed])))
    return hashes < np.uint64(int(fraction * 2**64))


def example_costs(lengths: Mapping[str, np.ndarray], budget_counts: str = "leaves") -> np.ndarray:
    """Padded positions of one row [n]: the longer of the source and the target with BOS or EOS."""
    source = lengths["leaves"] + lengths["nodes"] if budget_counts == "leaves_and_nodes" else lengths["leaves"]
    return np.maximum(source, lengths["tgt_pieces"] + 1)


def cut_batches(sorted_costs: np.ndarray, max_tokens: int) -> np.ndarray:
    """Starts of batches [num_batches + 1] over ascending costs: width * count <= max_tokens.

    An example that is longer than the budget gets a batch of its own.
    """
    starts = [0]
    while (start := starts[-1]) < len(sorted_costs):
        most = max(1, max_tokens // max(1, int(sorted_costs[start])))
        window = sorted_costs[start : start + most].astype(np.int64)
        padded = window * np.arange(1, len(window) + 1)
        starts.append(start + max(1, int(np.searchsorted(padded, max_tokens, side="right"))))
    return np.array(starts, dtype=np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """A pure function of lengths, text fingerprint, seed and BatchConfig. Steps count from 0.

    Rows are positions in the lengths that the plan was built from.
    """

    rows: np.ndarray  # [n] int32, the rows in use, in the order of the data set
    costs: np.ndarray  # [n] int32 or int16, of `rows`
    starts: np.ndarray  # [num_batches + 1], cuts over the sorted costs
    seed_key: int
    left_out: dict[str, int]  # rows not in use, by reason
    _orders: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, lengths: Mapping[str, np.ndarray], batch: BatchConfig, *, text_fingerprint: str, seed: int) -> "BatchPlan":
        """Plan from the columns of `lengths.arrow`. Raises UserError when no example is left or one exceeds the budget.

        The vocabulary enters by the lengths alone, so that a control tree, whose labels differ, keeps the batches.
        """
        leaves, targets = lengths["leaves"], lengths["tgt_pieces"]
        chosen = choose_fraction(lengths["example_id"], batch.fraction, seed if batch.subset == "by_seed" else None)
        fits = (leaves >= 1) & (leaves <= batch.max_leaves) & (targets <= batch.max_target_pieces)
        rows = np.flatnonzero(chosen & fits).astype(np.int32)
        if not len(rows):
            raise UserError(
                f"no training example is left of {len(leaves)}: raise batch.fraction = {batch.fraction}, batch.max_leaves = "
                f"{batch.max_leaves} or batch.max_target_pieces = {batch.max_target_pieces}"
            )
        costs = example_costs(lengths, batch.budget_counts)[rows]
        if costs.max() > batch.max_tokens:
            raise UserError(
                f"batch.max_tokens must be at least {costs.max()}, the longest training example, but is {batch.max_tokens}; "
                "raise it, or lower batch.max_leaves and batch.max_target_pieces"
            )
        if costs.max() <= np.iinfo(np.int16).max:
            costs = costs.astype(np.int16)  # NumPy sorts 16 bits by radix, ten times as fast
        return cls(
            rows=rows,
            costs=costs,
            starts=cut_batches(np.sort(costs, kind="stable"), batch.max_tokens),
            seed_key=int(fingerprint_of(text_fingerprint, seed), 16),
            left_out={"fraction": int((~chosen).sum()), "length": int((chosen & ~fits).sum())},
        )

    @property
    def num_batches(self) -> int:
        """Batches of one epoch, the same in every epoch."""
        return len(self.starts) - 1

    def epoch(self, step: int) -> int:
        return step // self.num_batches

    def batch(self, step: int) -> np.ndarray:
        """Rows [B] of the global batch of `step`."""
        epoch, position = divmod(step, self.num_batches)
        order, batches = self._epoch_order(epoch)
        index = batches[position]
        return order[self.starts[index] : self.starts[index + 1]]

    def hardest_batch(self) -> np.ndarray:
        """Rows of the batch with the most attention scores, count * width^2: the one that needs the most memory."""
        widths = np.sort(self.costs, kind="stable")[self.starts[1:] - 1].astype(np.int64)
        index = int(np.argmax(np.diff(self.starts) * widths**2))
        return self._epoch_order(0)[0][self.starts[index] : self.starts[index + 1]]

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows sorted by cost [n], order of the batches [num_batches]); the last epoch asked for is kept."""
        if epoch not in self._orders:
            random = np.random.default_rng([self.seed_key, epoch])
            shuffled = random.permutation(len(self.rows)).astype(np.int32)
            shuffled = shuffled[np.argsort(self.costs[shuffled], kind="stable")]
            order = self.rows[shuffled], random.permutation(self.num_batches)
            self._orders.clear()
            self._orders[epoch] = order
        return self._orders[epoch]


def plan_in_order(lengths: Mapping[str, np.ndarray], max_tokens: int) -> list[np.ndarray]:
    """All rows once, in batches of similar length within the budget: for validation and search."""
    costs = example_costs(lengths)
    order = np.argsort(costs, kind="stable")
    return np.split(order, cut_batches(costs[order], max_tokens)[1:-1]) if len(order) else []
