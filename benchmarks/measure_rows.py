"""Time that the driver of a job takes for the sizes of all rows: by itself, and with tasks on Ray. Prints JSON lines.

    python benchmarks/measure_rows.py [--shards 1000] [--rows 10000]

One shard of random trees in the shape of captions is linked under many names. `driver_cpu_s` is the time of the processor for the
driver alone. `seconds` is the time on the clock, which needs free cores for the tasks. The files of both ways must be the same.
"""

import argparse
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measure import emit
from training_data import write_captions

from treeproc.common.files import file_sha256
from treeproc.common.provenance import Recorder
from treeproc.shards.records import PackedRecords
from treeproc.shards.schema import shard_name
from treeproc.shards.store import ShardRecord, read_index
from treeproc.stages.lengths import write_lengths
from treeproc.stages.run_jobs import Run, ray_runner


def link_shards(encoded: Path, record: ShardRecord, shards: int) -> PackedRecords:
    """Records of `shards` shards that have the content of the one of `record`."""
    records = PackedRecords()
    for index in range(shards):
        name = shard_name("train", index, shards)
        os.link(encoded / record.name, encoded / name)
        records.append(replace(record, name=name, index=index))
    return records


def measure(encoded: Path, records: PackedRecords, run: Run | None) -> list[str]:
    """Write the files and print what they took; returns their hashes."""
    began, cpu = time.monotonic(), time.process_time()
    names = write_lengths(encoded, records, window_rows=1, run=run)
    emit(
        "measure_rows", "tasks" if run else "driver alone", "driver_cpu_s", time.process_time() - cpu,
        seconds=round(time.monotonic() - began, 1), shards=len(records), rows=sum(record.rows for record in records),
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
    )  # fmt: skip
    return [file_sha256(encoded / name) for name in names]


class Nothing:
    """A worker without work."""

    def __call__(self) -> dict:
        return {}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a shard (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as place:
        encoded = write_captions(Path(place), rows=args.rows, num_pieces=8000) / "encoded"
        records = link_shards(encoded, next(iter(read_index(encoded).records("train"))), args.shards)
        run = ray_runner(encoded, Recorder(Path(place), "benchmark"))
        alone = measure(encoded, records, None)
        list(run(Nothing, {}, [{}]))  # Ray starts
        if measure(encoded, records, run) != alone:
            raise SystemExit("tasks gave other bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
