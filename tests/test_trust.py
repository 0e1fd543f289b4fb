"""What others made never executes code, never leaves its folder, and takes no more memory than it has bytes."""

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from base64 import b64encode
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray.data  # registers extension types that unpickle
import torch
from toydata import write_toy_data

from treenet.data import ExampleSource
from treenet.inference.results import read_system
from treenet.training.checkpoint import META, WEIGHTS, is_whole
from treenet.training.ledger import LEDGER, Ledger
from treeproc import ray_job
from treeproc.arrow import column_views, ipc_bytes, record_batches
from treeproc.arrow_file import BadArrowFile, read_arrow
from treeproc.errors import without_credentials
from treeproc.files import atomic_write, file_sha256, json_bytes, locked, read_json
from treeproc.inspect import describe
from treeproc.inspect import main as inspect
from treeproc.line_encoder import LineEncoder
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.preprocess import PreprocessConfig, preprocess
from treeproc.ray_session import start_ray
from treeproc.readers.files import read_lines
from treeproc.schema import ENCODED_SCHEMA, FULL_ENCODED_SCHEMA, LENGTHS_SCHEMA, STAGE_SCHEMAS, TEXT_SCHEMA, select
from treeproc.settings import UserError, dump_settings, load_settings
from treeproc.shards import Shard, ShardRecord, check_hashes, finished_shard, read_index, read_lengths, stage_folder
from treeproc.stages.encode import EncodeShard, TreeConfig
from treeproc.storage import as_path, inside
from treeproc.verify import verify

PICKLED = {"ARROW:extension:name": "ray.data.arrow_pickled_object", "ARROW:extension:metadata": ""}


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


def ipc(table: pa.Table | pa.RecordBatch, **options) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


def put(folder: Path, name: str, content: bytes) -> None:
    """Replace a shard as an attacker does: sidecar and index say its size and hash."""
    (folder / name).write_bytes(content)
    index = json.loads((folder / "index.json").read_bytes())
    for record in index["shards"]:
        if record["name"] == name:
            record |= {"bytes": len(content), "sha256": file_sha256(folder / name)}
            (folder / name).with_suffix(".json").write_bytes(json_bytes(record))
    (folder / "index.json").write_bytes(json_bytes(index))


def first_record(folder: Path) -> ShardRecord:
    return ShardRecord(**json.loads((folder / "index.json").read_bytes())["shards"][0])


def with_column(table: pa.Table, name: str, field: pa.Field, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), field, values)


def read_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(path.read_bytes()).read_all()


@pytest.fixture
def data(tmp_path) -> Path:
    return write_toy_data(tmp_path / "data")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A data set of real stages, of words under control trees."""
    folder = tmp_path_factory.mktemp("job")
    for side in ("en", "de"):
        (folder / side).write_text("".join(f"the cat number {i} sees a dog\n" for i in range(12)))
    values = {
        "splits": {"train": {"source": [folder / "en"], "target": [folder / "de"]}},
        "parser": {"name": "words"}, "tree": {"tree_source": "balanced"}, "subwords": {"vocab_size": 300}, "rows_per_shard": 6,
        "workers": 0,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values), folder / "data")
    return folder / "data"


def one_line(error: BaseException | str, *parts: str) -> None:
    assert "\n" not in str(error) and len(str(error)) < 500
    for part in parts:
        assert part in str(error), error


def hostile(table: pa.Table, column: str, form: str, marker: Path) -> bytes:
    """The table with pickles that make `marker` in the place of a column."""
    values = pa.array([pickle.dumps(Payload(marker))] * len(table), pa.large_binary())
    strings = values.cast(pa.binary()).view(pa.string())
    if form == "pickled":
        field = pa.field(column, pa.large_binary(), nullable=False, metadata=PICKLED)
    elif form == "disguised as string":
        field, values = pa.field(column, pa.string(), nullable=False, metadata=PICKLED), strings
    elif form == "in a dictionary":
        values = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int32()), values[:1])
        field = pa.field(column, values.type, nullable=False, metadata=PICKLED)
    elif form == "in a list":
        item = pa.field("item", pa.large_binary(), nullable=False, metadata=PICKLED)
        values = pa.ListArray.from_arrays(pa.array(range(len(table) + 1), pa.int32()), values, type=pa.list_(item))
        field = pa.field(column, values.type, nullable=False)
    else:
        item = pa.field("text", pa.string(), nullable=False, metadata=PICKLED)
        child = pa.StructArray.from_arrays([strings], fields=[item])
        values = pa.ListArray.from_arrays(pa.array(range(len(table) + 1), pa.int32()), child)
        field = pa.field(column, values.type, nullable=False)
    # Ray would make pickles of its own while it writes the registered type.
    pa.unregister_extension_type("ray.data.arrow_pickled_object")
    try:
        return ipc(with_column(table, column, field, values))
    finally:
        pa.register_extension_type(ray.data._internal.object_extensions.arrow.ArrowPythonObjectType())


FORMS = ["pickled", "disguised as string", "in a dictionary", "in a list", "in a list of structs"]


def test_the_payload_of_these_tests_is_real(data, tmp_path):
    shard = next((data / "text").glob("train-*.arrow"))
    (tmp_path / "x.arrow").write_bytes(hostile(read_table(shard), "source", "pickled", tmp_path / "marker"))
    read_table(tmp_path / "x.arrow")["source"].chunk(0)[:1].to_numpy()
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", FORMS)
def test_no_reader_of_a_shard_runs_its_pickles(form, data, tmp_path):
    marker, folder = tmp_path / "marker", data / "encoded"
    name = first_record(folder).name
    put(folder, name, hostile(read_table(folder / name), "leaves", form, marker))
    told = f"{folder / name} column leaves must be list<item: struct<piece: int32 not null, "
    for read in (lambda: Shard(folder, first_record(folder)), lambda: ExampleSource(folder, "train"), lambda: describe(data)):
        with pytest.raises(UserError) as error:
            read()
        one_line(error.value, told, "the extension type ray.data.arrow_pickled_object" if form != "in a list of structs" else "")
    assert [p.path for p in verify(data).problems if "extension type" in p.what] == [folder / name]
    table = read_table(data / "text" / name)
    put(data / "text", name, hostile(table, "source", form, marker))
    with pytest.raises(UserError, match="column source must be string, but is the extension type"):
        Shard(data / "text", first_record(data / "text"))
    assert not marker.exists()


@pytest.mark.parametrize("form", FORMS[:2])
def test_no_ray_worker_runs_the_pickles_of_a_shard(form, job, tmp_path):
    """The encode stage in an actor, as preprocess.py runs it, and the reader of training in a worker."""
    data, marker = tmp_path / "data", tmp_path / "marker"
    shutil.copytree(job, data)
    text, parsed = first_record(data / "text"), first_record(data / "parsed")
    put(data / "parsed", parsed.name, hostile(read_table(data / "parsed" / parsed.name), "parse_status", form, marker))
    jobs = [{"text": text, "parsed": first_record(data / "parsed"), "mark": "x"}]
    arguments = {"data": data, "tree": TreeConfig(tree_source="balanced"), "base": None}
    with pytest.raises(UserError) as error:
        list(ray_job.run_shards(EncodeShard, arguments, jobs, folder=data / "encoded"))
    told = "column parse_status must be string, but is the extension type ray.data.arrow_pickled_object"
    one_line(error.value, parsed.name, told)
    with pytest.raises(UserError, match="column parse_status must be string"):
        preprocess(PreprocessConfig(parsed=data, tree=TreeConfig(tree_source="left")), tmp_path / "other")

    def read_in_worker(folder: Path) -> str:
        import ray.data  # noqa: F401

        try:
            ExampleSource(folder, "train")
        except UserError as error:
            return str(error)

    encoded = data / "encoded"
    put(encoded, parsed.name, hostile(read_table(encoded / parsed.name), "leaves", form, marker))
    start_ray()
    one_line(ray.get(ray.remote(num_cpus=0)(read_in_worker).remote(encoded)), "column leaves must be", "extension type")
    assert not marker.exists()


def test_every_command_says_one_line_of_a_hostile_shard(data, tmp_path):
    folder = data / "encoded"
    name = first_record(folder).name
    put(folder, name, hostile(read_table(folder / name), "leaves", "pickled", tmp_path / "marker"))
    run = subprocess.run([sys.executable, "-m", "treeproc.inspect", str(data)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "arrow_pickled_object" in run.stderr


@pytest.mark.parametrize("name", ["ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor", "pandas.period", "nobody.knows"])
def test_types_that_other_libraries_register_are_refused_too(name, data):
    """Older versions of Ray unpickle the description of a tensor type while the schema is read."""
    table = read_table(data / "encoded" / "lengths.arrow")
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": "cos\nsystem\n(S'false'\ntR."}
    fields = [field.with_metadata(metadata) if field.name == "leaves" else field for field in LENGTHS_SCHEMA]
    (data / "encoded" / "lengths.arrow").write_bytes(ipc(table.cast(pa.schema(fields))))
    with pytest.raises(UserError, match="lengths.arrow column leaves must be int32, but is the extension type") as error:
        read_lengths(data / "encoded", "train")
    one_line(error.value, name)


def test_schemas_must_be_the_known_ones_and_metadata_does_not_matter(tmp_path):
    def read(table):
        return read_arrow(pa.BufferReader(ipc(table)), list(STAGE_SCHEMAS.values()))[0]

    rows = {"example_id": [0], "source": ["a"], "target": ["b"]}
    table = pa.table(rows, TEXT_SCHEMA)
    assert read(table.replace_schema_metadata({"a": "b"})) == TEXT_SCHEMA
    for columns in (["label"], ["score", "leaf_labels"], ["arcs"]):
        schema = select(FULL_ENCODED_SCHEMA, [*ENCODED_SCHEMA.names, *columns])
        assert read(schema.empty_table()) == schema
    text = [*TEXT_SCHEMA]
    for fields, told in {
        (*text, pa.field("more", pa.int32())): "has a column more that no data set has",
        (text[0], pa.field("source", pa.large_string(), nullable=False)): "column source must be string, but is large_string",
        (text[0], pa.field("source", pa.dictionary(pa.int8(), pa.string()), nullable=False)): "must be string, but is dict",
        (text[0], text[1], text[1]): "in this order",
        (text[1], text[0]): "in this order",
        (text[0], pa.field("source", pa.string())): "none nullable",
    }.items():
        with pytest.raises(BadArrowFile, match=told):
            read(pa.schema(fields).empty_table())


def test_memory_is_that_of_the_file(data):
    """Compressed buffers, offsets that go back, and another number of rows than the index names."""
    folder = data / "encoded"
    record, schema = first_record(folder), ENCODED_SCHEMA
    table = read_table(folder / record.name)
    targets = schema.field("tgt_pieces")
    many = pa.array(np.zeros(4_000_000, np.int32))
    zeros = pa.ListArray.from_arrays([0] * len(table) + [len(many)], many, type=targets.type)
    content = ipc(with_column(table, "tgt_pieces", targets, zeros), compression="zstd")
    assert len(content) < 100_000
    before = pa.total_allocated_bytes()
    put(folder, record.name, content)
    with pytest.raises(UserError, match="is compressed, but data sets are not"):
        Shard(folder, first_record(folder))
    assert pa.total_allocated_bytes() - before < 1 << 20

    old, sink = {"ARROW:experimental_compression": "zstd"}, pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(table.to_batches()[0], custom_metadata=old)
    with pytest.raises(BadArrowFile, match="is compressed"):
        read_arrow(pa.BufferReader(sink.getvalue()), [schema])

    text = ipc(pa.table({"example_id": [0, 1, 2], "source": ["abc"] * 3, "target": ["abc"] * 3}, TEXT_SCHEMA))
    edges = np.array([0, 3, 6, 9], np.int32).tobytes()
    for bad in ([0, 5, 2, 9], [0, 3, 2**31 - 1, 9], [0, 3, 6, 2**31 - 1], [-9, 3, 6, 9]):
        with pytest.raises(BadArrowFile, match="is damaged"):
            read_arrow(pa.BufferReader(text.replace(edges, np.array(bad, np.int32).tobytes())), [TEXT_SCHEMA])

    put(folder, record.name, ipc(table.slice(1)))
    with pytest.raises(UserError, match="its number of rows is not the one in index.json"):
        Shard(folder, first_record(folder))


def test_batches_that_share_their_bytes_are_refused():
    """Fifty names of the same record batch would be copied fifty times."""
    row = {"example_id": 0, "source": "x" * 1000, "target": ""}
    schema_end = len(ipc_bytes([], TEXT_SCHEMA))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, TEXT_SCHEMA) as writer:
        for _ in range(50):
            writer.write_batch(next(record_batches([row], TEXT_SCHEMA)))
    content = sink.getvalue().to_pybytes()
    footer = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    size = (footer - 8) // 50  # of a batch, at most
    end = bytearray(content[footer:])
    first = next(
        at for at in range(0, len(end) - 24, 8) if 0 < int.from_bytes(end[at : at + 8], "little") < schema_end
        and int.from_bytes(end[at + 24 : at + 32], "little") - int.from_bytes(end[at : at + 8], "little") in range(1000, size + 1)
    )  # fmt: skip
    for i in range(1, 50):
        end[first + 24 * i : first + 24 * i + 24] = end[first : first + 24]
    whole = pa.ipc.open_file(pa.BufferReader(bytes(content[:footer]) + bytes(end)))
    assert whole.num_record_batches == 50 and whole.read_all()["source"].to_pylist() == [row["source"]] * 50
    with pytest.raises(BadArrowFile, match="more than it has"):
        read_arrow(pa.BufferReader(bytes(content[: footer // 25]) + bytes(end)), [TEXT_SCHEMA])


def test_damaged_arrow_files_are_one_line_whatever_the_damage():
    random = np.random.default_rng(0)
    rows = [{"example_id": i, "source": f"line {i}", "target": "x"} for i in range(20)]
    whole = ipc_bytes(rows, TEXT_SCHEMA)
    refused = 0
    for _ in range(600):
        content = bytearray(whole)
        for at in random.integers(len(content), size=random.integers(1, 4)):
            content[at] = random.integers(256)
        if random.random() < 0.3:
            content = content[: random.integers(len(content))]
        try:
            for batch in read_arrow(pa.BufferReader(bytes(content)), [TEXT_SCHEMA])[1]:
                [np.asarray(column_views(column)) for column in batch.columns]
        except BadArrowFile as error:
            one_line(error)
            refused += 1
    assert refused > 200


def test_sidecars_and_indices_are_checked(data):
    folder = data / "encoded"
    record = first_record(folder)
    good = json.loads((folder / "index.json").read_bytes())

    def index_with(change) -> None:
        index = json.loads(json.dumps(good))
        change(index)
        (folder / "index.json").write_bytes(json_bytes(index))

    for change, told in [
        (lambda i: i["shards"][0].update(rows="9"), "shards.0.rows"),
        (lambda i: i["shards"][0].update(more=1), "shards.0.more"),
        (lambda i: i["shards"][0].pop("sha256"), "shards.0.sha256"),
        (lambda i: i["shards"][0].update(sha256="../../" + "a" * 58), "shards.0.sha256"),
        (lambda i: i["shards"][0].update(name="../text/train-00000-of-00002.arrow"), "shards.0.name"),
        (lambda i: i["shards"][0].update(name="/etc/x.arrow"), "shards.0.name"),
        (lambda i: i.update(shards={}), "shards"),
        (lambda i: i.update(columns="leaves"), "columns"),
        (lambda i: i.update(num_pieces=-1), "num_pieces"),
        (lambda i: i.update(files={"vocab/pieces.model": 3}), "files"),
        (lambda i: i.update(files={"../../secret": "a" * 64}), "'../../secret' is no name of a file in that folder"),
        (lambda i: i.update(columns=["example_id", "leaves"]), "index.json names example_id, leaves"),
    ]:
        index_with(change)
        with pytest.raises(UserError) as error:
            check_hashes(folder, "train")
        one_line(error.value, told, str(folder))
    for key in ("fingerprint", "vocab_fingerprint", "tree_settings"):
        index_with(lambda i, key=key: i.pop(key, None))
        with pytest.raises(UserError) as error:
            read_index(folder)[key]
        one_line(error.value, f"index.json is damaged: it has no {key}", str(folder))
    index_with(lambda i: None)
    sidecar = (folder / record.name).with_suffix(".json")
    for change in ({"name": "../x.arrow"}, {"more": 1}, {"rows": "9"}):
        sidecar.write_bytes(json_bytes(asdict(record) | change))
        assert finished_shard(folder, record.name, record.fingerprint) is None


def test_borrowed_stages_are_neighbours_or_absolute(data):
    folder = data / "encoded"
    index = read_index(folder)
    for place, found in [
        ("../other/text", data.parent / "other" / "text"),
        ("/some/where/text", Path("/some/where/text")),
        ("s3://bucket/other/text", as_path("s3://bucket/other/text")),
        ("text", data / "text"),
    ]:
        (folder / "index.json").write_bytes(json_bytes(index | {"stages": {"text": place}}))
        assert stage_folder(data, "text") == found
    for place in ("../../other/text", "../other/parsed", "../..", "/etc", "/a/../etc/text", "x/text", "", "..", "/a\0/text"):
        (folder / "index.json").write_bytes(json_bytes(index | {"stages": {"text": place}}))
        with pytest.raises(UserError, match="stages.text must be"):
            stage_folder(data, "text")


def test_recorded_names_stay_inside(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a", outside):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "own").symlink_to(root / "a")
    assert inside(root, "a/b.txt") == root / "a" / "b.txt" and inside(root, "own/x") == root / "own" / "x"
    assert inside(as_path("s3://b/run"), "a/b") == as_path("s3://b/run/a/b")
    for name in ("", ".", "/etc/passwd", "..", "a/../../x", "../root/a", "a\0b"):
        for place in (root, as_path("s3://b/run")):
            with pytest.raises(UserError, match="is no name of a file in that folder"):
                inside(place, name)
    with pytest.raises(UserError, match="behind a link that leads out of"):
        inside(root, "link/x")


def test_names_in_ledgers_scores_and_checkpoints_stay_inside(tmp_path):
    (tmp_path / LEDGER).write_bytes(json_bytes({"cells": {"../../x": {"labels": {}, "settings": {}, "data_fingerprint": ""}}}))
    with pytest.raises(UserError, match="is no name of a file in that folder"):
        Ledger.read(tmp_path)
    (tmp_path / "run" / "translations.x").mkdir(parents=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret\n")
    (tmp_path / "run" / "scores.json").write_bytes(
        json_bytes({"x/../../secret": {"translations_sha256": file_sha256(secret), "split": "test"}})
    )
    with pytest.raises(UserError, match="is no name of a file in that folder"):
        read_system(tmp_path / "run", "x/../../secret")
    facts = {"bytes": secret.stat().st_size, "sha256": file_sha256(secret)}
    (tmp_path / "run" / WEIGHTS).write_text("secret\n")
    for more, whole in (({}, True), ({"../secret.txt": facts}, False), ({str(secret): facts}, False)):
        (tmp_path / "run" / META).write_bytes(json_bytes({"files": {WEIGHTS: facts, **more}}))
        assert is_whole(tmp_path / "run") is whole


def test_locks_and_outputs_are_never_written_through_links(tmp_path, monkeypatch):
    target, out = tmp_path / "target", tmp_path / "out"
    target.write_text("precious")
    out.mkdir()
    for make in (lambda path: path.symlink_to(target), lambda path: path.mkdir(), lambda path: os.mkfifo(path)):
        make(out / ".lock")
        with pytest.raises(UserError, match=r"\.lock must be a lock file, but is a link or no file"), locked(out):
            pass
        os.rmdir(out / ".lock") if (out / ".lock").is_dir() else (out / ".lock").unlink()
    os.link(target, out / ".lock")
    with locked(out), pytest.raises(UserError, match="another process is writing"), locked(out):
        pass
    temporary = out / f".tmp-{os.getpid()}-result.txt"
    for make in (temporary.symlink_to, temporary.hardlink_to):
        make(target)
        atomic_write(out / "result.txt", b"new")
    assert target.read_text() == "precious" and (out / "result.txt").read_text() == "new"

    cache = tmp_path / "cache"
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(cache))
    run = as_path("s3://bucket/run")
    with locked(run), pytest.raises(UserError, match="another process is writing to s3://bucket/run"), locked(run):
        pass
    (lock,) = (cache / "locks").iterdir()
    assert (cache / "locks").stat().st_mode & 0o777 == 0o700
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(UserError, match="must be a lock file, but is a link"), locked(run):
        pass
    shutil.rmtree(cache / "locks")
    (cache / "locks").symlink_to(out)
    with pytest.raises(UserError, match="must be a folder of your own"), locked(run):
        pass
    assert target.read_text() == "precious"


def test_a_compressed_checkpoint_is_refused(tmp_path):
    """PyTorch would unpack it: a thousand times its size."""
    from treenet.training.checkpoint import TRAINER, load_checkpoint, take_snapshot, write_checkpoint

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = write_checkpoint(tmp_path, take_snapshot(1, model, optimizer, {}, {"data_fingerprint": "x"}), keep=1)
    load_checkpoint(folder, model, optimizer, data_fingerprint="x")
    with zipfile.ZipFile(folder / TRAINER) as old, zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    os.replace(folder / "new", folder / TRAINER)
    with pytest.raises(UserError, match=r"trainer.pt is no file of PyTorch's, as its parts are compressed"):
        load_checkpoint(folder, model, optimizer, data_fingerprint="x")


def test_a_line_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("treeproc.readers.files._MOST_LINE_BYTES", 1 << 17)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a line\n" * 100_000 + b"x" * (1 << 22)))
    with pytest.raises(UserError, match=r"x.gz has a line of more than"):
        list(read_lines([tmp_path / "x.gz"]))
    (tmp_path / "x.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UserError, match=r"x.json cannot be read"):
        read_json(tmp_path / "x.json")


def test_text_gives_a_terminal_no_commands(data, capsys):
    labels = data / "encoded" / "vocab" / "labels.txt"
    labels.write_text(labels.read_text().replace("NP", "\x1b]0;title\x07NP\x1b[2J"))
    inspect([str(data)])
    printed = capsys.readouterr().out
    assert r"\x1b]0;title\x07NP" in printed and "\x1b" not in printed and "\x07" not in printed


def test_lengths_that_name_other_rows_are_refused(data):
    path = data / "encoded" / "lengths.arrow"
    table = read_table(path)
    for column in ("shard", "row"):
        values = pa.array([2**31 - 1] * len(table), pa.int32())
        path.write_bytes(ipc(with_column(table, column, LENGTHS_SCHEMA.field(column), values)))
        with pytest.raises(UserError, match="names rows that the shards have not"):
            ExampleSource(data / "encoded", "train")


SECRET = "hunter2"


def test_addresses_of_servers_are_http_and_their_secrets_are_not_written(tmp_path):
    endpoint = f"http://user:{SECRET}@localhost:9000"
    config = load_settings(PreprocessConfig, None, ["parser.name=corenlp", f"parser.endpoint={endpoint}"])
    assert config.parser.endpoint == endpoint  # used
    assert SECRET not in dump_settings(config) + repr(config) + config.model_dump_json()
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    again = load_settings(PreprocessConfig, tmp_path / "config.yaml")
    assert again.parser.endpoint == "http://localhost:9000" and dump_settings(again) == dump_settings(config)
    for bad in ("file:///etc/passwd", "ftp://host", "localhost:9000", "http://", f"http://a b:{SECRET}@host",
                f"http://host:9000/?token={SECRET}", f"http://user:{SECRET}@host:port", f"gopher://u:{SECRET}@h"):  # fmt: skip
        with pytest.raises(UserError, match="parser.endpoint.* must be http://HOST:PORT or https://HOST:PORT") as error:
            load_settings(PreprocessConfig, None, [f"parser.endpoint={bad}"])
        one_line(error.value)
        assert SECRET not in str(error.value)


def test_a_server_gets_the_user_and_password_of_its_address(monkeypatch):
    monkeypatch.delenv("CORENLP_HOME", raising=False)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            good = self.headers["Authorization"] == "Basic " + b64encode(f"user:{SECRET}".encode()).decode()
            self.send_response(200 if good else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        config = ParserConfig(name="corenlp", endpoint=f"http://user:{SECRET}@{host}")
        assert describe_parser(config)["library"] == "CoreNLP server"
        with pytest.raises(UserError, match=f"no server answers at http://{host} and") as error:
            describe_parser(ParserConfig(name="corenlp", endpoint=f"http://user:{SECRET}x@{host}"))
        assert SECRET not in str(error.value)
        server.shutdown()


@pytest.mark.parametrize(
    "override",
    [
        f"parser=http://user:{SECRET}@host",
        f"parser.endpoint.x=http://user:{SECRET}@host",
        f"parser.endpoint=[http://user:{SECRET}@{'h' * 200}]",
        f"parser.endpoint={{a: http://user:{SECRET}@host",
        f"splits.train.source=http://user:{SECRET}@host/x",
        f"parsed=s3://key:{SECRET}@bucket/data",
        f"parsed=s3:/key:{SECRET}@bucket/data",
        f"http://user:{SECRET}@host",
    ],
)
def test_no_message_repeats_a_secret(override):
    with pytest.raises(UserError) as error:
        load_settings(PreprocessConfig, None, [override])
    one_line(error.value)
    assert SECRET not in str(error.value)


def test_what_is_taken_out_of_messages():
    assert without_credentials("no server at http://a:b@h:1/x, s3://k:s@b") == "no server at http://***@h:1/x, s3://***@b"
    assert without_credentials("'https://h/x?token=t' failed") == "'https://h/x?***' failed"
    assert without_credentials("http://a:b@h/x?token=t") == "http://***@h/x?***"
    assert without_credentials("a@b http://h/x c@d") == "a@b http://h/x c@d"


def test_a_job_goes_on_whose_address_has_a_secret(tmp_path, job):
    """The same command continues, and what an earlier version wrote is taken out."""
    data = tmp_path / "data"
    shutil.copytree(job, data)
    text = (data / "config.yaml").read_text()
    plain = load_settings(PreprocessConfig, data / "config.yaml")
    secret = f"http://user:{SECRET}@localhost:9000"
    (data / "config.yaml").write_text(text.replace("http://localhost:9000", secret, 1))
    config = plain.model_copy(update={"parser": plain.parser.model_copy(update={"endpoint": secret})})
    assert preprocess(config, data) == read_index(job / "encoded")
    assert (data / "config.yaml").read_text() == text
    assert not [path for path in data.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_data_set_does_not_choose_who_reads_the_text(job, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(job, data)
    index = read_index(data / "encoded")
    settings = index["parser_settings"] | {"name": "corenlp", "endpoint": "http://elsewhere.example:9000"}
    parser = {"library": "CoreNLP server"}
    (data / "encoded" / "index.json").write_bytes(json_bytes(index | {"parser_settings": settings, "parser": parser}))
    monkeypatch.setattr("treeproc.line_encoder.describe_parser", lambda config: parser)
    with pytest.raises(UserError, match="parsed by a CoreNLP server at http://elsewhere.example:9000, which would read"):
        LineEncoder(data)
    monkeypatch.setenv("CORENLP_ENDPOINT", "file:///etc")
    with pytest.raises(UserError, match=r"\$CORENLP_ENDPOINT must be http"):
        LineEncoder(data)


def test_settings_that_are_borrowed_name_no_server(job, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(job, data)
    text = (data / "config.yaml").read_text()
    text = text.replace("name: words", "name: corenlp").replace("http://localhost:9000", "http://elsewhere.example:9000")
    (data / "config.yaml").write_text(text)
    files = {"source": [data / "x"], "target": [data / "y"]}
    config = PreprocessConfig.model_validate({"vocab_from": str(data), "splits": {"test": files}})
    assert config.parser.name == "corenlp" and config.parser.endpoint == "http://localhost:9000"


def test_models_of_parsers_with_pickles_are_refused(tmp_path):
    """Stanza loads weights alone."""
    from treeproc.parsers import build_parser
    from treeproc.parsers.models import SHIPPED_MODELS

    models = tmp_path / "models"
    shutil.copytree(SHIPPED_MODELS / "en", models)
    for name in ("constituency.pt", "vectors.pt"):
        whole = (models / name).read_bytes()
        torch.save({"model": Payload(tmp_path / "marker")}, models / name)
        with pytest.raises((UserError, pickle.UnpicklingError)):
            build_parser(ParserConfig(name="shipped", models=models))
        (models / name).write_bytes(whole)
    assert not (tmp_path / "marker").exists()


def test_nothing_in_the_source_unpickles():
    """torch.load takes weights alone, NumPy no pickles, YAML no tags of Python."""
    root = Path(__file__).resolve().parent.parent
    for path in [*root.glob("treeproc/**/*.py"), *root.glob("treenet/**/*.py"), *root.glob("workflows/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|cloudpickle|dill|joblib|marshal|shelve)\b", text, re.M), path
        assert not re.search(r"allow_pickle|yaml\.(full_load|unsafe_load|Loader|UnsafeLoader|FullLoader)|\bexec\(", text), path
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, (path, call)
        if path.name != "arrow_file.py":  # every Arrow file is read there
            assert "ipc.open" not in text and "read_message" not in text and "parquet" not in text, path
