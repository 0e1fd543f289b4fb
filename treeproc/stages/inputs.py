"""Settings of the files and the trees of a data set; a note of inputs that were read before: `text/inputs.json`.

Files whose paths, sizes and times of change are those of the note are not read again. The note holds a hash of these three. It
also holds the number of examples and the digest of every split.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, model_validator
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from treeproc.common.cache import SETTLED_NS
from treeproc.common.files import MADE_AGAIN, atomic_write, json_bytes, read_json
from treeproc.common.settings import Settings, UserError, later_field
from treeproc.common.storage import AnyPath, DataPath
from treeproc.common.store_requests import StoreRefuses
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.readers import Format, find_format, read_rows
from treeproc.readers.labelled import LabelledConfig, find_classes
from treeproc.readers.line_forms import Normalization
from treeproc.readers.numbered_lines import refuse_pipes
from treeproc.shards.schema import FULL_TEXT_SCHEMA
from treeproc.shards.store import OF_OTHER_LINES
from treeproc.stages.sentences import cut_sentences
from treeproc.trees.controls import ControlTree
from treeproc.trees.dependency_trees import PhraseLabels, PhraseShape

NOTE = "inputs.json"


class SplitFiles(Settings):
    """One split: files of a side are read one after the other."""

    source: list[DataPath] = Field(
        [], description="files of the source side, plain or compressed; some formats: folders, archives"
    )
    target: list[DataPath] = Field([], description="files of the target side, for formats that have one")
    hold_out: int | None = Field(None, ge=2, description="instead of files: take every n-th example out of train")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.source) == (self.hold_out is not None) or (self.target and not self.source):
            raise ValueError("must have either source files or hold_out")
        return self


@dataclass(frozen=True)
class Inputs:
    """The inputs of the text stage: the files of all splits, and their format."""

    splits: Mapping[str, SplitFiles]
    format: str
    tokenized: str
    labels: Mapping[int, int] | None  # class in the file -> class of the data set; examples of others are dropped
    normalization: Normalization = "none"
    labelled: LabelledConfig = field(default_factory=LabelledConfig)
    parser: ParserConfig | None = None  # that cuts lines into sentences, for format `documents`

    @property
    def form(self) -> Format:
        """Return the format of the files."""
        return find_format(self.format, self.labelled)

    def classes_of_train(self) -> list[str]:
        """Return the names of the classes in the files of train, for format `labelled`. Raises UserError on bad input."""
        refuse_pipes(self.splits["train"].source)
        return find_classes(self.splits["train"].source, self.labelled)

    def with_absolute_paths(self) -> "Inputs":
        """Return the same files for a process with another working folder."""
        splits = {
            split: files.model_copy(
                update={side: [path.absolute() for path in getattr(files, side)] for side in ("source", "target")}
            )
            for split, files in self.splits.items()
        }
        return replace(self, splits=splits)

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the text shards beside `example_id`."""
        form, tokenized = self.form, ("words",) if self.tokenized == "moses" else ()
        target = ("target",) if any(files.target for files in self.splits.values()) else ()
        names = {"source", *form.columns, *tokenized, *target}
        return tuple(name for name in FULL_TEXT_SCHEMA.names if name in names)

    def columns_beyond_key(self) -> list[str]:
        """Return the columns that the key of an example does not cover."""
        # Moses words follow from the source, all other columns from the file alone.
        known_by_key = {"source", "target", "label", *(("words",) if self.tokenized == "moses" else ())}
        return [name for name in self.columns() if name not in known_by_key]

    def rows(self, split: str) -> Iterator[dict]:
        """Return the examples of a split in order, without `example_id`. Raises UserError on bad input."""
        files = self.files(split)
        return self.of_split(split, self._rows(files.source, files.target))

    def _rows(self, source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
        rows = read_rows(self.format, source, target, self.tokenized, self.normalization, self.labelled)
        return rows if self.parser is None else cut_sentences(rows, self.parser)

    def of_split(self, split: str, rows: Iterator[dict], start: int = 0) -> Iterator[dict]:
        """Return the rows of the split among those of its files from line `start` on."""
        if (stride := self._stride(split)) is None:
            return rows
        held = split == "valid"
        return (row for number, row in enumerate(rows, start=start + 1) if (number % stride == 0) == held)

    def _stride(self, split: str) -> int | None:
        """Return the n of `hold_out`: every n-th example of the files of train belongs to valid. None for other splits."""
        strides = (files.hold_out for files in self.splits.values() if files.hold_out)
        return next(strides, None) if split in ("train", "valid") else None

    def files(self, split: str) -> SplitFiles:
        """Return the files that a split is read from."""
        return self.splits[split if self.splits[split].source else "train"]

    def examples_before(self, split: str, line: int) -> int:
        """Count the split's examples among the first `line` lines of its files, if examples are lines."""
        if (stride := self._stride(split)) is None:
            return line
        return line // stride if split == "valid" else line - line // stride

    def count_train_files(self) -> list[int]:
        """Read the source files of train, and return the number of examples of each, before `hold_out`."""
        beside = self.form.target == "required"  # a file beside itself is a pair of sides that fit
        counts = []
        for path in self.splits["train"].source:
            files = [path]
            try:
                counts.append(sum(1 for _ in self._rows(files, files * beside)))
            except StoreRefuses:
                raise
            except UserError:  # all files together were read before, so this one has no example
                counts.append(0)
        return counts

    def line(self, split: str, example_id: int) -> int:
        """Return the number, from 1, of an example over the files of its split; that of its line if examples are lines."""
        if (stride := self._stride(split)) is None:
            return example_id + 1
        return (example_id + 1) * stride if split == "valid" else example_id + example_id // (stride - 1) + 1

    def paths(self) -> list[AnyPath]:
        """Return the files of all splits and sides, each once."""
        return list(
            dict.fromkeys(path for files in self.splits.values() for side in (files.source, files.target) for path in side)
        )

    def paths_of_lines(self) -> list[AnyPath]:
        """Return the files that are read as plain lines of text: both sides of `parallel`, `text`, `documents`, the targets of
        trees.
        """
        formats = {"source": ("parallel", "text", "documents"), "target": ("parallel", "brackets", "conllu")}
        sides = [side for side, names in formats.items() if self.format in names]
        return [path for files in self.splits.values() for side in sides for path in getattr(files, side)]

    def no_example(self, split: str) -> UserError:
        """Return the error of a split whose files hold no example."""
        files = self.splits[split]
        names = " and ".join(" + ".join(map(str, side)) for side in (files.source, files.target) if side)
        what = f"no example of format {self.format} in {names}" if names else f"splits.{split}: hold_out takes no example"
        return UserError(f"{what}; {'at least one is needed' if names else 'set a smaller hold_out'}")


class _Form(TypedDict):
    stamps: str
    counts: dict[str, int]
    digests: dict[str, str]


@dataclass(frozen=True)
class InputCounts:
    """The number of examples and the digest of every split, from reading the inputs."""

    counts: dict[str, int]
    digests: dict[str, str]


def input_stamp(inputs: Inputs) -> str | None:
    """Hash how the inputs are read, and path, size and time of change of every file; None if one has none of these.

    If a part of an archive or table is read, the whole file counts. Raises UserError if an object store refuses.
    """
    facts: list[object] = [inputs.format, inputs.tokenized]
    if inputs.normalization != "none":  # so that older notes stay valid
        facts.append(inputs.normalization)
    if inputs.format == "labelled":
        facts.append(inputs.labelled.model_dump())
    if inputs.parser is not None:
        facts.append(describe_parser(inputs.parser))
    try:
        for split, files in sorted(inputs.splits.items()):
            facts.append([split, files.hold_out])
            for side in (files.source, files.target):
                facts.append([_stamps(path) for path in side])
    except OSError:
        return None
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _stamps(path: AnyPath) -> list[tuple[str, int, int]]:
    if not isinstance(path, Path):
        return [(str(path), *path.stamp())]
    path = path.absolute()
    return [(str(file), (facts := file.stat()).st_size, facts.st_mtime_ns) for file in _files(path)] + [(str(path), 0, 0)]


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    else:
        yield next((one for one in (path, *path.parents) if one.is_file()), path)


def changed_just_now(inputs: Inputs) -> bool:
    """Return whether an object may change again and keep its time, which most stores round to seconds."""
    return any(path.stamp()[1] >= time.time_ns() - SETTLED_NS for path in inputs.paths() if not isinstance(path, Path))


def read_cached_counts(folder: AnyPath, stamps: str | None) -> InputCounts | None:
    """Read what was noted in a text folder about inputs of these stamps; None if nothing was."""
    if stamps is None or not (folder / NOTE).exists():
        return None
    try:
        note = read_json(folder / NOTE, MADE_AGAIN, _Form)
    except UserError:  # a note that is damaged is none
        return None
    return InputCounts(note["counts"], note["digests"]) if note["stamps"] == stamps else None


def write_cached_counts(folder: AnyPath, stamps: str | None, known: InputCounts) -> None:
    """Write the result of reading. Without stamps, remove a note about other inputs."""
    if stamps is None:
        (folder / NOTE).unlink(missing_ok=True)
    else:
        atomic_write(folder / NOTE, json_bytes({"stamps": stamps, **asdict(known)}, _Form))


OfConstituents = Literal["parsed", "shuffled", "unlabelled", "permuted_labels", "other_shape"]
TreeSource = Literal[OfConstituents, "dependencies", ControlTree, "flat_tags"]


class TreeConfig(Settings):
    """Settings of the trees that models read: their source and their form."""

    tree_source: TreeSource = Field(
        "parsed",
        description="'parsed': the parser's constituents. 'dependencies': phrases made of its arcs (parser.dependencies=true); "
        "the default with parser.constituency=false. The others are controls. 'unlabelled', 'permuted_labels' and 'other_shape' "
        "change labels or shape of the line's constituents; 'shuffled': those of another line of the split with as many words. "
        "The rest need no parser; with 'flat_tags', every word has a node with its tag",
    )
    phrases: PhraseShape = Field(
        "layered",
        description="for tree_source: dependencies. 'layered': as in a treebank, NP in PP in VP in S. 'flat': a node for a head "
        "with its dependents. 'left', 'right': a node for every dependent, those of that side first",
    )
    phrase_labels: PhraseLabels = Field(
        "upos",
        description="for tree_source: dependencies; labels by the head's tag (NP, VP, ...), or by its relation (nsubj, obl, ...)",
    )
    side: Literal["source", "target"] = Field(
        "source", description="the side whose words are leaves; models write the other side"
    )
    collapse_unary: bool = Field(
        True, description="join a chain of nodes over the same words into one node, with the lowest label"
    )
    binarize: Literal["none", "left", "right"] = Field(
        "none", description="make trees binary: a node with more than two children gets inner nodes, labelled @ and its label"
    )
    documents: Literal["separate", "dummy_root"] = Field(
        "separate",
        description="'separate': the trees of an example are side by side. 'dummy_root': they are below one more node, labelled "
        "DOC. If unset: dummy_root for translation pairs and texts with classes, with parser.split_sentences",
    )
    seed: int = Field(1, description="seed of random and shuffled trees, of permuted labels, and of other shapes")
    min_parse_score: float | None = later_field(
        None,
        le=0,
        description="drop training examples whose `parse_score` is lower (parser.scores: true), such as -0.1. Lines without a "
        "complete parse are below every number",
    )
    min_parse_score_in: Literal["train", "all"] = later_field("train", description="'all': min_parse_score is for every split")

    @model_validator(mode="after")
    def _needs_a_least_score(self) -> Self:
        if self.min_parse_score is None and self.min_parse_score_in != "train":
            raise ValueError("min_parse_score_in: needs min_parse_score; set that too, or leave both out")
        return self

    def facts(self) -> dict:
        """Return the settings that decide on the trees, for fingerprints and the index."""
        others = {"min_parse_score", "min_parse_score_in"}  # which choose lines
        return self.model_dump(exclude=others if self.tree_source == "dependencies" else others | {"phrases", "phrase_labels"})

    def least_score(self, split: str) -> float | None:
        """Return the score below which examples of a split are dropped; None if all are kept."""
        return self.min_parse_score if split == "train" or self.min_parse_score_in == "all" else None

    @property
    def of_constituents(self) -> bool:
        """Return whether the trees are made of a parser's constituents."""
        return self.tree_source in get_args(OfConstituents)

    @property
    def of_other_lines(self) -> bool:
        """Return whether the tree of a line follows from other lines, too."""
        return self.tree_source in OF_OTHER_LINES

    @property
    def other_side(self) -> str:
        """Return the side that models write."""
        return "target" if self.side == "source" else "source"

    @property
    def parsed_columns(self) -> tuple[str, str]:
        """Return the words and trees of the leaves' side in a parsed shard."""
        return ("words", "trees") if self.side == "source" else ("target_words", "target_trees")

    @property
    def score_column(self) -> str:
        """Return the scores of the leaves' side in a parsed shard that has them."""
        return "parse_score" if self.side == "source" else "target_parse_score"

    @property
    def arcs_column(self) -> str:
        """Return the dependencies of the leaves' side in a parsed shard that has them."""
        return "arcs" if self.side == "source" else "target_arcs"
