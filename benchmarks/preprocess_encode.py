"""Encoding and reading of shards on one core, in CPU seconds. Prints JSON lines.

`encode`: text and parsed shards to encoded shards with files, by an encoder with empty caches. `read`: encoded shards to padded
batches of similar lengths, in random order; once complete, once without the structure maps.
"""

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import emit

from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import LEAVES, TREES
from treeproc.parsers import ParserConfig
from treeproc.shards.schema import TEXT_SCHEMA, shard_name
from treeproc.shards.store import ShardRecord, read_index, stage_folder, write_index, write_shard
from treeproc.stages.encode import EncodeShard
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.lengths import write_lengths
from treeproc.stages.parse_and_encode import ParseShard
from treeproc.stages.preprocess import SAMPLE
from treeproc.stages.vocabulary import TrainSplit, write_vocabulary
from treeproc.subwords import SubwordConfig

Records = list[ShardRecord]


def make_data(data: Path, count: int, rows_per_shard: int = 2000) -> tuple[Records, Records]:
    """Text and parsed shards of the shipped sample's first pairs, and a vocabulary."""
    sides = [gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n") for side in ("en", "de")]
    pairs = list(zip(*sides, strict=True))[:count]
    rows = [{"example_id": i, "source": source, "target": target} for i, (source, target) in enumerate(pairs)]
    for stage in ("text", "parsed", "encoded"):
        (data / stage).mkdir(parents=True)
    parser = ParseShard(data, ParserConfig(name="shipped"))
    num_shards = -(-len(rows) // rows_per_shard)
    text = [
        write_shard(
            data / "text", shard_name("train", i, num_shards), rows[i * rows_per_shard : (i + 1) * rows_per_shard], TEXT_SCHEMA,
            split="train", index=i, fingerprint="",
        )
        for i in range(num_shards)
    ]  # fmt: skip
    parsed = [parser(text=record, fingerprint="") for record in text]
    write_index(data / "parsed", parsed)
    write_vocabulary(data, TrainSplit(data, text, parsed, SubwordConfig(vocab_size=3000), TreeConfig()))
    return text, parsed


def train_records(folder: Path) -> Records:
    return list(read_index(folder).records("train"))


def best_rate(amount: int, step: Callable[[], None], seconds: float) -> float:
    """Amount per CPU second in the fastest of several rounds."""
    fastest, until = float("inf"), time.monotonic() + seconds
    while time.monotonic() < until or fastest == float("inf"):
        started = time.process_time()
        step()
        fastest = min(fastest, time.process_time() - started)
    return amount / fastest


def encode_all(data: Path, base: Path, text: Records, parsed: Records, tree: TreeConfig) -> Records:
    worker = EncodeShard(data, tree, base)
    places, window = range(len(text)), (0, len(text))
    return [worker(t, p, "", place, window) for t, p, place in zip(text, parsed, places, strict=True)]


def batches_of(lengths: np.ndarray, max_leaves: int = 4096) -> list[np.ndarray]:
    """Rows in batches of similar length, in random order."""
    random = np.random.default_rng(0)
    order = random.permutation(len(lengths))
    order = order[np.argsort(lengths[order], kind="stable")]
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // max_leaves)) + 1
    batches = np.split(order, cuts)
    return [batches[i] for i in random.permutation(len(batches))]


def measure_read(encoded: Path, seconds: float) -> None:
    for case, reads in (("read", LEAVES), ("read_with_tree_maps", TREES)):
        source = ExampleSource(encoded, "train", reads)
        batches = batches_of(np.asarray(source.lengths["leaves"]))
        total = int(np.asarray(source.lengths["leaves"]).sum())

        def read_all(source: ExampleSource = source, batches: list = batches) -> None:
            for batch in batches:
                source.batch(batch)

        emit("preprocess_encode", case, "leaves_per_second", best_rate(total, read_all, seconds), leaves=total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a finished data set (default: the shipped sample, parsed here)")
    parser.add_argument("--pairs", type=int, default=4000, help="pairs of the sample (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for every figure (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1,000 pairs and 2 seconds a figure, in less than 50 seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = 2.0 if args.quick else args.seconds
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "data"
        if args.data is None:
            base = out
            text, parsed = make_data(out, 1000 if args.quick else args.pairs)
        else:
            folders = [stage_folder(args.data.absolute(), stage) for stage in ("text", "parsed")]
            base = folders[0].parent
            text, parsed = (train_records(folder) for folder in folders)
            (out / "encoded").mkdir(parents=True)
            write_vocabulary(out, TrainSplit(base, text, parsed, SubwordConfig(vocab_size=3000), TreeConfig()))
        rows = sum(record.rows for record in text)
        for case, source in (("encode", "parsed"), ("encode_right_branching", "right"), ("encode_shuffled", "shuffled")):
            tree = TreeConfig(tree_source=source)
            rate = best_rate(rows, lambda tree=tree: encode_all(out, base, text, parsed, tree), seconds)
            emit("preprocess_encode", case, "pairs_per_second", rate, pairs=rows)
        records = encode_all(out, base, text, parsed, TreeConfig())
        write_lengths(out / "encoded", records)
        write_index(out / "encoded", records)
        measure_read(out / "encoded", seconds)


if __name__ == "__main__":
    main()
