"""The rows of a split of a data set, and its references, in the order of the lines that were read."""

from collections.abc import Iterator, Mapping

import numpy as np

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import read_lengths
from treeproc.shards.schema import lower_case
from treeproc.shards.shard import SplitShards, check_stage
from treeproc.shards.store import read_index, side_of, stage_folder


def read_split(data: AnyPath, stage: str, split: str) -> Iterator[dict]:
    """Read the rows of a stage that the encoded stage has too, in the order of the lines that were read; see `read_rows`."""
    lengths = read_lengths(data / "encoded", split)
    return read_rows(data, stage, split, lengths, np.argsort(lengths["example_id"], kind="stable"))


def read_rows(data: AnyPath, stage: str, split: str, lengths: Mapping[str, np.ndarray], rows: np.ndarray) -> Iterator[dict]:
    """Read the rows of a stage that belong to `rows` [n] of the encoded stage, of these `lengths`.

    Raises UserError as `check_stage`, and if a shard is missing or has no such row, when at that row.
    """
    folder = data / stage if stage == "encoded" else check_stage(data, stage, split)
    shards = SplitShards(folder, split)
    return _rows(
        data, stage, shards, zip(*(lengths[name][rows].tolist() for name in ("shard", "row", "example_id")), strict=True)
    )


def _rows(data: AnyPath, stage: str, shards: SplitShards, places: Iterator[tuple[int, int, int]]) -> Iterator[dict]:
    numbers = shards.by_index()
    for index, place, example_id in places:
        row = shards[numbers[index]].find(example_id, place) if index in numbers else None
        if row is None:
            raise UserError(
                f"{data}: its stages {stage} and encoded differ at line {example_id + 1}; run tree-attention preprocess again"
            )
        yield row


def read_parse_scores(data: AnyPath, split: str) -> np.ndarray | None:
    """Return the `parse_score` of every example of a split, in example order; None if the parsed stage has none or is not there.

    It is that of the leaves' side.
    """
    folder, column = stage_folder(data, "parsed"), f"{side_prefix(data)}parse_score"
    if not (folder / "index.json").exists() or column not in read_index(folder).get("columns", ()):
        return None
    return np.array([row[column] for row in read_split(data, "parsed", split)])


def side_prefix(data: AnyPath) -> str:
    """Return the prefix of the columns of the leaves' side in a parsed shard."""
    return "target_" if side_of(read_index(data / "encoded")) == "target" else ""


def read_sources(data: AnyPath, split: str) -> list[str]:
    """Return the lines of the side that models read, in example order, as they were given."""
    side = side_of(read_index(data / "encoded"))
    return [row[side] for row in read_split(data, "text", split)]


def read_references(data: AnyPath, split: str) -> list[str]:
    """Return the lines of the side that models write, in example order, lower-cased where the pieces are.

    Raises UserError if the data set has one side alone, and when text and encoded shards differ in their examples.
    """
    index = read_index(data / "encoded")
    if "tgt_pieces" not in index.get("columns", ["tgt_pieces"]):
        raise UserError(f"{data} holds no translations: its examples have one side; give the data set of a translation task")
    side = "source" if side_of(index) == "target" else "target"
    lowercase = index.get("subword_settings", {}).get("lowercase", False)
    lines = (row[side] for row in read_split(data, "text", split))
    return [lower_case(line) for line in lines] if lowercase else list(lines)
