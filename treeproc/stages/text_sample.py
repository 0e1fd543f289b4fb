"""The lines of text shards that are looked at for their language, found without a pass over all lines."""

from collections.abc import Sequence

from treeproc.common.storage import AnyPath
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord
from treeproc.stages.language import stride_of


def places_of(records: Sequence[ShardRecord]) -> list[tuple[ShardRecord, list[int]]]:
    """Find the shards of a split that have lines of the sample, and the places of these lines; `records` are the split's."""
    stride = stride_of(sum(record.rows for record in records))
    found, first = [], 0
    for record in records:
        if places := list(range(-first % stride, record.rows, stride)):
            found.append((record, places))
        first += record.rows
    return found


class ReadLines:
    """Reads lines of text shards: their `example_id`, and the lines of each side."""

    def __init__(self, folder: AnyPath, sides: Sequence[str]):
        self._folder, self._sides = folder, sides

    def __call__(self, shards: Sequence[tuple[dict, Sequence[int]]]) -> dict:
        """Read the lines at the places of each shard, which is given by its record."""
        rows = []
        for record, places in shards:
            shard = Shard(self._folder, ShardRecord(**record))
            rows += [shard.row(place) for place in places]
        return {name: [row[name] for row in rows] for name in ("example_id", *self._sides)}
