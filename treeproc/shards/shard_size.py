"""The number of rows of a shard with `rows_per_shard: auto`."""

from treeproc.shards.schema import ROWS_PER_RECORD_BATCH

# What a data set of up to 8,192,000 rows has.
SMALLEST = 2000
_SHARDS = 4096
# The largest stage is the parsed one: 500 bytes a pair of captions, and twice that for lines of WMT.
_BYTES_A_ROW = 1000
_BYTES_A_SHARD = 100_000_000
LARGEST = _BYTES_A_SHARD // _BYTES_A_ROW // ROWS_PER_RECORD_BATCH * ROWS_PER_RECORD_BATCH


def auto_rows_per_shard(rows: int) -> int:
    """Return the number of rows of a shard for a data set of `rows` input examples, all splits together.

    It grows so that there are at most 4,096 shards, in whole record batches, until a shard of the largest stage has about
    100 MB (99,328 rows). It depends on the number of rows alone. It does not use the cluster, nor the bytes of the input, which
    a compressed file hides. So data sets of the same text have the same shards.
    """
    if rows <= SMALLEST * _SHARDS:
        return SMALLEST
    batches = -(-rows // (_SHARDS * ROWS_PER_RECORD_BATCH))
    return min(LARGEST, batches * ROWS_PER_RECORD_BATCH)
