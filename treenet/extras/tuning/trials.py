"""A search over settings: its settings, its trials, and the file TUNING/trials.json with all of them.

A trial is one training run with values drawn from the space. All systems have the same space and, unless told otherwise, the same
number of trials: a system that was tuned longer looks better than it is.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Required

from pydantic import ConfigDict, Field, PositiveInt, model_validator
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.config import OPERATIONAL, TrainConfig, flatten
from treenet.experiments.ledger import Cell
from treenet.experiments.study_grid import check_name, check_once, overlay
from treeproc.common.errors import CommandEnded
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.hash_cache import file_stamp
from treeproc.common.messages import warn
from treeproc.common.settings import Settings, UserError, build_settings, differences, is_below
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.shards.store import read_index

# Drawing one of these would break the comparison: trials share data, seed and budget.
_NOT_DRAWN = ("seed", "data", "task", "max_steps", "batch.fraction", "batch.subset")
TRIALS = "trials.json"
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"


class Dimension(Settings):
    """The values of one setting: `choices`, or all numbers from `low` to `high`. Two whole bounds give whole numbers."""

    choices: tuple[Any, ...] = Field((), description="the values to choose from")
    low: int | float | None = Field(None, description="smallest value")
    high: int | float | None = Field(None, description="largest value")
    scale: Literal["linear", "log"] = Field("linear", description="scale on which numbers from low to high are drawn")

    @model_validator(mode="after")
    def _check(self):
        if self.choices:
            if self.low is not None or self.high is not None:
                raise ValueError("give choices, or low and high, not both")
            check_once(self.choices)
        elif self.low is None or self.high is None or self.low >= self.high:
            raise ValueError("give choices, or low and a larger high")
        elif self.scale == "log" and self.low <= 0:
            raise ValueError("a log scale needs a low above 0")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def example(self) -> Any:
        """Return some value of this dimension."""
        return self.choices[0] if self.choices else self.low


class TuneSettings(Settings):
    """The search: systems, space, number of trials, and how trials are chosen and stopped."""

    systems: dict[str, dict[str, Any]] = Field(
        {name: {"model": {"name": name}} for name in ("tree_transformer", "transformer")},
        min_length=1,
        description="the tuned systems: {name: {model: {...}, ...}}; these settings override the others",
    )
    space: dict[str, Dimension] = Field(
        {
            "optimizer.learning_rate": Dimension(low=3e-4, high=1e-2, scale="log"),
            "model.dropout": Dimension(choices=(0.1, 0.2, 0.3)),
        },
        min_length=1,
        description="the settings that trials draw: {optimizer.learning_rate: {low: 1e-4, high: 1e-2, scale: log}, ...}",
    )
    trials: PositiveInt = Field(16, description="trials of each system")
    more_trials: dict[str, PositiveInt] = Field(
        {}, description="systems with another number of trials: {name: N}. The report then warns that the tuning was unequal"
    )
    search: Literal["optuna", "random"] = Field(
        "optuna",
        description="optuna: a tree-structured Parzen estimator, which learns from finished trials; random: independent draws",
    )
    seed: int = Field(1, ge=0, lt=2**32, description="seed of the draws. All systems begin with the same draws")
    stop_early: bool = Field(True, description="stop bad trials by ASHA (asynchronous successive halving)")
    grace_steps: PositiveInt | None = Field(
        None, description="updates before a trial may be stopped; unset, an eighth of max_steps, but at least validate_every"
    )
    keep_one_in: int = Field(
        3, ge=2, description="ASHA keeps the best of so many trials at each level; levels grow by this factor"
    )
    parallel: PositiveInt | None = Field(None, description="trials at a time; unset, as many as the cluster has room for")

    @model_validator(mode="after")
    def _check_names(self):
        for name, settings in self.systems.items():
            check_name("systems", name)
            for key in self.space:
                if any(is_below(name, (key,)) for name in flatten(settings)):
                    raise ValueError(f"systems.{name} sets {key}, which the space draws; remove one of them")
        for name in self.more_trials:
            if name not in self.systems:
                raise ValueError(f"more_trials must be of {', '.join(self.systems)}, but is of {name}")
        for key in self.space:
            if is_below(key, _NOT_DRAWN):
                raise ValueError(f"space.{key}: trials differ in no such setting, since they share data, seed and budget")
        return self

    def trials_of(self, system: str) -> int:
        return self.more_trials.get(system, self.trials)


class TuningConfig(TrainConfig):
    """A search over settings of training runs."""

    names_of: ClassVar[Mapping[str, str]] = {"tune.more_trials": "tune.systems"}

    tune: TuneSettings = TuneSettings()

    @property
    def grace(self) -> int:
        """Updates before a trial may be stopped."""
        return self.tune.grace_steps or max(self.max_steps // 8, self.validate_every)


@dataclass
class Trial:
    """One trial. `curve` has the best validation criterion up to each validation: [update, criterion], lower is better."""

    number: int
    values: dict[str, Any]
    status: str = RUNNING
    curve: list[list[float]] = field(default_factory=list)
    error: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status != RUNNING

    @property
    def best(self) -> float:
        """The lowest criterion, inf without a validation."""
        return self.curve[-1][1] if self.curve else math.inf


class _TrialForm(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="forbid")

    number: Required[int]
    values: Required[dict[str, Any]]
    status: Required[Literal["running", "done", "stopped", "failed"]]
    curve: Required[list[Annotated[list[float], Field(min_length=2, max_length=2)]]]
    error: str


class _SystemForm(TypedDict):
    settings: dict
    data_fingerprint: str
    trials: list[_TrialForm]


class _TrialsForm(TypedDict):
    systems: dict[str, _SystemForm]


class Trials:
    """The trials of one system. Every change is in TUNING/trials.json when the call returns."""

    def __init__(self, out: AnyPath, config: TuningConfig, system: str):
        """Read the trials of an earlier command. Raises UserError if they are of other settings, another space or other data."""
        self.system, self._path = system, out / TRIALS
        self._here = Path.cwd()  # where relative paths start; the process of a trial works in another folder
        self._base = config.model_dump(mode="json", exclude={"tune"})
        self._over, self._out = config.tune.systems[system], out
        self._space = config.tune.space
        run = self.config_of({key: dimension.example() for key, dimension in self._space.items()})
        index = read_index(run.data / "encoded")
        if "valid" not in index["totals"]:
            raise UserError(f"a search needs a validation split, but {run.data} has none; preprocess with splits.valid")
        self._fingerprint = index["fingerprint"]
        self._settings = self._identity(run, config.tune)
        self._form = _read(self._path)
        self._stamp = _stamp_of(self._path)
        known = self._form["systems"].get(system)
        self.trials = [Trial(**trial) for trial in known["trials"]] if known else []
        if known:
            self._refuse_changes(known)

    def _identity(self, run: TrainConfig, tune: TuneSettings) -> dict:
        """Return the settings that decide which trials run and what they find."""
        settings = flatten(run.model_dump(mode="json", exclude={"data"}))
        kept = {key: value for key, value in settings.items() if not is_below(key, OPERATIONAL) and key not in self._space}
        search = tune.model_dump(mode="json", include={"search", "seed", "stop_early", "grace_steps", "keep_one_in"})
        return kept | {f"tune.{key}": value for key, value in search.items()} | {
            f"tune.space.{key}": dimension.model_dump(mode="json") for key, dimension in self._space.items()
        }  # fmt: skip

    def _refuse_changes(self, known: _SystemForm) -> None:
        changed = differences(known["settings"], self._settings)
        if known["data_fingerprint"] != self._fingerprint:
            changed.append(f"data fingerprint: {known['data_fingerprint']} -> {self._fingerprint}")
        if changed:
            raise UserError(
                f"{self._path} has trials of other settings ({self.system}: {'; '.join(changed)}); choose another --out, or the "
                "settings of those trials"
            )
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise UserError(f"{self._path} is damaged: the trials of {self.system} must be numbered from 0; restore it")

    def config_of(self, values: dict[str, Any]) -> TrainConfig:
        """Return the settings of a trial, with absolute paths. Raises UserError for settings that no run accepts."""
        drawn: dict[str, Any] = {}
        for key, value in values.items():
            place, (*sections, last) = drawn, key.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        where = f"tune.systems.{self.system} with {describe_values(values)}"
        run = build_settings(TrainConfig, overlay(overlay(self._base, self._over), drawn), where)
        return run.with_absolute_paths(self._here)

    def cell(self, number: int, values: dict[str, Any]) -> Cell:
        """Return the training run of a trial, in TUNING/cells/SYSTEM-NUMBER."""
        labels = {"system": self.system, "number": number}
        folder = self.cell_folder(number)
        return Cell(folder.name, labels, self.config_of(values), folder, self._fingerprint)

    def cell_folder(self, number: int) -> AnyPath:
        return self._out / "cells" / f"{self.system}-{number:03d}"

    def begin(self, values: dict[str, Any]) -> Trial:
        """Add a trial."""
        self.trials.append(Trial(len(self.trials), values))
        self._write()
        return self.trials[-1]

    def add_point(self, trial: Trial, step: int, criterion: float) -> None:
        """Add a validation to a running trial."""
        if not trial.has_ended and (not trial.curve or trial.curve[-1][0] < step):
            trial.curve.append([step, criterion])
            self._write()

    def end(self, trial: Trial, status: str, error: str = "") -> None:
        """End a running trial. The end of another one stays."""
        if not trial.has_ended:
            trial.status, trial.error = status, error
            self._write()

    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.has_ended]

    def _write(self) -> None:
        if _stamp_of(self._path) != self._stamp:  # the trials of another system have written since then
            self._form = _read(self._path)
        self._form["systems"][self.system] = {
            "settings": self._settings,
            "data_fingerprint": self._fingerprint,
            "trials": [asdict(trial) for trial in self.trials],
        }
        atomic_write(self._path, json_bytes(self._form))
        self._stamp = _stamp_of(self._path)


def _stamp_of(path: AnyPath) -> tuple[int, ...] | None:
    """Return what changes when another search writes the file; None without a file. A store is asked for this object alone."""
    with suppress(FileNotFoundError):
        return path.stamp() if isinstance(path, RemotePath) else file_stamp(path)
    return None


def _read(path: AnyPath) -> dict:
    hint = f"restore it, or remove it and run the same command again: the runs in {path.parent / 'cells'} are kept"
    return read_json(path, hint, _TrialsForm) if path.exists() else {"systems": {}}


def describe_values(values: dict[str, Any]) -> str:
    """`optimizer.learning_rate=0.00123 model.dropout=0.1`."""
    return " ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the lowest criterion, the first of equal ones; None if none has finished."""
    done = [trial for trial in trials if trial.status == DONE and math.isfinite(trial.best)]
    return min(done, key=lambda trial: trial.best) if done else None


def end_without_result(systems: Mapping[str, Trials], out: AnyPath) -> None:
    """Tell of failed trials. Raises CommandEnded with status 1 if a system has no trial that is done."""
    for name, trials in systems.items():
        failed = [trial for trial in trials.trials if trial.status == FAILED]
        if failed:
            what = f"{len(failed)} of {len(trials.trials)} trials of {name} failed, the first: {failed[0].error}"
            warn(f"warning: {what}; see {out / TRIALS}")
    if none := [name for name, trials in systems.items() if best_trial(trials.trials) is None]:
        raise CommandEnded(
            1,
            f"error: no trial of {', '.join(none)} is done, so there are no best settings; correct the cause, remove "
            f"{out / TRIALS}, and run the same command again",
        )
