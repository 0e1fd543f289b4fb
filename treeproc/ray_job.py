"""Shard workers on Ray Data: one row is one shard, one actor works on one shard at a time.

Ray Data's own sinks are not used: their file names are random and a crash leaves duplicates. A
worker writes its shard atomically under a fixed name and returns the sidecar, so that a rerun does
what is missing and nothing else.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import ray
import ray.data

from treeproc.ray_session import start_ray
from treeproc.settings import UserError
from treeproc.shards import ShardRecord


class _ShardActor:
    """Runs in an actor: builds the worker once, then does one row after the other."""

    def __init__(self, worker_class: type, arguments: dict):
        self._worker, self._error = None, ""
        try:
            self._worker = worker_class(**arguments)
        except UserError as error:  # raised here, Ray would print its own traceback
            self._error = str(error)

    def __call__(self, row: dict) -> dict:
        if self._worker is None:
            return {"record": "", "error": self._error}
        job = json.loads(row["job"])
        job = {name: ShardRecord(**value) if isinstance(value, dict) else value for name, value in job.items()}
        try:
            return {"record": json.dumps(asdict(self._worker(**job))), "error": ""}
        except UserError as error:
            return {"record": "", "error": str(error)}


def _silence_ray_data() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def actor_pool() -> tuple[int, float]:
    """Number of single-threaded actors and the CPUs each one asks for.

    One actor a core; together they leave one CPU of every node to Ray Data's own tasks, which
    would otherwise wait for ever.
    """
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    total, smallest = sum(nodes), min((cpus for cpus in nodes if cpus), default=1)
    if smallest > 1:
        return total, (smallest - 1) / smallest
    return max(1, total - 1), 1.0 if total > 1 else 0.0


def run_shards(worker_class: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[ShardRecord]:
    """Yield the record of every job as its shard lands on disk, in any order.

    A job is the keyword arguments of one call of the worker. Raises UserError when a worker does.
    """
    if not jobs:
        return
    start_ray()
    _silence_ray_data()
    actors, cpus = actor_pool()
    rows = [{"job": json.dumps({k: asdict(v) if isinstance(v, ShardRecord) else v for k, v in job.items()})} for job in jobs]
    records = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        _ShardActor,
        fn_constructor_args=(worker_class, arguments),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows)), max_tasks_in_flight_per_actor=2),
        num_cpus=cpus,
    )
    for row in records.iter_rows():
        if row["error"]:
            raise UserError(row["error"])
        yield ShardRecord(**json.loads(row["record"]))
