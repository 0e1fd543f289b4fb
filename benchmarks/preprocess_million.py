"""Millions of pairs from text to encoded shards, with right-branching trees and no parser model: memory and time per pair.

The given pairs are used again and again, with a number in each, so that all differ. One of a hundred is a copy of an earlier one.
Runs `workflows/preprocess.py` once for every size and watches it and all processes below it. Prints JSON lines.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLE = REPOSITORY / "treeproc" / "sample"
MIB = 1024


def read_pairs(path: Path | None) -> list[tuple[str, str]]:
    """(source, target) of a tab-separated file, or the pairs of the shipped sample."""
    if path is None:
        sides = (gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n") for side in ("en", "de"))
        return [pair for pair in zip(*sides, strict=True) if all(pair)]
    opened = gzip.open(path, "rt", encoding="utf-8", newline="\n") if path.suffix == ".gz" else open(path, encoding="utf-8")
    with opened as file:
        return [tuple(line.rstrip("\r\n").split("\t")[:2]) for line in file]


def numbered(pairs: list[tuple[str, str]], number: int) -> tuple[str, str]:
    """Pair `number`: of every hundred the last is a copy of the pair of half its number."""
    while number % 100 == 99:
        number //= 2
    again, place = divmod(number, len(pairs))
    source, target = pairs[place]
    return (f"{again} {source}", f"{again} {target}") if again else (source, target)


def write_inputs(folder: Path, pairs: list[tuple[str, str]], count: int) -> dict:
    """Files of `count` pairs, and the settings that read them."""
    with open(folder / "source", "w", encoding="utf-8") as source, open(folder / "target", "w", encoding="utf-8") as target:
        for number in range(count):
            left, right = numbered(pairs, number)
            source.write(left + "\n")
            target.write(right + "\n")
    return {
        "splits": {"train": {"source": [str(folder / "source")], "target": [str(folder / "target")]}},
        "filters": {"drop_duplicates": True},
        "parser": {"name": "words"},
        "tree": {"tree_source": "right"},
        "subwords": {"vocab_size": 8000},
    }


def descendants(root: int) -> set[int]:
    """Return the process and all processes below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, more = {root}, {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def memory(pid: int) -> Iterator[tuple[str, int]]:
    """Resident, proportional and private anonymous memory of a process, in KiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss", "Anonymous"):
            yield name, int(value.split()[0])


class Watch:
    """Memory peaks of single processes, by what they are, and CPU time of all; sampled until the job ends."""

    def __init__(self, root: int):
        self.root = root
        self.peaks: dict[str, int] = {}
        self.cpu: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            for pid in descendants(self.root):
                try:
                    self._look_at(pid)
                except (OSError, ValueError, IndexError):  # the process has just gone
                    continue

    def _look_at(self, pid: int) -> None:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.cpu[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        is_worker = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
        kind = "driver" if pid == self.root else "worker" if is_worker else "ray"
        for name, value in memory(pid):
            metric = f"{kind}_peak_{name.lower()}_mib"
            self.peaks[metric] = max(self.peaks.get(metric, 0), value)


def measure(count: int, pairs: list[tuple[str, str]], scratch: Path | None) -> None:
    """Run the job on `count` pairs and print its figures."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        (folder / "data.yaml").write_text(json.dumps(write_inputs(folder, pairs, count)))
        command = [sys.executable, str(REPOSITORY / "workflows" / "preprocess.py"), "--config", str(folder / "data.yaml")]
        started = time.monotonic()
        with open(folder / "log", "w") as log:
            # An embedded Ray, also where a cluster runs: what it does must be below this process.
            job = subprocess.Popen(
                [*command, "--out", str(folder / "data")], stdout=log, stderr=log, env=os.environ | {"RAY_ADDRESS": "local"}
            )
            with Watch(job.pid) as watch:
                status = job.wait()
        seconds = time.monotonic() - started
        if status:
            raise SystemExit(f"preprocess.py failed:\n{(folder / 'log').read_text()[-2000:]}")
        rows = json.loads((folder / "data" / "encoded" / "index.json").read_bytes())["totals"]["train"]["rows"]
    figures: dict[str, object] = {"rows": rows, "seconds": round(seconds, 1), "microseconds_per_pair": seconds / count * 1e6}
    figures["cpu_microseconds_per_pair"] = sum(watch.cpu.values()) / count * 1e6
    for metric, value in figures.items():
        print_figure(count, metric, value)
    for metric, value in sorted(watch.peaks.items()):
        print_figure(count, metric, value / MIB)


def print_figure(count: int, metric: str, value: object) -> None:
    value = round(value, 1) if isinstance(value, float) else value
    figure = {"benchmark": "preprocess_million", "case": f"{count}_pairs", "metric": metric, "value": value}
    print(json.dumps(figure), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path, help="tab-separated pairs, plain or .gz (default: the shipped sample)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[250_000, 1_000_000], help="numbers of pairs")
    parser.add_argument("--scratch", type=Path, help="folder for the data sets, about 1.2 GB for a million pairs")
    parser.add_argument("--quick", action="store_true", help="5,000 and 20,000 pairs, in less than 50 seconds")
    args = parser.parse_args()
    pairs = read_pairs(args.pairs)
    for count in [5_000, 20_000] if args.quick else args.sizes:
        measure(count, pairs, args.scratch)


if __name__ == "__main__":
    main()
