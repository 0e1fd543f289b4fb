"""The rows of a split of a data set, and its references, in the order of the lines that were read."""

from collections.abc import Iterator

import numpy as np

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import read_lengths
from treeproc.shards.schema import lower_case
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index, stage_folder


def split_order(data: AnyPath, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (shard, row) of every example of a split, by example_id: the order of the lines that were read."""
    lengths = read_lengths(data / "encoded", split)
    order = np.argsort(lengths["example_id"], kind="stable")
    return lengths["shard"][order], lengths["row"][order]


def read_split(data: AnyPath, stage: str, split: str) -> Iterator[dict]:
    """Read rows of a stage (`encoded` or `text`) in example order. Raises UserError if a shard is missing, when at its row."""
    shards = SplitShards(stage_folder(data, stage), split)
    numbers, (shard, row) = shards.by_index(), (part.tolist() for part in split_order(data, split))
    return (shards[numbers[index]].row(place) for index, place in zip(shard, row, strict=True))


def read_sources(data: AnyPath, split: str) -> list[str]:
    """Return the lines of the side that models read, in example order, as they were given."""
    side = read_index(data / "encoded").get("tree_settings", {}).get("side", "source")
    return [row[side] for row in read_split(data, "text", split)]


def read_references(data: AnyPath, split: str) -> list[str]:
    """Return the lines of the side that models write, in example order, lower-cased where the pieces are.

    Raises UserError when text and encoded shards differ in their examples.
    """
    index = read_index(data / "encoded")
    side = "source" if index.get("tree_settings", {}).get("side") == "target" else "target"
    lowercase = index.get("subword_settings", {}).get("lowercase", False)
    lines = []
    for text, encoded in zip(read_split(data, "text", split), read_split(data, "encoded", split), strict=True):
        if text["example_id"] != encoded["example_id"]:
            raise UserError(
                f"{data}: text has line {text['example_id'] + 1}, but encoded has line {encoded['example_id'] + 1}; run "
                "workflows/preprocess.py again"
            )
        lines.append(lower_case(text[side]) if lowercase else text[side])
    return lines
