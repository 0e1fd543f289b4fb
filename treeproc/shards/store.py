"""Arrow shards on disk or in an object store: atomic writer, sidecars, `index.json`. `shard.py` reads them.

A shard counts as written when its sidecar `.json` is there: the shard is written to a temporary
file, synced, renamed, and only then its sidecar the same way. `index.json` merges the sidecars of
a finished stage. A process killed at any moment leaves finished shards and temporary files behind,
never half a shard. `index.json` of more than 8,192 shards names parts, files that hold the
records. Objects are read through a local copy (`treeproc.common.cache`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Literal, NoReturn

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from treeproc.common.cache import HashFiles, find_changed, hash_here
from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, damaged_file, file_sha256, json_bytes, read_json
from treeproc.common.folder_kinds import DATA_SET, kind_of
from treeproc.common.storage import AnyPath, as_path, inside
from treeproc.common.store_requests import in_parallel
from treeproc.shards.records import Count, IndexPart, Int, Sha256, ShardRecord, read_part, write_parts
from treeproc.shards.rows import Batches, ipc_bytes
from treeproc.shards.schema import SCHEMA_VERSION, STAGE_SCHEMAS, in_order

# Up to so many, `index.json` holds the records itself.
_MOST_INLINE = 8192
# Below DATA/encoded. `tokenizer.json`, of a pretrained encoder, stands in place of `pieces.model`. `deprels.txt` and
# `pieces.tgt.model` are there only where they are needed.
VOCABULARY_FILES = ("vocab/pieces.model", "vocab/labels.txt", "vocab/pos_tags.txt")
OPTIONAL_VOCABULARY_FILES = ("vocab/pieces.tgt.model", "vocab/deprels.txt")
TOKENIZER_FILE = "vocab/tokenizer.json"
PIECES_FILES = ("vocab/pieces.model", "vocab/pieces.tgt.model", TOKENIZER_FILE)
# Share of the lines of a split that may keep their own shape in a control of other shapes. Studies refuse more.
MOST_KEPT_SHAPES = 0.05
# Values of tree.tree_source with which the tree of a line follows from other lines, too.
OF_OTHER_LINES = ("shuffled", "other_shape")


class _TrainFile(BaseModel):
    """A source file of train in the index of the text stage, with the number of its examples in train."""

    file: str
    examples: Count


class _Index(BaseModel):
    """The fields of an `index.json` that readers use, with their types; all others are free."""

    model_config = ConfigDict(extra="allow")

    shards: list[ShardRecord] = []
    parts: list[IndexPart] = []
    totals: dict[str, dict[str, Int]]
    columns: list[str] = []
    files: dict[str, Sha256] = {}
    stages: dict[str, str] = {}
    dropped: dict[str, dict[str, Int]] = {}
    fingerprint: str = ""
    text_fingerprint: str = ""
    tree_fingerprint: str = ""
    vocab_fingerprint: str = ""
    tree_source: str = ""
    parser: dict | None = None
    parser_settings: dict = {}
    tree_settings: dict = {}
    normalization: Literal["none", "nfc"] = "none"
    num_pieces: Count = 0
    num_labels: Count = 0
    num_classes: Count = 0
    classes: list[str] = []
    pairs: bool = False  # with classes: examples 2k and 2k + 1 are the sentences of pair k
    train_files: list[_TrainFile] = []


_RECORD = TypeAdapter(ShardRecord)


def fingerprint_of(*parts: object) -> str:
    """Return a short stable hash of JSON-serialisable parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def write_shard(
    folder: AnyPath,
    name: str,
    rows: Sequence[dict] | Batches,
    schema: pa.Schema,
    *,
    split: str,
    index: int,
    fingerprint: str,
    counts: Counter | None = None,
    longest: dict[str, int] | None = None,
) -> ShardRecord:
    """Write one shard and then its sidecar. Raises UserError when the disk refuses."""
    content = ipc_bytes(rows, schema)
    record = ShardRecord(
        name=name,
        split=split,
        index=index,
        rows=len(rows),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        fingerprint=fingerprint,
        counts=dict(sorted((counts or Counter()).items())),
        longest=dict(sorted((longest or {}).items())),
    )
    atomic_write(folder / name, content)
    atomic_write(sidecar_path(folder / name), json_bytes(asdict(record)))
    return record


def sidecar_path(shard: AnyPath) -> AnyPath:
    return shard.with_suffix(".json")


def finished_shard(folder: AnyPath, name: str, fingerprint: str) -> ShardRecord | None:
    """Return the record of a shard that is complete, hash included, and of this fingerprint; else None."""
    record = read_sidecar(folder, name, fingerprint)
    try:
        return record if record and record.sha256 == file_sha256(folder / name) else None
    except OSError:
        return None


def read_sidecar(folder: AnyPath, name: str, fingerprint: str) -> ShardRecord | None:
    """Read the record of a shard of this fingerprint."""
    try:
        record = _RECORD.validate_json(sidecar_path(folder / name).read_bytes())
    except (OSError, ValueError):
        return None
    return record if (record.name, record.fingerprint) == (name, fingerprint) else None


def in_index_order(records: Iterable[ShardRecord]) -> list[ShardRecord]:
    """Return the records split by split, each in the order of its shards."""
    by_split: dict[str, list[ShardRecord]] = {}
    for record in records:
        by_split.setdefault(record.split, []).append(record)
    return [record for split in in_order(by_split) for record in sorted(by_split[split], key=attrgetter("index"))]


def write_index(folder: AnyPath, records: Iterable[ShardRecord], **facts: object) -> dict:
    """Merge sidecars into `index.json`, the mark of a finished stage.

    `facts` go into the index as they are: the fingerprint of the stage, what was dropped, which
    parser ran.
    """
    ordered, totals = in_index_order(records), dict[str, Counter]()
    for record in ordered:
        totals.setdefault(record.split, Counter()).update({"rows": record.rows, "bytes": record.bytes, **record.counts})
    many = len(ordered) > _MOST_INLINE
    index = {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "totals": {split: dict(sorted(total.items())) for split, total in totals.items()},
        **({"parts": write_parts(folder, ordered)} if many else {"shards": [asdict(record) for record in ordered]}),
    }
    atomic_write(folder / "index.json", json_bytes(index))
    return index


def content_fingerprint(records: Iterable[ShardRecord], least: Mapping[str, float] | None = None) -> str:
    """Return the fingerprint of all rows of a stage. Examples below the `least` parse scores, by split, are dropped."""
    return fingerprint_of([record.sha256 for record in records], *([least] if least else []))


class Index(dict):
    """An `index.json`. A key that is asked for and is not there is a UserError that names the file."""

    def __init__(self, values: Mapping, folder: AnyPath):
        super().__init__(values)
        self._folder = folder
        self._read = dict[str, list[ShardRecord]]()  # of the parts that were asked for

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"{self._folder / 'index.json'} is damaged: it has no {key}; run tree-attention preprocess again")

    def records(self, split: str | None = None) -> list[ShardRecord]:
        """Return the records of a split, or of all splits one after the other, in order. Parts of other splits are not read.

        Raises UserError if a part is missing or damaged.
        """
        if "parts" not in self:
            return [ShardRecord(**shard) for shard in self["shards"] if split in (None, shard["split"])]
        return [record for part in self._parts() if split in (None, part.split) for record in self._of_part(part)]

    def records_between(self, begin: int, end: int) -> list[ShardRecord]:
        """Return `records()[begin:end]`, for places from 0. Parts without any of them are not read.

        Raises UserError as `records` does.
        """
        if "parts" not in self:
            return self.records()[begin:end]
        found, first = list[ShardRecord](), 0
        for part in self._parts():
            if first < end and begin < first + part.shards:
                found += self._of_part(part)[max(begin - first, 0) : end - first]
            first += part.shards
        return found

    def _parts(self) -> list[IndexPart]:
        return [IndexPart(**part) for part in self["parts"]]

    def _of_part(self, part: IndexPart) -> list[ShardRecord]:
        if part.name not in self._read:
            self._read[part.name] = read_part(self._folder, part)
        return self._read[part.name]


class OtherVersion(UserError):
    """The index is of another version of the format."""


def read_index(folder: AnyPath, hint: str | None = None) -> Index:
    """Read the index of a finished stage, or of states, whose message for a damaged one ends in `hint`.

    Raises UserError when it is missing, of another version, not of the form of an index, or names files outside of `folder`.
    """
    again = hint or "run tree-attention preprocess again"
    above = folder.parent
    if above.name in STAGE_SCHEMAS and not (folder / "index.json").exists() and (above / "index.json").exists():
        raise UserError(f"{above} is a single stage of a data set; give the data set: {above.parent}")
    if not hint and not above.is_dir():
        raise UserError(f"{above} is not a folder; give a data set of tree-attention preprocess")
    if not hint and not (folder / "index.json").exists() and (found := kind_of(above)) not in (None, DATA_SET):
        raise UserError(f"{above} is {found.name}; give a data set of tree-attention preprocess")
    index = read_json(folder / "index.json", hint or "run tree-attention preprocess to the end")
    if index.get("schema_version") != SCHEMA_VERSION:
        raise OtherVersion(
            f"{folder / 'index.json'}: schema version must be {SCHEMA_VERSION}, but is {index.get('schema_version')}; "
            "run tree-attention preprocess into a new folder"
        )
    if "totals" not in index or ("shards" in index) == ("parts" in index):
        raise UserError(f"{folder / 'index.json'} is damaged: it names no shards; {again}")
    try:
        _Index.model_validate(index)
    except ValidationError as error:
        raise damaged_file(folder / "index.json", error, again) from None
    for name in index.get("files", ()):
        inside(folder, name)
    return Index(index, folder)


def class_names(index: Mapping) -> list[str]:
    """Return the names of the classes of a data set in the order of their numbers: the numbers themselves if it has no names."""
    return index.get("classes") or [str(number) for number in range(index["num_classes"])]


def line_tags(index: Mapping) -> Sequence[str]:
    """Return the tags that may stand in front of the lines of a data set."""
    return index.get("parser_settings", {}).get("tags", ())


# Settings of trees that make a control of the same words: scores are known for what they are.
_CONTROL = {"tree_source", "seed"}
# Settings that trees of arcs alone have.
_OF_ARCS = {"phrases", "phrase_labels"}


def side_of(index: Mapping) -> str:
    """Return the side of the text that models read: source or target. Old indices and those of one side do not name it."""
    return index.get("tree_settings", {}).get("side", "source")


def forms_of_trees(*settings: Mapping) -> list[dict]:
    """Return from the settings of two data sets' trees what must be equal, so that a model reads both in one way."""
    ignored = _CONTROL if all("phrases" in one for one in settings) else _CONTROL | _OF_ARCS
    return [{name: value for name, value in one.items() if name not in ignored} for one in settings]


def describe_trees(index: dict) -> str:
    """Return `tree.tree_source` of a data set, with the form of phrases that are made of arcs; `given` for those of the files."""
    settings = index.get("tree_settings", {})
    form = [f"{name}={settings[name]}" for name in ("phrases", "phrase_labels") if name in settings]
    source = index["tree_source"]
    if source == "parsed" and (index.get("parser") or {}).get("name") == "given":
        source = "given"
    return f"{source} ({', '.join(form)})" if form else source


def describe_dropped(index: Mapping, split: str) -> str:
    """Describe how many examples of a split the filters dropped, and why; empty if none."""
    counts = index.get("dropped", {}).get(split, {})
    if not (lines := sum(counts.values())):
        return ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    return f"{lines:,} of {index['totals'][split]['rows'] + lines:,} lines of {split} were dropped: {why}"


def describe_agreement(index: Mapping) -> str:
    """Describe how much the trees of a control have in common with the lines' own trees; empty if the index does not count it.

    F1 is over the nodes of all lines, without labels, the node over the whole sentence included.
    """
    names = ("own_nodes", "given_nodes", "shared_nodes", "own_shapes", "compared_lines")
    own, given, shared, same, lines = (sum(total.get(name, 0) for total in index["totals"].values()) for name in names)
    if not lines or not own + given:
        return ""
    f1 = 2 * shared / (own + given)
    told = f"unlabelled F1 with the lines' own trees {f1:.2f}, {same / lines:.1%} of the shapes are the same"
    if any(kept_shapes(total) > MOST_KEPT_SHAPES for total in index["totals"].values()):
        return f"{told}: no control, because more than {MOST_KEPT_SHAPES:.0%} of a split keep their own shape"
    return f"{told}: hardly a control" if keeps_most_shapes(index) else told


def keeps_most_shapes(index: Mapping) -> bool:
    """Return whether most trees of other sentences have the shape of the line's own tree."""
    same, lines = (sum(total.get(name, 0) for total in index["totals"].values()) for name in ("own_shapes", "compared_lines"))
    return index.get("tree_source") == "shuffled" and 2 * same > lines


def kept_shapes(total: Mapping) -> float:
    """Return the share of lines that keep their own shape, of those with inner nodes; `total` has the counts of a split."""
    return total.get("kept_shapes", 0) / max(1, total.get("shaped_lines", 0))


def vocabulary_files(folder: AnyPath) -> list[str]:
    """Return the files of a vocabulary that are there, by their names below the encoded stage `folder`."""
    own = [TOKENIZER_FILE, *VOCABULARY_FILES[1:]] if (folder / TOKENIZER_FILE).exists() else VOCABULARY_FILES
    return [*own, *(name for name in OPTIONAL_VOCABULARY_FILES if (folder / name).exists())]


def pieces_fingerprint(index: Mapping) -> str:
    """Return the fingerprint of the pieces of a data set. That of its vocabulary depends on the labels of its trees too.

    An index without the hashes of its files gives that of the vocabulary.
    """
    pieces = {name: sha256 for name, sha256 in index.get("files", {}).items() if name in PIECES_FILES}
    return fingerprint_of(pieces) if pieces else index.get("vocab_fingerprint", "")


def _neighbour(data: AnyPath, name: str) -> AnyPath:
    """Return the folder of that name beside `data`, or beside the folder that `data` is a link to.

    `.` and `..` have no name, so what is beside them follows from the folder that they are.
    """
    near = data.parent / name
    if isinstance(data, Path) and (data.name in ("", "..") or not near.exists()):
        there = data.resolve().parent / name
        return there if there.exists() else near
    return near


def stage_folder(data: AnyPath, stage: str) -> AnyPath:
    """Return the folder of a stage, `text`, `parsed` or `encoded`, of the data set `data`.

    The text and the parsed stage may belong to another data set. The index of the encoded stage then names them as
    ../NEIGHBOUR/STAGE, or as an absolute path or URI that ends with /STAGE. Raises UserError for any other place.
    """
    place = stage if stage == "encoded" else read_index(data / "encoded").get("stages", {}).get(stage, stage)
    if place == stage:
        return data / stage
    first, *rest = place.split("/")
    if ".." not in rest and rest[-1:] == [stage] and "\0" not in place:
        # A neighbour's place begins with ../ and is found without it: object stores have no such step.
        if first == ".." and len(rest) == 2:
            return _neighbour(data, rest[0]) / stage
        if first != ".." and as_path(place).is_absolute():
            return as_path(place)
    raise UserError(
        f"{data / 'encoded' / 'index.json'}: stages.{stage} must be ../NEIGHBOUR/{stage} or an absolute path that ends with "
        f"/{stage}, but is {place[:200]!r}"
    )


def finished_shards(
    folder: AnyPath, names: Sequence[str], fingerprints: Sequence[str], hash_files: HashFiles = hash_here
) -> list[ShardRecord | None]:
    """Return the record of every shard that is complete and up to date, by the place of its name; None for the others.

    `hash_files` hashes the shards, but for those that were found right before and have not changed (`common/cache.py`).
    """
    sidecars = list(in_parallel(lambda shard: read_sidecar(folder, *shard), zip(names, fingerprints, strict=True)))
    damaged = set(find_changed(folder, {record.name: record.sha256 for record in sidecars if record}, hash_files))
    return [None if name in damaged else record for name, record in zip(names, sidecars, strict=True)]
