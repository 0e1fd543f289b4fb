"""Many shards: `index.json` names parts, which hold the records. Readers see the same, and damage is one line."""

import json

import pytest
from hostile_files import one_line

from treeproc.common.files import file_sha256, json_bytes
from treeproc.common.settings import UserError
from treeproc.inspect import describe
from treeproc.shards import records as records_module
from treeproc.shards import store
from treeproc.shards.shard import SplitShards, check_hashes
from treeproc.shards.store import ShardRecord, in_index_order, read_index, write_index
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.verify import verify


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(store, "_MOST_INLINE", 4)
    monkeypatch.setattr(records_module, "_SHARDS_A_PART", 3)


def record(split: str, index: int) -> ShardRecord:
    counts = {"leaves": index, f"status.{split}": 1}
    return ShardRecord(f"{split}-{index:05d}.arrow", split, index, 10 + index, 100, "a" * 64, "f", counts=counts)


ORDERED = [*(record("train", i) for i in range(8)), record("valid", 0), *(record("test", i) for i in range(4))]


def test_records_of_parts_are_those_that_were_written(tmp_path, small_limits):
    inline = write_index(tmp_path, ORDERED[:4], fingerprint="x")
    assert "parts" not in inline and read_index(tmp_path).records() == ORDERED[:4]
    written = write_index(tmp_path, reversed(ORDERED), fingerprint="x")
    index = read_index(tmp_path)
    assert index == written and "shards" not in index and index["totals"]["train"] == {
        "bytes": 800, "leaves": 28, "rows": 108, "status.train": 8,
    }  # fmt: skip
    assert [(part["split"], part["shards"]) for part in index["parts"]] == [
        ("train", 3), ("train", 3), ("train", 2), ("valid", 1), ("test", 3), ("test", 1),
    ]  # fmt: skip
    found = index.records()
    assert found == ORDERED
    for split in ("train", "valid", "test", "other"):
        assert index.records(split) == [one for one in ORDERED if one.split == split]


def test_only_the_parts_that_are_asked_for_are_read_and_once(tmp_path, small_limits):
    write_index(tmp_path, ORDERED)
    index = read_index(tmp_path)
    index.records("train").clear()  # the list of a caller is its own
    (tmp_path / "index-00001.json").unlink()  # the fourth to sixth shard of train
    assert index.records("train") == ORDERED[:8]
    assert read_index(tmp_path).records("test") == ORDERED[9:]
    assert read_index(tmp_path).records_between(1, 3) == ORDERED[1:3]
    assert read_index(tmp_path).records_between(6, 13) == ORDERED[6:]
    for asked in (lambda index: index.records("train"), lambda index: index.records_between(2, 4), lambda index: index.records()):
        with pytest.raises(UserError) as error:
            asked(read_index(tmp_path))
        one_line(error.value, "cannot read", "index-00001.json", "run tree-attention preprocess again")


@pytest.mark.parametrize("shards", [ORDERED, ORDERED[:4]])
def test_records_between_two_places_are_a_slice(tmp_path, small_limits, shards):
    write_index(tmp_path, shards)
    index = read_index(tmp_path)
    for begin in range(len(shards) + 2):
        for end in range(len(shards) + 2):
            assert index.records_between(begin, end) == shards[begin:end]


def test_the_order_of_the_index_is_that_of_splits_and_shards():
    names = [("newstest", 1), ("train", 2), ("valid", 0), ("train", 0), ("newstest", 0), ("train", 1)]
    records = [ShardRecord(f"{split}-{index}", split, index, 1, 1, "", "") for split, index in names]
    assert [(r.split, r.index) for r in in_index_order(iter(records))] == [
        ("train", 0), ("train", 1), ("train", 2), ("valid", 0), ("newstest", 0), ("newstest", 1),
    ]  # fmt: skip


def change_record(part, **changes) -> None:
    part.write_bytes(json_bytes([json.loads(part.read_bytes())[0] | changes, *json.loads(part.read_bytes())[1:]]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda part: part.write_bytes(part.read_bytes()[:-1]), "must have"),
        (lambda part: part.write_bytes(part.read_bytes().replace(b'"rows": 10', b'"rows": 11')), "its hash is not the one"),
        (lambda part: change_record(part, name="../x.arrow"), "0.name"),
        (lambda part: change_record(part, sha256="../../" + "a" * 58), "0.sha256"),
        (lambda part: change_record(part, more=1), "0.more"),
        (lambda part: change_record(part, rows=11), "shards, rows or split differ from those"),
        (lambda part: change_record(part, split="valid"), "shards, rows or split differ from those"),
        (lambda part: part.write_bytes(b"[" * 100_000), "Invalid JSON"),
        (lambda part: part.write_bytes(b"{}"), "valid array"),
    ],
)
def test_damaged_parts_are_one_line(tmp_path, small_limits, damage, message):
    """Also where the hash is right, as an attacker writes it."""
    write_index(tmp_path, ORDERED)
    part = tmp_path / "index-00000.json"
    damage(part)
    if message not in ("must have", "its hash is not the one"):
        index = json.loads((tmp_path / "index.json").read_bytes())
        index["parts"][0] |= {"sha256": file_sha256(part), "bytes": part.stat().st_size}
        (tmp_path / "index.json").write_bytes(json_bytes(index))
    with pytest.raises(UserError) as error:
        read_index(tmp_path).records()
    one_line(error.value, message, str(part))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../index-00000.json"}, "parts.0.name"),
        ({"name": "/etc/passwd"}, "parts.0.name"),
        ({"name": "train-00000.arrow"}, "parts.0.name"),
        ({"sha256": "x"}, "parts.0.sha256"),
        ({"bytes": 1 << 30}, "parts.0.bytes"),
        ({"shards": 1025}, "parts.0.shards"),
        ({"shards": "3"}, "parts.0.shards"),
        ({"rows": -1}, "parts.0.rows"),
        ({"more": 1}, "parts.0.more"),
    ],
)
def test_readers_check_the_parts_that_an_index_names(tmp_path, small_limits, changes, message):
    index = write_index(tmp_path, ORDERED)
    index["parts"][0] |= changes
    (tmp_path / "index.json").write_bytes(json_bytes(index))
    with pytest.raises(UserError) as error:
        read_index(tmp_path)
    one_line(error.value, f"index.json is damaged: {message}")
    (tmp_path / "index.json").write_bytes(json_bytes(index | {"shards": []}))
    with pytest.raises(UserError, match="it names no shards"):
        read_index(tmp_path)


def make(folder, out) -> PreprocessConfig:
    for side in ("en", "de"):
        (folder / side).write_text("".join(f"the cat number {i} sees a dog\n" for i in range(12)))
    splits = {split: {"source": [folder / "en"], "target": [folder / "de"]} for split in ("train", "valid")}
    values = {
        "splits": splits, "parser": {"name": "words"}, "tree": {"tree_source": "balanced"}, "subwords": {"vocab_size": 300},
        "rows_per_shard": 3, "workers": 0,
    }  # fmt: skip
    config = PreprocessConfig.model_validate(values)
    preprocess(config, out)
    return config


def shards_of(data) -> dict:
    files = (path for path in data.rglob("*") if path.is_file() and "index" not in path.name and path.suffix != ".json")
    return {path.relative_to(data): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_job_with_parts_makes_the_same_shards_and_mends_its_parts(tmp_path, monkeypatch):
    make(tmp_path, tmp_path / "inline")
    monkeypatch.setattr(store, "_MOST_INLINE", 4)
    monkeypatch.setattr(records_module, "_SHARDS_A_PART", 3)
    data = tmp_path / "data"
    config = make(tmp_path, data)
    assert shards_of(data) == shards_of(tmp_path / "inline")
    for stage in ("text", "parsed", "encoded"):
        inline, parted = (read_index(folder / stage) for folder in (tmp_path / "inline", data))
        parts = parted.pop("parts")
        assert [part["shards"] for part in parts] == [3, 1, 3, 1]
        assert read_index(data / stage).records() == inline.records()
        assert parted == {name: value for name, value in inline.items() if name != "shards"}
    check_hashes(data / "encoded", "train", "valid")
    assert not verify(data).problems and "valid: 12 examples" in describe(data)[0]
    assert [len(shard) for shard in SplitShards(data / "encoded", "train")] == [3, 3, 3, 3]
    before = {path: path.read_bytes() for path in data.rglob("index*.json")}
    for stage in ("text", "parsed", "encoded"):
        (data / stage / "index-00001.json").write_bytes(b"[]")
    report = verify(data)
    assert [problem.path.parent.name for problem in report.problems] == ["text", "parsed", "encoded"]
    assert all(problem.path.name == "index.json" and "index-00001.json must have" in problem.what for problem in report.problems)
    with pytest.raises(UserError, match="index-00001.json must have"):
        check_hashes(data / "encoded", "train")
    preprocess(config, data)
    assert {path: path.read_bytes() for path in data.rglob("index*.json")} == before
