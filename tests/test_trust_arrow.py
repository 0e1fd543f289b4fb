"""Arrow files of others never execute code, and take no more memory than they have bytes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray.data  # noqa: F401 (registers extension types that unpickle)
from hostile_files import HOSTILE_FORMS, first_record, hostile, ipc, make_job, one_line, put, read_table, with_column
from toydata import write_toy_data

from treenet.data.examples import ExampleSource
from treeproc.common.settings import UserError
from treeproc.inspect import describe
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.lengths import read_lengths
from treeproc.shards.rows import column_views, ipc_bytes, record_batches
from treeproc.shards.schema import ENCODED_SCHEMA, FULL_ENCODED_SCHEMA, LENGTHS_SCHEMA, STAGE_SCHEMAS, TEXT_SCHEMA, select
from treeproc.shards.shard import Shard
from treeproc.verify import verify

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path) -> Path:
    return write_toy_data(tmp_path / "data")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def test_the_payload_of_these_tests_is_real(data, tmp_path):
    shard = next((data / "text").glob("train-*.arrow"))
    (tmp_path / "x.arrow").write_bytes(hostile(read_table(shard), "source", "pickled", tmp_path / "marker"))
    read_table(tmp_path / "x.arrow")["source"].chunk(0)[:1].to_numpy()
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", HOSTILE_FORMS)
def test_no_reader_of_a_shard_runs_its_pickles(form, data, tmp_path):
    marker, folder = tmp_path / "marker", data / "encoded"
    name = first_record(folder).name
    put(folder, name, hostile(read_table(folder / name), "leaves", form, marker))
    message = f"{folder / name} column leaves must be list<item: struct<piece: int32 not null, "
    for read in (lambda: Shard(folder, first_record(folder)), lambda: ExampleSource(folder, "train"), lambda: describe(data)):
        with pytest.raises(UserError) as error:
            read()
        one_line(
            error.value, message, "the extension type ray.data.arrow_pickled_object" if form != "in a list of structs" else ""
        )
    assert [p.path for p in verify(data).problems if "extension type" in p.what] == [folder / name]
    table = read_table(data / "text" / name)
    put(data / "text", name, hostile(table, "source", form, marker))
    with pytest.raises(UserError, match="column source must be string, but is the extension type"):
        Shard(data / "text", first_record(data / "text"))
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
    for fields, message in {
        (*text, pa.field("more", pa.int32())): "has a column more that no data set has",
        (text[0], pa.field("source", pa.large_string(), nullable=False)): "column source must be string, but is large_string",
        (text[0], pa.field("source", pa.dictionary(pa.int8(), pa.string()), nullable=False)): "must be string, but is dict",
        (text[0], text[1], text[1]): "in this order",
        (text[1], text[0]): "in this order",
        (text[0], pa.field("source", pa.string())): "none nullable",
    }.items():
        with pytest.raises(BadArrowFile, match=message):
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
    with pytest.raises(UserError, match="has another number of rows than index.json"):
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
    intact = pa.ipc.open_file(pa.BufferReader(bytes(content[:footer]) + bytes(end)))
    assert intact.num_record_batches == 50 and intact.read_all()["source"].to_pylist() == [row["source"]] * 50
    with pytest.raises(BadArrowFile, match="more than it has"):
        read_arrow(pa.BufferReader(bytes(content[: footer // 25]) + bytes(end)), [TEXT_SCHEMA])


def test_columns_of_a_batch_have_its_rows():
    """Here, one batch has a row more of a column, and the next has a row less. All rows together are right."""
    numbers = {name: np.arange(10) for name in LENGTHS_SCHEMA.names if name != "split"}
    split = pa.DictionaryArray.from_arrays(pa.array([0] * 10, pa.int8()), ["train"])
    table = pa.table({**numbers, "split": split}).select(LENGTHS_SCHEMA.names).cast(LENGTHS_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LENGTHS_SCHEMA) as writer:
        writer.write_table(table, max_chunksize=5)
    content = bytearray(sink.getvalue().to_pybytes())
    nodes = np.array([5, 0] * len(LENGTHS_SCHEMA), np.int64).tobytes()  # rows and empty values of each column
    first = content.index(nodes)
    second = content.index(nodes, first + len(nodes))
    last = 16 * (len(LENGTHS_SCHEMA) - 1)
    assert len(read_arrow(pa.BufferReader(bytes(content)), [LENGTHS_SCHEMA])[1]) == 2
    content[first + last], content[second + last] = 6, 4
    with pytest.raises(BadArrowFile, match="is damaged"):
        read_arrow(pa.BufferReader(bytes(content)), [LENGTHS_SCHEMA])


@pytest.mark.parametrize("codes", [[0, 1, 1, 0], [0, 2], [-1], [0, -128], [127], []])
def test_codes_are_those_of_the_dictionary(codes):
    """The check agrees with Arrow's full validation, which takes ten times as long."""
    split = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), ["train", "valid"], safe=False)
    numbers = {name: np.arange(len(codes)) for name in LENGTHS_SCHEMA.names if name != "split"}
    arrays = [split if field.name == "split" else pa.array(numbers[field.name], field.type) for field in LENGTHS_SCHEMA]
    batch = pa.record_batch(arrays, schema=LENGTHS_SCHEMA)
    content = pa.BufferReader(ipc(batch))
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        with pytest.raises(BadArrowFile, match="a code is outside of its dictionary of 2 values"):
            read_arrow(content, [LENGTHS_SCHEMA])
        assert set(codes) - {0, 1}
    else:
        assert read_arrow(content, [LENGTHS_SCHEMA])[1][0].column("split").indices.to_pylist() == codes


def test_damaged_arrow_files_are_one_line_whatever_the_damage():
    random = np.random.default_rng(0)
    rows = [{"example_id": i, "source": f"line {i}", "target": "x"} for i in range(20)]
    intact = ipc_bytes(rows, TEXT_SCHEMA)
    refused = 0
    for _ in range(600):
        content = bytearray(intact)
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


def test_lengths_that_name_other_rows_are_refused(data):
    path = data / "encoded" / "lengths.arrow"
    table = read_table(path)
    for column in ("shard", "row"):
        values = pa.array([2**31 - 1] * len(table), pa.int32())
        path.write_bytes(ipc(with_column(table, column, LENGTHS_SCHEMA.field(column), values)))
        with pytest.raises(UserError, match="names rows that are not in train-00000-of-00002.arrow"):
            ExampleSource(data / "encoded", "train")
