"""Data sets in an object store: the same job, the same bytes, the same guarantees, over a real S3 server."""

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
from commands import Started, run_here
from moto_store import SECRET, s3_server
from test_preprocess import snapshot as local_snapshot

from treenet.cli.frozen_states import FrozenStatesConfig
from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.runs.mirror import mirror_of
from treeproc.common.cache import cache_folder, local_copy
from treeproc.common.files import atomic_write, file_sha256, locked
from treeproc.common.provenance import PROVENANCE, read_sessions
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.common.storage import AnyPath, RemotePath, _file_system, as_path
from treeproc.shards.lengths import read_lengths
from treeproc.shards.shard import SplitShards, check_hashes
from treeproc.shards.store import finished_shards, read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.verify import verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as uri:
        yield uri


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))


def test_uris_become_remote_paths_and_nothing_else_does():
    path = as_path("s3://bucket/a//b/")
    assert path == RemotePath("s3", "bucket/a/b") and str(path / "text") == "s3://bucket/a/b/text"
    assert (path / "x.arrow").with_suffix(".json").name == "x.json" and path.parent == as_path("s3://bucket/a")
    assert isinstance(as_path("data/x"), Path) and pickle.loads(pickle.dumps(path)) == path
    for bad in ("http://host/x", "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?endpoint_override=y"):
        with pytest.raises(UserError, match="a local path, s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME") as error:
            as_path(bad)
        assert "secret" not in str(error.value)
    for bad in ("s3:bucket/x", "s3:/bucket/x", "s3//bucket/x", "GS//bucket/x"):
        with pytest.raises(UserError, match=r"^\w\w[:/]+\.\.\.: a URI must have a colon and two slashes, as s3://BUCKET/NAME$"):
            as_path(bad)
    assert as_path("s3/x") == Path("s3/x")
    with pytest.raises(TypeError):
        open(path)


def test_settings_keep_uris(tmp_path):
    config = load_settings(TrainConfig, None, ["data=s3://bucket/data", "frozen_states=s3://bucket/states"])
    assert config.data == as_path("s3://bucket/data") and config.frozen_states == as_path("s3://bucket/states")
    of_states = load_settings(FrozenStatesConfig, None, ["data=s3://bucket/data", "encoder=e"])
    assert of_states.data == as_path("s3://bucket/data")
    (tmp_path / "c.yaml").write_text(dump_settings(config))
    assert load_settings(TrainConfig, tmp_path / "c.yaml") == config
    with pytest.raises(UserError, match="data: http://...: must be a local path"):
        load_settings(TrainConfig, None, ["data=http://host/data"])
    with pytest.raises(UserError, match="data: must be a path or a URI, but is -; write /dev/stdin or /dev/stdout$"):
        load_settings(TrainConfig, None, ["data=-"])
    with pytest.raises(UserError, match="^the command line: data: must be a path or a URI, but is empty$"):
        load_settings(TrainConfig, None, ["data="])


def test_objects_behave_like_files(bucket):
    folder = as_path(bucket) / "objects"
    assert not folder.exists() and list(folder.glob("*")) == []
    with pytest.raises(FileNotFoundError):
        (folder / "a.txt").read_bytes()
    with pytest.raises(FileNotFoundError):
        (folder / "a.txt").unlink()
    (folder / "a.txt").unlink(missing_ok=True)
    content = os.urandom(12 << 20)  # large enough for an upload in parts
    for name, value in {"b.bin": content, "a.txt": b"eins\nzwei\n", ".tmp-x": b""}.items():
        atomic_write(folder / name, value)
    assert [path.name for path in folder.glob("*")] == [".tmp-x", "a.txt", "b.bin"]
    assert [path.name for path in folder.glob(".tmp-*")] == [".tmp-x"]
    assert folder.is_dir() and (folder / "a.txt").is_file() and (folder / "b.bin").size() == len(content)
    assert (folder / "b.bin").read_bytes() == content and list((folder / "a.txt").open()) == [b"eins\n", b"zwei\n"]
    assert file_sha256(folder / "b.bin") == file_sha256(local_copy(folder / "b.bin", file_sha256(folder / "b.bin")))


def test_errors_of_the_store_give_one_line_without_keys(bucket):
    with pytest.raises(UserError, match="s3://nobucket/x: the object store refuses: .*check the bucket") as error:
        atomic_write(as_path("s3://nobucket/x"), b"x")
    assert "\n" not in str(error.value) and SECRET not in str(error.value)


def test_the_cache_loads_once_and_checks(bucket, fresh_cache):
    path = as_path(bucket) / "cached.bin"
    atomic_write(path, b"0123456789" * 100_000)
    digest = file_sha256(path)
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: local_copy(path, digest), range(8)))
    assert len(set(copies)) == 1 and file_sha256(copies[0]) == digest
    copies[0].write_bytes(b"damaged")
    assert file_sha256(local_copy(path, digest, anew=True)) == digest
    copies[0].unlink()
    atomic_write(path, b"1" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"s3://bucket/cached.bin is damaged: its hash"):
        local_copy(path, digest)
    assert [file.name for file in cache_folder().rglob("*") if file.is_file()] == [".lock"]


def test_one_machine_has_one_writer(bucket):
    folder = as_path(bucket) / "lock"
    with locked(folder), pytest.raises(UserError, match="another process is writing to s3://bucket/lock"), locked(folder):
        pass


def test_a_bucket_writes_nothing_outside_of_the_mirror(bucket, fresh_cache, tmp_path):
    """Names of objects that leave their run, hide, or lie behind a link in the mirror."""
    run = as_path(bucket) / "hostile"
    atomic_write(run / "config.yaml", b"x")
    atomic_write(run / ".pull-lock", b"x")
    atomic_write(run / "meta.json", b"{}")
    mirror = mirror_of(run)
    mirror.pull()
    assert sorted(path.name for path in mirror.folder.iterdir()) == [".pull-lock", "config.yaml", "meta.json"]
    assert not (mirror.folder / ".pull-lock").read_bytes()
    (mirror.folder / "notes").symlink_to(tmp_path)
    atomic_write(run / "notes" / "x.txt", b"x")
    with pytest.raises(UserError, match="behind a link that leads out of"):
        mirror.pull()
    (run / "notes" / "x.txt").unlink()
    # Arrow's own client would take the .. for a step.
    url = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/hostile/{'..%2F' * 3}escaped.txt"
    urllib.request.urlopen(urllib.request.Request(url, data=b"x", method="PUT"), timeout=10).close()
    for read in (mirror.pull, mirror_of(run, only=["averaged"]).pull, run.objects):
        with pytest.raises(UserError, match=r"escaped.txt' does not name a file in that folder") as error:
            read()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("escaped.txt")) and not list(tmp_path.parent.glob("escaped.txt"))


def test_a_shard_is_cached_by_a_hash_and_by_nothing_else(bucket, fresh_cache, tmp_path):
    """An index that names a path in the place of a hash would write there."""
    folder = as_path(bucket) / "paths" / "encoded"
    record = {"name": "train-0.arrow", "split": "train", "index": 0, "rows": 1, "bytes": 1, "fingerprint": "x"}
    index = {"schema_version": 1, "totals": {}, "shards": [record | {"sha256": f"../../{tmp_path.name}"}]}
    atomic_write(folder / "index.json", json.dumps(index).encode())
    with pytest.raises(UserError, match="shards.0.sha256"):
        check_hashes(folder, "train")


def remote_snapshot(folder: RemotePath) -> dict[str, bytes]:
    selector = pyarrow.fs.FileSelector(folder.key, recursive=True)
    infos = _file_system(folder.scheme).get_file_info(selector)
    files = sorted(info.path for info in infos if info.is_file)
    return {key.removeprefix(folder.key + "/"): RemotePath(folder.scheme, key).read_bytes() for key in files}


@pytest.fixture(scope="module")
def command(bucket, tmp_path_factory, repository):
    """Command line of a small job whose input files are objects; `--out` follows."""
    folder, inputs = tmp_path_factory.mktemp("job"), as_path(bucket) / "inputs"
    for side in ("en", "de"):
        lines = gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).split(b"\n")[:40]
        atomic_write(inputs / f"train.{side}.gz", gzip.compress(b"\n".join(lines) + b"\n"))
    train = {"source": [str(inputs / "train.en.gz")], "target": [str(inputs / "train.de.gz")]}
    config = {"splits": {"train": train}, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 400}, "rows_per_shard": 10}
    (folder / "config.yaml").write_text(json.dumps(config))
    script = str(repository / "workflows" / "preprocess.py")
    return [sys.executable, script, "--config", str(folder / "config.yaml"), "--out"]


def job_here(command: list[str], out: AnyPath) -> None:
    """The same job in this process, without Ray."""
    preprocess(load_settings(PreprocessConfig, Path(command[-2]), workers=0), out)


@pytest.fixture(scope="module")
def data(bucket, command, tmp_path_factory):
    """The data set in the store, of a job that was killed without Ray and run again on it, and the same one on disk."""
    logs, local = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("local") / "data"
    remote = as_path(bucket) / "data"
    job, deadline = Started(logs / "killed", "preprocess.py", *command[2:], remote, "workers=0"), time.monotonic() + 200
    while not list((remote / "parsed").glob("train-*.json")):
        assert job.is_alive() and time.monotonic() < deadline, (logs / "killed").read_text()
        time.sleep(0.05)
    job.kill()
    job.join()
    assert not (remote / "encoded" / "index.json").exists()
    run = run_here("preprocess.py", *command[2:], remote, "workers=0")
    assert run.returncode == 0, run.stderr
    assert "parse: " in run.stderr and SECRET not in run.stdout + run.stderr
    job_here(command, local)
    return remote, local


def test_killed_and_rerun_gives_the_bytes_of_the_local_job(data):
    remote, local = data
    there = remote_snapshot(remote)
    assert there.keys() - local_snapshot(local).keys() == {PROVENANCE}
    assert {name: there[name] for name in there.keys() - {PROVENANCE}} == local_snapshot(local)
    assert [session.outcome for session in read_sessions(remote)] == ["unfinished", "finished"]
    assert not any(secret in content for content in there.values() for secret in (SECRET.encode(), b"127.0.0.1"))


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_ray_gives_the_bytes_of_the_local_job(bucket, command, data):
    remote = as_path(bucket) / "on Ray"
    run = subprocess.run([*command, str(remote)], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "parse: " in run.stderr and ".cc:" not in run.stderr and SECRET not in run.stdout + run.stderr
    there = remote_snapshot(remote)
    assert {name: there[name] for name in there.keys() - {PROVENANCE}} == local_snapshot(data[1])


def test_checking_objects_copies_the_first_shard_alone(data, fresh_cache):
    """The others are hashed when they are copied; objects that are missing or cut off are found in the listing."""
    folder = data[0] / "encoded"
    check_hashes(folder, "train")
    first, second, *_ = SplitShards(folder, "train")
    copies = [local_copy(folder / shard.record.name, shard.record.sha256) for shard in (first, second)]
    copies[1].write_bytes(b"damaged")
    check_hashes(folder, "train")
    assert copies[0].exists() and not copies[1].exists()
    victim = folder / second.record.name
    intact = victim.read_bytes()
    try:
        victim.write_bytes(intact[:-1])
        with pytest.raises(UserError, match=rf"{victim} must have {len(intact)} bytes, but has {len(intact) - 1}; run"):
            check_hashes(folder, "train")
        victim.unlink()
        with pytest.raises(UserError, match=rf"{victim} is missing; run tree-attention preprocess again"):
            check_hashes(folder, "train")
    finally:
        victim.write_bytes(intact)


def test_finished_objects_are_read_once(data, monkeypatch):
    """The listing of the store shows that objects are unchanged since they were read."""
    from treeproc.common import cache

    folder, reads = data[0] / "encoded", []
    records = read_index(folder).records()
    asked = folder, [record.name for record in records], [record.fingerprint for record in records]
    monkeypatch.setattr(cache, "SETTLED_NS", 0)
    monkeypatch.setattr(cache, "file_sha256", lambda path: reads.append(path) or file_sha256(path))
    assert list(finished_shards(*asked)) == records
    reads.clear()
    assert list(finished_shards(*asked)) == records and not reads
    time.sleep(1.1)  # the times of objects are in seconds
    victim = folder / records[0].name
    victim.write_bytes(victim.read_bytes())
    assert list(finished_shards(*asked)) == records and reads == [victim]


def test_training_reads_the_objects(data, fresh_cache):
    remote, local = (path / "encoded" for path in data)
    check_hashes(remote, "train")
    there, here = ExampleSource(remote, "train"), ExampleSource(local, "train")
    assert len(there) == len(here) > 30
    assert there.batch(range(8)).leaf_pieces.tolist() == here.batch(range(8)).leaf_pieces.tolist()
    assert read_lengths(remote, "train")["leaves"].tolist() == np.asarray(here.lengths["leaves"]).tolist()


def test_a_flipped_byte_is_found_and_a_rerun_heals_it(data, command, fresh_cache):
    remote, _ = data
    victim = next((remote / "encoded").glob("train-00002-*.arrow"))
    intact = victim.read_bytes()
    middle = len(intact) // 2
    victim.write_bytes(intact[:middle] + bytes([intact[middle] ^ 1]) + intact[middle + 1 :])
    with pytest.raises(UserError, match=r"train-00002-.*\.arrow is damaged: its hash"):
        (source := ExampleSource(remote / "encoded", "train")).batch(range(len(source)))
    problems = verify(remote).problems
    assert any(problem.path == victim and "hash" in problem.what for problem in problems)
    job_here(command, remote)
    assert victim.read_bytes() == intact and not verify(remote).problems
