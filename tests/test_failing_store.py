"""A store that throttles, fails, loses answers or is slow, before a real S3 server. All requests end right or at once."""

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_here
from failing_store import Fault, failing_store, some
from moto_store import s3_server
from toyruns import losses
from training_jobs import tiny_config

from treenet.jobs.train_run import run_training
from treeproc.common import storage, store_requests
from treeproc.common.provenance import PROVENANCE
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.common.store_requests import run_all
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess

pytestmark = pytest.mark.slow

LARGE = os.urandom(12 << 20)  # two parts of an upload


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")), failing_store(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def works_again(proxy, monkeypatch):
    """Every test begins with a store that works, and ends so; nothing was repeated before it. Waits are short."""
    monkeypatch.setattr(store_requests, "_FIRST_WAIT_S", 0.005)
    monkeypatch.setattr(store_requests, "_repeats", 0)
    monkeypatch.setattr(store_requests, "_answered", True)
    proxy.works()
    yield
    proxy.works()


@pytest.fixture
def folder(proxy, request) -> RemotePath:
    """A place with a small object and one in a folder."""
    folder = as_path("s3://bucket") / request.node.name[-20:].replace("[", "-").strip("]")
    for name, content in {"small": b"tiny", "below/one": b"1"}.items():
        (folder / name).write_bytes(content)
    proxy.works()
    return folder


@pytest.fixture
def large(proxy, folder) -> RemotePath:
    (folder / "large").write_bytes(LARGE)
    proxy.works()
    return folder / "large"


def at_first(fault: Fault) -> Callable[[str, str], Fault]:
    """Return a `fault` for one of three equal requests, the first one included. Arrow asks twice more at the end of an upload."""
    asked: dict[tuple[str, str], int] = {}

    def decide(method: str, path: str) -> Fault:
        asked[method, path] = asked.get((method, path), 0) + 1
        repeated_by_arrow = fault != 429 or "uploadId" not in path  # it repeats parts of uploads, but not after this status
        return fault if asked[method, path] % 3 == 1 and repeated_by_arrow else None

    return decide


@pytest.mark.parametrize("fault", [503, 500, 429, "reset", "lost", "cut"])
def test_every_request_ends_right(proxy, folder, large, fault):
    proxy.fault = at_first(fault)
    assert (folder / "small").read_bytes() == b"tiny"  # smaller than the text of the store's error
    assert large.read_bytes() == LARGE
    with large.open_seekable() as file:
        assert file.seek(-5, os.SEEK_END) == len(LARGE) - 5 and file.read(5) == LARGE[-5:]
        assert file.seek(7) == 7 and file.read(9) == LARGE[7:16]
    assert folder.objects() == {"small": 4, "large": len(LARGE), "below/one": 1}
    assert [path.name for path in folder.glob("*")] == ["large", "small"] and folder.folders() == [folder / "below"]
    assert (folder / "small").size() == 4 and (folder / "small").is_file() and not (folder / "none").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "none").read_bytes()
    for size in (0, 4, len(LARGE)):
        (folder / "written").write_bytes(LARGE[:size])
        assert (folder / "written").read_bytes() == LARGE[:size]
    with (folder / "streamed").open_output() as file:
        for start in range(0, len(LARGE), 1 << 20):
            file.write(LARGE[start : start + (1 << 20)])
    assert (folder / "streamed").read_bytes() == LARGE
    (folder / "written").unlink()
    (folder / "written").unlink(missing_ok=True)
    (folder / "below").remove_objects()
    proxy.works()
    assert folder.objects().keys() == {"small", "large", "streamed"}
    with pytest.raises(FileNotFoundError):
        (folder / "none").unlink()


def test_reading_goes_on_where_it_was(proxy, large):
    with large.open() as file:
        begin = file.read(10 << 20)
        proxy.fault = at_first("cut")
        assert begin + file.read() == LARGE


def test_a_slow_answer_is_waited_for_and_none_is_asked_for_again(proxy, folder, monkeypatch):
    monkeypatch.setattr(storage, "_TIMEOUT_S", 1)
    storage._file_system.cache_clear()
    try:
        for seconds in (0.5, 3.0):
            proxy.works()
            proxy.fault = at_first(seconds)
            assert (folder / "small").read_bytes() == b"tiny" and (folder / "small").size() == 4
            assert (store_requests._repeats > 0) is (seconds > 1)
    finally:
        storage._file_system.cache_clear()


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_ends_at_once(proxy, folder, status):
    """So does that of an object whose name is that of an error."""
    proxy.fault = lambda method, path: status
    with pytest.raises(UserError, match=r"SLOW_DOWN: the object store refuses: .*; check the bucket, your rights and"):
        (folder / "SLOW_DOWN").write_bytes(b"1")
    assert proxy.counts.total() == 1 and not store_requests._repeats


def test_a_store_that_does_not_recover_is_told_apart_from_one_that_refuses(proxy, folder, monkeypatch):
    monkeypatch.setenv(store_requests.LIMIT, "0.5")
    monkeypatch.setattr(store_requests, "_LONGEST_WAIT_S", 0.05)
    storage._file_system.cache_clear()
    began = time.monotonic()
    proxy.fault = lambda method, path: 503
    for request in ((folder / "small").read_bytes, lambda: (folder / "large").write_bytes(LARGE), folder.objects):
        with pytest.raises(UserError, match=r"the object store throttles: asked \d+ times in \d s, .*; use fewer workers, or"):
            request()
    proxy.fault = lambda method, path: 500
    with pytest.raises(UserError, match=r"the object store fails: asked \d\d+ times .*set TREE_ATTENTION_STORE_RETRY_S to more"):
        (folder / "small").size()
    proxy.fault = lambda method, path: 403 if method == "GET" else None
    with pytest.raises(UserError, match=r"throttles, fails, or refuses to read this object: asked .*check the bucket, your"):
        (folder / "small").read_bytes()
    assert time.monotonic() - began > 2  # five times the limit, with room
    storage._file_system.cache_clear()


def test_an_upload_that_fails_leaves_the_object_that_was_there(proxy, folder, monkeypatch):
    """Arrow would put an empty object in its place when the beginning of an upload in parts fails."""
    monkeypatch.setenv(store_requests.LIMIT, "0")
    for failing in ("uploads", "partNumber=2", "uploadId"):
        proxy.fault = lambda method, path, failing=failing: 403 if failing in path and method in ("PUT", "POST") else None
        with pytest.raises(UserError, match="refuses"):
            (folder / "small").write_bytes(LARGE)
        proxy.works()
        assert (folder / "small").read_bytes() == b"tiny"


def test_repeats_are_told_once_and_counted(proxy, folder, capsys):
    proxy.fault = at_first(503)
    for _ in range(5):
        (folder / "small").size()
        (folder / "small").read_bytes()
    failed = sum(count for (_, fault), count in proxy.counts.items() if fault)
    store_requests.tell_repeats()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {folder}/small: the object store throttles (") and "for up to 300 s" in first
    assert last == f"requests to the object store that were repeated: {failed}" and failed > 5


def test_a_wrong_address_does_not_wait_for_minutes(proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(store_requests, "_UNREACHED_S", 0.1)
    monkeypatch.setattr(store_requests, "_answered", False)
    storage._file_system.cache_clear()
    try:
        with pytest.raises(UserError, match="s3://bucket/x: the object store cannot be reached: .*check the network and"):
            as_path("s3://bucket/x").exists()
    finally:
        storage._file_system.cache_clear()


BESIDE = """
from treeproc.common.storage import as_path
from treeproc.common.store_requests import run_all
run_all(lambda number: as_path(f"s3://bucket/{number}").exists(), range(40))
"""
TRAINING = """
import time
from treenet.runs.mirror import STOP_FILE, open_run
from treeproc.common.storage import as_path
with open_run(as_path("s3://bucket/stopped")) as mirror:
    for number in range(40):
        (mirror.folder / f"{number}.txt").touch()
    with mirror.watch(mirror.folder / STOP_FILE):
        time.sleep(1000)
"""


@pytest.mark.parametrize("script, busy", [(BESIDE, "HEAD"), (TRAINING, "PUT")])
def test_ctrl_c_does_not_wait_for_a_busy_store(proxy, tmp_path, monkeypatch, script, busy):
    """Threads that would repeat their requests for five minutes."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path))
    proxy.fault = lambda method, path: 503 if method == busy else None
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        while proxy.counts[busy, 503] < 40:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode and "KeyboardInterrupt" in told


def test_threads_that_end_do_not_hide_a_ctrl_c_from_others():
    with store_requests.may_give_up():
        store_requests.give_up_after(KeyboardInterrupt())
        run_all(len, ["a", "b"])
        assert store_requests.given_up.is_set()
    assert not store_requests.given_up.is_set()


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(folder, monkeypatch, value):
    monkeypatch.setenv(store_requests.LIMIT, value)
    with pytest.raises(UserError, match=f"TREE_ATTENTION_STORE_RETRY_S must be a number of seconds, 0 or more, but is '{value}'"):
        folder.exists()


def test_repeating_leaves_the_random_numbers_of_the_work_alone(proxy, folder):
    random.seed(7)
    expected = random.random()
    random.seed(7)
    proxy.fault = some(2, {503: 0.3})
    assert [(folder / "small").size() for _ in range(20)] == [4] * 20
    assert store_requests._repeats and random.random() == expected


# A start of a command ends right if its status is 0 and its bytes are those of a run without a store.
BUSY: dict[Fault, float] = {503: 0.15, 2.0: 0.05}
STARTS = range(6)
STEPS = 60


@pytest.fixture(scope="module")
def local_data(tmp_path_factory, small_job) -> dict[str, bytes]:
    preprocess(load_settings(PreprocessConfig, small_job, workers=0), out := tmp_path_factory.mktemp("local") / "data")
    return snapshot(out)


@pytest.fixture(scope="module")
def small_job(proxy, tmp_path_factory) -> Path:
    proxy.works()
    return write_small_job(as_path("s3://bucket/inputs"), tmp_path_factory.mktemp("job") / "config.yaml")


def write_small_job(inputs: RemotePath, config: Path) -> Path:
    """Write the configuration of a small job; its input files are objects."""
    splits = {}
    for split, begin, end in (("train", 0, 40), ("valid", 40, 50)):
        splits[split] = {}
        for side, language in (("source", "en"), ("target", "de")):
            lines = gzip.decompress((SAMPLE / f"train.{language}.gz").read_bytes()).split(b"\n")[begin:end]
            (inputs / f"{split}.{language}.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
            splits[split][side] = [str(inputs / f"{split}.{language}.gz")]
    settings = {"splits": splits, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 400}, "rows_per_shard": 10}
    config.write_text(json.dumps(settings))
    return config


@pytest.fixture(scope="module")
def remote_data(local_data) -> RemotePath:
    """The data set in the store, for training."""
    remote = as_path("s3://bucket/data")
    for name, content in local_data.items():
        (remote / name).write_bytes(content)
    return remote


@pytest.fixture(scope="module")
def local_run(remote_data, tmp_path_factory) -> dict[str, object]:
    """The weights and losses of an undisturbed run."""
    run_training(tiny_config(remote_data), out := tmp_path_factory.mktemp("undisturbed") / "run")
    return results(out)


def snapshot(folder: AnyPath) -> dict[str, bytes]:
    """Bytes of the files of a data set, without those that tell of the machine and of the times of the inputs."""
    names = (
        folder.objects()
        if isinstance(folder, RemotePath)
        else [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    )
    return {name: (folder / name).read_bytes() for name in names if Path(name).name not in (".lock", PROVENANCE, "inputs.json")}


def results(run: AnyPath) -> dict[str, object]:
    found = {
        name: (run / name).read_bytes()
        for name in ("averaged/model.safetensors", f"checkpoints/step_{STEPS:08d}/model.safetensors")
    }
    return found | {"losses": losses(run)}


@pytest.fixture
def start(proxy, tmp_path, monkeypatch, repository):
    """Run a command against the busy store, on a machine without copies. Returns what it printed to standard error."""

    numbers = itertools.count()

    def start(seed: int, script: str, *arguments: object, apart: bool = False) -> str:
        monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / f"machine-{next(numbers)}"))
        proxy.works()
        proxy.fault = some(seed, BUSY)
        if apart:
            command = [sys.executable, str(repository / "workflows" / script), *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        else:
            done = run_here(script, *arguments)
        failed = sum(count for (_, fault), count in proxy.counts.items() if fault)
        proxy.works()
        assert done.returncode == 0, done.stderr
        assert failed, "the store was not busy"
        return done.stderr

    return start


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", STARTS)
def test_preprocessing_on_a_busy_store(start, small_job, local_data, seed):
    out = as_path(f"s3://bucket/data-{seed}")
    told = start(seed, "preprocess.py", "--config", small_job, "--out", out, "workers=0")
    assert snapshot(out) == local_data
    assert told.count("the object store throttles") == 1 and "requests to the object store that were repeated: " in told


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", STARTS)
def test_training_and_resuming_on_a_busy_store(start, remote_data, local_run, tmp_path, seed):
    """The second command continues on a machine without copies."""
    out, config = as_path(f"s3://bucket/run-{seed}"), tmp_path / "config.yaml"
    config.write_text(dump_settings(tiny_config(remote_data)))
    for steps in (STEPS // 2, STEPS):
        start(seed, "train_wmt.py", "--config", config, "--out", out, f"max_steps={steps}")
    assert results(out) == local_run


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_ray_on_a_busy_store(start, small_job, local_data, remote_data, local_run, tmp_path):
    out, run, config = as_path("s3://bucket/data-ray"), as_path("s3://bucket/run-ray"), tmp_path / "config.yaml"
    start(1, "preprocess.py", "--config", small_job, "--out", out, apart=True)
    assert snapshot(out) == local_data
    config.write_text(dump_settings(tiny_config(remote_data, "workers=1")))
    start(1, "train_wmt.py", "--config", config, "--out", run, apart=True)
    assert results(run) == local_run
