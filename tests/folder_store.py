"""An object store in this process: a folder. It knows no folders of its own, as stores do, and needs no server."""

from pathlib import Path

import pyarrow.fs
import pytest

from treeproc.common import storage
from treeproc.readers import line_ranges


class FolderStore:
    """A folder with the methods that `RemotePath` calls of a file system. `opened`: the objects of which ranges were read."""

    def __init__(self, root: Path):
        self._root, self._files = root, pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
        self.opened: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self._files, name)

    def open_input_file(self, key: str):
        self.opened.append(key)
        return self._files.open_input_file(key)

    def open_output_stream(self, key: str, compression: str | None = "detect"):
        (self._root / key).parent.mkdir(parents=True, exist_ok=True)
        return self._files.open_output_stream(key, compression=compression)


@pytest.fixture
def store(tmp_path, monkeypatch) -> FolderStore:
    """The objects of s3:// lie below tmp_path/store, and copies of them in a cache of this test."""
    (tmp_path / "store").mkdir()
    found = FolderStore(tmp_path / "store")
    monkeypatch.setattr(storage, "_file_system", lambda *_: found)
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    line_ranges._chunk.cache_clear()
    yield found
    line_ranges._chunk.cache_clear()
