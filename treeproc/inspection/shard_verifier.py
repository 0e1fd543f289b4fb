"""Everything that can be wrong with one shard, in all stages of a data set: files, rows, and the places in `lengths.arrow`."""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

from treeproc.common.cache import DamagedObject, local_copy
from treeproc.common.errors import UserError
from treeproc.common.files import file_sha256, file_size
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.inspection.checks import arc_problems, encoded_problems, id_problems, parsed_problems
from treeproc.shards.lengths import read_lengths
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, read_sidecar, sidecar_path
from treeproc.stages.lengths import example_ids, row_sizes

STAGES = ("text", "parsed", "encoded")
_WRONG_HASH = "its hash is not the one in index.json"


def file_problem(folder: AnyPath, record: ShardRecord) -> str:
    """What is wrong with the bytes or the sidecar of a shard; empty when nothing is."""
    path = folder / record.name
    try:
        if (size := file_size(path)) != record.bytes:
            return f"must have {record.bytes} bytes, but has {size}"
        if isinstance(path, RemotePath):
            local_copy(path, record.sha256, anew=True)  # which the shard is then read from
        elif file_sha256(path) != record.sha256:
            return _WRONG_HASH
    except FileNotFoundError:
        return "is missing"
    except DamagedObject:
        return _WRONG_HASH
    if read_sidecar(folder, record.name, record.fingerprint) != record:
        return f"{sidecar_path(path).name} is missing or differs from index.json"
    return ""


class ShardVerifier:
    """Verifies the shards of one name, one after the other; a process or an actor has one.

    `columns` are those that the index of a stage names, `first` those of its first sound shard, as pairs of name and type;
    `sizes` are those of the vocabularies (`checks.encoded_problems`).
    """

    def __init__(
        self,
        folders: Mapping[str, AnyPath],
        columns: Mapping[str, list[str] | None],
        first: Mapping[str, list[list[str]] | None],
        sizes: Mapping[str, int],
    ):
        self._folders, self._columns, self._first, self._sizes = folders, columns, first, sizes
        self._lengths: tuple[str, Mapping[str, np.ndarray] | None] = ("", None)

    def __call__(self, start: int, **records: ShardRecord) -> dict[str, dict]:
        """By stage, what was found about the shard of this record, as JSON; `start` is its first row in `lengths.arrow`.

        `file` and `opening` are problems that end the check of the shard. `rows` and `order` are problems of rows as (row or
        None, example_id or None, what); those of `order` are ids that do not rise. `ids` are the first and the last example_id.
        `lengths` names columns that differ, and is None if the shard cannot be opened.
        """
        found: dict[str, dict] = {}
        sound: dict[str, Shard | None] = {}
        for stage in STAGES:
            if stage in records:
                found[stage], sound[stage] = self._look(stage, records[stage], sound, start)
        return found

    def _look(self, stage: str, record: ShardRecord, sound: Mapping[str, Shard | None], start: int) -> tuple[dict, Shard | None]:
        folder = self._folders[stage]
        found: dict = {"file": file_problem(folder, record), "opening": "", "rows": [], "ids": [], "order": [], "lengths": None}
        try:
            shard = Shard(folder, record)
        except UserError as error:
            if not found["file"]:
                found["opening"] = str(error).removeprefix(f"{folder / record.name}").removeprefix(":").split(";")[0].strip()
            return found, None
        if stage == "encoded":
            found["lengths"] = self._unlike_lengths(shard, start)
        if found["file"]:
            return found, None
        if what := self._schema_problem(stage, shard):
            return found | {"opening": what}, None
        ids = example_ids(shard)
        found["ids"] = [int(ids[0]), int(ids[-1])] if len(ids) else []
        found["order"] = [
            (row + 1, int(ids[row + 1]), what) for row, what in id_problems(ids[1:], int(ids[0]) if len(ids) else 0)
        ]
        before = STAGES[max(0, STAGES.index(stage) - 1)]
        found["rows"] = list(self._row_problems(stage, shard, ids, before, sound.get(before)))
        return found, shard

    def _schema_problem(self, stage: str, shard: Shard) -> str:
        if schema_facts(shard) != self._first[stage]:
            return "its columns differ from those of the first shard"
        columns = self._columns[stage]
        if columns is not None and list(columns) != shard.schema.names:
            return f"its columns are {', '.join(shard.schema.names)}, but index.json names {', '.join(columns)}"
        return ""

    def _row_problems(
        self, stage: str, shard: Shard, ids: np.ndarray, before: str, earlier: Shard | None
    ) -> Iterator[tuple[int | None, int | None, str]]:
        """The rules of a stage, and the same examples as in the stage before."""
        if earlier is not None and not np.array_equal(ids, example_ids(earlier)):
            yield None, None, f"its examples differ from those of {before}"
            earlier = None
        if stage == "encoded":
            found = chain.from_iterable(
                ((batch * ROWS_PER_RECORD_BATCH + row, what) for row, what in encoded_problems(views, self._sizes))
                for batch, views in enumerate(shard.columns)
            )
        else:
            found = _parsed(shard, earlier) if stage == "parsed" else iter(())
        yield from ((row, int(ids[row]), what) for row, what in found)

    def _unlike_lengths(self, shard: Shard, start: int) -> list[str]:
        """Columns of `lengths.arrow` that are not those of the shard; none if that file cannot be read."""
        split = shard.record.split
        if self._lengths[0] != split:
            try:
                self._lengths = split, read_lengths(self._folders["encoded"], split)
            except UserError:
                self._lengths = split, None
        lengths, rows = self._lengths[1], slice(start, start + len(shard))
        if lengths is None:
            return []
        return [name for name, values in row_sizes(shard).items() if not np.array_equal(values, lengths[name][rows])]


def schema_facts(shard: Shard) -> list[list[str]]:
    """The schema of a shard as JSON."""
    return [[field.name, str(field.type), str(field.nullable)] for field in shard.schema]


def _parsed(shard: Shard, text: Shard | None) -> Iterator[tuple[int, str]]:
    """Problems of the parsed rows: of the source side, and of the target side where it was parsed too."""
    for number, row in enumerate(shard.rows()):
        line = {} if text is None else text.row(number)
        yield from ((number, what) for what in _side_problems(row, line.get("source")))
        if "target_words" in row:
            target = {name.removeprefix("target_"): value for name, value in row.items() if name.startswith("target_")}
            yield from ((number, f"target: {what}") for what in _side_problems(target, line.get("target")))


def _side_problems(row: dict, line: str | None) -> Iterator[str]:
    words = {name: np.asarray(v) if name.endswith("_char") else v for name, v in row["words"].items()}
    yield from parsed_problems(row | {"words": words}, line)
    if "arcs" in row:
        governors = np.asarray(row["arcs"]["governor"])
        problems = arc_problems(np.array([0, len(governors)]), governors, np.array([len(words["text"])]))
        yield from (what for _, what in problems)
