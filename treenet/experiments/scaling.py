"""Data-size studies: models at several shares of the training data and several seeds, on one set of shards.

A study is a training configuration with a grid: each cell is the training run of `workflows/train.py` with another
model, `batch.fraction` and `seed`, in STUDY/cells/MODEL-FRACTION-seedSEED.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import TrainConfig
from treenet.evaluation.evaluate import EvaluateSettings, References, evaluate_run, more_fingerprint
from treenet.experiments.grid import CellWork
from treenet.experiments.ledger import Cell
from treenet.experiments.study import describe_stale
from treenet.experiments.study_grid import Parallel, Place, Seed, StudyConfig, check_name, check_once
from treenet.jobs.train_run import run_training
from treenet.loggers.feed import log_scores
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.runs.run_results import read_scores
from treenet.tasks.translation_metrics import COMPARED, MAIN, OF_STUDIES
from treeproc.common.settings import Settings, UserError
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    StudyMetric = str
else:
    StudyMetric = Literal[OF_STUDIES]
Fraction = Annotated[float, Field(gt=0, le=1)]


class GridConfig(Settings):
    """The grid of a study: every fraction with every model and every seed."""

    fractions: tuple[Fraction, ...] = Field(
        (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
        min_length=1,
        description="shares of the training examples; a larger share contains the smaller ones",
    )
    models: dict[str, dict[str, Any]] = Field(
        {name: {"model": {"name": name}} for name in ("tree_transformer", "transformer")},
        min_length=1,
        description="the compared models: {name: {model: {...}, ...}}; these settings override those of the study",
    )
    sizes: dict[Fraction, dict[str, Any]] = Field(
        {},
        description="settings of single shares, for all models: {0.25: {max_steps: 2000, optimizer: {decay_steps: 2000}}}. A "
        "smaller share wants a shorter schedule",
    )
    seeds: tuple[Seed, ...] = Field(
        (1, 2, 3),
        min_length=1,
        description="seeds of initialisation, dropout and batch order, and of the shares where batch.subset is by_seed",
    )
    baseline: str = Field(
        "transformer",
        description="the name in `models` of the baseline. The study tests its first other model against the baseline, and all "
        "further models against that first one",
    )
    split: str = Field("test", description="split of the data set that is translated and scored")
    more_references: list[Path] = Field(
        [], description="files of further references, as for evaluate.py: all cells are scored and tested with all references"
    )
    metric: StudyMetric = Field(MAIN, description="the compared metric: of detokenised lines, or of tokens, which papers report")
    parallel: Parallel = None
    bootstrap_samples: PositiveInt = Field(1000, description="samples of the paired bootstrap")

    _check_values = field_validator("fractions", "seeds")(check_once)

    @model_validator(mode="after")
    def _check_models(self):
        for name, settings in self.models.items():
            check_name("models", name)
            if "seed" in settings or {"fraction", "subset"} & settings.get("batch", {}).keys():
                raise ValueError(
                    f"models.{name}: leave seed, batch.fraction and batch.subset out; the grid gives the first two, and "
                    "batch.subset is for all models"
                )
        for fraction, settings in self.sizes.items():
            if fraction not in self.fractions:
                raise ValueError(f"sizes: {fraction:g} must be one of fractions = {list(self.fractions)}")
            if {"seed", "data", "model"} & settings.keys() or {"fraction", "subset"} & settings.get("batch", {}).keys():
                raise ValueError(f"sizes.{fraction:g}: leave seed, data, model, batch.fraction and batch.subset out")
        if self.baseline not in self.models:
            raise ValueError(f"baseline must be one of {', '.join(self.models)}, but is {self.baseline}")
        return self


class ScalingConfig(StudyConfig):
    """A data-size study. `seed` and `batch.fraction` are those of the grid."""

    grid: GridConfig = GridConfig()

    def places(self) -> Iterator[Place]:
        """Yield the whole curve of one seed, then that of the next."""
        for seed, fraction, (model, settings) in product(self.grid.seeds, self.grid.fractions, self.grid.models.items()):
            chosen = {"seed": seed, "batch": {"fraction": fraction}}
            labels = {"model": model, "fraction": fraction, "seed": seed}
            yield Place(f"models.{model}", labels, (self.grid.sizes.get(fraction, {}), settings, chosen))

    def check_task(self, run: TrainConfig, where: str) -> None:
        if run.task != "translation":
            raise UserError(
                f"{where}: task must be translation, but is {run.task}; for classifiers run workflows/compare_seeds.py"
            )

    def check_data(self, cells: Sequence[Cell], indices: Mapping[Path, Mapping]) -> None:
        first = next(iter(indices))
        if self.grid.split not in indices[first]["totals"]:
            there = ", ".join(indices[first]["totals"])
            raise UserError(f"grid.split: {first} has no split {self.grid.split!r}; there are: {there}")


def study_work(config: ScalingConfig, more: References = ()) -> CellWork:
    """Return the work of a cell: it trains as workflows/train.py does, and scores as workflows/evaluate.py does.

    `more` has the lines of the files `grid.more_references`.
    """
    split, files = config.grid.split, config.grid.more_references
    options: dict[str, Any] = {"more_references": files} if files else {}
    settings = EvaluateSettings(split=split, use_gpu=config.use_gpu, **options)
    stale = partial(describe_stale_cell, split, more_fingerprint(more))
    return CellWork(run_training, partial(score_cell, settings, more), stale)


def score_cell(settings: EvaluateSettings, more: References, folder: AnyPath) -> dict:
    """Translate and score a trained cell. Returns its line for the log."""
    with open_results(folder, AVERAGED) as run:
        _, scores = evaluate_run(run, settings, more)
        log_scores(run)
    return {name: scores[name] for name in COMPARED}


def describe_stale_cell(split: str, more: str | None, folder: AnyPath) -> str:
    """Describe why scores of a cell do not fit its model or the fingerprint of further references; empty if they fit."""
    return describe_stale((split,), folder) or describe_other_references(read_scores(folder).get(split), more)


def describe_other_references(scores: Mapping[str, Any] | None, more: str | None) -> str:
    """Describe why scores are not of the further references with this fingerprint; empty if they are."""
    if scores is None or scores.get("more_references_fingerprint") == more:
        return ""
    return "the files of grid.more_references are others"
