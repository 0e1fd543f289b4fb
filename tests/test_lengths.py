"""Lengths and numbers of classes that tasks measure: the same bytes as from one process, whatever the tasks are."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from commands import run_jobs_here
from hostile_files import ipc
from toydata import write_toy_data
from toylabels import NUM_CLASSES, write_toy_labels

from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError
from treeproc.shards.lengths import StoredCounts, open_lengths
from treeproc.shards.schema import LENGTHS_SCHEMA, MOST_SPLITS
from treeproc.shards.shard import Shard
from treeproc.shards.store import Index, read_index, write_shard
from treeproc.stages import encode, lengths
from treeproc.stages.encode import count_classes
from treeproc.stages.lengths import MeasureShards, kept_lengths, row_sizes, write_lengths

FILES = ["lengths.arrow", "size_counts.arrow"]


@pytest.fixture
def encoded(tmp_path):
    """DATA/encoded of five shards a split, of one to twelve rows."""
    return write_toy_data(tmp_path / "data", shards=5) / "encoded"


def written(folder, **options) -> dict[str, bytes]:
    """The files of the lengths; nothing else is left."""
    before = {path.name for path in folder.iterdir()} - {*FILES}
    names = write_lengths(folder, list(read_index(folder).records()), **options)
    assert {path.name for path in folder.iterdir()} == before | {*names}
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("rows_of_a_task", [1, 20, 10_000])
@pytest.mark.parametrize("window_rows", [1, 10_000])
def test_tasks_give_the_bytes_of_one_process(encoded, rows_of_a_task, window_rows, monkeypatch):
    alone = written(encoded, window_rows=window_rows)
    assert list(alone) == (FILES if window_rows == 1 else FILES[:1])
    monkeypatch.setattr(lengths, "TASK_ROWS", rows_of_a_task)
    assert written(encoded, window_rows=window_rows, run=run_jobs_here) == alone


def test_tasks_of_other_shards_have_other_files(encoded):
    """A task of a job that was killed may still write while the next job reads, perhaps by other settings."""

    def tasks_of(records) -> set[str]:
        found: list[str] = []

        def run(worker, arguments, jobs):
            found.extend(job["task"] for job in jobs)
            return run_jobs_here(worker, arguments, jobs)

        write_lengths(encoded, records, run=run)
        return set(found)

    records = list(read_index(encoded).records())
    changed = [replace(record, sha256="0" * 64) for record in records]
    assert tasks_of(records) == tasks_of(records) and not tasks_of(records) & tasks_of(changed)


@pytest.mark.parametrize("damage", ["no file", "cut off", "other columns"])
def test_a_damaged_file_of_a_task_is_one_line(encoded, damage):
    def damaging(worker, arguments, jobs):
        for number, result in run_jobs_here(worker, arguments, jobs):
            path = worker(**arguments).file("lengths.arrow", jobs[number]["task"])
            if damage == "no file":
                path.unlink()
            else:
                other = pa.table({"more": [1]})
                path.write_bytes(path.read_bytes()[:-9] if damage == "cut off" else ipc(other))
            yield number, result

    before = (encoded / "lengths.arrow").read_bytes()
    with pytest.raises(UserError, match="lengths.arrow, which a task wrote, .*; run the same command again$") as error:
        write_lengths(encoded, list(read_index(encoded).records()), run=damaging)
    assert "\n" not in str(error.value)
    assert (encoded / "lengths.arrow").read_bytes() == before


def test_lengths_are_those_of_the_rows(encoded):
    records = list(read_index(encoded).records())
    for record in records:
        shard = Shard(encoded, record)
        (batch,) = MeasureShards(encoded, ["train", "valid", "test"], FILES[:1]).batches(record)
        assert batch.schema == LENGTHS_SCHEMA
        found = batch.to_pylist()
        assert [(row["split"], row["shard"], row["row"]) for row in found] == [
            (record.split, record.index, number) for number in range(len(shard))
        ]
        for row, found_row in zip(shard.rows(), found, strict=True):
            assert found_row["leaves"] == len(row["leaves"]["piece"]) and found_row["nodes"] == len(row["nodes"]["label"])
            assert found_row["tgt_pieces"] == len(row["tgt_pieces"]) and found_row["example_id"] == row["example_id"]
        assert set(row_sizes(shard)) == {*LENGTHS_SCHEMA.names} - {"split"}


def test_many_small_splits_with_long_names_can_be_read(encoded):
    record = next(iter(read_index(encoded).records("test")))
    splits = [f"{number:050d}" for number in range(MOST_SPLITS)]
    write_lengths(encoded, [replace(record, split=split) for split in splits], window_rows=1)
    for split in (splits[0], splits[-1]):
        assert len(open_lengths(encoded, split)["leaves"]) == record.rows
        assert sum(StoredCounts(encoded, split, np.array([record.rows])).count(0, 1).rows) == record.rows


def test_classes_are_counted_by_tasks_too(tmp_path, monkeypatch):
    folder = write_toy_labels(tmp_path / "data") / "encoded"
    monkeypatch.setattr(encode, "TASK_ROWS", 1)
    records = list(read_index(folder).records())
    records.append(write_shard(folder, "none.arrow", [], Shard(folder, records[0]).schema, split="x", index=0, fingerprint=""))
    assert count_classes(folder, records) == count_classes(folder, records, run_jobs_here) == NUM_CLASSES


def test_lengths_of_a_finished_job_are_kept_if_nothing_changed(encoded):
    """They are made anew for other shards, a changed file, and a missing file of counts."""
    records = list(read_index(encoded).records())

    def kept(others=records, window_rows=10_000, **files: str) -> dict[str, str]:
        return kept_lengths(encoded, Index(read_index(encoded) | {"files": files}, encoded), others, window_rows)

    def stored(content: bytes) -> dict[str, str]:
        (encoded / "lengths.arrow").write_bytes(content)
        return {"lengths.arrow": file_sha256(encoded / "lengths.arrow")}

    content = (encoded / "lengths.arrow").read_bytes()
    files = stored(content)
    assert kept(**files) == files and kept() == {}
    assert kept(records[:-1], **files) == kept([*records[:-1], replace(records[-1], rows=99)], **files) == {}
    assert kept(window_rows=1, **files) == {}
    (encoded / "lengths.arrow").write_bytes(content[:-1] + b"x")
    assert kept(**files) == {}
