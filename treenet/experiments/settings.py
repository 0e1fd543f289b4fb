"""Settings of data-size studies and of the positive control, without the code that they run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import BatchConfig, TrainConfig
from treenet.data.splits import read_references
from treenet.evaluation.settings import TargetLanguage
from treenet.experiments.control_data import MOST_WORDS
from treenet.experiments.ledger import Cell
from treenet.experiments.study_grid import Parallel, Place, Protocol, Seed, StudyConfig, Systems, check_name, check_once
from treenet.tasks.translation_metrics import (
    INTERNATIONAL,
    MAIN,
    MAIN_OF_TOKENS,
    OF_STUDIES,
    SECOND,
    build_tokenizer,
    describe_blanks,
    tokenizer_of,
)
from treeproc.common.messages import warn
from treeproc.common.settings import Settings, UserError
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    StudyMetric = str
else:
    StudyMetric = Literal[OF_STUDIES]


Fraction = Annotated[float, Field(gt=0, le=1)]
_OF_SHARES = ("fraction", "subset")  # settings of batches


class GridConfig(Settings):
    """The grid of a study: every fraction with every model and every seed."""

    fractions: tuple[Fraction, ...] = Field(
        (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
        min_length=1,
        description="shares of the training examples; a larger share contains the smaller ones",
    )
    models: Systems = Field(
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
        [], description="files of further references, as in one run: all cells are scored and tested with all references"
    )
    metric: StudyMetric = Field(MAIN, description="the compared metric: of detokenised lines, or of tokens, which papers report")
    target_language: TargetLanguage = Field(
        None, description="target language, such as ja, which chooses the tokens, as in evaluate"
    )
    parallel: Parallel = None
    protocol: Protocol = None
    bootstrap_samples: PositiveInt = Field(1000, description="samples of the paired bootstrap")

    _check_values = field_validator("fractions", "seeds")(check_once)

    @field_validator("fractions")
    @classmethod
    def _check_names(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        check_once(tuple(f"{value:g}" for value in values))  # as in the names of cells
        return values

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        for name, settings in self.models.items():
            check_name("models", name)
            if _sets(settings, f"models.{name}", "seed"):
                raise ValueError(
                    f"models.{name}: leave seed, batch.fraction and batch.subset out; the grid gives the first two, and "
                    "batch.subset is for all models"
                )
        for fraction, settings in self.sizes.items():
            if fraction not in self.fractions:
                raise ValueError(f"sizes: {fraction:g} must be one of fractions = {list(self.fractions)}")
            if _sets(settings, f"sizes.{fraction:g}", "seed", "data", "model"):
                raise ValueError(f"sizes.{fraction:g}: leave seed, data, model, batch.fraction and batch.subset out")
        if self.baseline not in self.models:
            raise ValueError(f"baseline must be one of {', '.join(self.models)}, but is {self.baseline}")
        return self


def _sets(settings: Mapping[str, Any], where: str, *names: str) -> bool:
    """Return whether settings have one of these names, or choose a share of the examples.

    Raises ValueError for a batch that is not a section: the share of a cell would replace it.
    """
    batch = settings.get("batch", {})
    if not isinstance(batch, dict):
        raise ValueError(f"{where}.batch must be a section, for example {{max_tokens: 4096}}, but is {batch!r}")
    return not (settings.keys().isdisjoint(names) and batch.keys().isdisjoint(_OF_SHARES))


class ScalingConfig(StudyConfig):
    """A data-size study. The grid has seeds and shares."""

    grid: GridConfig = GridConfig()

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        """Refuse a value that the grid would replace."""
        if (share := self.batch.fraction) != BatchConfig.model_fields["fraction"].default:
            raise ValueError(
                f"batch.fraction: the grid has the shares of a study; set grid.fractions=[{share:g}] and batch.fraction=1"
            )
        return self

    def places(self) -> Iterator[Place]:
        """Yield the whole curve of one seed, then that of the next."""
        for seed, fraction, (model, settings) in product(self.grid.seeds, self.grid.fractions, self.grid.models.items()):
            chosen = {"seed": seed, "batch": {"fraction": fraction}}
            labels: dict[str, str | float] = {"model": model, "fraction": fraction, "seed": seed}
            yield Place(f"models.{model}", labels, (self.grid.sizes.get(fraction, {}), settings, chosen))

    def check_task(self, run: TrainConfig, where: str) -> None:
        if run.task != "translation":
            raise UserError(
                f"{where}: task must be translation, but is {run.task}; for other tasks run tree-attention compare-seeds"
            )

    def check_data(self, cells: Sequence[Cell], indices: Mapping[AnyPath, Mapping]) -> None:
        first = next(iter(indices))
        if self.grid.split not in indices[first]["totals"]:
            there = ", ".join(indices[first]["totals"])
            raise UserError(f"grid.split: {first} has no split {self.grid.split!r}; there are: {there}")
        of_tokens = tokenizer_of(first, self.grid.target_language)
        build_tokenizer(of_tokens)  # before the first cell is trained
        tokenizer = of_tokens if self.grid.metric == MAIN_OF_TOKENS else INTERNATIONAL
        if self.grid.metric != SECOND and (note := describe_blanks(read_references(first, self.grid.split), tokenizer)):
            warn(f"warning: {note}; set grid.metric={SECOND}, or grid.metric={MAIN_OF_TOKENS} and grid.target_language")


@dataclass(frozen=True)
class Rung:
    """Defaults of a rung, and what it shows."""

    shows: str
    sizes: tuple[int, ...]
    max_steps: int
    leaves: int  # of a typical sentence, for the batch
    training: Mapping[str, Any] = field(default_factory=dict)


RUNGS = {
    "a": Rung("the order of the words comes from a random tree alone", (8000,), 1600, 5),
    "b": Rung("the order follows from the words, by the precedence of operators", (250, 1000, 4000, 16_000), 1500, 12),
    "c": Rung(
        "English lines, whose target has the children of verb phrases reversed",
        (8000,),
        3000,
        8,
        {"model": {"d_model": 128, "d_ff": 256, "dropout": 0.1}},
    ),
    "d": Rung("rung a, trained on trees of depth 4 and tested on depths 6 to 8", (16_000,), 2500, 9),
}


class ControlSettings(Settings):
    """Settings of the positive control. Everything that is unset depends on the rung."""

    rung: Literal["a", "b", "c", "d"] = Field(
        "a", description="; ".join(f"'{name}': {rung.shows}" for name, rung in RUNGS.items())
    )
    all: bool = Field(
        False, description="rung a: every translation model that reads a tree, each with trees in the form that it reads"
    )
    sizes: tuple[PositiveInt, ...] | None = Field(
        None,
        min_length=1,
        description="numbers of training pairs; smaller sets are parts of the largest, of about this size; unset, by the rung",
    )
    test_pairs: int = Field(2000, ge=10, description="test pairs (rung c has 500), and validation pairs, at most 500")
    words: int = Field(5, ge=2, le=MOST_WORDS, description="rung a: words of a sentence")
    max_steps: int | None = Field(None, ge=20, description="updates of each run; unset, by the rung")
    training: dict[str, Any] = Field(
        {}, description="settings of training that replace the control's, for all systems: {model: {d_model: 128}}"
    )
    data_seed: int = Field(1, ge=0, lt=2**63, description="seed of words and trees")
    seeds: tuple[Seed, ...] = Field((1,), min_length=1, description="seeds of training; every system runs with each")
    parallel: PositiveInt = Field(2, description="runs at a time, in processes that share the threads of this one")

    _check_values = field_validator("seeds", "sizes")(lambda values: values and check_once(values))

    @model_validator(mode="after")
    def _check_rung(self) -> Self:
        if self.all and self.rung != "a":
            raise ValueError(f"all: only rung a has trees in every form, but rung is {self.rung}; leave all out")
        if self.all and self.words < 3:
            raise ValueError("words must be at least 3 with all, but is 2: the form levels has one order of two words")
        if self.words != 5 and self.rung != "a":
            raise ValueError(f"words: is for rung a, but rung is {self.rung}; leave it out")
        if given := sorted({"data", "seed", "max_steps", "grid", "task"} & self.training.keys()):
            raise ValueError(f"training: leave {', '.join(given)} out; the control gives them")
        return self

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """The numbers of training pairs, ascending."""
        return tuple(sorted(self.sizes or RUNGS[self.rung].sizes))

    @property
    def split_sizes(self) -> dict[str, int]:
        """The numbers of pairs of all splits."""
        return {"train": self.all_sizes[-1], "valid": min(self.test_pairs, 500), "test": self.test_pairs}
