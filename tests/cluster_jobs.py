"""Jobs on Ray clusters of several nodes, for test_ray_job.py: `python cluster_jobs.py JOB FOLDER`, result in FOLDER/result.json.

A process of its own, so that no other test's Ray is in the way.
"""

import ctypes
import io
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from treeproc.common.messages import messages_shown
from treeproc.common.settings import UserError
from treeproc.shards.store import ShardRecord
from treeproc.stages import ray_job, ray_late_jobs
from treeproc.stages.inputs import Inputs, SplitFiles

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


class Worker:
    """Leaves a note of every start, sends its process a signal once, and works when as many have started as `company` says."""

    def __init__(self, notes: Path, dies: int = 0, company: int = 1):
        self._notes, self._dies, self._company = notes, dies, company
        (notes / f"started-{os.getpid()}").touch()

    def __call__(self, number: int) -> ShardRecord:
        died = self._notes / "died"
        if self._dies and number == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), self._dies)
        time.sleep(0.2)
        deadline = time.monotonic() + 60
        while len(list(self._notes.glob("started-*"))) < self._company and time.monotonic() < deadline:
            time.sleep(0.1)
        return ShardRecord(str(number), "train", number, 1, 0, "", "")


def run(folder: Path, **arguments) -> dict:
    """The result of eight shards: their numbers, the number of started actors, and the error if there was one."""
    notes = folder.parent / "notes"
    notes.mkdir(exist_ok=True)
    try:
        jobs = [{"number": number} for number in range(8)]
        records = [record for _, record in ray_job.run_on_ray(Worker, {"notes": notes, **arguments}, jobs, folder=folder)]
    except UserError as error:
        return {"error": str(error), "started": len(list(notes.glob("started-*")))}
    return {
        "numbers": sorted(record.index for record in records),
        "started": len(list(notes.glob("started-*"))),
        "died": (notes / "died").exists(),
        "left": [path.name for path in folder.iterdir()],
    }


def hide_from_this_thread(folder: Path) -> bool:
    """Lay an empty file system over `folder`, for this thread and the processes that it starts. False without rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    return not (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None)
    )


def nodes(folder: Path) -> dict:
    """One job into a folder that both nodes see, and one into a folder that the second does not see."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    shared, hidden = folder / "shared", folder / "hidden"
    shared.mkdir()
    hidden.mkdir()
    # Ray starts nodes from the main thread alone, so the driver is another one, which keeps its view.
    with ThreadPoolExecutor(1) as driver:
        driver.submit(os.getpid).result()
        try:
            if not hide_from_this_thread(hidden):
                return {"skip": "no rights"}
            cluster.add_node(num_cpus=1)
            os.environ["RAY_ADDRESS"] = cluster.address
            seen = driver.submit(run, shared).result()
            seen["inputs"] = [driver.submit(sees_inputs, place).result() for place in (shared, hidden)]
            for note in (folder / "notes").iterdir():
                note.unlink()
            return {"seen": seen, "blind": driver.submit(run, hidden).result()}
        finally:
            ray.shutdown()
            cluster.shutdown()


def sees_inputs(folder: Path) -> bool:
    """Whether all nodes see an input file in the folder."""
    (folder / "lines").write_text("a\n")
    seen = ray_job.all_nodes_see(Inputs({"test": SplitFiles(source=[folder / "lines"])}, "parallel", "none", None))
    (folder / "lines").unlink()
    return seen


def growing(folder: Path) -> dict:
    """A cluster without a core at the start, and two nodes that come one after the other."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    (folder / "out").mkdir()
    os.environ["RAY_ADDRESS"] = cluster.address
    with ThreadPoolExecutor(1) as driver:
        try:
            job = driver.submit(run, folder / "out", company=2)
            time.sleep(5)
            started = job.done() or ((folder / "notes").exists() and len(list((folder / "notes").iterdir())))
            cluster.add_node(num_cpus=1)
            cluster.add_node(num_cpus=1)
            return {"before": int(started), **job.result()}
        finally:
            ray.shutdown()
            cluster.shutdown()


def dying(folder: Path) -> dict:
    """The actor at work on one shard is killed; Ray Data gets five of the eight shards, and then the others."""
    (folder / "out").mkdir()
    ray_job.MOST_JOBS = 5
    return run(folder / "out", dies=signal.SIGKILL)


def hanging(folder: Path) -> dict:
    """The actor at work on one shard is stopped, so Ray waits for it. It says nothing, and its process stays until the end."""
    (folder / "out").mkdir()
    ray_late_jobs.LEAST_S = 10.0  # the second actor may start late
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with redirect_stderr(io.StringIO()) as said, messages_shown():
        return run(folder / "out", dies=signal.SIGSTOP) | {"said": said.getvalue()}


def tasks(folder: Path) -> dict:
    """Two steps in tasks. In the first one, the process at work on one job is killed."""
    found = []
    for step in ("first", "second"):
        (notes := folder / step).mkdir()
        jobs = [{"number": number} for number in range(8)]
        results = ray_job.run_on_ray(
            Worker, {"notes": notes, "dies": signal.SIGKILL * (step == "first")}, jobs, folder=folder, in_tasks=True
        )
        numbers = sorted(record.index for _, record in results)
        pids = [path.name for path in notes.glob("started-*")]
        found.append({"numbers": numbers, "died": (notes / "died").exists(), "processes": pids})
    return dict(zip(("first", "second"), found, strict=True))


if __name__ == "__main__":
    job = {"nodes": nodes, "growing": growing, "dying": dying, "hanging": hanging, "tasks": tasks}[sys.argv[1]]
    # Not on standard output, where Ray writes notes of its own.
    (Path(sys.argv[2]) / "result.json").write_text(json.dumps(job(Path(sys.argv[2]))))
