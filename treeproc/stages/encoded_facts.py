"""What the index of the encoded stage says of its rows: the files of their sizes, and the number of classes."""

from treeproc.common.files import file_sha256
from treeproc.common.progress import phase
from treeproc.common.provenance import Recorder
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.store import read_index
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.encode_shard import count_classes
from treeproc.stages.lengths import kept_lengths, write_lengths
from treeproc.stages.run_jobs import run_here
from treeproc.stages.shard_jobs import previous_index, ray_runner

# Rows that tasks of Ray measure. Fewer take this process some seconds, which is what Ray takes to start.
LEAST_ROWS = 10_000_000


def measure_rows(
    config: PreprocessConfig, folder: AnyPath, records: PackedRecords, record: Recorder, *, labelled: bool
) -> tuple[dict[str, str], dict[str, int | list[str]]]:
    """Hash the files of sizes by name, and give `num_classes` and the names `classes` if rows are `labelled`.

    What is made already is kept. Raises UserError if the models of `vocab_from` have too few classes.
    """
    index = previous_index(folder, "files")
    files = kept_lengths(folder, index, records) if index is not None else {}
    found = index.get("num_classes") if index is not None and files and config.vocab_from is None else None
    few = config.workers == 0 or sum(shard.rows for shard in records) < LEAST_ROWS
    run = None if few else ray_runner(folder, record)
    with phase("measuring all rows"):
        files = files or {name: file_sha256(folder / name) for name in write_lengths(folder, records, run=run)}
        if labelled and found is None:
            found = count_classes(folder, records, run or run_here)
    if not labelled or found is None:
        return files, {}
    names = config.classes()
    return files, {"num_classes": max(_known_classes(config, found), len(names))} | ({"classes": names} if names else {})


def _known_classes(config: PreprocessConfig, found: int) -> int:
    """Return the number of classes: of the examples, or of the data set of `vocab_from` for its models."""
    other = config.vocab_from
    if other is None or config.new_pieces is not None:
        return found
    known = read_index(other.absolute() / "encoded")["num_classes"]
    if found > known:
        raise UserError(f"vocab_from: {other} has {known} classes, but these examples have {found}; set labels")
    return known
