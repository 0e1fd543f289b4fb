"""`rows_per_shard: auto`: a pure function of the number of rows, which keeps every data set as it was."""

from hypothesis import given
from hypothesis import strategies as st

from treeproc.shards.schema import LARGEST, ROWS_PER_RECORD_BATCH, SMALLEST, auto_rows_per_shard
from treeproc.stages.config import PreprocessConfig


@given(st.integers(0, 5_000_000_000))
def test_shards_grow_from_2000_rows_to_100_mb(rows):
    size = auto_rows_per_shard(rows)
    assert size == SMALLEST == 2000 or (size % ROWS_PER_RECORD_BATCH == 0 and SMALLEST < size <= LARGEST)
    assert size == LARGEST or rows <= 4096 * size
    assert auto_rows_per_shard(rows + 1) >= size


def test_known_sizes():
    sizes = {1: 2000, 8_192_000: 2000, 8_192_001: 2048, 10**7: 3072, 10**8: 24_576, 10**9: 99_328, 10**12: 99_328}
    assert {rows: auto_rows_per_shard(rows) for rows in sizes} == sizes


def test_a_number_is_kept_and_a_data_set_that_was_begun_keeps_its_own():
    auto, seven = PreprocessConfig(), PreprocessConfig(rows_per_shard=7)
    assert auto.rows_per_shard == "auto" and auto.with_shard_size(10**8).rows_per_shard == 24_576
    assert seven.with_shard_size(10**8) == seven and seven.settled({"rows_per_shard": 30}) == seven
    begun = auto.settled({"rows_per_shard": 30})
    assert begun.with_shard_size(10**8).rows_per_shard == 30
    assert auto.settled().with_shard_size(5).rows_per_shard == 2000
