"""Counts of sizes beside the lengths, and shards that are opened when they are needed."""

import errno
import os

import numpy as np
import pyarrow as pa
import pytest
import torch
from toydata import write_toy_data

from treenet.config import BatchConfig, TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.plan import BatchPlan
from treenet.tasks.base import build_task
from treenet.training.batch_stream import TrainingData
from treeproc.common.cache import CopiesAhead
from treeproc.common.files import file_sha256, json_bytes
from treeproc.common.settings import UserError
from treeproc.shards import lengths
from treeproc.shards.lengths import CountedLengths, SizeCounts, StoredCounts, open_lengths
from treeproc.shards.schema import SIZE_COUNTS_SCHEMA
from treeproc.shards.store import read_index
from treeproc.stages.lengths import write_lengths
from treeproc.verify import verify


@pytest.fixture
def encoded(tmp_path):
    """DATA/encoded of four shards a split, with counts."""
    folder = write_toy_data(tmp_path / "data", shards=4) / "encoded"
    store_counts(folder)
    return folder


def store_counts(folder) -> None:
    index = read_index(folder)
    names = write_lengths(folder, list(index.records()), window_rows=1)
    index["files"] = {**index.get("files", {}), **{name: file_sha256(folder / name) for name in names}}
    (folder / "index.json").write_bytes(json_bytes(index))


def same(one: SizeCounts, other: SizeCounts) -> bool:
    return all(np.array_equal(vars(one)[name], vars(other)[name]) for name in vars(one))


def test_no_rows_have_no_cells():
    nothing = SizeCounts.of(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    assert [len(column) for column in vars(nothing).values()] == [0] * 4 and same(SizeCounts.merge([]), nothing)
    assert same(SizeCounts.merge([nothing, nothing]), nothing)


def test_small_data_sets_have_no_file_of_counts(tmp_path):
    folder = write_toy_data(tmp_path / "data", shards=2) / "encoded"
    assert write_lengths(folder, list(read_index(folder).records())) == ["lengths.arrow"]
    before = (folder / "lengths.arrow").read_bytes()
    assert not (folder / "size_counts.arrow").exists()
    assert write_lengths(folder, list(read_index(folder).records()), window_rows=1) == ["lengths.arrow", "size_counts.arrow"]
    assert (folder / "lengths.arrow").read_bytes() == before


def test_stored_counts_are_those_of_the_lengths(encoded):
    for split in ("train", "valid"):
        rows = np.array([record.rows for record in read_index(encoded).records(split)])
        lengths = open_lengths(encoded, split)
        stored, counted = StoredCounts(encoded, split, rows), CountedLengths(encoded / "lengths.arrow", lengths, rows)
        for first in range(len(rows) + 1):
            for last in range(first, len(rows) + 1):
                assert same(stored.count(first, last), counted.count(first, last))
        every = [np.asarray(lengths[name]) for name in ("leaves", "tgt_pieces", "nodes")]
        assert same(stored.count(0, len(rows)), SizeCounts.of(*every))


def test_shards_are_counted_a_few_cells_at_once(encoded, monkeypatch):
    rows = np.array([record.rows for record in read_index(encoded).records("train")])
    stored = StoredCounts(encoded, "train", rows)
    whole, reads, read = stored.count(0, len(rows)), [], stored._read
    monkeypatch.setattr(stored, "_read", lambda first, last: reads.append((first, last)) or read(first, last))
    cells = [len(stored._read(shard, shard + 1).rows) for shard in range(len(rows))]
    for most, expected in ((1, [(0, 1), (1, 2), (2, 3), (3, 4)]), (sum(cells[:2]), [(0, 2), (2, 4)]), (sum(cells), [(0, 4)])):
        reads.clear()
        monkeypatch.setattr(lengths, "_CELLS_AT_ONCE", most)
        assert same(stored.count(0, len(rows)), whole) and reads == expected


def test_taken_rows_have_the_mean_of_the_nodes_of_their_cell():
    counts = SizeCounts(*(np.array(column) for column in ([2, 2, 5, 7], [1, 4, 1, 1], [3, 1, 2, 0], [10, 7, 8, 0])))
    taken = counts.take(np.array([2, 1, 0, 0]))
    assert [column.tolist() for column in vars(taken).values()] == [[2, 2], [1, 4], [2, 1], [7, 7]]
    assert same(
        counts.without_targets(), SizeCounts(*(np.array(one) for one in ([2, 5, 7], [0, 0, 0], [4, 2, 0], [17, 8, 0])))[[0, 1]]
    )


def test_a_run_has_the_same_windows_with_stored_counts_and_without(encoded):
    batch, plans = BatchConfig(max_tokens=64, window_rows=15, fraction=0.8), []
    for files in (read_index(encoded)["files"], {}):
        (encoded / "index.json").write_bytes(json_bytes({**read_index(encoded), "files": files}))
        source = ExampleSource(encoded, "train")
        plans.append(BatchPlan.build(source.lengths, batch, text_fingerprint="text", seed=1, shards=source.shards))
    assert plans[0].num_batches == plans[1].num_batches and plans[0].left_out == plans[1].left_out
    for step in range(2 * plans[0].num_batches):
        assert plans[0].batch(step).tolist() == plans[1].batch(step).tolist()
    assert len({rows.start for rows in map(plans[0].next_rows, range(plans[0].num_batches))}) > 1, "several windows"


def rewrite(encoded, change) -> None:
    """Change the columns of every record batch of the counts."""
    path = encoded / "size_counts.arrow"
    with pa.ipc.open_file(pa.BufferReader(path.read_bytes())) as reader:
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    with path.open("wb") as file, pa.ipc.new_file(file, SIZE_COUNTS_SCHEMA) as writer:
        for number, batch in enumerate(batches):
            columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names[1:]}
            changed = change(number, {name: column.copy() for name, column in columns.items()})
            arrays = [pa.array(changed[field.name], field.type) for field in list(SIZE_COUNTS_SCHEMA)[1:]]
            writer.write_batch(pa.record_batch([batch.column("split"), *arrays], schema=SIZE_COUNTS_SCHEMA))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("rows", 10**6, "counts other rows than index.json"),
        ("rows", -1, "numbers below 0"),
        ("leaves", -(2**31), "numbers below 0"),
        ("nodes", -1, "numbers below 0"),
        ("shard", 9, "names other shards"),
        ("shard", -1, "names other shards"),
        ("shard", 2**31 - 1, "names other shards"),
        ("shard", 0, "names other shards"),
        ("leaves", 2**31 - 1, "leave no training example|does not fit|at least"),
    ],
)
def test_counts_that_are_wrong_are_refused(encoded, column, value, message):
    rewrite(encoded, lambda number, columns: columns | {column: np.full_like(columns[column], value)})
    with pytest.raises(UserError, match=message):
        source = ExampleSource(encoded, "train")
        batch = BatchConfig(max_tokens=64, window_rows=15)
        BatchPlan.build(source.lengths, batch, text_fingerprint="text", seed=1, shards=source.shards).batch(0)


def test_sizes_below_0_in_lengths_are_refused_where_they_are_counted(encoded):
    lengths = {name: np.asarray(column) for name, column in open_lengths(encoded, "train").items()}
    lengths["leaves"][3] = -4
    with pytest.raises(UserError, match=r"lengths\.arrow is damaged: a size must be at least 0"):
        CountedLengths(encoded / "lengths.arrow", lengths, np.array([len(lengths["leaves"])])).count(0, 1)


def test_a_damaged_shard_is_named_when_it_is_met(encoded):
    records = read_index(encoded).records("train")
    path, size = encoded / records[2].name, records[2].bytes
    content = path.read_bytes()
    path.write_bytes(b"\0" * size)
    source = ExampleSource(encoded, "train")
    first = sum(record.rows for record in records[:2])
    assert source.batch(range(first)).example_ids.shape == (first,)
    with pytest.raises(UserError, match=f"{records[2].name} is not an Arrow file"):
        source.batch([0, first])
    path.write_bytes(content)
    assert len(source.batch([0, first]).example_ids) == 2, "a shard that is restored is opened"
    for broken, message in ((lambda: path.write_bytes(content[:-8]), "must have"), (path.unlink, "is missing")):
        broken()
        with pytest.raises(UserError, match=f"{records[2].name} {message}"):
            ExampleSource(encoded, "train")


def test_open_shards_keep_no_descriptor_and_rows_know_their_records(encoded):
    before = len(os.listdir("/proc/self/fd"))
    source = ExampleSource(encoded, "train")
    source.batch(range(len(source)))
    assert len(os.listdir("/proc/self/fd")) == before
    records = read_index(encoded).records("train")
    assert [record.name for record in source.records(range(len(source)))] == [record.name for record in records]
    first = records[0].rows
    assert [record.index for record in source.records(range(first - 1, first + 1))] == [0, 1]
    assert source.records(range(first, first)) == []


def test_the_objects_of_the_next_window_are_fetched_when_a_window_begins(encoded, monkeypatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(CopiesAhead, "begin", lambda _, objects: asked.append([path.name for path, _ in objects]))
    config = TrainConfig(data=encoded.parent, batch={"max_tokens": 64, "window_rows": 15})
    data = TrainingData(build_task(config), 0, 1, torch.device("cpu"))
    windows = []
    for step in range(2 * data.plan.num_batches):
        data.rank_batch(step)
        if (rows := data.plan.next_rows(step)) not in windows[-1:]:
            windows.append(rows)
    assert len(windows) > 4
    assert asked == [[record.name for record in data.micro_batches.source.records(rows)] for rows in windows]


@pytest.mark.parametrize(("number", "limit"), [(errno.ENOMEM, "vm.max_map_count"), (errno.EMFILE, "ulimit -n")])
def test_a_limit_of_the_machine_is_blamed_and_not_the_data(encoded, monkeypatch, number, limit):
    def refuse(path: str) -> None:
        raise OSError(number, f"Failed to open local file '{path}'")

    source = ExampleSource(encoded, "train")
    monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(UserError, match=f"train-00003-of-00004.arrow is not damaged, but this process has no .*{limit}"):
        source.batch([len(source) - 1])
    with pytest.raises(UserError, match=f"lengths.arrow is not damaged, but this process has no .*{limit}"):
        open_lengths(encoded, "train")


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("nodes", 7, "nodes"),
        ("tgt_pieces", 99, "tgt_pieces"),
        ("rows", 1, "rows"),
        ("leaves", -1, "leaves"),
        ("leaves", -999, "rows"),
        ("shard", 9, ""),
    ],
)
def test_verify_counts_the_shards_again(column, value, what, tmp_path):
    """Counts that were written wrong have a right hash. Those of one shard are found among all."""
    encoded = write_toy_data(tmp_path / "data", shards=4) / "encoded"
    store_counts(encoded)
    path = encoded / "size_counts.arrow"
    assert not [problem for problem in verify(tmp_path / "data").problems if problem.path == path]

    def change(number: int, columns: dict) -> dict:
        if number == 1:
            columns[column][0 if column != "shard" else slice(None)] += value
        return columns

    rewrite(encoded, change)
    index = read_index(encoded)
    index["files"]["size_counts.arrow"] = file_sha256(path)
    (encoded / "index.json").write_bytes(json_bytes(index))
    found = [problem.what for problem in verify(tmp_path / "data").problems if problem.path == path]
    assert len(found) == 1 and found[0].startswith(f"{what} of train differ from those" if what else "names other shards"), found
