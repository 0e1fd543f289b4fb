"""Comparisons of classifiers, or of models of relatedness, over seeds: models, ablations, control trees, all with the same seeds.

A comparison is a configuration of workflows/train.py with a grid. Each cell is one run of that workflow, with the
settings of one system and one seed, in OUT/cells/SYSTEM-seedSEED.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import TrainConfig
from treenet.evaluation.classify import score_peak, score_run
from treenet.evaluation.evaluate import References
from treenet.experiments.grid import CellWork
from treenet.experiments.ledger import Cell
from treenet.experiments.study import describe_stale
from treenet.experiments.study_grid import Parallel, Place, Seed, StudyConfig, check_name, check_once
from treenet.jobs.train_run import run_training
from treenet.loggers.feed import log_scores
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.tasks.registry import build_task
from treeproc.common.settings import Settings, UserError
from treeproc.common.storage import AnyPath

TASKS = ("classification", "relatedness")
# Entries of scores.json that a cell has.
SCORED = ("valid", "test", "valid.last", "test.last")


class SeedGridConfig(Settings):
    """Settings of a comparison: the systems, their baselines and the seeds."""

    systems: dict[str, dict[str, Any]] = Field(
        {name: {"model": {"name": name}} for name in ("tree_transformer", "transformer")},
        min_length=1,
        description="the compared systems: {name: {model: {...}, data: DIR, ...}}; these settings override the others",
    )
    seeds: tuple[Seed, ...] = Field(
        tuple(range(1, 11)), min_length=1, description="seeds of initialisation, dropout and batch order"
    )
    fewer_seeds: dict[str, PositiveInt] = Field({}, description="systems that run only with the first N seeds: {name: N}")
    baseline: str = Field(
        "tree_transformer", description="the name in `systems` of the baseline, against which the study tests the others"
    )
    parallel: Parallel = None
    peak_on_test: bool = Field(
        False,
        description="also score every kept checkpoint on test, and show the score of the best with a mark. This choice is not "
        "valid for a model, but some published results may use it. keep_checkpoints sets the number of checkpoints",
    )

    _check_values = field_validator("seeds")(check_once)

    @model_validator(mode="after")
    def _check_systems(self):
        for name, settings in self.systems.items():
            check_name("systems", name)
            if "seed" in settings:
                raise ValueError(f"systems.{name}: leave seed out; the grid gives it")
        for what, names in (("baseline", [self.baseline]), ("fewer_seeds", self.fewer_seeds)):
            for name in names:
                if name not in self.systems:
                    raise ValueError(f"{what} must be one of {', '.join(self.systems)}, but is {name}")
        return self


class SeedsConfig(StudyConfig):
    """A comparison over seeds. `seed` is that of the grid."""

    names_of: ClassVar[Mapping[str, str]] = {"grid.fewer_seeds": "grid.systems"}

    grid: SeedGridConfig = SeedGridConfig()

    def places(self) -> Iterator[Place]:
        """Yield all systems with one seed, then with the next."""
        for number, seed in enumerate(self.grid.seeds):
            for system, settings in self.grid.systems.items():
                if number < self.grid.fewer_seeds.get(system, len(self.grid.seeds)):
                    yield Place(f"systems.{system}", {"system": system, "seed": seed}, (settings, {"seed": seed}))

    def check_task(self, run: TrainConfig, where: str) -> None:
        if run.task != self.task or run.task not in TASKS:
            raise UserError(f"{where}: task must be {' or '.join(TASKS)}, the same for all systems, but is {run.task}")

    def check_data(self, cells: Sequence[Cell], indices: Mapping[Path, Mapping]) -> None:
        """Raise UserError if their classes differ, or for a data set that a system cannot learn from."""
        (first, index), *others = indices.items()
        for data, other in others:
            if other.get("num_classes") != index.get("num_classes"):
                raise UserError(
                    f"{data} and {first} differ in num_classes, but all systems must learn the same classes; preprocess one with "
                    "parsed set to the other"
                )
        for run in {(cell.config.data, cell.config.model.name): cell.config for cell in cells}.values():
            build_task(run).check(indices[run.data])


def seed_work(config: SeedsConfig, more: References = ()) -> CellWork:
    """Return the work of a cell: it trains and scores as workflows/train.py does."""
    return CellWork(run_training, partial(score_cell, config.use_gpu, config.grid.peak_on_test), partial(describe_stale, SCORED))


def score_cell(use_gpu: bool, peak_on_test: bool, folder: AnyPath) -> dict:
    """Score a trained cell. Returns the scores for the log: accuracies in per cent, or correlations."""
    with open_results(folder, AVERAGED, "checkpoints/*") as run:
        scores = score_run(run, use_gpu=use_gpu)
        if peak_on_test:
            score_peak(run, "test", use_gpu=use_gpu)
        log_scores(run)
    shown = {name: scores[name] for name in ("valid", "test", "test.last") if name in scores}
    return {name: 100 * entry["accuracy"] if "accuracy" in entry else entry["pearson"] for name, entry in shown.items()}
