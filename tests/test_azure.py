"""Azure's blobs, over Azurite, the server of Microsoft for tests. `make azurite` installs it."""

import os
import subprocess
from pathlib import Path

import pytest
from commands import run_here
from test_failing_store import STEPS, results, snapshot, write_small_job
from training_jobs import tiny_config
from waiting import wait_for_line

from treenet.jobs.train_run import run_training
from treeproc.common import storage
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import RemotePath, _file_system, as_path

AZURITE = Path(os.environ.get("AZURITE") or Path(__file__).resolve().parent.parent / ".azurite/node_modules/.bin/azurite-blob")
# The account and the key of every Azurite. They are in its documentation, and open nothing else.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
LARGE = os.urandom(12 << 20)

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(not AZURITE.exists(), reason="needs Azurite: make azurite")]


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("azurite")
    options = [
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        "0",
        "--skipApiVersionCheck",
        "--inMemoryPersistence",
        "--disableTelemetry",
    ]
    with open(folder / "log", "w") as log, pytest.MonkeyPatch.context() as patch:
        server = subprocess.Popen([str(AZURITE), *options], stdout=log, stderr=log, cwd=folder)
        try:
            patch.setenv("AZURE_STORAGE_ENDPOINT", wait_for_line(server, folder / "log", r"(http://127\.0\.0\.1:[1-9]\d*)"))
            patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
            patch.setenv("TREE_ATTENTION_CACHE", str(folder / "cache"))
            storage._file_system.cache_clear()
            _file_system("az").create_dir("container")
            yield as_path("az://container")
        finally:
            storage._file_system.cache_clear()
            server.terminate()
            server.wait()


def test_objects_behave_like_files(container):
    folder = container / "objects"
    assert not folder.exists() and list(folder.glob("*")) == [] and folder.objects() == {}
    for missing in ((folder / "a.txt").read_bytes, (folder / "a.txt").unlink, (folder / "a.txt").size):
        with pytest.raises(FileNotFoundError):
            missing()
    (folder / "a.txt").unlink(missing_ok=True)
    for name, value in {"b.bin": LARGE, "a.txt": b"eins\nzwei\n", "empty": b"", "below/c": b"c"}.items():
        (folder / name).write_bytes(value)
        assert (folder / name).read_bytes() == value
    with (folder / "streamed").open_output() as file:
        file.write(LARGE)
    assert (folder / "streamed").read_bytes() == LARGE
    with (folder / "b.bin").open_seekable() as file:
        assert file.seek(7) == 7 and file.read(9) == LARGE[7:16]
    assert folder.objects() == {"a.txt": 10, "b.bin": len(LARGE), "below/c": 1, "empty": 0, "streamed": len(LARGE)}
    assert [path.name for path in folder.glob("*")] == ["a.txt", "b.bin", "empty", "streamed"]
    assert folder.folders() == [folder / "below"] and folder.is_dir() and (folder / "a.txt").is_file()
    (folder / "below").remove_objects()
    (folder / "a.txt").unlink()
    assert folder.objects().keys() == {"b.bin", "empty", "streamed"}


def test_an_object_is_the_old_one_until_the_new_one_is_complete(container, monkeypatch):
    path, seen = container / "replaced", []
    path.write_bytes(b"old")
    copy = RemotePath._publish
    monkeypatch.setattr(RemotePath, "_publish", lambda self, written: (seen.append(path.read_bytes()), copy(self, written)))
    path.write_bytes(b"new one")
    with path.open_output() as file:
        file.write(b"newest")
        file.flush()
        seen.append(path.read_bytes())
    assert seen == [b"old", b"new one", b"new one"] and path.read_bytes() == b"newest"
    with pytest.raises(ZeroDivisionError), path.open_output() as file:
        file.write(b"half of")
        raise ZeroDivisionError
    assert path.read_bytes() == b"newest"
    assert [one for one in container.objects() if ".tmp-" in one] == []


def test_errors_are_one_line_without_keys(container, monkeypatch):
    with pytest.raises(UserError, match=r"az://none/x: the object store refuses: .*404.*check the bucket.*AZURE_STORAGE"):
        as_path("az://none/x").write_bytes(b"x")
    for name, value, message in (
        ("AZURE_STORAGE_ACCOUNT_KEY", "AAAA" + KEY[4:], "az://container/x: the object store refuses: .*403"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "no key", "az://container/x: the object store refuses"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "", "set AZURE_STORAGE_ACCOUNT_NAME to the storage account"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            storage._file_system.cache_clear()
            with pytest.raises(UserError, match=message) as error:
                as_path("az://container/x").exists()
            assert KEY[4:] not in str(error.value) and "\n" not in str(error.value)
    storage._file_system.cache_clear()


@pytest.mark.timeout(900)
def test_preprocess_train_and_resume(container, tmp_path, monkeypatch):
    """As on a disk, to the last bit; the training continues on a machine without copies."""
    config = write_small_job(container / "inputs", tmp_path / "config.yaml")
    for out in (container / "data", tmp_path / "data"):
        done = run_here("preprocess.py", "--config", config, "--out", out, "workers=0")
        assert done.returncode == 0, done.stderr
    assert snapshot(container / "data") == snapshot(tmp_path / "data")
    run_training(tiny_config(tmp_path / "data"), tmp_path / "run")
    config.write_text(dump_settings(tiny_config(container / "data")))
    for steps in (STEPS // 2, STEPS):
        monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / f"disk-{steps}"))
        done = run_here("train_wmt.py", "--config", config, "--out", container / "run", f"max_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert results(container / "run") == results(tmp_path / "run")
