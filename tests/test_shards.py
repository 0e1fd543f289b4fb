"""Shards: round trip, zero-copy views, canonical bytes, damage, full disk."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from toydata import write_toy_data

import treeproc.shards.shard as shard_module
from treenet.api.shards import read_shards
from treeproc.common.settings import UserError
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.rows import ipc_bytes, string_bytes, strings_of
from treeproc.shards.schema import ENCODED_SCHEMA, PARSED_SCHEMA, ROWS_PER_RECORD_BATCH, line_end_in
from treeproc.shards.shard import MOST_NAMES, Shard, SplitShards, names_bytes, tables
from treeproc.shards.store import (
    describe_agreement,
    describe_trees,
    finished_shard,
    read_index,
    sidecar_path,
    stage_folder,
    vocabulary_files,
    write_index,
    write_shard,
)


def encoded_row(example_id: int, num_leaves: int = 3) -> dict:
    leaves = list(range(num_leaves))
    return {
        "example_id": example_id,
        "leaves": {"piece": leaves, "word_index": leaves, "pos_tag": [1] * num_leaves},
        "nodes": {"label": [2], "parent": [-1]},
        "spans": {"start": [0], "end": [num_leaves], "subtree_end": [1]},
        "tgt_pieces": [7] * (example_id % 4),
    }


def write(folder, rows, index=0):
    return write_shard(
        folder, f"train-0000{index}-of-00002.arrow", rows, ENCODED_SCHEMA, split="train", index=index, fingerprint="f"
    )


@num_examples(15)
@given(st.lists(st.tuples(st.text(max_size=5), st.lists(st.text(max_size=3), max_size=3)), max_size=8))
def test_rows_come_back(tmp_path_factory, cases):
    folder = tmp_path_factory.mktemp("shard")
    rows = [
        {
            "example_id": i,
            "words": {"text": words, "start_char": [1] * len(words), "end_char": [2] * len(words), "pos_tag": ["T"] * len(words)},
            "trees": [tree],
            "parse_status": "parsed",
        }
        for i, (tree, words) in enumerate(cases)
    ]
    record = write_shard(folder, "train-00000-of-00001.arrow", rows, PARSED_SCHEMA, split="train", index=0, fingerprint="f")
    assert list(Shard(folder, record).rows()) == [
        {**row, "words": {k: v if k in ("text", "pos_tag") else pytest.approx(v) for k, v in row["words"].items()}}
        for row in rows
    ]


@pytest.mark.parametrize("count", [0, 1, ROWS_PER_RECORD_BATCH, ROWS_PER_RECORD_BATCH + 1, 2 * ROWS_PER_RECORD_BATCH + 5])
def test_record_batches_of_fixed_size(tmp_path, count):
    record = write(tmp_path, [encoded_row(i, 1 + i % 5) for i in range(count)])
    shard = Shard(tmp_path, record)
    assert len(shard) == count and shard.schema == ENCODED_SCHEMA
    for i in {0, count // 2, count - 1, ROWS_PER_RECORD_BATCH} & set(range(count)):
        row = shard.row(i)
        assert row["example_id"] == i and row["leaves"]["piece"].tolist() == list(range(1 + i % 5))
        assert row["spans"]["end"].tolist() == [1 + i % 5] and row["tgt_pieces"].tolist() == [7] * (i % 4)


def test_views_are_not_copies(tmp_path):
    shard = Shard(tmp_path, write(tmp_path, [encoded_row(i) for i in range(10)]))
    before = pa.total_allocated_bytes()
    rows = [shard.row(i) for i in range(10)]
    assert pa.total_allocated_bytes() == before
    assert not rows[3]["leaves"]["piece"].flags.owndata and not rows[3]["leaves"]["piece"].flags.writeable


@given(st.lists(st.text(max_size=4), max_size=5), st.integers(0, 5))
@num_examples(30)
def test_bytes_and_edges_are_those_of_the_strings(strings, first):
    data, edges = string_bytes(pa.array(strings, pa.string())[first:])
    chosen = strings[first:]
    assert bytes(data) == "".join(chosen).encode()
    assert edges.tolist() == [len("".join(chosen[:at]).encode()) for at in range(len(chosen) + 1)]
    assert strings_of(data, edges).to_pylist() == chosen


def test_numbers_that_arrow_cannot_count_are_refused():
    with pytest.raises(UserError, match="have 4,294,967,301 bytes of text, or words, but .*; cut long examples"):
        strings_of(np.zeros(8, np.uint8), np.array([0, 2**32 + 5]))
    assert names_bytes([str(number) for number in range(MOST_NAMES)])
    with pytest.raises(UserError, match="the trees have 32,769 labels, tags or relations of one kind, but at most 32,768 are"):
        names_bytes([str(number) for number in range(MOST_NAMES + 1)])


@pytest.mark.parametrize("code", [-1, 2, 127])
def test_codes_are_of_their_dictionary(code):
    schema = pa.schema([pa.field("split", pa.dictionary(pa.int8(), pa.string()))])

    def read(codes: list[int]) -> int:
        column = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(["train", "test"]), safe=False)
        with pa.ipc.new_file(sink := pa.BufferOutputStream(), schema) as writer:
            writer.write_batch(pa.record_batch([column], schema=schema))
        return sum(map(len, read_arrow(pa.BufferReader(sink.getvalue()), [schema])[1]))

    assert read([0, 1, 1]) == 3 and read([]) == 0
    with pytest.raises(BadArrowFile):
        read([0, 1, code])


def test_bytes_depend_on_rows_alone():
    rows = [encoded_row(i) for i in range(50)]
    assert ipc_bytes(rows, ENCODED_SCHEMA) == ipc_bytes([dict(reversed(list(row.items()))) for row in rows], ENCODED_SCHEMA)
    as_arrays = [{**row, "leaves": {k: np.array(v) for k, v in row["leaves"].items()}} for row in rows]
    assert ipc_bytes(rows, ENCODED_SCHEMA) == ipc_bytes(as_arrays, ENCODED_SCHEMA)


def test_damage_is_found(tmp_path):
    record = write(tmp_path, [encoded_row(i) for i in range(10)])
    assert finished_shard(tmp_path, record.name, "f") == record
    assert finished_shard(tmp_path, record.name, "other settings") is None
    path = tmp_path / record.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert finished_shard(tmp_path, record.name, "f") is None
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"must have {record.bytes} bytes, but has {record.bytes - 1}"):
        Shard(tmp_path, record)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        Shard(tmp_path, record)
    assert finished_shard(tmp_path, record.name, "f") is None
    sidecar_path(path).write_text("{")
    assert finished_shard(tmp_path, record.name, "f") is None


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left on device; free space"):
        write(tmp_path, [encoded_row(0)])
    assert list(tmp_path.iterdir()) == []


def test_agreement_is_told_of_compared_lines_with_nodes():
    for counts in ({}, {"own_nodes": 5}, {"compared_lines": 3}):
        assert describe_agreement({"totals": {"train": counts}}) == ""
    counts = {"own_nodes": 3, "given_nodes": 1, "shared_nodes": 1, "own_shapes": 1, "compared_lines": 2}
    told = "unlabelled F1 with the lines' own trees 0.50, 50.0% of the shapes are the same"
    assert describe_agreement({"totals": {"train": counts, "valid": {}}}) == told
    index = {"tree_source": "shuffled", "totals": {"train": counts, "valid": {"own_shapes": 1, "compared_lines": 1}}}
    assert describe_agreement(index) == told.replace("50.0%", "66.7%") + ": hardly a control"


@pytest.mark.parametrize("end", [*"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"])
def test_a_line_end_in_a_name_is_found(end):
    assert line_end_in(["NP", "N\xa0P\tx"]) == ""
    assert line_end_in(["NP", f"V{end}P"]) == f"{f'V{end}P'!r} with the line end U+{ord(end):04X}"


def test_index_and_tables(tmp_path):
    records = [write(tmp_path, [encoded_row(i) for i in range(2)]), write(tmp_path, [encoded_row(9)], index=1)]
    write_index(tmp_path, reversed(records), fingerprint="x")
    assert [len(shard) for shard in SplitShards(tmp_path, "train")] == [2, 1]
    assert read_index(tmp_path)["totals"]["train"]["rows"] == 3
    flat = tables(tmp_path, "train")
    assert flat["leaves"].column("example_id").to_pylist() == [0] * 3 + [1] * 3 + [9] * 3
    assert flat["spans"].column_names == ["example_id", "start", "end", "subtree_end"]
    with pytest.raises(UserError, match="no split 'test'"):
        SplitShards(tmp_path, "test")


def test_shards_are_opened_when_they_are_asked_for(tmp_path, monkeypatch):
    data = write_toy_data(tmp_path / "data", train=20, shards=5)
    expected = [list(shard.rows()) for shard in SplitShards(data / "encoded", "train")]
    opened, real = [], shard_module.Shard
    monkeypatch.setattr(shard_module, "Shard", lambda folder, record: opened.append(record.index) or real(folder, record))
    monkeypatch.setattr(shard_module, "HELD_SHARDS", 2)
    shards = SplitShards(data / "encoded", "train")
    assert len(shards) == 5 and not opened
    assert [len(shard) for shard in shards] == list(map(len, expected)) and opened == [0, 1, 2, 3, 4]
    assert list(map(len, [shards[-1], shards[3]])) == list(map(len, expected[:2:-1])) and opened == [0, 1, 2, 3, 4], "held"
    assert [len(shards[place]) for place in (0, 1)] == list(map(len, expected[:2])) and opened[5:] == [0, 1]
    (data / "encoded" / shards.records[2].name).unlink()
    opened.clear()
    ranks = [read_shards(data).to_torch(rank, 5) for rank in (0, 4)]
    assert [row["example_id"] for row in ranks[1]] == [row["example_id"] for row in expected[4]]
    assert opened == [0, 0, 4], "a rank opens its shards, and each reader the first"
    with pytest.raises(UserError, match="is missing"):
        list(read_shards(data).to_torch())


def test_an_example_is_found_by_its_number(tmp_path):
    """Its place in the encoded stage is a guess: that stage may lack rows."""
    record = write(tmp_path, [encoded_row(number) for number in (2, 3, 5, 9)])
    shard = Shard(tmp_path, record)
    assert shard.ids.tolist() == [2, 3, 5, 9]
    for place in (0, 1, 2, 3, 4, 100):
        for number in range(11):
            row = shard.find(number, place)
            assert (row["example_id"] if row else None) == (number if number in (2, 3, 5, 9) else None)


def test_stages_are_beside_the_data_set_or_where_its_index_says(tmp_path, monkeypatch):
    data = tmp_path / "data"
    (data / "encoded").mkdir(parents=True)

    def place(stage: str, **stages: str):
        (data / "encoded" / "index.json").write_text(
            json.dumps({"schema_version": 1, "totals": {}, "shards": [], "stages": stages})
        )
        return stage_folder(data, stage)

    assert place("text") == place("text", text="text", parsed="/a/parsed") == data / "text"
    assert place("encoded", encoded="../other/encoded") == data / "encoded"
    assert place("text", text="../other/text") == tmp_path / "other" / "text"
    assert place("parsed", parsed="/a/b/parsed") == Path("/a/b/parsed")
    place("text", text="../other/text")
    link, inside = tmp_path / "links" / "link", data / "encoded"
    link.parent.mkdir()
    link.symlink_to(data)
    assert stage_folder(link, "text") == tmp_path / "links" / "other" / "text"  # neither is there
    (tmp_path / "other" / "text").mkdir(parents=True)
    assert stage_folder(link, "text") == tmp_path / "other" / "text"
    monkeypatch.chdir(data)
    (data / "other").mkdir()  # which is in the data set, not beside it
    assert stage_folder(Path("."), "text") == tmp_path / "other" / "text"
    monkeypatch.chdir(inside)
    assert stage_folder(Path(".."), "text") == tmp_path / "other" / "text"
    (tmp_path / "links" / "other").symlink_to(tmp_path)
    assert stage_folder(link, "text") == tmp_path / "links" / "other" / "text"  # a neighbour of the link goes first
    for wrong in ("../text", "../a/b/text", "../other/parsed", "a/text", "/a/../text", "/a/text/b", "../a\0/text", "../../text"):
        with pytest.raises(UserError, match=r"stages\.text must be \.\./NEIGHBOUR/text or an absolute path that ends with /text"):
            place("text", text=wrong)


def test_a_vocabulary_has_a_tokenizer_or_learned_pieces_and_what_is_there_of_the_rest(tmp_path):
    (tmp_path / "vocab").mkdir()
    always = ["vocab/labels.txt", "vocab/pos_tags.txt"]
    assert vocabulary_files(tmp_path) == ["vocab/pieces.model", *always]
    (tmp_path / "vocab" / "deprels.txt").touch()
    assert vocabulary_files(tmp_path) == ["vocab/pieces.model", *always, "vocab/deprels.txt"]
    (tmp_path / "vocab" / "tokenizer.json").touch()
    assert vocabulary_files(tmp_path) == ["vocab/tokenizer.json", *always, "vocab/deprels.txt"]


def test_other_schema_version_is_refused(tmp_path):
    (tmp_path / "index.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="schema version must be 1, but is 99"):
        read_index(tmp_path)
    with pytest.raises(UserError, match="is missing; run tree-attention preprocess"):
        read_index(tmp_path / "nowhere")


def test_trees_made_of_arcs_are_described_with_their_form():
    assert describe_trees({"tree_source": "balanced", "parser": {"name": "given"}}) == "balanced"
    assert describe_trees({"tree_source": "parsed", "parser": {"name": "given"}}) == "given"
    settings = {"phrases": "flat", "phrase_labels": "upos", "seed": 1}
    described = describe_trees({"tree_source": "dependencies", "tree_settings": settings})
    assert described == "dependencies (phrases=flat, phrase_labels=upos)"


def test_a_stage_is_no_data_set(tmp_path):
    stage = tmp_path / "data" / "encoded"
    stage.mkdir(parents=True)
    write_index(stage, [], fingerprint="x")
    with pytest.raises(UserError, match=rf"^{stage} is a single stage of a data set; give the data set: {tmp_path / 'data'}$"):
        read_index(stage / "encoded")
    assert read_index(stage)["shards"] == []


def test_a_column_that_no_data_set_has_is_named_without_control_characters():
    with pa.ipc.new_file(sink := pa.BufferOutputStream(), schema := pa.schema([pa.field("\x1b[31mred", pa.int8())])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1], pa.int8())], schema=schema))
    with pytest.raises(BadArrowFile, match=r"^has a column \?\[31mred that no data set has$"):
        read_arrow(pa.BufferReader(sink.getvalue()), [PARSED_SCHEMA])
