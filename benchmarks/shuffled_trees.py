"""Trees of other lines (`tree_source: shuffled`): CPU seconds and memory of a process that encodes shards of one window.

    python benchmarks/shuffled_trees.py --rows 1000000 --rows-per-shard 25600     # a window of large data
    python benchmarks/shuffled_trees.py --rows 8000000 --rows-per-shard 2048      # the largest data of one window
    python benchmarks/shuffled_trees.py --quick

One parsed shard is written; all others are links to it. `find` reads ids and lengths of all lines and finds the
donors. `first` and `later` are the trees of a shard, when the shards of the donors are opened for it, and when they are open.
`memory_mb` is the highest RssAnon of /proc/self/status, without mapped files; `start_mb` of it is Python and its libraries.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import emit
from scale import Memory

from treeproc.shards.schema import PARSED_SCHEMA, shard_name
from treeproc.shards.store import write_index, write_shard
from treeproc.stages import shuffle
from treeproc.stages.shuffle import DonorTrees


def tree_of(texts: list[str], draw: random.Random) -> str:
    """A random binary tree."""
    if len(texts) == 1:
        return f"(NN {texts[0]})"
    cut = draw.randint(1, len(texts) - 1)
    return f"(X {tree_of(texts[:cut], draw)} {tree_of(texts[cut:], draw)})"


def line(number: int, words: int) -> dict:
    """A parsed line with a random tree."""
    texts = [f"w{number % 97 + i}" for i in range(words)]
    tree = f"(X {tree_of(texts, random.Random(number))})"
    places = {"text": texts, "start_char": [0] * words, "end_char": [1] * words, "pos_tag": ["NN"] * words}
    return {"example_id": number, "words": places, "trees": [tree], "parse_status": "parsed"}


def write_parsed(folder: Path, rows: int, rows_per_shard: int) -> int:
    """Write a parsed stage; returns its number of shards."""
    folder.mkdir()
    shards, draw = -(-rows // rows_per_shard), random.Random(0)
    lines = [line(number, 1 + int(draw.gammavariate(2.7, 9.58))) for number in range(rows_per_shard)]
    first = write_shard(folder, shard_name("train", 0, shards), lines, PARSED_SCHEMA, split="train", index=0, fingerprint="")
    records = [replace(first, name=shard_name("train", index, shards), index=index) for index in range(shards)]
    for record in records[1:]:
        os.link(folder / first.name, folder / record.name)
    write_index(folder, records)
    return shards


def measure(folder: Path, shards: int) -> None:
    """The child: print the figures of one process."""
    case, start = f"{shards}_shards", Memory.now()
    # All shards have the same ids. Hashes of different ids are as good as these numbers.
    shuffle.hash_examples = lambda ids, seed: np.random.default_rng(seed).integers(0, 2**63, len(ids), dtype=np.uint64)
    donors, memory = DonorTrees(folder, "words", "trees", 1), Memory()
    for metric, begin, end in (("find", 0, 0), ("first", 0, 1), ("later", 1, min(shards, 5))):
        memory.peak, began = Memory.now(), time.process_time()
        if metric == "find":
            donors.read(0, shards)
        for place in range(begin, end):
            donors.of_shard(place, (0, shards))
        seconds = (time.process_time() - began) / max(1, end - begin)
        peak = max(memory.peak, Memory.now())
        emit("shuffled_trees", case, f"{metric}_cpu_s", seconds, memory_mb=round(peak, 1), start_mb=round(start, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="lines of the window (default %(default)s)")
    parser.add_argument("--rows-per-shard", type=int, default=25_600, help="lines of a shard (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="20,000 lines in shards of 2,048")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(Path(args.child[0]), int(args.child[1]))
        return
    rows, per_shard = (20_000, 2_048) if args.quick else (args.rows, args.rows_per_shard)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "parsed"
        shards = write_parsed(folder, rows, per_shard)
        subprocess.run([sys.executable, __file__, "--child", str(folder), str(shards)], check=True)


if __name__ == "__main__":
    main()
