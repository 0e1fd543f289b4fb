"""Training on Ray clusters and full disks, for test_training_faults.py: `python training_jobs.py JOB FOLDER`.

A process of its own, so that no other test's Ray is in the way. The data set is FOLDER/data, the run FOLDER/run, what
happened is written to FOLDER/result.json.
"""

import ctypes
import io
import json
import os
import resource
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from socket import socket

import torch
from cluster_jobs import CLONE_NEWNS, MS_PRIVATE, MS_REC
from metadata_service import metadata_service
from toyruns import make_config
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.jobs import ray_train
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import checkpoint_folders, checkpoint_step, is_complete
from treeproc.common.messages import messages_shown
from treeproc.common.settings import UserError, dump_settings

REPOSITORY = Path(__file__).resolve().parent.parent


def tiny_config(data: Path, *overrides: str) -> TrainConfig:
    """Sixty steps with twelve checkpoints, all of them kept."""
    changes = ("max_steps=60", "validate_every=60", "keep_checkpoints=20", "average_checkpoints=2")
    return make_config(data, *changes, *overrides)


def add_node(cluster):
    return cluster.add_node(num_cpus=1)


def two_nodes(folder: Path, disturb, *overrides: str, replace: bool = True, alone: bool = False, start=add_node) -> dict:
    """Two workers on two nodes of a core each; `disturb(cluster, second node)` after a checkpoint, then another node comes.

    If it begins `alone`, there is no second node before, which `start(cluster)` returns.
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = None if alone else start(cluster)
    os.environ |= {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
    settings = ("workers=2", "max_steps=400", "checkpoint_every=20", "keep_checkpoints=20", "log_every=10", *overrides)
    config = tiny_config(folder / "data", *settings)
    message = io.StringIO()
    # Ray starts nodes from the main thread alone.
    with ThreadPoolExecutor(1) as driver, redirect_stderr(message), messages_shown():
        try:
            training = driver.submit(run_training, config, folder / "run")
            wait_for(lambda: checkpoint_folders(folder / "run"), seconds=260)
            disturb(cluster, second)
            step = checkpoint_step(checkpoint_folders(folder / "run")[-1])
            if replace:
                add_node(cluster)
            return {"disturbed_at": step, "step": training.result().step, "said": message.getvalue()}
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)  # before Ray ends this process
            raise
        finally:
            ray.shutdown()
            cluster.shutdown()


def kill_node(cluster, node) -> None:
    cluster.remove_node(node, allow_graceful=False)


def lost_node(folder: Path) -> dict:
    """SIGKILL of a node."""
    return two_nodes(folder, kill_node)


def fewer_nodes(folder: Path) -> dict:
    """The same, and no other node comes."""
    return two_nodes(folder, kill_node, "min_workers=1", replace=False)


def more_nodes(folder: Path) -> dict:
    """One of two workers begins on the only node, and another node comes; Ray looks for it every two seconds, not every 60."""
    ray_train.ScalingConfig = partial(ray_train.ScalingConfig, elastic_resize_monitor_interval_s=2)
    return two_nodes(folder, lambda cluster, second: None, "min_workers=1", "max_steps=1000", alone=True)


def called_back(folder: Path) -> dict:
    """EC2 says that it takes a spot node back in two minutes."""

    def announce(cluster, node) -> None:
        with metadata_service() as service:
            service.announce(120)
            command = [sys.executable, REPOSITORY / "workflows" / "clusters" / "spot_notice.py"]
            options = [f"--address={cluster.address}", f"--node-id={node.node_id}"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = os.environ | {"PATH": path, "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}
            subprocess.run([*command, *options], env=environment, check=True, timeout=100)

    return two_nodes(folder, announce)


def deleted_pod(folder: Path) -> dict:
    """Kubernetes deletes the pod of a node: SIGTERM to the command with which KubeRay starts it, and SIGKILL much later."""
    environment = os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "280"}

    def start(cluster) -> subprocess.Popen:
        ray = f"{Path(sys.executable).parent}/ray start --address={cluster.address} --num-cpus=1 --dashboard-agent-listen-port=0"
        return subprocess.Popen(["bash", "-c", "--", f"ulimit -n 65536; {ray} --block"], env=environment)

    def delete(cluster, pod) -> None:
        pod.terminate()
        pod.wait(150)  # it ends when the worker on it has ended

    return two_nodes(folder, delete, start=start)


def submit_when_ready(client, command: str, environment: dict) -> str:
    """Submit a job as soon as the cluster has the agent that starts it, some seconds after the rest."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return client.submit_job(entrypoint=command, runtime_env=environment)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def submitted(folder: Path) -> dict:
    """A job that is submitted and stopped, and the same command again from the command line; the cluster asks for a token."""
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": port}
    cluster, address = Cluster(initialize_head=True, head_node_args=head), f"http://127.0.0.1:{port}"
    os.environ["RAY_ADDRESS"] = address  # goes before what clients are given, and may name another cluster
    config = tiny_config(folder / "data", "workers=1", "max_steps=100000", "checkpoint_every=10")
    (folder / "config.yaml").write_text(dump_settings(config))
    command = f"{sys.executable} workflows/train_wmt.py --config {folder / 'config.yaml'} --out {folder / 'run'}"
    environment = {"working_dir": str(REPOSITORY), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "100"}}
    try:
        try:
            urllib.request.urlopen(f"{address}/api/jobs/", timeout=30)
            without_token = 200
        except urllib.error.HTTPError as error:
            without_token = error.code
        client = JobSubmissionClient(address)
        job = submit_when_ready(client, command, environment)
        wait_for(lambda: checkpoint_folders(folder / "run"), seconds=260)
        client.stop_job(job)
        deadline = time.monotonic() + 100
        while client.get_job_status(job) not in (JobStatus.STOPPED, JobStatus.FAILED) and time.monotonic() < deadline:
            time.sleep(0.2)
        stopped = client.get_job_info(job)
        step = checkpoint_step(checkpoint_folders(folder / "run")[-1])
        again = ["job", "submit", "--address", address, "--runtime-env-json", json.dumps(environment), "--"]
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *again, *command.split(), f"max_steps={step + 5}"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        return {
            "without_token": without_token,
            "stopped": str(stopped.status),
            "step": step,
            "first": client.get_job_logs(job)[-2000:],
            "status": done.returncode,
            "output": done.stdout + done.stderr,
        }
    finally:
        cluster.shutdown()


def full_disk(folder: Path) -> dict:
    """A run on a file system of one megabyte, of which most is taken after the first checkpoint."""
    libc, run_dir = ctypes.CDLL(None, use_errno=True), folder / "run"
    run_dir.mkdir()
    place = os.fsencode(run_dir)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"none", place, b"tmpfs", 0, b"size=1m")
    ):
        return {"skip": "no rights"}
    run_training(tiny_config(folder / "data", "max_steps=5"), run_dir)
    room = os.statvfs(run_dir)
    (run_dir / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - 50_000))
    return refused(folder)


def limited_files(folder: Path) -> dict:
    """The same where nothing can be mounted: files may no longer grow beyond 50 kB."""
    run_training(tiny_config(folder / "data", "max_steps=5"), folder / "run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    return refused(folder)


def refused(folder: Path) -> dict:
    """The error of training into a full folder, and the checkpoints that it leaves."""
    try:
        run_training(tiny_config(folder / "data", "max_steps=40"), folder / "run")
        error = ""
    except UserError as message:
        error = str(message)
    return {
        "error": error,
        "whole": [path.name for path in checkpoint_folders(folder / "run") if is_complete(path)],
        "all": sorted(path.name for path in (folder / "run" / "checkpoints").iterdir() if not path.name.startswith(".lock")),
    }


def run_and_note(name: str, folder: Path) -> None:
    """Write what the job returns to a file, not to standard output, where Ray writes notes of its own."""
    torch.set_num_threads(1)
    jobs = (lost_node, fewer_nodes, more_nodes, called_back, deleted_pod, submitted, full_disk, limited_files)
    job = {job.__name__: job for job in jobs}[name]
    (folder / "result.json").write_text(json.dumps(job(folder)))


if __name__ == "__main__":
    run_and_note(sys.argv[1], Path(sys.argv[2]))
