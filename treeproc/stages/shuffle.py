"""Trees of other lines, for `tree_source: shuffled`: a parser's trees, each over the words of another line.

A line gets the tree of another line of its split that has as many words, so that a split keeps its trees, their labels and
their depths. A line that is the only one of its length keeps its own tree.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from treeproc.common.storage import AnyPath
from treeproc.shards.ragged import edges_of
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, read_index
from treeproc.trees.control_trees import hash_examples

# The donors of the lines of one shard: numbers of shards in the index of the parsed stage, and rows in them.
Donors = tuple[list[int], list[int]]
# Trees of lines in brackets: line r has trees [edges[r], edges[r + 1]).
Donated = tuple[np.ndarray, pa.Array]


def find_donors(folder: AnyPath, parsed: Sequence[ShardRecord], words: str, seed: int) -> list[Donors]:
    """Donors for every shard of the parsed stage, by the number of words in column `words`; a function of `seed` and ids.

    The lines of a split that have one length stand in an order that a hash of seed and example id decides. Each gets the tree
    of the next one, the last that of the first.
    """
    found = [(batch["example_id"], np.diff(batch[words][0])) for record in parsed for batch in Shard(folder, record).columns]
    ids, lengths = map(np.concatenate, zip(*found, strict=True))
    splits = {split: number for number, split in enumerate(dict.fromkeys(record.split for record in parsed))}
    rows = np.array([record.rows for record in parsed])
    split = np.repeat([splits[record.split] for record in parsed], rows)
    order = np.lexsort((ids, hash_examples(ids, seed), lengths, split))
    is_first = (np.diff(lengths[order], prepend=-1) != 0) | (np.diff(split[order], prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    following = np.arange(1, len(order) + 1)
    following[np.append(first[1:], len(order)) - 1] = first
    donor = np.empty_like(order)
    donor[order] = order[following]
    edges = edges_of(rows)
    shard = np.searchsorted(edges, donor, side="right") - 1
    row = donor - edges[shard]
    return [(shard[a:b].tolist(), row[a:b].tolist()) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def read_donated(folder: AnyPath, parsed: ShardRecord, donors: Donors, trees: str) -> tuple[Donated, int]:
    """The donors' trees, column `trees` of the parsed stage, for the lines of shard `parsed`; how many keep their own."""
    shards, (shard, row) = read_index(folder).records(), map(np.array, donors)
    own = [record.name for record in shards].index(parsed.name)
    found: list[list[str]] = [[]] * len(row)
    for number in np.unique(shard).tolist():
        donor = Shard(folder, shards[number])
        for line in np.flatnonzero(shard == number).tolist():
            found[line] = donor.row(int(row[line]))[trees]
    lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
    donated = edges_of(lengths), pa.array([tree for own_trees in found for tree in own_trees], pa.string())
    return donated, int(np.count_nonzero((shard == own) & (row == np.arange(len(row)))))


def cut(donated: Donated, first: int, count: int) -> Donated:
    """The part for `count` lines from line `first` on."""
    edges, texts = donated
    own = edges[first : first + count + 1]
    return own - own[0], texts.slice(own[0], own[-1] - own[0])
