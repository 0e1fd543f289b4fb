"""The training loop on Ray Train workers, on CPU (gloo) or GPU (NCCL).

Ray starts the workers, and ends all of them if one dies. The driver starts them again as long as they make progress. The
checkpoints are those of this package. New workers continue from the latest complete one in the run folder, which may be in an
object store.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import ray
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig

from treenet.config import TrainConfig
from treenet.jobs.ray_interrupt import InterruptibleTrainer, callbacks_into
from treenet.jobs.ray_room import POLL_S as ROOM_POLL_S
from treenet.jobs.ray_room import (
    Room,
    Rooms,
    bundles_of,
    given_room,
    refuse_more_than_there_is,
    take_given,
    worker_resources,
)
from treenet.jobs.ray_watch import Heart, Watch
from treenet.layers.backend import best_precision_here
from treenet.runs.metrics_log import describe_metrics, read_metrics
from treenet.runs.mirror import RAY_FOLDER, RunMirror, mirror_of
from treenet.runs.ray_metrics import count_failure
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks, TrainingFailed, flight_recorder
from treenet.training.trainer import TrainOutcome, train
from treeproc.common.command_line import describe_refusal
from treeproc.common.errors import first_line
from treeproc.common.files import locked
from treeproc.common.messages import Progress, phase, tell, warn
from treeproc.common.provenance import Meter
from treeproc.common.ray_session import cause_of, describe_wait, start_ray
from treeproc.common.settings import UserError, build_settings
from treeproc.common.storage import RemotePath, as_path, place_for_libraries

# After so many failures in a row without a new checkpoint, a run gives up.
MAX_FAILURES = 3
# Longer than any save of a checkpoint by rank 0. The other ranks wait during it.
COLLECTIVE_TIMEOUT_S = 900
# Seconds between two checks for new metrics, on disk and in an object store.
POLL_S, REMOTE_POLL_S = 1.0, 5.0
# After a kill of the driver, its workers live for some seconds.
ORPHANS_S = 120
_STARTING = "starting workers, building the plan, trying the largest batch"
_RESTARTING = "restarting workers"


def train_with_ray(config: TrainConfig, mirror: RunMirror, stop_file: Path, count_usage: Callable[[dict], None]) -> TrainOutcome:
    """Run `config.workers` workers to the end. All nodes see a local run folder and `config.data` under the same absolute paths.

    `count_usage` gets the `Meter.usage` of every worker that finishes. Lost workers and nodes are replaced. There is no limit on
    their number, as long as a new checkpoint appears between two failures, or between a few. Raises UserError for problems that a
    user can resolve, also if a worker finds them.
    """
    start_ray()
    with Watch(config.watch, mirror.out, stop_file.exists) as watch:
        mirror.push()
        try:
            with _Follow(config, mirror, stop_file, watch) as follow:
                outcome = _fit_with_restarts(config, mirror, stop_file, follow, count_usage)
        finally:
            mirror.remove_ray_folder()
            mirror.forget_stop()
        mirror.pull()
    if "error" in outcome:
        raise UserError(outcome["error"])
    return TrainOutcome(**outcome)


def _fit_with_restarts(
    config: TrainConfig,
    mirror: RunMirror,
    stop_file: Path,
    follow: "_Follow",
    count_usage: Callable[[dict], None] = lambda usage: None,
) -> dict:
    """Return the result of `_work`, after restarts.

    Ray's own limit counts all failures, and weeks on spot nodes would reach it.
    """
    failures, reached = 0, mirror.last_step()
    while True:
        try:
            outcome = _fit(config, mirror, stop_file, follow)
            for usage in outcome.pop("usage", ()):
                count_usage(usage)
            if not outcome.pop("node_ends", False) or stop_file.exists():
                return outcome
            tell(f"the cluster took a node back; other workers continue from step {outcome['step']}")
            follow.begin(_RESTARTING)
        except (TrainingFailedError, RayActorError) as error:  # the second: Ray Train's controller died
            lost = list(error.worker_failures.items()) if isinstance(error, WorkerGroupError) else []
            for _, failure in lost:
                if isinstance(failure, UserError):
                    raise UserError(str(failure)) from None
            if stop_file.exists():  # the workers ended before they began, or the stop waited for lost ones
                return _stopped(mirror)
            before, reached = reached, mirror.last_step()
            failures = 1 if reached > before else failures + 1
            if failures > MAX_FAILURES:
                raise
            what, failure = (f"worker {lost[0][0]}", lost[0][1]) if lost else ("training", cause_of(error))
            warn(f"warning: {what} failed: {first_line(failure)[:200]}; new workers continue from step {reached}")
            count_failure(follow.name)
            follow.begin(_RESTARTING)


def _stopped(mirror: RunMirror) -> dict:
    return {"step": mirror.last_step(), "finished": False}


def _wait_for_room(config: TrainConfig, stop_file: Path, follow: "_Follow") -> Room | None:
    """Return the room for a group of workers, and show what it waits for; None once `stop_file` is there."""
    refuse_more_than_there_is(config)
    what = follow.phase
    with Rooms(bundles_of(config)) as rooms:
        rooms.want(1)
        while not stop_file.exists():
            if room := rooms.take():
                follow.show_phase(what)
                return room
            follow.show_phase(rooms.describe())
            time.sleep(ROOM_POLL_S)
    return None


def _fit(config: TrainConfig, mirror: RunMirror, stop_file: Path, follow: "_Follow") -> dict:
    """Run one group of workers, from its start to its end."""
    given = take_given()  # its owner gives it back, unless the workers fail or a node ends
    room = given or _wait_for_room(config, stop_file, follow)
    if room is None:
        return _stopped(mirror)
    elastic = 0 < config.min_workers < config.workers
    workers = (config.min_workers, config.workers) if elastic else config.workers
    notes, file_system = place_for_libraries(mirror.out / RAY_FOLDER)
    name = f"{follow.name}-{time.time_ns()}"  # with an earlier name, Ray would restore its own record of that run
    trainer = InterruptibleTrainer(
        _work,
        train_loop_config={"config": config.model_dump(mode="json"), "out": str(mirror.out), "stop_file": stop_file.name},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=config.use_gpu, resources_per_worker=worker_resources(config)),
        run_config=RunConfig(
            name=name,
            worker_runtime_env={"env_vars": flight_recorder(mirror.folder)} if config.use_gpu else {},
            callbacks=callbacks_into(room),
            storage_path=notes,
            storage_filesystem=file_system,
            # Nodes that announce their end do not count.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=MAX_FAILURES),
        ),
        torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
    )
    try:
        with follow.watch.over(trainer, name):
            outcome = trainer.fit().return_value
    except BaseException:
        room.give_back()
        raise
    if not given or outcome.get("node_ends"):
        room.give_back()
    return outcome


class _Follow:
    """Prints in the driver the lines that rank 0 writes to metrics.jsonl, because workers have no terminal.

    It also tells rank 0 when `stop_file` appears, because rank 0 on another machine does not see that file.
    """

    def __init__(self, config: TrainConfig, mirror: RunMirror, stop_file: Path, watch: Watch):
        lines = read_metrics(mirror.out)
        self.name, self.watch = mirror.out.name, watch
        self._mirror, self._stop_file, self._told = mirror, stop_file, False
        self._progress = Progress("train", config.max_steps, unit="steps", initial=lines[-1]["step"] if lines else 0)
        self._stop, self._showing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "_Follow":
        self._progress.__enter__()
        self.show_phase(_STARTING)
        self._thread.start()
        return self

    @property
    def phase(self) -> str:
        return self._progress.phase

    def show_phase(self, name: str) -> None:
        """Show what the workers do before their first update."""
        if name != self._progress.phase:
            self._progress.show_phase(name)

    def begin(self, phase: str) -> None:
        """Begin again: rate and time left of the workers before do not count."""
        self._show()
        self.show_phase(phase)
        self._progress.began()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()
        self._progress.__exit__(*exception)

    def _follow(self) -> None:
        shown = time.monotonic()
        while not self._stop.wait(POLL_S):
            if self._stop_file.exists() and not self._told:
                with suppress(UserError):  # a store that does not answer is asked again
                    self._mirror.ask_to_stop()
                    self._told = True
            if time.monotonic() - shown >= (REMOTE_POLL_S if isinstance(self._mirror.out, RemotePath) else 0):
                self._show()
                shown = time.monotonic()

    def _show(self) -> None:
        with self._showing, suppress(UserError):  # a store that does not answer is read again at the next look
            lines = [line for line in read_metrics(self._mirror.out) if line["event"] == "train"]
            if lines and lines[-1]["step"] != self._progress.count:
                last = lines[-1]
                if self._progress.phase:
                    self._progress.show_phase("")
                    self._progress.began(sum(line["seconds"] for line in lines if line["step"] > self._progress.count))
                self._progress.update(last["step"] - self._progress.count, postfix=describe_metrics(last))


def precision_of_workers(config: TrainConfig) -> str:
    """Ask one worker for the value of `precision: auto` on the workers' GPUs. A given room has all GPUs that may be free."""
    start_ray()
    refuse_more_than_there_is(config)
    room, ask = given_room(), ray.remote(num_cpus=0, num_gpus=1)(best_precision_here)
    if room:
        return ray.get(ask.options(**room.in_first_bundle()).remote())
    with phase(describe_wait([worker_resources(config)], time.time())):
        return ray.get(ask.remote())


def _work(settings: dict) -> dict:
    """Run one worker. Returns the outcome, or an error that a restart would only repeat."""
    out, context = as_path(settings["out"]), ray.train.get_context()
    mirror, rank = mirror_of(out), context.get_world_rank()
    if not isinstance(out, RemotePath) and not out.is_dir():
        raise UserError(
            f"node {ray.util.get_node_ip_address()} does not see {out}: put --out and data on storage that all nodes share, or "
            "in an object store (s3://..., gs://..., az://...)"
        )
    with (
        closing(Heart(settings["out"], context.get_experiment_name(), rank, context.get_world_size())) as heart,
        _only_writer(mirror.folder) if rank == 0 else nullcontext(),
    ):
        if isinstance(out, RemotePath):
            ray.train.collective.barrier()  # no upload is running now, so all ranks get the same files
            mirror.pull()
        config = build_settings(TrainConfig, settings["config"], str(out / "config.yaml"))
        stop_file = mirror.folder / settings["stop_file"]
        with mirror.watch(stop_file) if rank == 0 else nullcontext():
            return _train_rank(config, mirror.folder, stop_file, heart)


def _train_rank(config: TrainConfig, run_dir: Path, stop_file: Path, heart: Heart) -> dict:
    """Train until the end, until the stop file exists, or until a node announces its end, as spot nodes do two minutes before."""
    announced, last, meter = threading.Event(), {}, Meter()

    def report(metrics: dict) -> None:
        last.update(metrics)
        if ray.train.get_preemption_info() is not None:  # all ranks ask together
            announced.set()

    def should_stop() -> bool:
        heart.update()
        return rank == 0 and (announced.is_set() or stop_file.exists())

    if not config.use_gpu:
        torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    try:
        outcome = train(
            build_task(config),
            run_dir,
            rank=rank,
            world_size=context.get_world_size(),
            device=ray.train.torch.get_device(),
            should_stop=should_stop,
            report=report,
            show_progress=False,
        )
    except TrainingFailed as error:
        return {"error": str(error)}
    except OSError as error:  # an error of one rank; the others wait for it, and Ray ends them
        if reason := describe_refusal(error):
            raise UserError(reason) from None
        raise
    heart.phase = "the end of the rank"
    # Once: Ray takes one report every two seconds, and a rank with a second one waits. metrics.jsonl has all lines.
    ray.train.report(last)
    usage = Ranks(rank, context.get_world_size(), ray.train.torch.get_device()).gather(meter.usage())
    return {**vars(outcome), "node_ends": announced.is_set() and not outcome.finished, "usage": usage}


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Let only rank 0 write, after the rank 0 of a killed driver has ended. Otherwise both would write the same files."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    with locked(folder / "checkpoints", wait_s=ORPHANS_S):
        yield
