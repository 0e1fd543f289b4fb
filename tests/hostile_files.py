"""Data sets, and what an attacker makes of them: shards whose values are pickles, with right hashes."""

import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import ray.data  # registers extension types that unpickle

from treeproc.common.files import file_sha256, json_bytes
from treeproc.shards.store import ShardRecord
from treeproc.stages.preprocess import PreprocessConfig, preprocess

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


def make_job(folder: Path) -> Path:
    """A data set of real stages, of words under control trees."""
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


HOSTILE_FORMS = ["pickled", "disguised as string", "in a dictionary", "in a list", "in a list of structs"]
