"""Memory on the head of a cluster beside the driver, while cells of a study train on another node.

    python benchmarks/head_memory.py                       # 0, 1, 4 and 8 cells of one worker
    python benchmarks/head_memory.py --workers 2 --cells 0 1 4

Head and nodes are processes of this machine (`ray.cluster_utils`). The figure is the PSS of Ray's worker processes on the head,
from /proc/PID/smaps_rollup, when every cell has trained an update. Without cells, the study waits for nodes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
from measure import emit
from preprocess_nodes import LIMIT_S, REPOSITORY, patiently
from ray.cluster_utils import Cluster

sys.path.insert(0, str(REPOSITORY / "tests"))

import light_nodes  # noqa: F401 (nodes without agents, which start faster)
from toydata import write_toy_data

STUDY = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "batch": {"max_tokens": 64},
    "max_steps": 10**6,
    "log_every": 1,
    "grid": {"fractions": [1.0], "models": {"transformer": {"model": {"name": "transformer"}}}},
}


def workers_on(raylet: int) -> Counter[str]:
    """Return the MB (PSS) of the worker processes below a raylet, by their names."""
    found: Counter[str] = Counter()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            name = (process / "cmdline").read_bytes().partition(b"\0")[0].decode().strip()
            if parent == raylet and name.startswith("ray::"):
                lines = (process / "smaps_rollup").read_text().splitlines()
                found[name] += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1000
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cells", type=int, nargs="+", default=[0, 1, 4, 8])
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_toy_data(folder / "data")
        study = STUDY | {"workers": arguments.workers, "data": str(folder / "data")}
        study["grid"] |= {"seeds": list(range(1, max(arguments.cells) + 1))}
        (folder / "study.yaml").write_text(json.dumps(study))
        cluster = patiently(lambda: Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False}))
        command = [sys.executable, str(REPOSITORY / "workflows" / "scaling.py"), "--config", str(folder / "study.yaml")]
        with open(folder / "log", "w") as log:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            driver = subprocess.Popen([*command, "--out", str(folder / "out")], stdout=log, stderr=log, env=environment)
        try:
            measure(cluster, driver, folder, arguments.cells, arguments.workers)
        finally:
            driver.kill()
            driver.wait()
            ray.shutdown()
            cluster.shutdown()


def measure(cluster: Cluster, driver: subprocess.Popen, folder: Path, counts: Sequence[int], workers: int) -> None:
    """Print the memory of the head while so many cells train. For each count, a node comes with room for the further cells."""
    raylet, before, deadline = cluster.head_node.all_processes["raylet"][0].process.pid, 0, time.monotonic() + LIMIT_S
    for count in counts:
        if count > before:
            patiently(partial(cluster.add_node, num_cpus=(count - before) * workers))
            before = count
        while len(list(folder.glob("out/cells/*/metrics.jsonl"))) < count or "needs" not in (folder / "log").read_text():
            if driver.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cells do not train: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(1)
        time.sleep(10)  # helpers start beside the training
        found = workers_on(raylet)
        processes = {name: round(size, 1) for name, size in sorted(found.items())}
        emit("head_memory", f"{count} cells of {workers} workers", "mb", sum(found.values()), processes=processes)


if __name__ == "__main__":
    main(sys.argv[1:])
