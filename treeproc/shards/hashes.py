"""Shards against the hashes of their index."""

from treeproc.common.cache import local_copy
from treeproc.common.errors import UserError
from treeproc.common.files import file_sha256
from treeproc.common.storage import AnyPath, inside
from treeproc.shards.shard import open_shards
from treeproc.shards.store import read_index


def check_hashes(folder: AnyPath, *splits: str) -> None:
    """Read the shards of these splits, and what the index names beside them, once.

    Of objects, the local copies are read, which are loaded where they are missing or damaged. Raises UserError for the
    first file that is missing, cut off, or whose bytes are not what the index says.
    """
    shards = [shard for split in splits for shard in open_shards(folder, split)]
    hashes = {shard.record.name: shard.record.sha256 for shard in shards}
    for name, sha256 in {**read_index(folder).get("files", {}), **hashes}.items():
        path = inside(folder, name)
        try:
            complete = file_sha256(local_copy(path, sha256, recheck=True)) == sha256
        except FileNotFoundError:
            complete = False
        if not complete:
            raise UserError(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")
