"""Everything that can be wrong with one shard, in all stages of a data set: files, rows, and its sizes in other files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice

import numpy as np

from treeproc.common.cache import DamagedObject, local_copy
from treeproc.common.errors import UserError
from treeproc.common.files import file_sha256, file_size
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.inspection.checks import arc_problems, encoded_problems, id_problems, parsed_problems
from treeproc.parsers.config import is_fallback
from treeproc.shards.lengths import Column, SizeCounts, StoredCounts, open_lengths
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH, UNSCORED
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, read_sidecar, sidecar_path
from treeproc.stages.lengths import row_sizes

STAGES = ("text", "parsed", "encoded")
# Row, example_id, what is wrong.
RowProblem = tuple[int | None, int | None, str]
# Problems of rows of a shard that are listed: the command holds those of all shards.
MOST_LISTED = 20
_WRONG_HASH = "its hash is not the one in index.json"


def file_problem(folder: AnyPath, record: ShardRecord) -> str:
    """Return what is wrong with the bytes or the sidecar of a shard; empty when nothing is."""
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
    `sizes` are those of the vocabularies (`checks.encoded_problems`). If there is a `size_counts.arrow`, `shard_rows` are rows of
    the encoded shards by split.
    """

    def __init__(
        self,
        folders: Mapping[str, AnyPath],
        columns: Mapping[str, list[str] | None],
        first: Mapping[str, list[list[str]] | None],
        sizes: Mapping[str, int],
        shard_rows: Mapping[str, Sequence[int]] | None = None,
    ):
        self._folders, self._columns, self._first, self._sizes = folders, columns, first, sizes
        self._shard_rows = shard_rows or {}
        self._split = ""
        self._lengths: Mapping[str, Column] | None = None
        self._counts: StoredCounts | None = None

    def __call__(self, start: int, **records: ShardRecord) -> dict[str, dict]:
        """Return what was found about the shard of this record, by stage, as JSON; `start` is its first row in `lengths.arrow`.

        `file` and `opening` are problems that end the check of the shard. `rows` and `order` are problems of rows as (row or
        None, example_id or None, what); those of `order` are ids that do not rise. `ids` are the first and the last example_id.
        `lengths` and `size_counts` name columns of these files that differ, and are None if the shard cannot be opened.
        """
        found: dict[str, dict] = {}
        sound: dict[str, Shard | None] = {}
        for stage in STAGES:
            if stage in records:
                found[stage], sound[stage] = self._look(stage, records[stage], sound, start)
        return found

    def _look(self, stage: str, record: ShardRecord, sound: Mapping[str, Shard | None], start: int) -> tuple[dict, Shard | None]:
        folder = self._folders[stage]
        found: dict = {"file": file_problem(folder, record), "opening": "", "rows": [], "ids": [], "order": []}
        found |= {"lengths": None, "size_counts": None}
        try:
            shard = Shard(folder, record)
        except UserError as error:
            if not found["file"]:
                found["opening"] = str(error).removeprefix(f"{folder / record.name}").removeprefix(":").split(";")[0].strip()
            return found, None
        if stage == "encoded":
            found |= self._unlike_sizes(shard, start)
        if found["file"]:
            return found, None
        if what := self._schema_problem(stage, shard):
            return found | {"opening": what}, None
        ids = shard.ids
        found["ids"] = [int(ids[0]), int(ids[-1])] if len(ids) else []
        unordered = id_problems(ids[1:], int(ids[0]) if len(ids) else 0)
        found["order"] = _first_of((row + 1, int(ids[row + 1]), what) for row, what in unordered)
        before = STAGES[max(0, STAGES.index(stage) - 1)]
        found["rows"] = _first_of(self._row_problems(stage, shard, ids, before, sound.get(before)))
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
    ) -> Iterator[RowProblem]:
        """Check the rules of a stage, and that its examples are those of the stage before."""
        if earlier is not None and not _are_examples_of(shard, ids, earlier.ids):
            yield None, None, f"its examples differ from those of {before}"
            earlier = None
        if stage == "encoded":
            found: Iterator[tuple[int, str]] = chain.from_iterable(
                ((batch * ROWS_PER_RECORD_BATCH + row, what) for row, what in encoded_problems(views, self._sizes))
                for batch, views in enumerate(shard.columns)
            )
        else:
            found = _parsed(shard, earlier) if stage == "parsed" else iter(())
        yield from ((row, int(ids[row]), what) for row, what in found)

    def _unlike_sizes(self, shard: Shard, start: int) -> dict[str, list[str]]:
        """Return the columns of the files of sizes that are not those of the shard; none of a file that cannot be read."""
        self._open_sizes(shard.record.split)
        sizes, rows = row_sizes(shard), slice(start, start + len(shard))
        lengths = self._lengths or {}
        unlike = [name for name in lengths if not np.array_equal(sizes[name], lengths[name][rows])]
        return {"lengths": unlike, "size_counts": self._unlike_counts(shard.record.index, sizes)}

    def _unlike_counts(self, index: int, sizes: Mapping[str, np.ndarray]) -> list[str]:
        if self._counts is None:
            return []
        try:
            stored = vars(self._counts.count(index, index + 1))
        except (UserError, IndexError):  # numbers below 0, other rows than the index says, or no such shard
            return ["rows"]
        counted = vars(SizeCounts.of(sizes["leaves"], sizes["tgt_pieces"], sizes["nodes"]))
        return [name for name in counted if not np.array_equal(counted[name], stored[name])]

    def _open_sizes(self, split: str) -> None:
        """Map the files of a split's sizes, unless they are those of the shard before."""
        if self._split == split:
            return
        folder, self._split, self._lengths, self._counts = self._folders["encoded"], split, None, None
        with suppress(UserError):
            self._lengths = open_lengths(folder, split)
        if split in self._shard_rows:
            with suppress(UserError):
                self._counts = StoredCounts(folder, split, np.array(self._shard_rows[split], np.int64))


def _are_examples_of(shard: Shard, ids: np.ndarray, before: np.ndarray) -> bool:
    """Return whether a shard has the examples of the stage before, but for as many as it says that were dropped."""
    left = len(before) - shard.record.counts.get("dropped.parse_score", 0)
    return len(ids) == left and bool(np.isin(ids, before).all())


def _first_of(problems: Iterable[RowProblem]) -> list[RowProblem]:
    """Return the problems that are listed, and how many others there are."""
    left = iter(problems)
    found = list(islice(left, MOST_LISTED))
    if more := sum(1 for _ in left):
        found.append((None, None, f"{more:,} more problems of its rows are not listed"))
    return found


def schema_facts(shard: Shard) -> list[list[str]]:
    """Return the schema of a shard as JSON."""
    return [[field.name, str(field.type), str(field.nullable)] for field in shard.schema]


def _parsed(shard: Shard, text: Shard | None) -> Iterator[tuple[int, str]]:
    """Yield the problems of the parsed rows: of the source side, and of the target side where it was parsed too."""
    for number, row in enumerate(shard.rows()):
        line = {} if text is None else text.row(number)
        yield from ((number, what) for what in _side_problems(row, line.get("source")))
        if "target_words" in row:
            target = {name.removeprefix("target_"): value for name, value in row.items() if name.startswith("target_")}
            yield from ((number, f"target: {what}") for what in _side_problems(target, line.get("target")))


def _side_problems(row: dict, line: str | None) -> Iterator[str]:
    words = {name: np.asarray(v) if name.endswith("_char") else v for name, v in row["words"].items()}
    yield from parsed_problems(row | {"words": words}, line)
    if "parse_score" in row and (row["parse_score"] == UNSCORED) != is_fallback(row["parse_status"]):
        yield "parse_score and parse_status differ on whether the line has a parse"
    if row.get("parse_score", 0.0) > 0:
        yield "parse_score is above 0"
    if "arcs" in row:
        governors = np.asarray(row["arcs"]["governor"])
        problems = arc_problems(np.array([0, len(governors)]), governors, np.array([len(words["text"])]))
        yield from (what for _, what in problems)
