"""`python -m treeproc.verify DATA`: is a data set complete? Every file and every row is read; every problem is named.

Damage (a hash that is not the one of the index, a missing file) is repaired by running the job again. Rows that break a
rule although their hash is right were written so.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa

from treeproc.common.errors import CommandEnded, printable
from treeproc.common.files import file_sha256, file_size
from treeproc.common.progress import Progress
from treeproc.common.settings import ArgumentParser, UserError, run_cli
from treeproc.common.storage import AnyPath, as_path, inside
from treeproc.inspection.checks import arc_problems, encoded_problems, id_problems, parsed_problems
from treeproc.shards.lengths import read_lengths
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, finished_shard, read_index, sidecar_path, stage_folder
from treeproc.stages.lengths import example_ids, row_sizes
from treeproc.subwords import LabelVocab, Subwords

STAGES = ("text", "parsed", "encoded")
_THREADS = 4


@dataclass(frozen=True)
class Problem:
    """`row` counts within the shard, from 0; messages count rows and lines from 1.

    `mendable`: the job writes the file anew when it runs again.
    """

    path: AnyPath
    what: str
    row: int | None = None
    example_id: int | None = None
    mendable: bool = True

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row + 1}, line {self.example_id + 1}"
        return f"{self.path}{where}: {self.what}"


@dataclass
class Verification:
    """The result of a verification: numbers of shards and rows read, and the problems found."""

    problems: list[Problem] = field(default_factory=list)
    shards: int = 0
    rows: int = 0


def stage_folders(data: AnyPath) -> dict[str, AnyPath]:
    """The folders of the stages; below `data` when the encoded stage has no index."""
    try:
        return {stage: stage_folder(data, stage) for stage in STAGES}
    except UserError:
        return {stage: data / stage for stage in STAGES}


def verify(data: AnyPath) -> Verification:
    """Check all stages of a data set. Raises UserError where `data` holds none."""
    folders = stage_folders(data)
    if not any(folder.exists() for folder in folders.values()):
        raise UserError(f"{data} holds no data set; give the --out of workflows/preprocess.py")
    report = Verification()
    indices = {}
    for stage, folder in folders.items():
        try:
            index = read_index(folder)
            index.check_parts()
            indices[stage] = index
        except UserError as error:
            report.problems.append(Problem(folder / "index.json", str(error).removeprefix(f"{folder / 'index.json'} ")))
    records = {stage: index.records() for stage, index in indices.items()}
    total = sum(record.rows for stage in records.values() for record in stage)
    intact: dict[str, dict[str, Shard]] = {}
    with Progress("verify", total, unit="rows") as progress:
        for stage, index in indices.items():
            shards = intact[stage] = _check_files(folders[stage], index, records[stage], report)
            for record in records[stage]:
                shard = shards.get(record.name)
                if shard is not None:
                    report.problems += _check_rows(stage, folders, shard, intact, indices)
                report.shards += 1
                report.rows += record.rows
                progress.update(record.rows, f"{len(report.problems):,} problems")
            report.problems += _check_order(folders[stage], shards.values())
    if "encoded" in indices:
        report.problems += _check_lengths(folders["encoded"], records["encoded"])
    return report


def _check_files(folder: AnyPath, index: dict, records: Sequence[ShardRecord], report: Verification) -> dict[str, Shard]:
    """Hashes, sidecars and schemas; the shards that can be read on."""
    with ThreadPoolExecutor(_THREADS) as pool:
        whats = list(pool.map(lambda record: _file_problem(folder, record), records))
    found = {record.name: Problem(folder / record.name, what) for record, what in zip(records, whats, strict=True) if what}
    for name, sha256 in index.get("files", {}).items():
        path = inside(folder, name)
        if not path.exists() or file_sha256(path) != sha256:
            found[name] = Problem(path, "its hash is not the one in index.json" if path.exists() else "is missing")
    report.problems += found.values()
    intact, schema = {}, None
    for record in records:
        if record.name in found:
            continue
        try:
            shard = Shard(folder, record)
        except UserError as error:
            what = str(error).removeprefix(f"{folder / record.name}").removeprefix(":").split(";")[0].strip()
            report.problems.append(Problem(folder / record.name, what, mendable=False))
            continue
        schema = schema or shard.schema
        if what := _schema_problem(shard, index.get("columns"), schema):
            report.problems.append(Problem(folder / record.name, what, mendable=False))
        else:
            intact[record.name] = shard
    return intact


def _file_problem(folder: AnyPath, record: ShardRecord) -> str:
    path = folder / record.name
    try:
        if (size := file_size(path)) != record.bytes:
            return f"must have {record.bytes} bytes, but has {size}"
        if file_sha256(path) != record.sha256:
            return "its hash is not the one in index.json"
    except FileNotFoundError:
        return "is missing"
    if finished_shard(folder, record.name, record.fingerprint) != record:
        return f"{sidecar_path(path).name} is missing or differs from index.json"
    return ""


def _schema_problem(shard: Shard, columns: list[str] | None, first: pa.Schema) -> str:
    schema = shard.schema
    if schema != first:
        return "its columns are not those of the first shard"
    if columns is not None and list(columns) != schema.names:
        return f"its columns are {', '.join(schema.names)}, but index.json names {', '.join(columns)}"
    return ""


def _check_rows(stage: str, folders: dict, shard: Shard, intact: dict[str, dict[str, Shard]], indices: dict) -> Iterator[Problem]:
    """The rules of a stage, and the same examples as in the stage before."""
    ids = example_ids(shard)
    before = STAGES[STAGES.index(stage) - 1] if stage != "text" else None
    earlier = intact.get(before, {}).get(shard.record.name)
    if earlier is not None and not np.array_equal(ids, example_ids(earlier)):
        yield Problem(folders[stage] / shard.record.name, f"its examples are not those of {before}", mendable=False)
        earlier = None
    if stage == "encoded":
        sizes = _vocabulary_sizes(folders[stage], indices[stage])
        found = chain.from_iterable(
            ((batch * ROWS_PER_RECORD_BATCH + row, what) for row, what in encoded_problems(views, sizes))
            for batch, views in enumerate(shard.columns)
        )
    elif stage == "parsed":
        found = _parsed(shard, earlier)
    else:
        found = iter(())
    for row, what in found:
        yield Problem(folders[stage] / shard.record.name, what, row, int(ids[row]), mendable=False)


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


def _vocabulary_sizes(folder: AnyPath, index: dict) -> dict[str, int]:
    """The upper bounds of ids. They are from the index when a vocabulary file is damaged, which is reported elsewhere."""
    sizes = {"pieces": index["num_pieces"], "labels": index["num_labels"], "pos_tags": 1 << 15}
    try:
        vocab = folder / "vocab"
        found = {name: len(LabelVocab.load(vocab / f"{name}.txt")) for name in ("labels", "pos_tags")}
        return sizes | found | {"pieces": len(Subwords(vocab / "pieces.model"))}
    except (OSError, ValueError, UserError):
        return sizes


def _check_order(folder: AnyPath, shards) -> Iterator[Problem]:
    last: dict[str, int] = {}
    for shard in shards:
        ids = example_ids(shard)
        for row, what in id_problems(ids, last.get(shard.record.split, -1)):
            yield Problem(folder / shard.record.name, what, row, int(ids[row]), mendable=False)
        if len(ids):
            last[shard.record.split] = int(ids[-1])


def _check_lengths(folder: AnyPath, records: Sequence[ShardRecord]) -> Iterator[Problem]:
    """`lengths.arrow` says of every row what the shards say."""
    path = folder / "lengths.arrow"
    for split in dict.fromkeys(record.split for record in records):
        try:
            lengths = read_lengths(folder, split)
            shards = [Shard(folder, record) for record in records if record.split == split]
        except UserError as error:
            if not str(error).startswith(f"{folder / split}-"):  # a damaged shard was named before
                yield Problem(path, str(error).removeprefix(f"{path} "))
            continue
        expected: dict[str, list[np.ndarray]] = {}
        for shard in shards:
            for name, values in row_sizes(shard).items():
                expected.setdefault(name, []).append(values)
        wrong = [name for name, parts in expected.items() if not np.array_equal(np.concatenate(parts), lengths[name])]
        if wrong:
            yield Problem(path, f"{', '.join(wrong)} of {split} are not those of the shards")


def advice(report: Verification, data: AnyPath) -> str:
    """The last line: what to do."""
    read = f"{report.shards:,} shards, {report.rows:,} rows read"
    if not report.problems:
        return f"{read}: no problem; nothing to do"
    files = len(Counter(problem.path for problem in report.problems))
    found = f"{read}: {len(report.problems):,} problems in {files} files"
    if all(problem.mendable for problem in report.problems):
        command = f"workflows/preprocess.py --config {data / 'config.yaml'} --out {data}"
        return f"{found}; run the job again, it makes only the damaged files again: python {command}"
    return f"{found}; some rows were written like this, with a right hash: run the job into a new --out"


def main(argv: Sequence[str]) -> None:
    parser = ArgumentParser(prog="python -m treeproc.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=as_path, metavar="DATA", help="a folder of workflows/preprocess.py, s3://... or gs://...")
    data = parser.parse_args(argv).data
    report = verify(data)
    for problem in report.problems:
        print(printable(str(problem)))
    print(advice(report, data))
    if report.problems:
        raise CommandEnded(2)


if __name__ == "__main__":
    run_cli(main)
