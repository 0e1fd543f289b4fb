"""Commands on a cluster that grows, for test_autoscaling.py: `python autoscaling_jobs.py JOB FOLDER`.

The result is in FOLDER/result.json, the data set in FOLDER/data. The cluster has a head without CPUs and 0 to 3 nodes of one CPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from fake_autoscaler import REPOSITORY, NodeCount, autoscaling_cluster
from waiting import wait_for

from treeproc.stages import ray_job


def start(folder: Path, script: str, *arguments: str) -> subprocess.Popen:
    """A command; what it says goes to FOLDER/log."""
    command = [sys.executable, str(REPOSITORY / "workflows" / script), *arguments]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def settings(folder: Path) -> list[str]:
    return ["--config", str(folder / "settings.yaml"), "--out", str(folder / "out"), f"data={folder / 'data'}"]


def say(folder: Path) -> str:
    return (folder / "log").read_text()


def from_zero_and_back(folder: Path, script: str) -> dict:
    """A command to its end, and the nodes until they are gone."""
    with NodeCount() as nodes:
        command = start(folder, script, *settings(folder))
        status = command.wait(1200)
        nodes.wait_for(0, 300)
    return {"status": status, "nodes": nodes.seen, "said": say(folder)}


def study(folder: Path) -> dict:
    return from_zero_and_back(folder, "scaling.py")


def search(folder: Path) -> dict:
    return from_zero_and_back(folder, "tune.py")


class Slow:
    """A worker whose jobs take some seconds."""

    def __call__(self, number: int) -> int:
        time.sleep(5)
        return number


def preprocessing(folder: Path) -> dict:
    """The pool of actors of preprocessing, and its tasks."""
    found = {}
    for kind in ("actors", "tasks"):
        with NodeCount() as nodes:
            jobs = [{"number": number} for number in range(24)]
            results = sorted(result for _, result in ray_job.run_on_ray(Slow, {}, jobs, folder=folder, in_tasks=kind == "tasks"))
            nodes.wait_for(0, 400)
        found[kind] = {"results": results, "nodes": nodes.seen}
    return found


def killed(folder: Path) -> dict:
    """A study whose driver is killed while its demands wait: the cluster gets no more nodes."""
    with NodeCount() as nodes:
        command = start(folder, "scaling.py", *settings(folder))
        wait_for(lambda: nodes.now() > 0, command, 600, folder / "log", pause=0.5)
        command.send_signal(signal.SIGKILL)
        command.wait()
        nodes.wait_for(0, 400)
        time.sleep(15)
    return {"nodes": nodes.seen}


def waiting(folder: Path) -> dict:
    """A training that the cluster can never hold: what it says, and how long it takes to stop."""
    command = start(folder, "train_wmt.py", *settings(folder), "workers=4")
    wait_for(lambda: "waiting for nodes" in say(folder), command, 600, folder / "log")
    command.terminate()
    began = time.monotonic()
    status = command.wait(120)
    return {"status": status, "seconds": time.monotonic() - began, "said": say(folder)}


def serving(folder: Path) -> dict:
    """A server of FOLDER/run with two replicas, each on a node of its own, until it answers."""
    with NodeCount() as nodes:
        command = start(folder, "serve.py", "--out", str(folder / "run"), "replicas=2", "port=0")
        wait_for(lambda: "http://" in say(folder), command, 600, folder / "log")
        command.send_signal(signal.SIGINT)
        command.wait(60)
        nodes.wait_for(0, 400)
    return {"nodes": nodes.seen, "said": say(folder)}


if __name__ == "__main__":
    job = {job.__name__: job for job in (study, search, preprocessing, killed, waiting, serving)}[sys.argv[1]]
    place = Path(sys.argv[2])
    with autoscaling_cluster() as address:
        os.environ["RAY_ADDRESS"] = address
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        # Not on standard output, where Ray writes notes of its own.
        (place / "result.json").write_text(json.dumps(job(place)))
        ray.shutdown()
