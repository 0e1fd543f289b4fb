"""Local copies of objects: data sets in an object store are read by memory map like those on disk.

A copy is named by the hash of its content, so it is never out of date, and the same shard under two names is one copy.
The folder (`TREE_ATTENTION_CACHE`, else ~/.cache/tree-attention) may be deleted whenever nothing reads from it.
"""

import hashlib
import os
from pathlib import Path

from treeproc.common.errors import UserError
from treeproc.common.files import TEMPORARY_PREFIX, cache_folder, create, file_sha256, held
from treeproc.common.storage import AnyPath

_CHUNK = 1 << 20


def local_copy(path: AnyPath, sha256: str, *, recheck: bool = False) -> Path:
    """The file itself, or a copy of the object, whose hash is checked while it is loaded.

    Processes of one machine that want the same object load it once. With `recheck` a copy that is there is hashed
    again. Raises FileNotFoundError, and UserError when the object's bytes are not those of `sha256`.
    """
    if isinstance(path, Path):
        return path
    folder = cache_folder() / sha256[:2]
    copy = folder / sha256
    if copy.exists() and not recheck:
        return copy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / ".lock"):
            if not copy.exists() or (recheck and file_sha256(copy) != sha256):
                _load(path, sha256, copy)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot write to the cache {folder}: {error.strerror}; set TREE_ATTENTION_CACHE") from None
    return copy


def _load(path: AnyPath, sha256: str, copy: Path) -> None:
    """Under the lock: what an earlier process left half-done is overwritten."""
    temporary = copy.with_name(TEMPORARY_PREFIX + copy.name)
    digest = hashlib.sha256()
    with path.open("rb") as source, create(temporary) as sink:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != sha256:
        temporary.unlink()
        raise UserError(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")
    os.replace(temporary, copy)
