"""Settings of a search over settings: its systems, its space, the number of trials, and how trials are chosen and stopped."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from treenet.config import TrainConfig, flatten
from treenet.experiments.study_grid import check_name, check_once
from treeproc.common.setting_effects import is_below
from treeproc.common.settings import Settings

# Drawing one of these would break the comparison: trials share data, seed and budget.
_NOT_DRAWN = ("seed", "data", "task", "max_steps", "batch.fraction", "batch.subset")


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
