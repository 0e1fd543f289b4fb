"""A search over settings: its settings, and its trials, which are cells of TUNING/ledger.json.

A trial is one training run with values drawn from the space. All systems have the same space and, unless told otherwise, the same
number of trials: a system that was tuned longer looks better than it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from treenet.config import MAY_CHANGE, TrainConfig, flatten
from treenet.experiments.ledger import DONE, FAILED, LEDGER, STOPPED, Cell, CellResult, Entry, Ledger, refuse_changes
from treenet.experiments.study_grid import (
    Systems,
    check_model_name,
    check_name,
    check_once,
    check_same_pieces,
    hash_encoder,
    overlay,
)
from treeproc.common.errors import CommandEnded
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.hub import HubModel
from treeproc.common.messages import warn
from treeproc.common.settings import Settings, UserError, build_settings, differences, is_below, load_settings, nested
from treeproc.common.storage import AnyPath
from treeproc.shards.store import read_index

# Another value of one of these would break the comparison. A system may have another data set, of the same pieces.
_SHARED = ("seed", "task", "max_steps", "batch.fraction", "batch.subset", "masked_lm")
_WHY_SHARED = "trials differ in no such setting, since they share data, seed and budget"
ENDS = (DONE, STOPPED, FAILED)
_COORDINATES = ("system", "number")  # labels of a trial beside its values
_OF_DRAWS = {"search", "seed", "stop_early", "grace_steps", "keep_one_in", "space"}


class Dimension(Settings):
    """The values of one setting: `choices`, or all numbers from `low` to `high`. Two whole bounds give whole numbers."""

    choices: tuple[Any, ...] = Field((), description="the values to choose from")
    low: int | float | None = Field(None, description="smallest value")
    high: int | float | None = Field(None, description="largest value")
    scale: Literal["linear", "log"] = Field("linear", description="scale on which numbers from low to high are drawn")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices:
            if self.low is not None or self.high is not None:
                raise ValueError("give choices, or low and high, not both")
            if several := [choice for choice in self.choices if isinstance(choice, list | dict)]:
                raise ValueError(f"choices must be single values, but one is {several[0]}; give tune.systems one of them each")
            if self.scale == "log":
                raise ValueError("scale: is of numbers from low to high; leave it out beside choices")
            check_once(self.choices)
        elif self.low is None or self.high is None or self.low >= self.high:
            raise ValueError("give choices, or low and a larger high")
        elif self.scale == "log" and self.low <= 0:
            raise ValueError("a log scale needs a low above 0")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)


class TuneSettings(Settings):
    """The search: systems, space, number of trials, and how trials are chosen and stopped."""

    systems: Systems = Field(
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
    def _check_names(self) -> Self:
        for name, settings in self.systems.items():
            check_name("systems", name)
            for key in flatten(settings):
                if is_below(key, _SHARED):
                    raise ValueError(f"systems.{name}.{key}: {_WHY_SHARED}")
            for key in self.space:
                if any(is_below(name, (key,)) for name in flatten(settings)):
                    raise ValueError(f"systems.{name} sets {key}, which the space draws; remove one of them")
        for name in self.more_trials:
            if name not in self.systems:
                raise ValueError(f"more_trials must be of {', '.join(self.systems)}, but is of {name}")
        for key in self.space:
            if is_below(key, (*_SHARED, "data")):
                raise ValueError(f"space.{key}: {_WHY_SHARED}")
            if is_below(key, MAY_CHANGE):
                raise ValueError(f"space.{key}: does not change the training of a trial, so a search cannot choose it")
        return self

    def trials_of(self, system: str) -> int:
        return self.more_trials.get(system, self.trials)


class TuningConfig(TrainConfig):
    """A search over settings of training runs."""

    names_of: ClassVar[Mapping[str, str]] = {"tune.more_trials": "tune.systems"}

    tune: TuneSettings = TuneSettings()

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        """Refuse a value that the systems would replace, or that never takes effect."""
        if (grace := self.tune.grace_steps) is not None and grace > self.max_steps:
            raise ValueError(f"tune.grace_steps must be at most max_steps = {self.max_steps}, but is {grace}")
        check_model_name(self.model.name, self.tune.systems.values())
        return self

    @property
    def grace(self) -> int:
        """Updates before a trial may be stopped."""
        return self.tune.grace_steps or max(self.max_steps // 8, self.validate_every)


@dataclass(frozen=True)
class Trial:
    """One trial: its run as a cell of the ledger, and the entry there. Its labels have the drawn values."""

    cell: Cell
    entry: Entry

    @property
    def number(self) -> int:
        return self.cell.labels["number"]

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for key, value in self.cell.labels.items() if key not in _COORDINATES}

    @property
    def has_ended(self) -> bool:
        return self.entry.status in ENDS

    @property
    def updates(self) -> int:
        """The update of the last validation, 0 without one."""
        return int(self.entry.result.get("updates", 0))

    @property
    def best(self) -> float:
        """The lowest criterion, inf without a validation."""
        return self.entry.result.get("criterion", math.inf)


class Trials:
    """The trials of one system, as cells of TUNING/ledger.json. Every change is there when the call returns."""

    def __init__(self, out: AnyPath, config: TuningConfig, system: str):
        """Read the trials of an earlier command. Raises UserError if they are of other settings, space, data or encoder."""
        self.system, self._out = system, out
        self._here = Path.cwd()  # where relative paths start; the process of a trial works in another folder
        self._base = config.model_dump(mode="json", exclude={"tune"})
        self._over = config.tune.systems[system]
        self._ends = [{key: dimension.ends[end] for key, dimension in config.tune.space.items()} for end in (0, 1)]
        encoder = self.config_of(self._ends[0]).with_pinned_encoder(out).model.pretrained.folder
        if isinstance(encoder, HubModel):  # all trials have one commit of it
            self._over = overlay(self._over, nested({"model.pretrained.folder": str(encoder)}))
        self._usual = self.config_of(self._ends[0])
        self.data = self._usual.data
        self.index = read_index(self.data / "encoded")
        if "valid" not in self.index["totals"]:
            raise UserError(f"a search needs a validation split, but {self.data} has none; preprocess with splits.valid")
        self._encoders: dict[AnyPath | HubModel | None, str] = {None: ""}
        self.ledger = Ledger.read(out)
        self._cells: list[Cell] = []
        if self.ledger.entries:
            _refuse_another_search(out, config)
        while entry := self.ledger.entries.get(name := self._name(len(self._cells))):
            if entry.labels.keys() != {*_COORDINATES, *config.tune.space} or None in entry.result.values():
                raise UserError(f"{out / LEDGER} is damaged: labels or result of {name}; restore it")
            cell = self._cell({key: entry.labels[key] for key in config.tune.space})
            refuse_changes(out, cell, entry)
            self._cells.append(cell)

    @property
    def trials(self) -> list[Trial]:
        return [Trial(cell, self.ledger.entries[cell.name]) for cell in self._cells]

    def config_of(self, values: dict[str, Any]) -> TrainConfig:
        """Return the settings of a trial, with absolute paths. Raises UserError for settings that no run accepts."""
        where = f"tune.systems.{self.system} with {describe_values(values)}"
        run = build_settings(TrainConfig, overlay(overlay(self._base, self._over), nested(values)), where)
        return run.with_absolute_paths(self._here)

    def unread(self) -> list[str]:
        """Return the settings of the space that no run reads: neither with the first values of the others nor with their last."""
        from treenet.tasks.base import build_task  # here, because it loads PyTorch

        def is_unread(key: str, values: dict[str, Any]) -> bool:
            try:
                return is_below(key, tuple(build_task(self.config_of(values)).unread_settings(self.index)))
            except UserError:
                return False

        # A default never counts as unread, and one of the two ends is none.
        return [
            key
            for key in self._ends[0]
            if all(any(is_unread(key, {**others, key: end[key]}) for end in self._ends) for others in self._ends)
        ]

    def _name(self, number: int) -> str:
        return f"{self.system}-{number:03d}"

    def _cell(self, values: dict[str, Any]) -> Cell:
        """Return the next cell. If no run accepts the values, it has the usual settings: the trial fails when it starts."""
        try:
            config = self.config_of(values)
        except UserError:
            config = self._usual
        if (encoder := config.model.pretrained.folder) is not None and encoder not in self._encoders:
            self._encoders[encoder] = hash_encoder(encoder)
        number = len(self._cells)
        labels, folder = {"system": self.system, "number": number, **values}, self._out / "cells" / self._name(number)
        return Cell(self._name(number), labels, config, folder, self.index["fingerprint"], self._encoders[encoder])

    def begin(self, values: dict[str, Any]) -> Trial:
        """Add a trial."""
        self._cells.append(self._cell(values))
        self.ledger.start(self._cells[-1])
        return self.trials[-1]

    def end(self, trial: Trial, status: str, curve: Sequence[tuple[int, float]], error: str = "", seconds: float = 0.0) -> None:
        """End a running trial, whose validations had these updates and criteria. The end of another one stays."""
        if not trial.has_ended:
            result = {"updates": curve[-1][0], "criterion": curve[-1][1]} if curve else {}
            self.ledger.end(trial.cell, CellResult(status, seconds, result, error))

    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.has_ended]


def _refuse_another_search(out: AnyPath, config: TuningConfig) -> None:
    """Raise UserError if the trials in TUNING were drawn or stopped in another way, as its config.yaml says."""
    if (out / CONFIG).exists():
        before = load_settings(TuningConfig, out / CONFIG)
        then, now = (one.model_dump(mode="json", include={"tune": _OF_DRAWS}) for one in (before, config))
        changed = differences(then, now)
        if not changed and list(before.tune.space) != list(config.tune.space):
            changed = ["tune.space: another order of the same settings"]  # draws are in this order
        if changed:
            raise UserError(
                f"{out} has trials of another search ({'; '.join(changed)}); choose another --out, or give the old settings"
            )


def check_systems(systems: Mapping[str, Trials]) -> None:
    """Tell which settings of the space a system does not read.

    Raises UserError for one that no system reads, and for systems that read other text or other pieces.
    """
    check_same_pieces({trials.data: trials.index for trials in systems.values()})
    unread = {name: trials.unread() for name, trials in systems.items()}
    if nowhere := set.intersection(*map(set, unread.values())):
        raise UserError(f"tune.space.{min(nowhere)}: no system reads it; leave it out")
    for name, keys in unread.items():
        if keys:
            warn(f"note: tune.space: {name} does not read {', '.join(keys)}")


def describe_values(values: dict[str, Any]) -> str:
    """`optimizer.learning_rate=0.00123 model.dropout=0.1`."""
    return " ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the lowest criterion, the first of equal ones; None if none has finished."""
    done = [trial for trial in trials if trial.entry.status == DONE and math.isfinite(trial.best)]
    return min(done, key=lambda trial: trial.best) if done else None


def end_without_result(systems: Mapping[str, Trials], out: AnyPath) -> None:
    """Tell of failed trials. Raises CommandEnded with status 1 if a system has no trial that is done."""
    for name, trials in systems.items():
        failed = [trial for trial in trials.trials if trial.entry.status == FAILED]
        if failed:
            what = f"{len(failed)} of {len(trials.trials)} trials of {name} failed, the first: {failed[0].entry.error}"
            warn(f"warning: {what}; see {out / LEDGER}")
    if none := [name for name, trials in systems.items() if best_trial(trials.trials) is None]:
        raise CommandEnded(
            1,
            f"error: no trial of {', '.join(none)} is done, so there are no best settings; correct the cause, remove "
            f"{out / LEDGER}, and run the same command again",
        )
