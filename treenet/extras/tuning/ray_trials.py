"""Trials of a search on Ray Tune: Tune chooses and stops them, and each trains its cell in a task.

Tune's own files hold pickles, so nothing reads them again. A command that continues gives Tune the recorded trials first: a trial
that ended reports its recorded curve, and one that was running continues from its checkpoint.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # it ignores verbose=0, and names a folder that is gone at the end
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C ends the command, as everywhere; Tune would only end a search

import optuna
import ray
from ray import tune
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search.optuna import OptunaSearch

from treenet.experiments.grid import CellWork, printing_to_log
from treenet.experiments.ledger import DONE, FAILED, INTERRUPTED, STOPPED, Cell, CellResult
from treenet.experiments.ray_cells import train_in
from treenet.extras.tuning.trials import Dimension, Trial, Trials, TuningConfig, describe_values
from treenet.jobs.ray_room import Room, Rooms, bundles_of, refuse_more_than_there_is
from treenet.jobs.train_run import run_training
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treeproc.common.folder_kinds import RUN, mark_folder
from treeproc.common.messages import tell
from treeproc.common.ray_session import refuse_without_gpu, start_ray
from treeproc.common.settings import UserError

POLL_S = 1.0
# Seconds between two messages about what a search waits for.
SAY_S = 30.0
# A trial's own process only follows its training, which has a room. Tune takes no empty request. On another node than the head,
# the process would keep the node of a training that has ended.
_NEXT_TO_NOTHING = {"node:__internal_head__": 0.001}
CRITERION = "criterion"
_STEP, _STATUS, _ERROR = "step", "status", "error"


def run_trials(config: TuningConfig, trials: Trials) -> None:
    """Run the trials of one system until it has `trials_of` ended ones, and record each."""
    wanted = config.tune.trials_of(trials.system)
    if len(trials.ended()) >= wanted:
        return
    start_ray(instead="")
    refuse_more_than_there_is(config)
    bundles, cpus = bundles_of(config), 0
    if not config.workers:
        refuse_without_gpu(config.use_gpu, "set use_gpu=false")
        cpus = cpus_of_trial(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        bundles = [{"CPU": float(cpus), **({"GPU": 1.0} if config.use_gpu else {})}]
    scheduler: Any = FIFOScheduler()
    if config.tune.stop_early:
        # One update more than a run has, so that no trial is stopped at its end.
        scheduler = ASHAScheduler(
            time_attr=_STEP, max_t=config.max_steps + 1, grace_period=min(config.grace, config.max_steps),
            reduction_factor=config.tune.keep_one_in,
        )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="ray-tune-"))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rooms = Rooms(bundles)
    try:
        tune.Tuner(
            tune.with_resources(tune.with_parameters(_run_trial, trials=trials, cpus=cpus), _NEXT_TO_NOTHING),
            tune_config=tune.TuneConfig(
                metric=CRITERION, mode="min", num_samples=wanted, max_concurrent_trials=config.tune.parallel, scheduler=scheduler,
                search_alg=_Search(config, trials, rooms, wanted),
            ),
            run_config=tune.RunConfig(name=trials.system, storage_path=str(folder), verbose=0, callbacks=[_Record(trials)]),
        ).fit()  # fmt: skip
    finally:
        rooms.want(0)
        shutil.rmtree(folder, ignore_errors=True)


def cpus_of_trial(config: TuningConfig, nodes: Iterable[Mapping[str, float]]) -> int:
    """Return the CPUs of a trial with `workers: 0`: its share of the nodes that trials use, and never more than a node has."""
    kind = "GPU" if config.use_gpu else "CPU"
    nodes = [node for node in nodes if node.get(kind)]
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    parallel = config.tune.parallel or sum(int(node[kind]) for node in nodes) or 1
    return max(1, min(sum(cpus) // parallel, max(cpus, default=1)))


class _RecordedFirst(optuna.samplers.BaseSampler):
    """Gives the values of recorded trials first. It takes and leaves their draws, or the next trials would repeat them."""

    def __init__(self, sampler: optuna.samplers.BaseSampler, recorded: Sequence[Mapping[str, Any]]):
        self._sampler, self._recorded = sampler, recorded

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict:
        """Return nothing: each setting is drawn by itself."""
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict:
        """Return nothing, as above."""
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        """Return the value of one setting of a trial."""
        drawn = self._sampler.sample_independent(study, trial, param_name, param_distribution)
        return self._recorded[trial.number][param_name] if trial.number < len(self._recorded) else drawn


class _Search(OptunaSearch):
    """Optuna's search; it numbers and records what it draws, and draws the recorded trials first.

    It draws a trial when there is room for it, so that the draw knows all results until then. The demands for room are of all
    trials that are left.
    """

    def __init__(self, config: TuningConfig, trials: Trials, rooms: Rooms, wanted: int):
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=config.tune.seed)
        if config.tune.search == "optuna":
            sampler = optuna.samplers.TPESampler(seed=config.tune.seed)
        space = {key: distribution(dimension) for key, dimension in config.tune.space.items()}
        recorded = _RecordedFirst(sampler, [trial.values for trial in trials.trials])
        super().__init__(space, metric=CRITERION, mode="min", sampler=recorded)
        self._trials, self._next, self._rooms, self._wanted = trials, 0, rooms, wanted
        self._most = config.tune.parallel or wanted
        self._live: set[str] = set()
        self._say_at = time.monotonic() + POLL_S

    def suggest(self, trial_id: str) -> dict | None:
        known = self._trials.trials
        room = None
        if self._next == len(known) or not known[self._next].has_ended:
            self._rooms.want(min(self._wanted - self._next, self._most - len(self._live)))
            room = self._rooms.take()
            if room is None:
                if not self._live:
                    self._say_wait()
                return None  # Tune asks again
        values = super().suggest(trial_id)
        if values is None:
            if room:
                room.give_back()
            return None
        if self._next == len(known):
            self._trials.begin(values)
        elif room:
            self._trials.ledger.start(known[self._next].cell)
        if room:
            self._live.add(trial_id)
        self._next += 1
        return {"trial": self._trials.trials[self._next - 1], "room": room}

    def on_trial_complete(self, trial_id: str, *arguments: Any, **options: Any) -> None:
        self._live.discard(trial_id)
        super().on_trial_complete(trial_id, *arguments, **options)

    def _say_wait(self) -> None:
        """Show what the search waits for, once in a while."""
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_S
            tell(f"{self._trials.system}: {self._rooms.describe()}")


def distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    """Return a dimension as Optuna's distribution."""
    if dimension.choices:
        return optuna.distributions.CategoricalDistribution(dimension.choices)
    kind = optuna.distributions.IntDistribution if dimension.is_whole else optuna.distributions.FloatDistribution
    return kind(dimension.low, dimension.high, log=dimension.scale == "log")


class _Record(tune.Callback):
    """Writes the ends of trials to the ledger, and prints a line of each."""

    def __init__(self, trials: Trials):
        self._trials = trials

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: object) -> None:
        last = trial.last_result or {}
        self._end(trial, last.get(_STATUS, STOPPED), last.get(_ERROR, ""))

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: object) -> None:
        self._end(trial, FAILED, f"the process of the trial died; see {trial.config['trial'].cell.folder}")

    def _end(self, trial: RayTrial, status: str, error: str = "") -> None:
        if room := trial.config["room"]:
            room.give_back()
        found: Trial = trial.config["trial"]
        if found.has_ended:
            return
        last = trial.last_result or {}
        curve = read_curve(found.cell, last.get(_STEP, 0))
        self._trials.end(found, status, curve, error, last.get("time_total_s", 0.0))
        facts = f" at update {curve[-1][0]:,.0f}: best {curve[-1][1]:.4f}" if curve else ""
        why = f": {error}" if error else ""
        tell(f"{found.cell.name}: {status}{facts}{why} ({describe_values(found.values)})")


def read_curve(cell: Cell, until: float = math.inf) -> list[tuple[int, float]]:
    """Return the update of each validation of a trial, and the best criterion up to it: lower is better."""
    criterion = build_task(cell.config).criterion
    lines = [line for line in read_metrics(cell.folder) if line["event"] == "valid" and line["step"] <= until]
    found = {line["step"]: criterion(line) for line in lines if math.isfinite(criterion(line))}
    return list(zip(found, accumulate(found.values(), min), strict=True))


def _run_trial(values: dict, trials: Trials, cpus: int) -> None:
    """Report a recorded trial, or train one and report its validations."""
    trial: Trial = values["trial"]
    cell, entry = trial.cell, trial.entry
    if trial.has_ended:
        recorded = read_curve(cell, trial.updates) or [(trial.updates, trial.best)] * bool(trial.updates)
        for step, best in recorded:
            tune.report({_STEP: step, CRITERION: best})
        _end(entry.status, recorded, entry.error)
        return
    try:
        trials.config_of(trial.values)  # whose error says what no run accepts
        mark_folder(cell.folder, RUN)
    except UserError as error:
        _end(FAILED, [], str(error))
        return
    room: Room = values["room"]
    place = room.in_first_bundle()
    if cell.config.workers:  # which take the room themselves
        place = room.beside_workers()
    start = ray.remote(_train).options(name=cell.name, **place)
    curve: list[tuple[int, float]] = []
    result = CellResult(INTERRUPTED, 0.0)
    while result.status == INTERRUPTED:  # by SIGTERM; it continues from its checkpoint
        running = start.remote(cell, os.environ.get("RAY_ADDRESS"), cpus, room)
        ended: list[ray.ObjectRef] = []
        while not ended:
            ended, _ = ray.wait([running], timeout=POLL_S)
            for step, best in read_curve(cell)[len(curve) :]:
                curve.append((step, best))
                tune.report({_STEP: step, CRITERION: best})
        result = ray.get(running)
    if result.status == FAILED:
        _end(FAILED, curve, result.error)
    elif not curve:
        _end(FAILED, curve, f"the run has no finite validation in {cell.config.max_steps} updates")
    else:
        _end(DONE, curve)


def _end(status: str, curve: list[tuple[int, float]], error: str = "") -> None:
    """Report how a trial ended. A failed one is the worst that the search has seen."""
    step, criterion = (curve[-1][0], curve[-1][1]) if curve else (1, math.inf)
    tune.report({_STEP: step, CRITERION: math.inf if status == FAILED else criterion, _STATUS: status, _ERROR: error})


def _train(cell: Cell, address: str | None, cpus: int, room: Room) -> CellResult:
    """Train the run of a trial, and print to its log.txt."""
    with printing_to_log(cell.folder):
        return train_in(room, cell, CellWork(run_training, lambda folder: {}), address, threads=cpus)
