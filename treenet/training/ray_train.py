"""The training loop on Ray Train workers, CPU (gloo) or GPU (NCCL).

Ray starts the workers, restarts all of them when one dies, and carries metrics. Checkpoints are
ours: the restarted workers continue from the latest whole one in the run folder.
"""

import os
import shutil
import threading
import time
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from treenet.config import TrainConfig
from treenet.training.logs import describe_metrics, read_metrics
from treenet.training.loop import Outcome, TrainingDiverged, train
from treeproc.progress import Progress
from treeproc.ray_session import start_ray
from treeproc.settings import UserError, build_settings

MAX_FAILURES = 3
# Longer than any save of a checkpoint by rank 0, during which the other ranks wait.
COLLECTIVE_TIMEOUT_S = 900
# How often the driver looks for new metrics.
POLL_S = 1.0


def train_with_ray(config: TrainConfig, run_dir: Path, stop_file: Path) -> Outcome:
    """Run `config.workers` workers to the end; `config.data` and `run_dir` are absolute paths that every node sees.

    Raises UserError for what a user can mend, also when a worker finds it.
    """
    start_ray()
    _check_resources(config)
    trainer = TorchTrainer(
        _work,
        train_loop_config={"config": config.model_dump(mode="json"), "run_dir": str(run_dir), "stop_file": str(stop_file)},
        scaling_config=ScalingConfig(num_workers=config.workers, use_gpu=config.use_gpu),
        run_config=RunConfig(
            name=f"start-{time.time_ns()}",  # a name used before would restore Ray's own record of it
            storage_path=str(run_dir / "ray"),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
        torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
    )
    try:
        with _Follow(config, run_dir):
            outcome = trainer.fit().return_value
    except TrainingFailedError as error:
        for failure in vars(error).get("worker_failures", {}).values():
            if isinstance(failure, UserError):
                raise UserError(str(failure)) from None
        raise
    finally:
        shutil.rmtree(run_dir / "ray", ignore_errors=True)  # holds markers of Ray Train alone
    if "error" in outcome:
        raise UserError(outcome["error"])
    return Outcome(**outcome)


class _Follow:
    """Shows in the driver what rank 0 writes to metrics.jsonl: workers have no terminal of their own."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        lines = read_metrics(run_dir)
        self._run_dir = run_dir
        self._progress = Progress("train", config.max_steps, unit="steps", initial=lines[-1]["step"] if lines else 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "_Follow":
        self._progress.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()
        self._progress.__exit__(*exception)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._show()

    def _show(self) -> None:
        lines = [line for line in read_metrics(self._run_dir) if line["event"] == "train"]
        if lines and lines[-1]["step"] != self._progress.count:
            last = lines[-1]
            self._progress.update(last["step"] - self._progress.count, postfix=describe_metrics(last))


def _check_resources(config: TrainConfig) -> None:
    """On a Ray of this machine alone, which never grows, refuse what would wait for ever."""
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return
    kind = "GPU" if config.use_gpu else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))
    if there < config.workers:
        raise UserError(
            f"workers = {config.workers} need as many {kind}s, but Ray has {there}; lower workers, or use 0 to train without Ray"
        )


def _work(settings: dict) -> dict:
    """One worker. Returns the outcome, or the error that a restart would only repeat."""
    run_dir, stop_file = Path(settings["run_dir"]), Path(settings["stop_file"])
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not seen by node {ray.util.get_node_ip_address()}: put --out and data on storage that all nodes share"
        )
    config = build_settings(TrainConfig, settings["config"], str(run_dir / "config.yaml"))
    if not config.use_gpu:
        torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    try:
        outcome = train(
            config,
            run_dir,
            rank=rank,
            world_size=context.get_world_size(),
            device=ray.train.torch.get_device(),
            should_stop=lambda: rank == 0 and stop_file.exists(),
            report=ray.train.report,
            show_progress=False,
        )
    except TrainingDiverged as error:
        return {"error": str(error)}
    return vars(outcome)
