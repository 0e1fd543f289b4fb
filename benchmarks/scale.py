"""Index and batch plan of data sets of up to a billion rows: seconds and memory of one rank. Prints one JSON line per figure.

    python benchmarks/scale.py [--quick] [--rows 1000000000] [--folder DIR]

Metadata alone is written (`scale_data.py`), 8 bytes a row on disk, and removed at the end; there are no shards. For each size one
process opens index, lengths and counts and builds the plan of `batch.max_tokens=25000`. A second one starts in the middle of an
epoch, a third one takes a share of the rows. `memory_mb` is the highest RssAnon of /proc/self/status, 100 times a second: memory
of the process without mapped files. `start_mb` of it is Python and its libraries. `cpu_s` beside seconds is the time of the
processor: where other work runs on the machine, the seconds are longer than on an idle one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scale_data import write_metadata

from treenet.config import BatchConfig
from treenet.data.plan import BatchPlan
from treenet.data.windows import ShardSizes
from treeproc.shards.lengths import open_counts, open_lengths
from treeproc.shards.schema import WINDOW_ROWS
from treeproc.shards.shard import split_records

SIZES, QUICK_SIZES = (10**7, 10**8, 10**9), (10**6, 10**7)
FRACTION = 0.3


class Memory:
    """Watches the memory of this process that is not a mapped file."""

    def __init__(self):
        self.peak = self.now()
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def now() -> float:
        """RssAnon in MB."""
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1000

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.01)


def open_plan(encoded: Path, fraction: float) -> BatchPlan:
    """As a rank does it, but for the shards themselves."""
    records = split_records(encoded, "train")
    rows = np.array([record.rows for record in records])
    lengths = open_lengths(encoded, "train")
    shards = ShardSizes(rows, open_counts(encoded, "train", lengths, rows).count)
    batch = BatchConfig(max_tokens=25_000, fraction=fraction)
    return BatchPlan.build(lengths, batch, text_fingerprint="text", seed=1, shards=shards)


def measure(encoded: Path, begin: float, fraction: float) -> None:
    """The child: print what was measured as one JSON object. `begin` is where in the first epoch the rank starts."""
    found: dict[str, float] = {}
    start, memory = Memory.now(), Memory()

    def timed(name: str, call: Callable):
        wall, cpu = time.monotonic(), time.process_time()
        result = call()
        found[f"{name}_s"], found[f"{name}_cpu_s"] = time.monotonic() - wall, time.process_time() - cpu
        found[f"{name}_peak_mb"], memory.peak = max(memory.peak, memory.now()), 0.0
        return result

    plan = timed("open", lambda: open_plan(encoded, fraction))
    step = int(begin * plan.num_batches)
    timed("first_batch", lambda: plan.batch(step))
    timed("hardest_batch", plan.hardest_batch)
    timed("next_window", lambda: plan.batch(step + plan.num_batches // 2))
    timed("next_epoch", lambda: plan.batch(plan.num_batches))
    timed("facts", plan.used_sizes)
    print(json.dumps({**found, "start_mb": start, "held_mb": memory.now(), "batches": plan.num_batches}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one and ten million rows")
    parser.add_argument("--rows", type=int, help="this number of rows alone")
    parser.add_argument("--folder", type=Path, help="where the metadata is written; the system's temporary folder by default")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, begin, fraction = arguments.child
        measure(Path(folder), float(begin), float(fraction))
        return
    for rows in [arguments.rows] if arguments.rows else QUICK_SIZES if arguments.quick else SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            run(Path(folder) / "encoded", rows)


def run(encoded: Path, rows: int) -> None:
    """Write the metadata of `rows` rows, measure, and print the figures."""
    started = time.monotonic()
    shards = write_metadata(encoded, rows)
    case = f"{rows:,}"

    def emit(metric: str, value: float, **more: object) -> None:
        print(json.dumps({"benchmark": "scale", "case": case, "metric": metric, "value": round(value, 3), **more}), flush=True)

    emit("write_s", time.monotonic() - started, shards=shards)
    for file in ("index.json", "lengths.arrow", "size_counts.arrow"):
        emit("bytes", (encoded / file).stat().st_size, file=file)
    # A billion rows in a cold cache are read from the disk at first: the second process finds the pages that the first read.
    # A share of one window is drawn by ids, which are zeros here.
    shares = [("share", 0.0, FRACTION)] if rows > WINDOW_ROWS else []
    for name, begin, fraction in (("start", 0.0, 1.0), ("resume", 0.5, 1.0), *shares):
        command = [sys.executable, __file__, "--child", str(encoded), str(begin), str(fraction)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for metric in ("open", "first_batch", "hardest_batch", "next_window", "next_epoch", "facts"):
            times = {"cpu_s": round(found[f"{metric}_cpu_s"], 3), "memory_mb": round(found[f"{metric}_peak_mb"], 1)}
            emit(f"{metric}_s", found[f"{metric}_s"], process=name, **times)
        emit("held_mb", found["held_mb"], process=name, start_mb=round(found["start_mb"], 1), batches=found["batches"])


if __name__ == "__main__":
    main()
