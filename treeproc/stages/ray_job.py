"""Shard workers on Ray Data: one row is one job, one actor or task works on one job at a time.

Ray Data's own sinks are not used: their file names are random and a crash leaves duplicates. A
worker writes its shard atomically under a fixed name and returns the sidecar, so that a rerun does
what is missing and nothing else.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.data
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from treeproc.common.files import TEMPORARY_PREFIX, atomic_write
from treeproc.common.messages import format_seconds, tell, warn
from treeproc.common.provenance import Meter
from treeproc.common.ray_session import can_grow, describe_wait, start_ray
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import retry_limit
from treeproc.shards.store import ShardRecord
from treeproc.stages.inputs import Inputs, input_stamp
from treeproc.stages.ray_late_jobs import MEDIANS, first_results

logger = logging.getLogger(__name__)

# Jobs that Ray Data gets at once. It holds some kilobytes for each, and new actors load their models again for the next ones.
MOST_JOBS = 32_768
# Actors that ask for room at a time. Those without room have no process.
MOST_PENDING = 64
# A network file system may show a new file a moment later to another machine.
_LOOKS, _PAUSE_S = 3, 1.0
# A node answers in this time, beside that in which it asks an object store again. Ray gives its environment ten minutes.
_ANSWER_S = 900.0
# Marks the record of a shard in the JSON of a job. Its blank makes it none of the words of a text.
_RECORD = "shard record"


class _JobRunner:
    """Builds the worker once, then processes one row after the other. It is a Ray actor, or serves the tasks of one process."""

    def __init__(self, worker_class: type, arguments: dict, token: AnyPath):
        self._worker, self._error, self._meter = None, "", Meter()
        try:
            # Nodes may join while the job runs, so every process looks again.
            if problem := _unseen_folder(token):
                raise UserError(problem)
            self._worker = worker_class(**arguments)
        except UserError as error:  # raised here, Ray would print its own traceback
            self._error = str(error)

    def __call__(self, row: dict) -> dict:
        if self._worker is None:
            return {"result": "", "error": self._error, "usage": "", "number": -1}
        job = from_json(row["job"])
        began = time.monotonic()
        try:
            result = to_json(self._worker(**job))
            usage = self._meter.usage() | {"seconds": time.monotonic() - began}
            return {"result": result, "error": "", "usage": json.dumps(usage), "number": row["number"]}
        except UserError as error:
            return {"result": "", "error": str(error), "usage": "", "number": row["number"]}


# The runner of this process, by the token of the step that its tasks belong to.
_of_tasks: dict[str, _JobRunner] = {}


def _run_in_task(row: dict, worker_class: type, arguments: dict, token: AnyPath) -> dict:
    """Process one row in a task. Ray runs the tasks of later steps in the same processes, which keep the latest worker alone."""
    if token.name not in _of_tasks:
        _of_tasks.clear()
        _of_tasks[token.name] = _JobRunner(worker_class, arguments, token)
    return _of_tasks[token.name](row)


def to_json(value: object) -> str:
    """Return a job, or what its worker returned, as JSON. It may hold records of shards."""
    return json.dumps(value, default=_marked)


def _marked(value: object) -> dict:
    if not isinstance(value, ShardRecord):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return {_RECORD: vars(value)}


def from_json(text: str) -> Any:
    """Read what `to_json` wrote."""
    return json.loads(text, object_hook=lambda found: ShardRecord(**found[_RECORD]) if found.keys() == {_RECORD} else found)


def _set_up_ray_data() -> None:
    """Let Ray Data print no progress, and give all cores to the one operator of a pipeline.

    Its reservations between operators left every second core idle where tasks take a tenth of a second.
    """
    context = ray.data.DataContext.get_current()
    context.op_resource_reservation_enabled = False
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _unseen_folder(token: AnyPath) -> str:
    """Return the problem of a node that does not see the folder of the token; empty when it sees it."""
    for look in range(_LOOKS):
        try:
            if token.exists():
                return ""
        except UserError as error:
            return f"node {ray.util.get_node_ip_address()}: {error}"
        time.sleep(_PAUSE_S * (look + 1 < _LOOKS))
    return (
        f"node {ray.util.get_node_ip_address()} does not see {token.parent}: put --out on storage that all nodes share, or in an "
        "object store (s3://..., gs://..., az://...)"
    )


@contextmanager
def _shared(folder: AnyPath) -> Iterator[AnyPath]:
    """Write a token in `folder` that every node must see. Raises UserError for the first node of several that does not."""
    token = folder / f"{TEMPORARY_PREFIX}shared-{uuid.uuid4().hex}"
    atomic_write(token, b"")
    try:
        if problems := list(filter(None, _on_all_nodes(_unseen_folder, token))):
            raise UserError(problems[0])
        yield token
    finally:
        token.unlink(missing_ok=True)


def _on_all_nodes(function: Callable, *arguments: object) -> list:
    """Run a function on every node. Return the results of the nodes that answer; none if this machine is the only one.

    Raises UserError for a living node that does not answer.
    """
    nodes = {node["NodeID"]: node.get("NodeManagerAddress", "") for node in ray.nodes() if node["Alive"]}
    if len(nodes) == 1:
        return []
    probe = ray.remote(num_cpus=0)(function)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    answers, found = [probe.options(scheduling_strategy=place).remote(*arguments) for place in places], []
    for node, answer in zip(nodes, answers, strict=True):
        try:
            found.append(ray.get(answer, timeout=_ANSWER_S + _LOOKS * retry_limit()))
        except RayTaskError:  # of the function
            raise
        except GetTimeoutError:
            raise UserError(
                f"node {nodes[node]} lives, but does not answer; its storage may hang: mount it again, or end Ray on that node, "
                "then run the same command again"
            ) from None
        except RayError:  # the node has died just now, and no work goes there
            logger.warning("warning: node %s of the cluster does not answer; the job goes on without it", node[:8])
    return found


def all_nodes_see(inputs: Inputs) -> bool:
    """Return whether every node sees the input files that this process sees."""
    start_ray()
    here, inputs = input_stamp(inputs), inputs.with_absolute_paths()
    return all(there == here for there in _on_all_nodes(_stamps_there, inputs))


def _stamps_there(inputs: Inputs) -> str | None:
    """Return the stamps that a node sees; None if an object store refuses it."""
    try:
        return input_stamp(inputs)
    except UserError:
        return None


def actor_pool(gpus_per_actor: float) -> int:
    """Return the number of single-threaded actors to begin with: one a core, or as many as share the GPUs of the cluster.

    Where nodes may join, at least MOST_PENDING: an autoscaler sees those that have no room yet, and starts nodes for them.
    """
    nodes, least = [node["Resources"] for node in ray.nodes() if node["Alive"]], MOST_PENDING if can_grow() else 1
    if gpus_per_actor and any(node.get("GPU") for node in nodes):
        return max(least, sum(int(node.get("GPU", 0) / gpus_per_actor) for node in nodes))
    return max(least, sum(int(node.get("CPU", 0)) for node in nodes))


def run_on_ray(
    worker_class: type,
    arguments: dict,
    jobs: Sequence[dict],
    *,
    folder: AnyPath,
    in_tasks: bool = False,
    gpus_per_actor: float = 0.0,
    count_usage: Callable[[dict], None] = lambda usage: None,
    describe: Callable[[int], str] = lambda number: f"job {number}",
) -> Iterator[tuple[int, Any]]:
    """Yield the number of every job and what its worker returned, JSON with records of shards, in any order.

    A job is the keyword arguments of one call of the worker. The pool asks for the room of many actors and grows with the
    cluster; actors ask for GPUs where the cluster has any. With `in_tasks`, the processes stay for the next call: right for
    workers that are built in a moment. Without, late jobs are tried twice (`first_results`), and `describe` names them.
    `count_usage` gets the `Meter.usage` of a process for a job, with the `seconds` that the job took.
    Raises UserError when a worker does, and before any work when a node does not see `folder`.
    """
    if not jobs:
        return
    start_ray()
    if not ray.cluster_resources().get("CPU"):
        tell(describe_wait([{"CPU": 1.0}], time.time()))
    _set_up_ray_data()
    with _shared(folder) as token:
        for first in range(0, len(jobs), MOST_JOBS):
            numbers = range(first, min(first + MOST_JOBS, len(jobs)))
            rows = [{"job": to_json(jobs[number]), "number": number} for number in numbers]
            source = ray.data.from_items(rows, override_num_blocks=len(rows))
            del rows
            given = (worker_class, arguments, token)
            gpus = gpus_per_actor if gpus_per_actor and ray.cluster_resources().get("GPU") else None
            # Both ways ask for a whole CPU for each process, so that no core gets two. Nothing else of these pipelines needs one.
            if in_tasks:
                results = source.map(_run_in_task, fn_args=given, compute=ray.data.TaskPoolStrategy(), num_cpus=1.0)
            else:
                results = _map_in_actors(source, given, len(numbers), gpus)
            results.set_name(worker_class.__name__)  # in Ray's dashboard

            def try_again(number: int, median: float, given: tuple = given, gpus: float | None = gpus) -> ray.ObjectRef:
                usual = f"{describe(number)} takes more than {MEDIANS} times as long as others ({format_seconds(median)})"
                warn(f"warning: {usual}; another process tries it, too")
                task = ray.remote(num_cpus=1.0, num_gpus=gpus, max_calls=1)(_run_in_task)
                return task.remote({"job": to_json(jobs[number]), "number": number}, *given)

            for row in results.iter_rows() if in_tasks else first_results(results, numbers, try_again):
                if row["error"]:
                    raise UserError(row["error"])
                count_usage(json.loads(row["usage"]))
                yield row["number"], from_json(row["result"])


def _map_in_actors(source: ray.data.Dataset, given: tuple, jobs: int, gpus: float | None) -> ray.data.Dataset:
    """Run jobs in actors, which Ray Data adds where resources are free. Ray's dashboard has the name of the worker."""
    runner = type(given[0].__name__, (_JobRunner,), {})
    return source.map(
        runner,
        fn_constructor_args=given,
        compute=ray.data.ActorPoolStrategy(
            min_size=min(actor_pool(gpus or 0.0), jobs), max_size=jobs, max_tasks_in_flight_per_actor=2
        ),
        num_cpus=1.0,
        num_gpus=gpus,
    )
