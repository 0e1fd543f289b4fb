"""The index of a billion rows: writing it, opening it, reading its records, and a start that finds every file known.

    python benchmarks/index_parts.py              # 10,068 shards, what `rows_per_shard: auto` makes of a billion rows
    python benchmarks/index_parts.py --quick      # 200 shards, in parts of 50

There is no text. Each shard is a file of 100 bytes beside a record of the usual size, with 60 counts as in the parsed stage.
Memory is the anonymous memory of the process (RssAnon) above that before the work.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from measure import emit
from scale import Memory

from treeproc.common.cache import find_changed
from treeproc.shards import records as records_module
from treeproc.shards import store
from treeproc.shards.schema import LARGEST, shard_name
from treeproc.shards.store import ShardRecord, read_index, write_index

ROWS = 1_000_000_000
T = TypeVar("T")


def measure(name: str, work: Callable[[], T]) -> T:
    """Print the seconds of the work and the memory that its result holds; returns the result."""
    before, began = Memory.now(), time.monotonic()
    result = work()
    emit("index_parts", name, "seconds", time.monotonic() - began, held_mb=round(Memory.now() - before, 1))
    return result


def write_files(folder: Path, count: int) -> list[ShardRecord]:
    """Files of 100 bytes that were changed a minute ago, and records of them."""
    made = []
    for number in range(count):
        name, content = shard_name("train", number, count), f"{number:100d}".encode()
        (folder / name).write_bytes(content)
        os.utime(folder / name, (time.time() - 60, time.time() - 60))
        counts = {f"label.{label}": number + label for label in range(60)}
        sha256 = hashlib.sha256(content).hexdigest()
        made.append(ShardRecord(name, "train", number, LARGEST, len(content), sha256, "f" * 16, counts=counts))
    return made


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(argv).quick
    if quick:
        store._MOST_INLINE, records_module._SHARDS_A_PART = 100, 50
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        os.environ["TREE_ATTENTION_CACHE"] = str(Path(name) / "cache")
        made = write_files(folder, 200 if quick else -(-ROWS // LARGEST))
        measure("write the index", lambda: write_index(folder, made))
        index = measure("open the index", lambda: read_index(folder))
        records = measure("all records", lambda: index.records("train"))
        rows = sum(record.rows for record in records)
        emit("index_parts", "rows", "rows", rows, shards=len(records), parts=len(index["parts"]))
        hashes = {record.name: record.sha256 for record in records}
        for start in ("first start", "second start"):
            if measure(f"hashes, {start}", lambda: find_changed(folder, hashes)):
                raise SystemExit("a file has not got its hash")


if __name__ == "__main__":
    main(sys.argv[1:])
