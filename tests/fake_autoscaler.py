"""A Ray cluster of this machine with Ray's own autoscaler, whose fake nodes are processes here."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket

import ray

# Ray ends a node whose agents take 15 seconds to start, as on a busy machine. The autoscaler starts another one.
HEAD_STARTS = 6
REPOSITORY = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_processes(folder: str) -> None:
    """End the processes of a cluster by its temporary folder."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if folder in " ".join(process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def autoscaling_cluster(nodes: int = 3, cpus: int = 1, idle_s: float = 20) -> Iterator[str]:
    """The address of a cluster of a head without CPUs and 0 to `nodes` nodes. An unused node leaves after `idle_s` seconds.

    Ray's own `AutoscalingCluster` begins and ends with `ray stop`, which ends every Ray of the machine. Here the processes end
    whose command line has the temporary folder of this cluster.
    """
    folder, address = tempfile.mkdtemp(prefix="ray-as-"), f"127.0.0.1:{free_port()}"
    config = {
        "cluster_name": "fake",
        "max_workers": nodes,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",
            "module": "light_nodes.LightNodes",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": cpus, "object_store_memory": 100 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": nodes,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "upscaling_speed": 1.0,
        "docker": {},
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }
    (Path(folder) / "cluster.json").write_text(json.dumps(config))
    command = [
        "-c", "import light_nodes; from ray.scripts.scripts import main; main()", "start", "--head", "--block",
        f"--autoscaling-config={folder}/cluster.json", "--num-cpus=0", "--node-ip-address=127.0.0.1",
        f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}", "--include-dashboard=false",
        f"--ray-client-server-port={free_port()}", f"--object-store-memory={100 << 20}", "--disable-usage-stats",
    ]  # fmt: skip
    environment = os.environ | {
        "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0",
        "RAY_health_check_failure_threshold": "60",  # a busy machine is no dead node
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)
    try:
        for attempt in range(HEAD_STARTS):
            with open(Path(folder) / "head.log", "w") as log:
                head = subprocess.Popen(
                    [sys.executable, *command], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            while head.poll() is None and "Ray runtime started" not in (Path(folder) / "head.log").read_text():
                time.sleep(0.2)
            if head.poll() is None:
                break
            end_processes(folder)
            assert attempt < HEAD_STARTS - 1, (Path(folder) / "head.log").read_text()
        yield address
    finally:
        end_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)


class NodeCount:
    """Counts the nodes of the connected cluster besides its head, every second: `seen` has (seconds, nodes) of each change."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self._started, self._stop = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> "NodeCount":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> int:
        return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())

    def _count(self) -> None:
        while not self._stop.wait(1):
            count = self.now()
            if not self.seen or self.seen[-1][1] != count:
                self.seen.append((round(time.monotonic() - self._started), count))

    def wait_for(self, count: int, seconds: float = 120) -> None:
        """Wait until there are so many nodes, and `seen` ends with this number."""
        deadline = time.monotonic() + seconds
        while self.now() != count or not self.seen or self.seen[-1][1] != count:
            assert time.monotonic() < deadline, self.seen
            time.sleep(0.5)
