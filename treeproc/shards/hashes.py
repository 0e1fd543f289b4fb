"""Shards against the hashes of their index."""

from pathlib import Path

from treeproc.common.cache import drop_damaged
from treeproc.common.errors import UserError
from treeproc.common.hash_cache import find_changed
from treeproc.common.storage import AnyPath, RemotePath, inside
from treeproc.shards.shard import Shard, check_names
from treeproc.shards.store import read_index


def check_hashes(folder: AnyPath, *splits: str) -> None:
    """Check the shards of these splits, and what the index names beside them, and open the first shard of each split.

    Files are hashed, but for those that were found right before and have not changed since (`hash_cache`). Objects must be
    there in their size: each is hashed when it is copied here, and copies that are here are hashed as files are. Raises UserError
    for the first file that is missing, cut off, or whose bytes are not what the index says.
    """
    index = read_index(folder)
    records = {split: index.records(split) for split in splits}
    hashes = dict(index.get("files", {}))
    sizes = {}
    for split, of_split in records.items():
        if not of_split:
            raise UserError(f"{folder / 'index.json'} has no split {split!r}; there are: {', '.join(index['totals'])}")
        for record in of_split:
            hashes[record.name], sizes[record.name] = record.sha256, record.bytes
    for name in hashes:
        inside(folder, name)
    if isinstance(folder, RemotePath):
        _check_objects(folder, hashes, sizes)
    else:
        _check_files(folder, hashes)
    for of_split in records.values():
        check_names(folder, Shard(folder, of_split[0]), index.get("columns"))


def _check_files(folder: Path, hashes: dict[str, str]) -> None:
    for name in find_changed(folder, hashes):
        raise UserError(f"{folder / name} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")


def _check_objects(folder: RemotePath, hashes: dict[str, str], sizes: dict[str, int]) -> None:
    there = folder.objects()
    for name in hashes:
        if name not in there:
            raise UserError(f"{folder / name} is missing; run workflows/preprocess.py again")
        if (size := there[name]) != sizes.get(name, size):
            raise UserError(f"{folder / name} must have {sizes[name]} bytes, but has {size}; run workflows/preprocess.py again")
    drop_damaged(hashes.values())
