"""The invariants of the rows of a data set, checked for a record batch at once.

A check yields (row of the batch, what is wrong). Columns come as `treeproc.shards.rows.column_views` gives them: lists as
(offsets, flat values). Letters: R rows, M list items of all rows together.
"""

from collections.abc import Iterator

import numpy as np

from treeproc.parsers import read_trees
from treeproc.trees.spans import check_tree

Problems = Iterator[tuple[int, str]]


def _owners(offsets: np.ndarray) -> np.ndarray:
    """Return the row of every list item [M]."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _rows(bad: np.ndarray, owners: np.ndarray, what: str) -> Problems:
    return ((int(row), what) for row in np.unique(owners[bad]))


def node_depths(offsets: np.ndarray, subtree_ends: np.ndarray) -> np.ndarray:
    """Return the depth of every node [M], 0 for roots: the earlier nodes of its row whose subtree is still open."""
    first = np.repeat(offsets[:-1], np.diff(offsets)) - offsets[0]
    closed = np.cumsum(np.bincount(first + subtree_ends, minlength=len(first) + 1))
    return np.arange(len(first)) - closed[: len(first)]


def id_problems(ids: np.ndarray, previous: int) -> Problems:
    """Check that ids rise within a split; `previous` is the last one of the shards before."""
    bad = np.flatnonzero(np.diff(ids, prepend=previous) <= 0)
    return ((int(row), "example_id does not rise") for row in bad)


def encoded_problems(views: dict, sizes: dict[str, int]) -> Problems:
    """Check that ids are below their `sizes` (of `pieces`, `labels`, `pos_tags` and `classes`), and that trees are trees."""
    leaf_offsets, leaves = views["leaves"]
    node_offsets, nodes = views["nodes"]
    span_offsets, spans = views["spans"]
    owners, num_leaves = _owners(leaf_offsets), np.diff(leaf_offsets)
    limits = [("leaves.piece", leaves["piece"], owners, "pieces"), ("leaves.pos_tag", leaves["pos_tag"], owners, "pos_tags")]
    limits.append(("nodes.label", nodes["label"], _owners(node_offsets), "labels"))
    if "tgt_pieces" in views:
        limits.append(("tgt_pieces", views["tgt_pieces"][1], _owners(views["tgt_pieces"][0]), "pieces"))
    if "label" in views and "classes" in sizes:
        limits.append(("label", views["label"], np.arange(len(num_leaves)), "classes"))
    for name, values, rows, kind in limits:
        yield from _rows((values < 0) | (values >= sizes[kind]), rows, f"{name} is not below {sizes[kind]}")
    words = leaves["word_index"]
    steps = np.diff(words, prepend=0)
    starts = leaf_offsets[:-1][num_leaves > 0] - leaf_offsets[0]
    steps[starts] = words[starts]
    bad = (steps < 0) | (steps > 1)
    bad[starts] = words[starts] != 0
    yield from _rows(bad, owners, "leaves.word_index does not count the words from 0")
    if not np.array_equal(np.diff(node_offsets), np.diff(span_offsets)):
        for row in np.flatnonzero(np.diff(node_offsets) != np.diff(span_offsets)):
            yield int(row), "nodes and spans differ in number"
        return
    yield from tree_problems(node_offsets - node_offsets[0], spans, nodes["parent"], num_leaves)
    if "arcs" in views:
        arc_offsets, arcs = views["arcs"]
        num_words = np.zeros(len(num_leaves), int)
        num_words[num_leaves > 0] = words[(leaf_offsets[1:] - leaf_offsets[0])[num_leaves > 0] - 1] + 1
        yield from arc_problems(arc_offsets, arcs["governor"], num_words)


def tree_problems(offsets: np.ndarray, spans: dict, parents: np.ndarray, num_leaves: np.ndarray) -> Problems:
    """Check that spans are nested, in pre-order and over every leaf, and have the parents and subtree ends of Proposition 1."""
    starts, ends, subtree_ends = (spans[name].astype(np.int64) for name in ("start", "end", "subtree_end"))
    owners, sizes = _owners(offsets), np.diff(offsets)
    inside = (starts >= 0) & (starts < ends) & (ends <= num_leaves[owners])
    yield from _rows(~inside, owners, "a span is empty or leaves the sentence")
    follows = np.diff(owners, prepend=-1) == 0
    ordered = ~follows | (np.diff(starts, prepend=0) > 0) | ((np.diff(starts, prepend=0) == 0) & (np.diff(ends, prepend=0) <= 0))
    yield from _rows(~ordered, owners, "nodes are not in pre-order")
    # The rest reads the rows that are sound so far: their nodes lie sorted by (row, start).
    sound = np.ones(len(sizes), bool)
    sound[owners[~(inside & ordered)]] = False
    kept = sound[owners]
    starts, ends, subtree_ends, parents, owners = (a[kept] for a in (starts, ends, subtree_ends, parents, owners))
    offsets = np.concatenate([[0], np.cumsum(np.where(sound, sizes, 0))])
    first, places = offsets[owners], np.arange(len(owners))
    stride = int(num_leaves.max(initial=0)) + 1
    rebuilt = np.searchsorted(owners * stride + starts, owners * stride + ends) - first
    yield from _rows(rebuilt != subtree_ends, owners, "subtree_end does not follow from the spans (Proposition 1)")
    depths = node_depths(offsets, rebuilt)
    above = np.clip(parents + first, 0, max(0, len(owners) - 1))
    has_parent = parents >= 0
    right = (above < places) & (first + rebuilt[above] > places) & (depths[above] == depths - 1) & (owners[above] == owners)
    yield from _rows(np.where(has_parent, ~right, (depths != 0) | (parents != -1)), owners,
                     "parent does not follow from the spans (Proposition 1)")  # fmt: skip
    yield from _rows(has_parent & right & (ends > ends[above]), owners, "spans cross")
    roots = depths == 0
    root_rows, root_starts, root_ends = owners[roots], starts[roots], ends[roots]
    begins = np.diff(root_rows, prepend=-1) != 0
    last = np.diff(root_rows, append=len(sizes)) != 0
    gap = root_starts != np.where(begins, 0, np.concatenate([[0], root_ends[:-1]])[: len(root_ends)])
    yield from _rows(gap | (last & (root_ends != num_leaves[root_rows])), root_rows, "the roots do not cover the leaves")
    for row in np.flatnonzero((sizes == 0) & (num_leaves > 0)):
        yield int(row), "leaves without a node"


def arc_problems(offsets: np.ndarray, governors: np.ndarray, num_words: np.ndarray) -> Problems:
    """Check for one governor a word, -1 for a root, and no cycle."""
    owners, sizes = _owners(offsets), np.diff(offsets)
    for row in np.flatnonzero(sizes != num_words):
        yield int(row), "arcs and words differ in number"
    outside = (governors < -1) | (governors >= sizes[owners])
    yield from _rows(outside, owners, "a governor is not a word of the sentence")
    first = offsets[owners] - offsets[0]
    # Each round goes twice as far up. A word that is not above a root by then is in a cycle.
    up = np.append(np.where((governors < 0) | outside, len(governors), governors + first), len(governors))
    for _ in range(int(sizes.max(initial=1)).bit_length() + 1):
        up = up[up]
    yield from _rows(up[:-1] != len(governors), owners, "arcs form a cycle")


def parsed_problems(row: dict, source: str | None) -> Iterator[str]:
    """Check one parsed row against its source line, where the text is at hand."""
    words = row["words"]
    starts, ends = words["start_char"], words["end_char"]
    if (ends <= starts).any() or (starts[1:] < ends[:-1]).any():
        yield "words overlap or are empty"
    if source is not None and [source[s:e] for s, e in zip(starts, ends, strict=True)] != list(words["text"]):
        yield "words differ from the characters of their line"
    if not row["parse_status"]:
        yield "parse_status is empty"
    try:
        trees = read_trees(row)
        for tags, tree in trees:
            if len(tree):  # a bare pre-terminal has no nonterminal
                check_tree(tree, len(tags))
    except ValueError as error:
        yield f"trees: {error}"
        return
    if sum(len(tags) for tags, _ in trees) != len(starts):
        yield "trees and words differ in their number of words"
