"""Draws that depend on ids alone: hashes of examples, shares of a data set that nest, and how often an epoch has each example.

The last follows from the weights of the files of the training split. Ids of examples count over the files, in the order of the
data set's settings. The index of the text stage has the number of examples of each file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from treenet.config import CorpusConfig
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import SizeCounts
from treeproc.shards.rows import hash_ids
from treeproc.shards.shard import check_stage
from treeproc.shards.store import read_index

_AT_ONCE = 1 << 20  # ids that are hashed together: temporary arrays are several times as large


def choose_fraction(example_ids: np.ndarray, fraction: float, seed: int | None = None) -> np.ndarray:
    """Choose about `fraction` of the examples [n]; a smaller fraction chooses a subset of a larger one with the same `seed`.

    Two seeds draw independently of each other; None draws the same for all runs.
    """
    if fraction >= 1:
        return np.ones(len(example_ids), dtype=bool)
    return _seeded(example_ids, seed) < np.uint64(int(fraction * 2**64))


def share_of_cells(counts: SizeCounts, fraction: float, window: int, seed: int | None) -> np.ndarray:
    """Return the rows [cells] that a share of a window takes of each size: floor(fraction * rows + u), u of a hash in [0, 1).

    So the batches of a share are known from the counts alone. Smaller fractions take at most as many of each.
    """
    if fraction >= 1:
        return counts.rows
    sizes = hash_ids(counts.leaves << 32 | counts.tgt_pieces)
    hashes = _seeded(sizes ^ hash_ids(np.array([window])), seed)
    u = (hashes >> np.uint64(11)) / 2.0**53
    return np.floor(fraction * counts.rows + u).astype(np.int64)


def choose_in_cells(
    leaves: np.ndarray, tgt_pieces: np.ndarray, example_ids: np.ndarray, fraction: float, window: int, seed: int | None
) -> np.ndarray:
    """Choose the share [n] of the rows of a window: the rows with the smallest hashes of each size, `share_of_cells` many.

    A smaller fraction chooses a subset of a larger one with the same `seed`.
    """
    order = np.argsort(_seeded(example_ids, seed), kind="stable")
    width = int(tgt_pieces.max(initial=0)) + 1
    keys = leaves.astype(np.int64) * width + tgt_pieces
    if len(keys) and keys.max() <= np.iinfo(np.int32).max:
        keys = keys.astype(np.int32)  # half of the memory to sort
    order = order[np.argsort(keys[order], kind="stable")]  # by size, then by hash: the order of cells in SizeCounts
    counts = SizeCounts.of(leaves, tgt_pieces, np.zeros(len(leaves), dtype=np.int8))
    taken = share_of_cells(counts, fraction, window, seed)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts.rows) - counts.rows, counts.rows)  # of a row in its cell
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[place < np.repeat(taken, counts.rows)]] = True
    return chosen


def _seeded(ids: np.ndarray, seed: int | None) -> np.ndarray:
    out = np.empty(len(ids), dtype=np.uint64)
    for start in range(0, len(ids), _AT_ONCE):
        hashes = hash_ids(ids[start : start + _AT_ONCE])
        out[start : start + _AT_ONCE] = hashes if seed is None else hash_ids(hashes ^ hash_ids(np.array([seed])))
    return out


def keys_of_examples(example_ids: np.ndarray, *numbers: int) -> np.ndarray:
    """Make a key uint64 [n] for the draws of each example from its id and the numbers: seed, epoch, purpose of the draws."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = hash_ids(key ^ np.uint64(number))
    return hash_ids(hash_ids(example_ids) ^ key)


def keys_of_parts(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Make a key uint64 for each part of examples with `counts` [n] parts, from their keys [n] and the part's number."""
    ends = np.cumsum(counts)
    numbers = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return hash_ids(np.repeat(keys, counts) + numbers.astype(np.uint64))


# Keeps these draws apart from those of shares and of samples.
_PURPOSE = 0x636F70696573


@dataclass(frozen=True)
class Corpora:
    """The files of the training split [files], in the order of the examples."""

    files: tuple[str, ...]
    examples: np.ndarray  # those that a filter dropped included
    weights: np.ndarray

    def places(self, example_ids: np.ndarray) -> np.ndarray:
        """Return the number of the file [n] that each example came from. Raises UserError for an example of no file."""
        places = np.searchsorted(np.cumsum(self.examples), example_ids, side="right")
        if (places == len(self.files)).any():
            raise UserError(
                f"train has example {int(np.max(example_ids)) + 1:,}, but its files have {self.examples.sum():,}; run "
                "tree-attention preprocess again"
            )
        return places

    def count_copies(self, example_ids: np.ndarray, seed: int | None) -> np.ndarray:
        """Return how often [n] each example occurs in an epoch: the whole part of the weight of its file, or once more.

        The share of examples that occur once more is about the fraction of the weight. They follow from the ids and the seed.
        """
        weights = self.weights[self.places(example_ids)]
        whole = np.floor(weights)
        drawn = (keys_of_examples(example_ids, _PURPOSE, 0 if seed is None else seed + 1) >> np.uint64(11)) / 2.0**53
        return (whole + (drawn < weights - whole)).astype(np.int64)

    def describe(self, used_ids: np.ndarray) -> list[dict]:
        """Return the facts of every file for run.json. `used_ids` are the ids of all examples of an epoch."""
        counts = np.bincount(self.places(used_ids), minlength=len(self.files))
        columns = (self.files, self.examples.tolist(), self.weights.tolist(), counts.tolist())
        return [dict(zip(("file", "examples", "weight", "in_epoch"), row, strict=True)) for row in zip(*columns, strict=True)]


def read_corpora(data: AnyPath, corpora: Sequence[CorpusConfig], sentences: int = 1) -> Corpora | None:
    """Return the files of train with the weights of `batch.corpora`; None without weights. An id is of so many `sentences`.

    Raises UserError if the data set does not know its files, or if the weights do not fit them.
    """
    if not corpora:
        return None
    folder = check_stage(data, "text")
    found = read_index(folder)["train_files"]
    files = tuple(one["file"] for one in found)
    examples = np.array([one["examples"] for one in found], dtype=np.int64) // sentences
    return Corpora(files, examples, _weights_of_files(files, corpora))


def _weights_of_files(files: Sequence[str], corpora: Sequence[CorpusConfig]) -> np.ndarray:
    """Return the weight of every file. Raises UserError for a name that fits no file, or several, or a file named before."""
    weights: dict[str, float] = {}
    for corpus in corpora:
        name = corpus.file
        fitting = {file for file in files if _ends_with(file, name)}
        exact = {name} & fitting
        if len(chosen := exact or fitting) != 1:
            raise UserError(
                f"batch.corpora must name files of train, but {name} fits {len(chosen) or 'none'} of {', '.join(files)}"
                + ("; give more of the path" if chosen else "")
            )
        (file,) = chosen
        if file in weights:
            raise UserError(f"batch.corpora names {file} twice; give it one weight")
        weights[file] = corpus.weight
    return np.array([weights.get(file, 1.0) for file in files])


def _ends_with(file: str, name: str) -> bool:
    parts = PurePosixPath(name).parts
    return PurePosixPath(file).parts[-len(parts) :] == parts
