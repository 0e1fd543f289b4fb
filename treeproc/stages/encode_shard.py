"""Parsed shards to encoded shards, and the classes in encoded shards."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.ragged import numbers_of
from treeproc.shards.rows import Batches
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, write_shard
from treeproc.stages.encode import RowEncoder, encoded_columns
from treeproc.stages.lengths import TASK_ROWS
from treeproc.stages.run_jobs import Jobs, Run, grouped, run_here
from treeproc.stages.shuffle import DonorTrees, cut
from treeproc.stages.tree_config import TreeConfig

# Columns of classes of parts of an example.
_CLASSES = ("node_labels", "leaf_labels")


class EncodeShard:
    """Text and parsed shard to encoded shard. `base` holds text and parsed stage, if not `data` itself.

    `other_shapes` is that of `DonorTrees`.
    """

    def __init__(self, data: Path, tree: TreeConfig, base: Path | None = None, other_shapes: bool = True):
        self._data, self._base, self._tree = data, base or data, tree
        self._encoder = RowEncoder(data / "encoded" / "vocab", tree)
        shuffled = tree.tree_source == "shuffled"
        self._donors = None
        if shuffled:
            rule = {"collapse_unary": tree.collapse_unary, "other_shapes": other_shapes}
            self._donors = DonorTrees(self._base / "parsed", *tree.parsed_columns, tree.seed, **rule)

    def __call__(
        self, text: ShardRecord, parsed: ShardRecord, fingerprint: str, place: int = 0, window: Sequence[int] = (0, 0)
    ) -> ShardRecord:
        """Encode a shard. Shuffled trees need `place` and `window`, as `DonorTrees.of_shard` takes them."""
        lines, trees = Shard(self._base / "text", text), Shard(self._base / "parsed", parsed)
        schema = encoded_columns(lines.schema.names, trees.schema.names, self._tree)
        counts, longest = Counter(), {}
        donated = None
        if self._donors is not None:
            donated, counts["lines_without_partner"] = self._donors.of_shard(place, window)
        first, batches = 0, []
        try:
            for views in zip(lines.columns, trees.columns, strict=True):
                rows = len(views[0]["example_id"])
                part = None if donated is None else cut(donated, first, rows)
                batches.append(self._encoder.encode(*views, counts, part))
                first += rows
        except ValueError as error:
            raise UserError(f"{self._base / 'parsed' / parsed.name}: {error}; run workflows/preprocess.py again") from None
        for name in ("leaves", "nodes", "tgt_pieces"):
            sizes = np.concatenate([[0], *(_lengths(batch, name) for batch in batches)])
            counts[name], longest[name] = int(sizes.sum()), int(sizes.max())
        return write_shard(
            self._data / "encoded", text.name, Batches(batches), schema,
            split=text.split, index=text.index, fingerprint=fingerprint, counts=counts, longest=longest,
        )  # fmt: skip


class CountClasses:
    """Finds the highest class in encoded shards."""

    def __init__(self, folder: AnyPath):
        self._folder = folder

    def __call__(self, shards: Sequence[dict]) -> int:
        """Return one more than the highest class of an example, a node or a leaf, of these records of shards."""
        columns = (views for facts in shards for views in Shard(self._folder, ShardRecord(**facts)).columns)
        parts = (part for views in columns for part in (views["label"], *(views[n][1] for n in _CLASSES if n in views)))
        return 1 + max(int(part.max(initial=-1)) for part in parts)


def count_classes(folder: AnyPath, records: Sequence[ShardRecord], run: Run = run_here) -> int:
    """Return one more than the highest class in encoded shards."""
    groups = grouped([(record.rows, place) for place, record in enumerate(records)], TASK_ROWS)
    jobs = Jobs(groups, lambda places: {"shards": [asdict(records[place]) for place in places]})
    return max(found for _, found in run(CountClasses, {"folder": folder}, jobs))


def _lengths(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return the number of items of a list column per row; none if the data set has no such column."""
    return np.diff(numbers_of(batch.column(name).offsets)) if name in batch.schema.names else np.zeros(0, dtype=np.int64)
