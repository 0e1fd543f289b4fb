"""Copies of objects: a size limit that loses nothing that is read, prefetching, a full disk, several processes."""

import errno
import hashlib
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pytest
from commands import PROCESSES

from treeproc.common import cache, storage
from treeproc.common.cache import CopiesAhead, cache_limit, local_copy
from treeproc.common.settings import UserError
from treeproc.common.storage import RemotePath, as_path
from treeproc.common.store_requests import AT_ONCE, ask
from treeproc.shards.records import ShardRecord
from treeproc.shards.shard import check_size

SIZE = 100_000


class Store:
    """Objects that are files below a folder, and how many are read at once."""

    def __init__(self, folder: Path):
        self.folder, self.reads, self.now, self.most, self.delay = folder, [], 0, 0, 0.0
        self._lock = threading.Lock()

    def put(self, name: str, content: bytes) -> tuple[RemotePath, str]:
        path = self.folder / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return as_path(f"s3://bucket/{name}"), hashlib.sha256(content).hexdigest()

    def open(self, path: RemotePath, mode: str = "rb"):
        with self._lock:
            self.reads.append(path.name)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.delay)
        with self._lock:
            self.now -= 1
        return open(self.folder / path.key, mode)


@pytest.fixture
def store(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_evictor", cache.Evictor())
    monkeypatch.setattr(storage, "_file_system", lambda *_: fake_file_system(store.folder))
    monkeypatch.setattr(RemotePath, "open", lambda path, mode="rb": store.open(path, mode))
    return store


def fake_file_system(folder: Path) -> pyarrow.fs.FileSystem:
    return pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem())


def objects(store: Store, count: int) -> list[tuple[RemotePath, str]]:
    return [store.put(f"{number}.bin", bytes([number]) * SIZE) for number in range(count)]


def held_names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").glob("??/*") if len(path.name) == 64}


def used_long_ago(copy: Path, seconds: float) -> None:
    os.utime(copy, (time.time() - seconds, copy.stat().st_mtime))


def test_copies_that_nobody_asked_for_for_longest_go(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", str(3.5 * SIZE / 1e9))
    items = objects(store, 5)
    copies = [local_copy(*item) for item in items[:3]]
    for age, copy in zip((300, 200, 100), copies, strict=True):
        used_long_ago(copy, age)
    assert local_copy(*items[0]) == copies[0]  # asked for again: now the newest
    local_copy(*items[3])
    assert held_names(tmp_path) == {items[i][1] for i in (0, 2, 3)}
    local_copy(*items[4])
    assert held_names(tmp_path) == {items[i][1] for i in (0, 3, 4)}
    assert local_copy(*items[1]).read_bytes() == bytes([1]) * SIZE  # and is simply loaded again
    assert store.reads == ["0.bin", "1.bin", "2.bin", "3.bin", "4.bin", "1.bin"]


def test_copies_used_before_the_clock_was_set_back_go(store, tmp_path, monkeypatch, caplog):
    """Their last use lies a year ahead, which says nothing about how long ago it was."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", str(2.5 * SIZE / 1e9))
    items = objects(store, 4)
    with caplog.at_level(logging.WARNING):
        for item in items:
            used_long_ago(local_copy(*item), -365 * 24 * 3600)
    assert len(held_names(tmp_path)) == 2 and items[3][1] in held_names(tmp_path) and not caplog.records


def test_eviction_keeps_and_reports_mapped_copies(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", str(1.5 * SIZE / 1e9))
    items = objects(store, 4)
    copy = local_copy(*items[0])
    with pa.memory_map(str(copy)) as source:
        mapped = source.read_buffer()
    with caplog.at_level(logging.WARNING):
        for item in items[1:]:
            used_long_ago(copy, 200)
            used_long_ago(local_copy(*item), 100)
    assert copy.exists() and copy.name in held_names(tmp_path) and len(held_names(tmp_path)) == 2
    assert mapped.to_pybytes() == bytes(SIZE)
    assert caplog.text.count("is too small: processes read") == 1
    del mapped
    used_long_ago(copy, 200)
    local_copy(*items[1])
    assert not copy.exists()


def test_a_copy_that_was_removed_is_still_read(store):
    """Linux keeps a removed file for those that have opened it."""
    ((path, sha256),) = objects(store, 1)
    copy = local_copy(path, sha256)
    with pa.memory_map(str(copy)) as source:
        mapped = source.read_buffer()
        copy.unlink()
        assert mapped.to_pybytes() == source.read_at(SIZE, 0) == bytes(SIZE)


def test_a_copy_that_lacks_its_end_is_copied_again(store):
    """As a power cut may leave it. The shard is right, so no other run of the job would help."""
    name, content = "train-00000-of-00001.arrow", bytes(SIZE)
    path, sha256 = store.put(f"encoded/{name}", content)
    record = ShardRecord(name, "train", 0, 1, SIZE, sha256, "f")
    copy = local_copy(path, sha256)
    copy.write_bytes(content[:-1])
    assert check_size(path.parent, record).read_bytes() == content
    with pytest.raises(UserError, match=f"must have {SIZE + 1} bytes, but has {SIZE}; run"):
        check_size(path.parent, replace(record, bytes=SIZE + 1))


@pytest.mark.parametrize("value", ["0", "-1", "ten", "nan", "inf"])
def test_a_limit_that_is_no_number_is_one_line(store, monkeypatch, value):
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", value)
    with pytest.raises(UserError, match=f"TREE_ATTENTION_CACHE_GB must be a number of gigabytes above 0, but is .{value}"):
        local_copy(*objects(store, 1)[0])


def test_the_limit_is_half_of_what_is_free_with_what_the_cache_holds(store, monkeypatch):
    disk = os.statvfs_result((4096, 4096, 0, 0, 1000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert cache_limit(96_000) == (4_096_000 + 96_000) // 2
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", "1.5")
    assert cache_limit(96_000) == 1_500_000_000


def test_on_a_full_disk_older_copies_make_room(store, tmp_path, monkeypatch):
    items, load, room = objects(store, 5), cache._load, [4]

    def full_after_four(path, sha256, copy):
        if not len(held_names(tmp_path)) < room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        load(path, sha256, copy)

    monkeypatch.setattr(cache, "_load", full_after_four)
    for age, item in enumerate(items[:4]):
        used_long_ago(local_copy(*item), 200 - age)
    local_copy(*items[4])
    assert held_names(tmp_path) == {items[i][1] for i in (2, 3, 4)}
    room[0] = 0
    with pytest.raises(UserError, match="cannot write to the cache .*: No space left on device; set TREE_ATTENTION_CACHE"):
        local_copy(*items[0])


def test_a_full_disk_leaves_nothing_half_written(store, tmp_path, monkeypatch):
    item, create = objects(store, 1)[0], cache.create

    class Full:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self._file.close()

        def write(self, content):
            self._file.write(content[:1000])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "create", lambda path: Full(create(path)))
    with pytest.raises(UserError, match="No space left on device"):
        local_copy(*item)
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".lock"]


def test_copies_are_made_ahead_several_at_once_and_errors_are_left_to_readers(store, tmp_path):
    store.delay = 0.05
    items = objects(store, 24)
    missing, damaged = (as_path("s3://bucket/none.bin"), "0" * 64), (items[0][0], "1" * 64)
    for future in CopiesAhead().begin([missing, damaged, (tmp_path, "2" * 64), *items]):
        future.result()
    assert held_names(tmp_path) == {sha256 for _, sha256 in items}
    assert 8 <= store.most <= 16
    count = len(store.reads)
    assert all(local_copy(*item).stat().st_size == SIZE for item in items) and len(store.reads) == count
    with pytest.raises(FileNotFoundError):
        local_copy(*missing)
    with pytest.raises(UserError, match="0.bin is damaged"):
        local_copy(*damaged)


def test_copies_ahead_end_with_their_reader(store, monkeypatch):
    tried, all_tried = [], threading.Event()

    def fails() -> None:
        tried.append(threading.get_ident())
        if len(set(tried)) == AT_ONCE:
            all_tried.set()
        raise OSError("AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr(RemotePath, "open", lambda path, mode="rb": ask(path, fails))
    # No two of these hashes share a lock, so no thread waits for another one.
    copies, items = CopiesAhead(), [(as_path(f"s3://bucket/{number}"), f"{number:02x}" * 32) for number in range(3 * AT_ONCE)]
    futures = copies.begin(items)
    assert all_tried.wait(60)
    copies.close()
    assert [future.cancelled() for future in futures] == [False] * AT_ONCE + [True] * 2 * AT_ONCE


def test_eviction_removes_the_leftovers_of_killed_processes_after_an_hour(store, tmp_path):
    old, fresh = (tmp_path / "cache" / folder / f".tmp-{'a' * 64}" for folder in ("aa", "bb"))
    for path in (old, fresh):
        path.parent.mkdir()
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    local_copy(*objects(store, 1)[0])
    assert not old.exists() and fresh.exists()


def test_eviction_keeps_copies_of_the_last_minute(store, tmp_path, monkeypatch):
    """A process that has just got a copy is about to open it."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", str(1.5 * SIZE / 1e9))
    first, second, third = objects(store, 3)
    used_long_ago(local_copy(*first), 30)
    used_long_ago(local_copy(*second), 61)
    local_copy(*third)
    assert held_names(tmp_path) == {first[1], third[1]}


def test_a_copy_that_is_asked_for_while_others_are_removed_stays(store, tmp_path):
    items = objects(store, 2)
    for item in items:
        used_long_ago(local_copy(*item), 1000)
    found = cache._copies()
    local_copy(*items[0])
    assert cache._evict(found, 0) == SIZE and held_names(tmp_path) == {items[0][1]}


def read_again_and_again(folder: Path, items: list[tuple[str, str]], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    storage._file_system = lambda *_: fake_file_system(folder)
    cache._JUST_USED_NS = 0
    for turn in range(4):
        for number, (path, sha256) in enumerate(items):
            kept = None
            while kept is None:  # another process may remove the copy before it is open, as no time protects it here
                with suppress(FileNotFoundError), pa.memory_map(str(local_copy(as_path(path), sha256))) as source:
                    kept = source.read_buffer()
            time.sleep(0.05)
            assert kept.to_pybytes() == bytes([number]) * SIZE, (turn, number)


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_them(store, tmp_path, monkeypatch):
    """Each evicts what the others load; every byte that is read is right."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE_GB", str(1.5 * SIZE / 1e9))
    items = objects(store, 6)
    environment = {name: value for name, value in os.environ.items() if name.startswith("TREE_ATTENTION_CACHE")}
    arguments = (store.folder, [(str(path), sha256) for path, sha256 in items], environment)
    running = [PROCESSES.Process(target=read_again_and_again, args=arguments) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
        assert process.exitcode == 0
    assert 0 < len(held_names(tmp_path)) < len(items)
