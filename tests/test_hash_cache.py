"""Files that had their hash are not read again until something about them changes."""

import json
import os
import shutil
import time

import pytest

from treeproc.common import cache
from treeproc.common.cache import find_changed
from treeproc.common.files import cache_folder, file_sha256
from treeproc.common.store_requests import in_parallel
from treeproc.stages import run_jobs
from treeproc.stages.run_jobs import HashNames, hasher


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """Names of the files that were read."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    names: list[str] = []
    monkeypatch.setattr(cache, "file_sha256", lambda path: names.append(path.name) or file_sha256(path))
    return names


def write(folder, name: str, content: bytes, age_s: float = 10) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time(), time.time() - age_s))


@pytest.fixture
def hashes(tmp_path):
    names = ["a.arrow", "b.arrow", "vocab/c.txt"]
    for name in names:
        write(tmp_path / "data", name, name.encode())
    return {name: file_sha256(tmp_path / "data" / name) for name in names}


def test_unchanged_files_are_not_hashed_again(tmp_path, reads, hashes):
    folder = tmp_path / "data"
    assert find_changed(folder, hashes) == [] and sorted(reads) == ["a.arrow", "b.arrow", "c.txt"]
    reads.clear()
    assert find_changed(folder, hashes) == [] and find_changed(folder / ".." / "data", hashes) == [] and not reads
    assert find_changed(folder, hashes | {"a.arrow": "0" * 64}) == ["a.arrow"] and reads == ["a.arrow"]
    assert not list(folder.glob("*.json"))  # the notes are not among the files


@pytest.mark.parametrize("how", ["content", "size", "time", "replaced", "moved folder", "copied with its times"])
def test_changed_files_are_hashed_again(tmp_path, reads, hashes, how):
    folder = tmp_path / "data"
    assert find_changed(folder, hashes) == []
    reads.clear()
    path, status = folder / "a.arrow", (folder / "a.arrow").stat()
    wrong = ["a.arrow"]
    if how == "content":
        write(folder, "a.arrow", b"A.arrow")
    elif how == "size":
        path.write_bytes(b"a.arrow more")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "time":
        os.utime(path, (time.time(), time.time() - 100))
        wrong = []
    elif how in ("replaced", "copied with its times"):
        write(folder, "new", b"A.arrow")
        os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        (folder / "new").replace(path)
    else:
        folder = folder.rename(tmp_path / "moved")
        wrong = []
    assert find_changed(folder, hashes) == wrong and "a.arrow" in reads


def test_missing_and_wrong_files_are_named_in_order_and_never_noted(tmp_path, reads, hashes):
    folder = tmp_path / "data"
    (folder / "vocab" / "c.txt").unlink()
    write(folder, "a.arrow", b"other")
    for _ in range(2):
        assert find_changed(folder, hashes) == ["a.arrow", "vocab/c.txt"]
    assert sorted(reads) == ["a.arrow", "a.arrow", "b.arrow"]


def test_a_file_that_has_just_changed_is_not_noted(tmp_path, reads, hashes):
    folder = tmp_path / "data"
    write(folder, "a.arrow", b"a.arrow", age_s=0)
    for _ in range(2):
        assert find_changed(folder, hashes) == []
    assert reads.count("a.arrow") == 2 and reads.count("b.arrow") == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"folder": "x", "files": {}}', b'{"folder": 1, "files": [1]}', b"[" * 100_000]
)
def test_notes_that_cannot_be_read_are_none(tmp_path, reads, hashes, content):
    find_changed(tmp_path / "data", hashes)
    (notes,) = (cache_folder() / "hashes").iterdir()
    assert notes.stat().st_mode & 0o077 == 0 or notes.parent.stat().st_mode & 0o077 == 0
    notes.write_bytes(content)
    reads.clear()
    assert find_changed(tmp_path / "data", hashes) == [] and len(reads) == 3
    find_changed(tmp_path / "data", hashes)
    assert len(reads) == 3


def test_notes_that_cannot_be_written_are_a_warning(tmp_path, reads, hashes, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hashes").symlink_to(tmp_path)
    assert find_changed(tmp_path / "data", hashes) == []
    assert "cannot record which hashes were checked, so the next command checks them again" in caplog.text


def test_results_come_in_order_and_no_more_than_so_many_are_begun():
    begun, taken = [], []
    for result in in_parallel(lambda number: begun.append(number) or -number, range(40), at_once=4):
        taken.append(result)
        assert len(begun) <= len(taken) + 4
    assert taken == [-number for number in range(40)]

    def fail(number):
        if number >= 5:
            raise ValueError(number)
        return number

    found = in_parallel(fail, iter(range(1000)), at_once=3)
    assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="^5$"):
        next(found)


def test_jobs_hash_many_bytes_to_the_same(tmp_path, reads, hashes, monkeypatch):
    """Each job hashes some bytes, and results come in any order. Wrong and missing files are named as without jobs."""
    folder, jobs_run = tmp_path / "data", []
    for number in range(6):
        write(folder, f"{number}.arrow", bytes([number]) * 40)
        hashes[f"{number}.arrow"] = file_sha256(folder / f"{number}.arrow")
    hashes["2.arrow"] = "0" * 64
    hashes["none.arrow"] = "1" * 64

    def run(worker, arguments, jobs):
        assert worker is HashNames
        jobs_run.extend(json.loads(json.dumps(job))["names"] for job in jobs)
        return ((number, worker(**arguments)(**jobs[number])) for number in reversed(range(len(jobs))))

    expected = find_changed(folder, hashes)
    assert expected == ["2.arrow", "none.arrow"]
    shutil.rmtree(cache_folder())
    assert find_changed(folder, hashes, hasher(run)) == expected and not jobs_run, "few bytes are hashed here"
    shutil.rmtree(cache_folder())
    monkeypatch.setattr(run_jobs, "LEAST_BYTES", 1)
    monkeypatch.setattr(run_jobs, "JOB_BYTES", 80)
    assert find_changed(folder, hashes, hasher(run)) == expected
    assert jobs_run == [
        ["a.arrow", "b.arrow", "vocab/c.txt", "0.arrow", "1.arrow"],
        ["2.arrow", "3.arrow"],
        ["4.arrow", "5.arrow"],
    ]
    jobs_run.clear()
    assert find_changed(folder, hashes, hasher(run)) == expected and jobs_run == [["2.arrow"]], "the others are known"
