"""The places where constituents may be split in two: what tree regularisation (Nandi, Manning and Murty, 2024) compares.

Trees are made binary from the right: a node of children c1, ..., cm is split after c1, the rest after c2, and so on. A span is
split only between words. Spans with fewer than two possible splits teach nothing, and are left out. Trees side by side are
separate: no span crosses two roots.

Shapes: B batch, S spans, M possible splits of all spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.ancestor_at_depth import find_parents
from treenet.structure.base import Structure
from treenet.structure.span_table import SpanTable, expand


@dataclass
class SplitPoints(Structure):
    """All possible splits of the spans of a batch, span after span. A split at k makes [start, k) and [k, end)."""

    example: Tensor  # [M] int64, example of the batch
    start: Tensor  # [M] int64, as the next two
    split: Tensor
    end: Tensor
    span: Tensor  # [M] int64, number of the span
    gold: Tensor  # [S] int64, place among the M of the split in the tree
    share: Tensor  # [S] float64, 1 / number of spans of the example
    owner: Tensor  # [S] int64, example of the batch

    @classmethod
    def build(cls, table: SpanTable, words: Sequence[np.ndarray]) -> "SplitPoints":
        """Build from `words[b]` [L_b], the word of every leaf, ascending."""
        example, start, gold, end = _binary_spans(table)
        leaf_tree, leaf = np.nonzero(~table.leaf_pad_mask)
        word = np.full(table.leaf_pad_mask.shape, -1)
        word[leaf_tree, leaf] = np.concatenate(words)
        begins = (np.diff(word, axis=1, prepend=-1) != 0) & ~table.leaf_pad_mask
        places = np.nonzero(begins)[1]  # of the first leaves of words, example after example
        before = np.concatenate([[0], begins.ravel().cumsum()])  # words that begin before a flat leaf
        flat = example * table.num_leaves
        first, last, right = before[flat + start + 1], before[flat + end], before[flat + gold]
        kept = begins[example, gold] & (last - first >= 2)
        example, start, end, first, last, right = (x[kept] for x in (example, start, end, first, last, right))
        span, index, first_row = expand(last - first)
        counts = np.bincount(example, minlength=len(table.leaf_counts))
        columns = (
            example[span],
            start[span],
            places[first[span] + index],
            end[span],
            span,
            first_row + right - first,
            1.0 / counts[example],
            example,
        )
        return cls(*map(torch.from_numpy, columns))


def _binary_spans(table: SpanTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return example, start, split and end of every split of the trees made binary from the right."""
    tree, node = np.nonzero(~table.node_pad_mask)
    leaf = np.nonzero(~table.leaf_pad_mask)[1]
    of_nodes, of_leaves = find_parents(table)
    parent = np.concatenate([of_nodes, of_leaves])
    start = np.concatenate([table.start[tree, node], leaf])
    order = np.lexsort((start, parent))
    order = order[parent[order] >= 0]
    parent, start = parent[order], start[order]
    later = np.flatnonzero(parent[1:] == parent[:-1]) + 1  # children that follow another one
    owner = parent[later]
    return tree[owner], start[later - 1], start[later], table.end[tree, node][owner]
