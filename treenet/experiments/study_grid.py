"""The grid of a study, and the options of its command.

The axes are sizes of the training data, systems and seeds. A place in the grid is a cell, one training run.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_origin

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from treenet.config import ModelConfig, TrainConfig
from treenet.experiments.ledger import Cell
from treeproc.common.command_line import ArgumentParser, any_path
from treeproc.common.hub import HubModel
from treeproc.common.messages import phase
from treeproc.common.settings import Effect, UserError, build_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.store import MOST_KEPT_SHAPES, kept_shapes, pieces_fingerprint, read_index, side_of

_SHOWN = {"fraction": "{:g}", "seed": "seed{}"}  # coordinates in the name of a cell, as transformer-0.1-seed2
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Studies use Ray by default, because it runs their cells side by side.
CellWorkers = Annotated[
    int,
    Effect.NONE,
    Field(ge=0, description="workers of a cell on Ray; 0: the cells train in processes of this machine, without Ray"),
]
Parallel = Annotated[
    PositiveInt | None,
    Field(
        description="cells at a time, with workers=0 in processes of this machine that share its threads; unset, as many as the "
        "cluster has room for, or one with workers=0"
    ),
]


Protocol = Annotated[
    Path | None,
    Effect.NONE,
    Field(
        description="file with the hypotheses and tests of the study. The study starts only if the present commit of git has the "
        "file as it is; records then have its commit, beside the time of the first update"
    ),
]


def _without_null(systems: object) -> object:
    return {name: one for name, one in systems.items() if one is not None} if isinstance(systems, dict) else systems


# The compared systems by name, each with the settings that are its own. NAME=null takes one of a file away.
Systems = Annotated[dict[str, dict[str, Any]], BeforeValidator(_without_null)]


def check_once(values: tuple) -> tuple:
    """Raise ValueError for a value that occurs twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"must hold every value once, but is {list(values)}")
    return values


def check_name(field: str, name: str) -> None:
    """Raise ValueError for a name that cannot be part of a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
        raise ValueError(f"{field}: a name is part of a folder's and must be letters, digits, _ and ., but is {name!r}")


def check_model_name(name: str, systems: Iterable[dict]) -> None:
    """Raise ValueError for a model.name of the whole study that no system has, because all have another one."""
    models = [settings.get("model") for settings in systems]
    names = [model.get("name", name) if isinstance(model, dict) else name for model in models]
    if name != ModelConfig.model_fields["name"].default and name not in names:
        raise ValueError(
            f"model.name: every compared system has its own, and none is {name}; leave it out, or compare a system without "
            "model.name"
        )


_MOST_SHOWN = 5  # classes
# Settings that are a mapping of patterns, of which the first that matches counts.
_PATTERNS = frozenset(name for name, field in TrainConfig.model_fields.items() if get_origin(field.annotation) is dict)


def overlay(values: dict, over: dict) -> dict:
    """Override `values` by those of `over`, sections key by key, and mappings of patterns as `_overlay_patterns` does."""
    merged = dict(values)
    for key, value in over.items():
        before = merged.get(key)
        if key in _PATTERNS and isinstance(value, dict | None):
            merged[key] = _overlay_patterns(before or {}, value or {})
        else:
            merged[key] = overlay(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return merged


def _overlay_patterns(values: dict, over: dict) -> dict:
    """Put the patterns of `over` before the others of `values`. None takes one of `values` back; an empty `over` takes all."""
    others = {pattern: value for pattern, value in values.items() if over and pattern not in over}
    return {pattern: value for pattern, value in over.items() if value is not None or pattern not in values} | others


class Place(NamedTuple):
    """A place in a grid: the setting with its system, its coordinates by axis, and settings over those of the study, in order."""

    system: str
    labels: Mapping[str, str | float | int]
    settings: Sequence[dict]


class StudyConfig(TrainConfig):
    """A training configuration with a grid, which has the seeds."""

    workers: CellWorkers = 1
    grid: Any

    @model_validator(mode="after")
    def _check_axes(self) -> Self:
        """Refuse values that the grid would replace."""
        if self.seed != TrainConfig.model_fields["seed"].default:
            raise ValueError(f"seed: the grid has the seeds of a study; set grid.seeds=[{self.seed}] and seed=1")
        check_model_name(self.model.name, (reduce(overlay, place.settings, {}) for place in self.places()))
        return self

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Yield the places in the order in which their cells run."""

    @abstractmethod
    def check_task(self, run: TrainConfig, where: str) -> None:
        """Raise UserError if the study cannot score the run of a cell. `where` names its settings."""

    @abstractmethod
    def check_data(self, cells: Sequence[Cell], indices: Mapping[AnyPath, Mapping]) -> None:
        """Raise UserError if the data sets of the cells, each with its index, do not fit the study. Their pieces are the same."""


def study_cells(config: StudyConfig, out: AnyPath) -> list[Cell]:
    """Return the cells in the order in which they run.

    Raises UserError for settings that no run accepts. Each system may have another data set, for example with control trees; it
    raises UserError if their text or pieces differ.
    """
    shared = config.model_dump(mode="json", exclude={"grid"})
    cells, indices = [], {config.data.resolve(): read_index(config.data / "encoded")}
    encoders: dict[AnyPath | HubModel | None, str] = {}
    for system, labels, settings in config.places():
        run = build_settings(TrainConfig, reduce(overlay, settings, shared), f"grid.{system}")
        config.check_task(run, f"grid.{system}")
        run = run.with_absolute_paths().with_pinned_encoder(out)
        if run.data not in indices:
            indices[run.data] = read_index(run.data / "encoded")
        if (encoder := run.model.pretrained.folder) not in encoders:
            encoders[encoder] = hash_encoder(encoder)
        name = "-".join(_SHOWN.get(axis, "{}").format(value) for axis, value in labels.items())
        cells.append(Cell(name, labels, run, out / "cells" / name, indices[run.data]["fingerprint"], encoders[encoder]))
    for data, index in indices.items():
        if "train" not in index["totals"]:
            raise UserError(f"{data} has no train split; give a data set to train on")
    check_same_pieces(indices)
    check_other_shapes(indices)
    config.check_data(cells, indices)
    return cells


def hash_encoder(place: AnyPath | HubModel | None) -> str:
    """Return the hashes of the files of a pretrained encoder, which may change between two commands; empty without weights.

    It is empty too for a model of the hub, whose files its commit decides.
    """
    if place is None or isinstance(place, HubModel):
        return ""
    from treenet.models.pretrained_folder import hash_files  # here, because it loads PyTorch

    with phase(f"hashing the encoder in {place}"):
        return hash_files(place)


def check_same_pieces(indices: Mapping[AnyPath, Mapping]) -> None:
    """Raise UserError unless all data sets, each with its index, have the same pieces of the same side of the same text.

    Their trees may differ, also in labels.
    """
    (first, index), *others = indices.items()
    for data, other in others:
        # Examples have the numbers of their classes.
        mine, theirs = ([*one.get("classes", ())][:_MOST_SHOWN] for one in (other, index))
        text = f"text or classes ({', '.join(mine)} and {', '.join(theirs)})" if mine and theirs and mine != theirs else "text"
        for what, differ in (
            (text, other["text_fingerprint"] != index["text_fingerprint"]),
            ("pieces", pieces_fingerprint(other) != pieces_fingerprint(index)),
            ("side", side_of(other) != side_of(index)),
        ):
            if differ:
                raise UserError(
                    f"{data} and {first} differ in {what}, but all models of a study must read the same pieces of the same side "
                    "of one text; preprocess one with parsed set to the other, and with the same tree.side and subwords"
                )


def check_other_shapes(indices: Mapping[AnyPath, Mapping]) -> None:
    """Raise UserError for a control of other shapes in which too many lines of a split keep their own."""
    for data, index in indices.items():
        for split, total in index["totals"].items():
            if (share := kept_shapes(total)) > MOST_KEPT_SHAPES:
                raise UserError(
                    f"{data}: at most {MOST_KEPT_SHAPES:.0%} of the lines of a split may keep their own shape, but {share:.1%} "
                    f"of {split} do; choose another tree.tree_source than other_shape"
                )


def add_study_options(parser: ArgumentParser) -> None:
    """Add the options of the workflows of studies."""
    parser.add_argument("--dry-run", action="store_true", help="show the cells, their disk and the table so far; run nothing")
    add_records_option(parser)


def add_records_option(parser: ArgumentParser) -> None:
    """Add the option of commands that keep records of cells."""
    parser.add_argument(
        "--records",
        type=partial(any_path, option="--records"),
        metavar="DIR",
        help="keep a small file of every finished cell in this folder or object store, without weights. A cell with such a file "
        "is done, and the table is made of these files. So the same command continues a study even if its --out is lost",
    )
