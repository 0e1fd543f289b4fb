"""Matches the parameters of two models by name and shape, and the rows of their vocabularies by the names of the entries."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from treenet.models.registry import only_shapes
from treenet.runs.loading import load_processor
from treenet.tasks.base import Task
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.piece_files import read_tokenizer, tokenizer_names
from treeproc.shards.shard import check_vocabulary_files, read_names
from treeproc.shards.store import TOKENIZER_FILE, class_names, read_index

# What a size of `Task.sizes` counts.
KINDS = {
    "num_pieces": "pieces",
    "num_labels": "labels",
    "num_pos_tags": "part-of-speech tags",
    "num_deprels": "dependency relations",
    "num_classes": "classes",
}
_FILES = {"num_labels": "labels.txt", "num_pos_tags": "pos_tags.txt", "num_deprels": "deprels.txt"}


@dataclass(frozen=True)
class Vocabularies:
    """The vocabularies of a data set. `fingerprint` and `sizes` are those that its model recorded; files are read when asked."""

    data: AnyPath
    fingerprint: str
    sizes: Mapping

    def names(self, kind: str) -> list[str]:
        """Return the entries of one vocabulary in the order of its ids.

        Raises UserError if the data set is not there, or if it has another vocabulary now.
        """
        again = "run its tree-attention preprocess again"
        if not self.data.is_dir():
            raise UserError(
                f"init: {self.data} is missing, but its vocabulary is needed to match rows; if it moved, run the training "
                "command of that run with data=NEW, which records the new place"
            )
        index = read_index(self.data / "encoded")
        if (found := index["vocab_fingerprint"]) != self.fingerprint:
            raise UserError(
                f"init: the vocabulary of {self.data} must be {self.fingerprint}, as in the training, but is {found}; {again}"
            )
        check_vocabulary_files(self.data / "encoded", index, again)
        if kind == "num_classes":
            names = class_names(index)
        elif kind == "num_pieces":
            tokenizer = self.data / "encoded" / TOKENIZER_FILE
            if tokenizer.exists():
                names = tokenizer_names(read_tokenizer(tokenizer))
            else:
                processor = load_processor(self.data)
                names = [processor.id_to_piece(number) for number in range(processor.vocab_size())]
        else:
            names = read_names(self.data / "encoded" / "vocab" / _FILES[kind])
        if len(names) != self.sizes[kind]:
            raise UserError(f"init: {self.data} has {len(names)} {KINDS[kind]}, but its model has {self.sizes[kind]}; {again}")
        return names


@dataclass(frozen=True)
class Place:
    """The dimension `dim` of a parameter, which has one row for each entry of the vocabulary `kind`."""

    kind: str
    dim: int


@dataclass(frozen=True)
class Parameter:
    """The shape of a parameter, and the place of its vocabulary rows if it has any."""

    shape: tuple[int, ...]
    place: Place | None = None


@dataclass(frozen=True)
class Rows:
    """Rows `own` [M] of a parameter take the values of rows `theirs` [M] of another one, along dimension `dim`."""

    dim: int
    own: Tensor
    theirs: Tensor


@dataclass
class Matches:
    """The outcome for all parameters of a model: each of its names is in `taken`, in `in_part` or in `new`.

    `rows` has the parameters that take single rows, and `in_part` a note for those that take only some. `new` has the reasons why
    a parameter takes nothing. `unused` are parameters of the other model that this one does not have.
    """

    taken: list[str] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)
    in_part: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def record(self) -> dict:
        """Return the outcome for a JSON file."""
        return {name: getattr(self, name) for name in ("taken", "in_part", "new", "unused")}


def vocabulary_places(task: Task, sizes: Mapping) -> dict[str, Place]:
    """Return the places of vocabulary rows by the names of parameters.

    A place is a dimension that grows when the vocabulary does. The models for that have no memory for weights.
    """
    here = _shapes(task, sizes)
    places: dict[str, Place] = {}
    for kind in KINDS:
        if kind in sizes:
            for name, shape in _shapes(task, {**sizes, kind: sizes[kind] + 1}).items():
                grown = [dim for dim, size in enumerate(shape) if size != here[name][dim]]
                places |= {name: Place(kind, grown[0])} if grown else {}
    return places


def model_parameters(task: Task, sizes: Mapping) -> dict[str, Parameter]:
    """Return the parameters of a model of these sizes by name."""
    places = vocabulary_places(task, sizes)
    return {name: Parameter(shape, places.get(name)) for name, shape in _shapes(task, sizes).items()}


def _shapes(task: Task, sizes: Mapping) -> dict[str, tuple[int, ...]]:
    with only_shapes():
        return {name: tuple(parameter.shape) for name, parameter in task.build_model(sizes).named_parameters()}


def match_parameters(
    own: Mapping[str, Parameter], theirs: Mapping[str, Parameter], own_entries: Vocabularies, their_entries: Vocabularies
) -> Matches:
    """Match parameters `own` with those of another model. Raises UserError if a vocabulary is needed and cannot be read."""
    matches = Matches(unused=[name for name in theirs if name not in own])
    is_same = own_entries.fingerprint == their_entries.fingerprint  # of all vocabularies but the classes

    @cache
    def shared(kind: str) -> tuple[Tensor, Tensor]:
        return _shared_rows(own_entries.names(kind), their_entries.names(kind))

    for name, parameter in own.items():
        other = theirs.get(name)
        if other is None:
            matches.new[name] = "the other run has no such parameter"
        elif _kind(parameter) != _kind(other):
            matches.new[name] = f"has {_kind(parameter)} here and {_kind(other)} there"
        elif parameter.place is None or other.place is None or (is_same and parameter.place.kind != "num_classes"):
            if parameter.shape == other.shape:
                matches.taken.append(name)
            else:
                matches.new[name] = _other_shapes(parameter, other)
        elif _without(parameter) != _without(other):
            matches.new[name] = _other_shapes(parameter, other)
        elif other.shape[other.place.dim] != (size := their_entries.sizes[other.place.kind]):
            matches.new[name] = f"has {other.shape[other.place.dim]:,} rows there for {size:,} {KINDS[other.place.kind]}"
        else:
            _match_rows(matches, name, parameter, other, *shared(parameter.place.kind))
    return matches


def _match_rows(matches: Matches, name: str, parameter: Parameter, other: Parameter, own: Tensor, theirs: Tensor) -> None:
    assert parameter.place is not None and other.place is not None
    dim, kind = parameter.place.dim, KINDS[parameter.place.kind]
    if not len(own):
        matches.new[name] = f"the two vocabularies share no {kind}"
        return
    matches.rows[name] = Rows(dim, own, theirs)
    if len(own) == parameter.shape[dim]:
        matches.taken.append(name)
    else:
        matches.in_part[name] = f"{len(own):,} of {parameter.shape[dim]:,} {kind}; the other run has {other.shape[dim]:,}"


def _shared_rows(own: Sequence[str], theirs: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the ids [M] of the entries that both vocabularies have, in the first and in the second."""
    place = {name: number for number, name in enumerate(theirs)}
    pairs = torch.tensor([(number, place[name]) for number, name in enumerate(own) if name in place], dtype=torch.long)
    first, second = pairs.view(-1, 2).unbind(1)
    return first, second


def _kind(parameter: Parameter) -> str:
    return f"a row for each of the {KINDS[parameter.place.kind]}" if parameter.place else "no rows of a vocabulary"


def _without(parameter: Parameter) -> tuple[int | None, list[int]]:
    """Return the dimension of the vocabulary rows, and the sizes of the others."""
    dim = parameter.place.dim if parameter.place else None
    return dim, [size for number, size in enumerate(parameter.shape) if number != dim]


def _other_shapes(parameter: Parameter, other: Parameter) -> str:
    return f"has shape {list(parameter.shape)} here and {list(other.shape)} there"


def describe_matches(matches: Mapping) -> list[str]:
    """Describe a record of `Matches.record`, in a few lines. Layers that fare alike share a line."""
    lines = [f"  in part: {name}: {note}" for name, note in matches["in_part"].items()]
    for reason in dict.fromkeys(matches["new"].values()):
        names = [name for name, why in matches["new"].items() if why == reason]
        lines.append(f"  not taken: {_join(names)}: {reason}")
    if matches["unused"]:
        lines.append(f"  not in this model: {_join(matches['unused'])}")
    return lines


def _join(names: Sequence[str]) -> str:
    """Join names of parameters; those of several layers become one with a star and their number."""
    groups = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in groups.items())
