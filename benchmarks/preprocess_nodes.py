"""A Ray cluster of nodes of one core preprocesses from and to an S3 server on loopback, and nodes are killed meanwhile.

    python benchmarks/preprocess_nodes.py              # 4 nodes, 24 shards, two nodes killed; some minutes on two cores
    python benchmarks/preprocess_nodes.py --quick      # 2 nodes, 8 shards, one node killed

Inputs and data set are objects. The nodes are processes of this machine (`ray.cluster_utils`). Each has its own cache for copies
of objects, and no folder is shared. When a third and two thirds of the parsed shards exist, a node is killed (its raylet and all
its workers). Only the first one is replaced. The data set must have the same bytes as one made on disk by one process without
Ray. It prints one JSON line per figure. The exit status is 1 if a byte differs or the job fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import ray
from measure import emit
from preprocess_million import REPOSITORY, read_pairs
from ray.cluster_utils import Cluster

sys.path.insert(0, str(REPOSITORY / "tests"))

from moto_store import s3_server

from treeproc.common.files import atomic_write
from treeproc.common.provenance import PROVENANCE
from treeproc.common.storage import RemotePath, as_path

T = TypeVar("T")

ROWS = 40
LIMIT_S = 1500


def write_config(folder: Path, inputs: RemotePath, shards: int) -> Path:
    """Write the settings of a job over pairs of the shipped sample, whose input files are objects."""
    pairs = read_pairs(None)[: shards * ROWS]
    files = {}
    for place, side in enumerate(("source", "target")):
        atomic_write(inputs / f"train.{side}", "".join(pair[place] + "\n" for pair in pairs).encode())
        files[side] = [str(inputs / f"train.{side}")]
    path = folder / "data.yaml"
    path.write_text(
        json.dumps(
            {"splits": {"train": files}, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 1000}, "rows_per_shard": ROWS}
        )
    )
    return path


def patiently(start: Callable[[], T]) -> T:
    """Start a node. Ray waits for it for 30 seconds, which is too short on a busy machine."""
    for _ in range(9):
        try:
            return start()
        except Exception as error:  # Ray has no class for it
            print(f"starting a node again: {error}", file=sys.stderr)
    return start()


class Nodes:
    """A cluster whose head does no work, and nodes of one core, each with its own cache."""

    def __init__(self, scratch: Path, count: int):
        self._scratch, self._started = scratch, 0
        self._cluster = patiently(lambda: Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False}))
        self._nodes = [self._start() for _ in range(count)]
        self.address = self._cluster.address

    def _start(self):
        self._started += 1
        cache = {"TREE_ATTENTION_CACHE": str(self._scratch / f"cache-{self._started}")}
        return patiently(lambda: self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20, env_vars=cache))

    def kill(self, replace: bool) -> None:
        """Kill the oldest node; another one comes with `replace`."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        if replace:
            self._nodes.append(self._start())

    def copied(self) -> list[float]:
        """MB of copies in the cache of every node that there was."""
        folders = [self._scratch / f"cache-{number + 1}" for number in range(self._started)]
        return [round(sum(p.stat().st_size for p in folder.glob("??/*") if p.name[0] != ".") / 1e6, 2) for folder in folders]

    def end(self) -> None:
        """Stop all nodes."""
        ray.shutdown()
        self._cluster.shutdown()


def run_job(config: Path, out: object, address: str, log: Path, *overrides: str) -> subprocess.Popen:
    """Start the job as a user does."""
    command = [sys.executable, str(REPOSITORY / "workflows" / "preprocess.py"), "--config", str(config), "--out", str(out)]
    environment = os.environ | {"RAY_ADDRESS": address, "TREE_ATTENTION_CACHE": str(log.parent / "cache-driver")}
    with open(log, "w") as file:
        return subprocess.Popen([*command, *overrides], stdout=file, stderr=file, env=environment)


def wait(job: subprocess.Popen, log: Path) -> None:
    """Wait for the end of a job; what went wrong ends this program."""
    if job.wait(LIMIT_S):
        raise SystemExit(f"the job failed: {log.read_text()[-2000:]}")


def contents(folder: Path | RemotePath) -> dict[str, bytes]:
    """Return all files of a data set, without the lock and the provenance."""
    if isinstance(folder, Path):
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    else:
        names = list(folder.objects())
    kept = [name for name in names if name not in (".lock", PROVENANCE)]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(kept, pool.map(lambda name: (folder / name).read_bytes(), kept), strict=True))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(argv).quick
    count, shards, kills = (2, 8, 1) if quick else (4, 24, 2)
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name)) as bucket:
        scratch, out = Path(name), as_path(bucket) / "data"
        config = write_config(scratch, as_path(bucket) / "inputs", shards)
        began = time.monotonic()
        alone = run_job(config, scratch / "alone", "local", scratch / "alone.log", "workers=0")
        wait(alone, scratch / "alone.log")
        emit("preprocess_nodes", "one process, no Ray", "seconds", time.monotonic() - began)
        nodes = Nodes(scratch, count)
        try:
            began = time.monotonic()
            job = run_job(config, out, nodes.address, scratch / "nodes.log")
            for number in range(kills):
                while (done := len(list((out / "parsed").glob("train-*.json")))) < (number + 1) * shards // (kills + 1):
                    if job.poll() is not None:
                        raise SystemExit(f"the job ended before a node was killed: {(scratch / 'nodes.log').read_text()[-2000:]}")
                    time.sleep(0.2)
                nodes.kill(replace=number == 0)
                print(f"killed a node after {done} of {shards} parsed shards", file=sys.stderr)
            wait(job, scratch / "nodes.log")
            emit(
                "preprocess_nodes",
                f"{count} nodes, {kills} killed",
                "seconds",
                time.monotonic() - began,
                copied_mb=nodes.copied(),
            )
        finally:
            nodes.end()
        here, there = contents(scratch / "alone"), contents(out)
        wrong = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        emit("preprocess_nodes", "data set", "different_files", len(wrong), files=len(here), names=wrong[:5])
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
