"""The text stage on Ray with inputs and outputs in an object store, against one process and files."""

import gzip
import io
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from folder_store import store
from test_text_blocks import LINE_FILES, check_kills, check_ranges, everything, here, inputs_of, on_ray, runner, small, stage

from treeproc.common.settings import UserError
from treeproc.common.storage import RemotePath, as_path, open_seekable
from treeproc.common.store_requests import StoreRefuses
from treeproc.readers import line_ranges
from treeproc.readers.line_ranges import ChunkedObject, ObjectChanged, Stamp, read_range
from treeproc.stages import inputs as stage_inputs
from treeproc.stages.cut_inputs import Unpack, bytes_that_can_be_cut, mark_of
from treeproc.stages.filters import FilterConfig
from treeproc.stages.inputs import Inputs, SplitFiles, changed_just_now, input_stamp
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.text_warnings import TextNotices

__all__ = ["small", "store"]  # fixtures
BUCKET = RemotePath("s3", "bucket")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(line_ranges, "_CHUNK_BYTES", 16)


def put(name: str, content: bytes) -> RemotePath:
    (BUCKET / name).write_bytes(content)
    assert (BUCKET / name).size() == len(content), "an object has the bytes that were written, whatever its name"
    return BUCKET / name


def in_store(inputs: Inputs) -> Inputs:
    """The same inputs as objects."""

    def moved(paths: list[Path]) -> list[RemotePath]:
        return [put(f"inputs/{path.name}", path.read_bytes()) for path in paths]

    splits = {
        split: files.model_copy(update={"source": moved(files.source), "target": moved(files.target)})
        for split, files in inputs.splits.items()
    }
    return replace(inputs, splits=splits)


@pytest.mark.slow
def test_inputs_and_data_set_in_a_store_have_the_bytes_of_one_process(tmp_path, store):
    inputs, filters = everything(tmp_path / "files", 24)
    (tmp_path / "here" / "text").mkdir(parents=True)
    expected = stage(tmp_path / "here", here(tmp_path / "here", inputs, filters), inputs, 5)
    assert {b"duplicate", b"overlap"} <= {line.split(b"\t")[2] for line in expected["files"]["text/dropped.tsv"].splitlines()}
    remote = in_store(inputs)
    assert bytes_that_can_be_cut(remote) == bytes_that_can_be_cut(inputs) > 0
    for number, (places, out) in enumerate([(remote, BUCKET / "out"), (remote, tmp_path / "out"), (inputs, BUCKET / "out2")]):
        (out / "text").mkdir(parents=True)
        found = stage(out, on_ray(out, places, filters, runner(number)), places, 5)
        assert found == expected
    assert not [name for name in store.opened if ".work-" in name and (tmp_path / "store" / name).exists()]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ([b"a\n" * 9 + b"\xff\n"], [b"a\n" * 10])}, "inputs/train.0.s, line 10: not valid UTF-8"),
        ({"train": ([b"a\n" * 9], [b"a\n" * 4])}, "has 9 lines, but"),
        ({"train": ([b"a\n" * 9 + b"\xff"], [b"a\n" * 4])}, "inputs/train.0.s, line 10: not valid"),
    ],
)
def test_bad_input_has_the_message_of_one_process_and_leaves_nothing(splits, message, tmp_path, store):
    inputs = in_store(inputs_of(tmp_path / "files", splits))
    there = BUCKET / "out"
    (tmp_path / "here" / "text").mkdir(parents=True)
    expected = stage(tmp_path / "here", here(tmp_path / "here", inputs, FilterConfig()), inputs, 2)
    assert message in expected["error"]
    assert stage(there, on_ray(there, inputs, FilterConfig(), runner()), inputs, 2) == expected
    assert not there.objects()


def test_a_missing_object_and_a_damaged_packed_one_are_named(tmp_path, store):
    target = put("inputs/t", b"a\n" * 50)
    damaged = put("inputs/damaged.gz", gzip.compress(os.urandom(100) + b"\n" * 50)[:-9])
    for source, message in ((BUCKET / "inputs/no", "inputs/no"), (damaged, "cannot read .*damaged.gz|damaged.gz, line 1")):
        inputs = Inputs({"train": SplitFiles(source=[source], target=[target])}, "parallel", "none", None)
        with pytest.raises(UserError, match=message):
            on_ray(BUCKET / "out", inputs, FilterConfig(), runner()).digests()
        assert not (BUCKET / "out").objects()


@pytest.mark.slow
def test_killed_after_any_job_the_same_command_goes_on(tmp_path, store):
    lines = "\n".join(f"line {i % 7} of this" for i in range(12)).encode()
    inputs = inputs_of(tmp_path / "files", {"train": ([lines], [lines]), "test": ([b"line 2, of this\n"], [b"x"])})
    inputs.splits["train"].source[0].rename(tmp_path / "plain")
    packed = tmp_path / "files" / "train.0.s.gz"
    packed.write_bytes(gzip.compress(lines))
    splits = {**inputs.splits, "train": inputs.splits["train"].model_copy(update={"source": [packed]})}
    inputs, filters = in_store(replace(inputs, splits=splits)), FilterConfig(drop_duplicates=True)
    check_kills(BUCKET, inputs, filters, {"Unpack", "CheckBlock", "GatherKeys", "WriteText"})


def test_a_store_that_refuses_loses_nothing(tmp_path, store, monkeypatch):
    """An error of the store says nothing about the lines: the job ends, and the next one continues."""
    inputs, filters = everything(tmp_path / "files", 24)
    inputs, out, opened = in_store(inputs), BUCKET / "out", store.open_input_file

    def refuses(key: str):
        if key.endswith("train.0.s") and len(list((BUCKET / "out").objects())) > 9:
            raise OSError("When reading: AWS Error ACCESS_DENIED")
        return opened(key)

    store.open_input_file = refuses
    with pytest.raises(StoreRefuses, match=r"train.0.s: the object store refuses: .*ACCESS_DENIED"):
        on_ray(out, inputs, filters, runner()).digests()
    before = {name: stamp for name, (_, stamp) in out.listing().items() if "/block-" in name}
    assert before
    store.open_input_file = opened
    on_ray(out, inputs, filters, runner()).digests()
    assert before == {name: stamp for name, (_, stamp) in out.listing().items() if name in before}


@pytest.mark.parametrize("requests", [["get_file_info"], ["open_input_stream", "open_input_file"]])
def test_a_store_that_refuses_the_first_file_leaves_no_folder(requests, tmp_path, store, monkeypatch):
    sides = {"source": [str(put("inputs/s", b"a\n" * 9))], "target": [str(put("inputs/t", b"b\n" * 9))]}
    config = PreprocessConfig.model_validate({"splits": {"train": sides}, "parser": {"name": "words"}, "workers": 0})

    def refuses(*_, **__):
        raise OSError("When reading: AWS Error ACCESS_DENIED")

    for name in requests:
        monkeypatch.setattr(store, name, refuses, raising=False)
    with pytest.raises(StoreRefuses, match="inputs/s: the object store refuses"):
        preprocess(config, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_ranges_of_objects_against_a_pass_over_all(store):
    paths = [put(str(i), content) for i, content in enumerate(LINE_FILES)]
    for chunk in (1, 7, 64):
        side = check_ranges(paths, chunk)
    for content in (b"other", LINE_FILES[0].replace(b"last", b"lost")):  # another size, and the same size at another time
        line_ranges._chunk.cache_clear()
        put("0", content)
        with pytest.raises(UserError, match="s3://bucket/0 changed while it was read"):
            list(read_range(side.pieces(0, 1)))


def test_neighbours_share_the_chunks_of_an_object(store):
    content = os.urandom(100)
    path = put("x", content)
    with io.BufferedReader(ChunkedObject(path, Stamp(*path.stamp())), 5) as file:
        for start in (0, 3, 15, 17, 40, 39, 96, 100):
            file.seek(start)
            assert file.read(7) == content[start : start + 7]
        assert file.seek(-4, io.SEEK_END) == 96 and file.read() == content[96:]
    assert len(store.opened) == 4, "chunks 0, 1, 2 and 6"
    with pytest.raises(ObjectChanged):
        ChunkedObject(path, Stamp(100, 1)).read(1)


def test_a_stream_to_an_object_is_complete_or_absent(store):
    content = os.urandom(1000)
    with (BUCKET / "x").open_output() as file:
        file.write(content)
    with open_seekable(BUCKET / "x") as file:
        file.seek(990)
        assert file.read(100) == content[990:]
    with suppress(ValueError), (BUCKET / "x").open_output() as file:
        file.write(content)
        raise ValueError
    assert not (BUCKET / "x").exists()
    packed = put("x.gz", gzip.compress(content))
    assert Unpack()(str(packed), str(BUCKET / "plain")) and (BUCKET / "plain").read_bytes() == content
    assert mark_of(BUCKET / "plain").exists() and mark_of(BUCKET / "plain") == as_path("s3://bucket/plain.json")
    put("x.gz", gzip.compress(content)[:-3])
    assert not Unpack()(str(packed), str(BUCKET / "other")) and not list(BUCKET.glob("other*"))


def test_stamps_of_objects(tmp_path, store, monkeypatch):
    inputs = in_store(inputs_of(tmp_path / "files", {"train": ([b"a\n"], [b"a\n"])}))
    before = input_stamp(inputs)
    assert before and before == input_stamp(inputs) and changed_just_now(inputs)
    monkeypatch.setattr(stage_inputs, "SETTLED_NS", 0)
    assert not changed_just_now(inputs)
    put("inputs/train.0.s", b"b\nb\n")
    assert input_stamp(inputs) != before
    (BUCKET / "inputs/train.0.s").unlink()
    assert input_stamp(inputs) is None


def test_work_folders_of_other_inputs_are_removed(tmp_path, store):
    put("out/.work-0123456789abcdef/block-000000.json", b"{}")
    inputs, out = in_store(inputs_of(tmp_path / "files", {"train": ([b"a\n" * 4], [b"a\n" * 4])})), BUCKET / "out"
    on_ray(out, inputs, FilterConfig(), runner()).digests()
    assert not (out / ".work-0123456789abcdef").objects() and out.folders()
    with line_list(tmp_path / DROPPED) as dropped:
        on_ray(out, inputs, FilterConfig(), runner()).write("mark", 2, TextNotices({}, inputs.line), dropped)
