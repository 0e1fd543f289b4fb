"""What a reader of lengths asks the system for: the heads of record batches and their splits, not the bodies."""

import os

import numpy as np
import pyarrow as pa
import pytest

from treeproc.shards.arrow_file import ReadAhead, read_arrow
from treeproc.shards.lengths import Column, _column, open_columns
from treeproc.shards.schema import LENGTHS_SCHEMA

ROWS, BATCHES = 10_000, 3


@pytest.fixture
def path(tmp_path):
    """Lengths of two splits, a record batch for each shard."""
    path, names = tmp_path / "lengths.arrow", ["train", "valid"]
    with pa.ipc.new_file(path, LENGTHS_SCHEMA) as writer:
        for number in range(BATCHES):
            split = pa.DictionaryArray.from_arrays(pa.array([number // 2] * ROWS, pa.int8()), names)
            columns = {
                field.name: pa.array(np.arange(ROWS) + number, field.type) for field in LENGTHS_SCHEMA if field.name != "split"
            }
            arrays = [split if field.name == "split" else columns[field.name] for field in LENGTHS_SCHEMA]
            writer.write_batch(pa.record_batch(arrays, schema=LENGTHS_SCHEMA))
    return path


@pytest.fixture
def asked(monkeypatch):
    """Return the list of requests that follow: (start, size) of each."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: ranges.append((start, size)))
    return ranges


def test_lengths_ask_for_what_they_read_and_no_more(path, asked):
    open_columns(path.parent, path.name, LENGTHS_SCHEMA, "train")
    there = set().union(*(range(start, start + size) for start, size in asked))
    assert len(there) < BATCHES * (ROWS + 4096) < path.stat().st_size / 10
    content = path.read_bytes()
    codes = [bytes([number // 2]) * ROWS for number in range(BATCHES)]
    begin = 0
    for code in codes:  # in the order of the file
        begin = content.index(code, begin)
        assert there >= set(range(begin, begin + ROWS))
        begin += ROWS
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        bodies = [reader.get_batch(i).column("leaves").buffers()[1] for i in range(BATCHES)]
        start = source.read_buffer().address
        assert not there & {body.address - start + place for body in bodies for place in range(0, body.size, 512)}


def test_reading_ahead_gives_the_same_bytes(path):
    with pa.memory_map(str(path)) as source:
        plain = read_arrow(source, [LENGTHS_SCHEMA])[1]
    found = open_columns(path.parent, path.name, LENGTHS_SCHEMA, "train")
    assert found.keys() == {*LENGTHS_SCHEMA.names} - {"split"}
    for name, column in found.items():
        pieces = [batch.column(name).to_numpy() for batch in plain[:2]]
        assert np.array_equal(column, np.concatenate(pieces))
        assert [piece.tolist() for piece in column.pieces()] == [piece.tolist() for piece in pieces]
    assert len(open_columns(path.parent, path.name, LENGTHS_SCHEMA, "valid")["leaves"]) == ROWS


@pytest.mark.parametrize(
    ("start", "size"), [(-5, 10), (0, 0), (90, 1 << 40), (100, 1), (1 << 62, 1), (50, -60), (-(1 << 63), 1 << 31)]
)
def test_no_question_leaves_the_file(start, size, tmp_path, asked):
    """Heads of hostile files may lie anywhere."""
    (tmp_path / "file").write_bytes(bytes(100))
    with pa.memory_map(str(tmp_path / "file")) as source, ReadAhead(tmp_path / "file", source.read_buffer()) as ahead:
        ahead.ask(start, size)
    there = {place for begin, length in asked for place in range(begin, begin + length)}
    assert there == {place for place in range(100) if start <= place < start + size}


def test_long_parts_are_asked_for_in_pieces(tmp_path, asked):
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with pa.memory_map(str(tmp_path / "file")) as source, ReadAhead(tmp_path / "file", memory := source.read_buffer()) as ahead:
        ahead.ask_for(memory[10:900_000])
    assert [start for start, _ in asked] == list(range(10, 900_000, 1 << 17)) and sum(size for _, size in asked) == 899_990


def test_a_piece_between_two_items_is_refused():
    values = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="multiples of the size"):
        Column(np.array([values.ctypes.data + 2]), np.array([1]), np.int32, values)


def test_a_column_must_be_in_the_memory_that_is_kept():
    memory = pa.py_buffer(np.arange(16, dtype=np.int32).tobytes())
    batch = pa.record_batch([pa.Array.from_buffers(pa.int32(), 16, [None, memory])], names=["leaves"])
    found = _column(batch.schema.field(0), [batch.slice(2, 3), batch.slice(0, 1)], memory)
    assert [found[row] for row in range(4)] == [2, 3, 4, 0]
    for kept in (memory.slice(0, 63), memory.slice(1)):
        with pytest.raises(ValueError, match="in the memory map"):
            _column(batch.schema.field(0), [batch], kept)
