"""Input lines to text shards."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from treeproc.filters import FilterConfig, drop_reason
from treeproc.readers import read_pairs
from treeproc.schema import TEXT_SCHEMA, shard_name
from treeproc.shards import ShardRecord, write_shard


def write_text(
    folder: Path,
    split: str,
    source: Sequence[Path],
    target: Sequence[Path],
    num_pairs: int,
    rows_per_shard: int,
    filters: FilterConfig,
    mark: str,
) -> Iterator[ShardRecord]:
    """Filter the pairs of one split into text shards. A shard covers a fixed range of input lines."""
    num_shards = -(-num_pairs // rows_per_shard)
    pairs = enumerate(read_pairs(source, target))
    for index in range(num_shards):
        rows, counts = [], Counter()
        for example_id, (src, tgt) in (next(pairs) for _ in range(min(rows_per_shard, num_pairs - index * rows_per_shard))):
            reason = drop_reason(src, tgt, split, filters)
            if reason:
                counts[f"dropped.{reason}"] += 1
            else:
                rows.append({"example_id": example_id, "source": src, "target": tgt})
        name = shard_name(split, index, num_shards)
        yield write_shard(folder, name, rows, TEXT_SCHEMA, split=split, index=index, fingerprint=mark, counts=counts)
