"""Memory and time of the driver for the records of many shards: three stages whose work is empty, their indices, a resume.

    python benchmarks/driver_records.py                   # 10,068 shards, what `rows_per_shard: auto` makes of a billion rows
    python benchmarks/driver_records.py --shards 4096     # what it makes of 8 to 406 million rows

It runs `make_shards` and `write_index` for the stages, without Ray. There is no text and no shard. The records have as many
counts as those of real stages: 3, 60 and 20. `peak_mb` is the highest resident memory of the process so far, and `start_mb` that
of Python and its libraries. Prints JSON lines.
"""

import argparse
import hashlib
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from measure import emit

from treeproc.common.provenance import Recorder
from treeproc.shards.schema import shard_name
from treeproc.shards.store import ShardRecord, fingerprint_of, read_index, write_index
from treeproc.stages.ray_job import to_json
from treeproc.stages.run_jobs import StageWork, make_shards

ROWS = 2000
COUNTS = {"text": 3, "parsed": 60, "encoded": 20}
T = TypeVar("T")


class Describe:
    """A worker that makes the record of a shard and nothing else. Each job goes through JSON, as on Ray."""

    def __init__(self, counts: int):
        self._counts = counts

    def __call__(self, text: ShardRecord, fingerprint: str, parsed: ShardRecord | None = None) -> ShardRecord:
        to_json({"text": text, "parsed": parsed, "fingerprint": fingerprint})
        return describe(text.name, text.index, fingerprint, self._counts)


def describe(name: str, index: int, fingerprint: str, counts: int) -> ShardRecord:
    """A record with counts that differ from shard to shard, in the size of real ones."""
    found = {f"label.{number}": (index * 7919 + number * 104729) % 4001 for number in range(counts)}
    sha256 = hashlib.sha256(f"{name} {fingerprint}".encode()).hexdigest()
    return ShardRecord(name, "train", index, ROWS, 500_000 + index % 9973, sha256, fingerprint, counts=found)


def timed(name: str, work: Callable[[], T]) -> T:
    """Print what the work took; returns its result."""
    began, cpu = time.monotonic(), time.process_time()
    result = work()
    more = {"seconds": round(time.monotonic() - began, 1), "peak_mb": round(peak_mb())}
    emit("driver_records", name, "cpu_s", time.process_time() - cpu, **more)
    return result


def peak_mb() -> float:
    """The highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def make_stage(data: Path, stage: str, text: list[ShardRecord], parsed: list[ShardRecord] | None) -> list[ShardRecord]:
    """Make all records of a stage, and its index."""
    folder = data / stage
    folder.mkdir()
    fingerprints = timed(f"{stage}: fingerprints", lambda: [fingerprint_of(record.sha256) for record in parsed or text])

    def job(place: int) -> dict:
        both = {"text": text[place], "fingerprint": fingerprints[place]}
        return both | ({"parsed": parsed[place]} if parsed else {})

    def make() -> list[ShardRecord]:
        work, jobs = StageWork(stage, "", Describe, {"counts": COUNTS[stage]}), [job(place) for place in range(len(text))]
        return make_shards(work, folder, text, fingerprints, jobs, in_this_process=True, record=Recorder(data, "benchmark"))

    records = timed(f"{stage}: shards", make)
    timed(f"{stage}: index", lambda: write_index(folder, records))
    if not timed(f"{stage}: the index against the records", lambda: records == read_index(folder).records()):
        raise SystemExit("the index has other records")
    return records


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_068)
    count = parser.parse_args(argv).shards
    logging.disable(logging.INFO)
    emit("driver_records", "start", "start_mb", peak_mb(), shards=count)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place)
        os.environ["TREE_ATTENTION_CACHE"] = str(data / "cache")
        names = (shard_name("train", index, count) for index in range(count))
        text = timed("text: records", lambda: [describe(n, i, "text", COUNTS["text"]) for i, n in enumerate(names)])
        parsed = make_stage(data, "parsed", text, None)
        make_stage(data, "encoded", text, parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
