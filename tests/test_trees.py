"""Spans <-> brackets, normal form, split words, drawing: on hand-made trees and Hypothesis trees."""

from collections import Counter
from itertools import chain, pairwise, product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_encoding import check_tree, join, slow_depths, split_words

from treeproc.trees.controls import ControlTree, control_spans
from treeproc.trees.spans import (
    SpanTree,
    draw,
    flat_tree,
    keep_leaves,
    normalise,
    parents_and_subtree_ends,
    read_brackets,
    write_brackets,
)

TOM = "(ROOT (S (NP (NNP Tom)) (VP (VBZ is) (NP (DT a) (NN student))) (. .)))"


@st.composite
def span_trees(draw_from, max_leaves: int = 12):
    """A tree of one root with n-ary nodes, unary chains and single leaves, and its number of leaves."""
    num_leaves = draw_from(st.integers(1, max_leaves))
    tree = SpanTree([], [], [])
    stack = [(0, num_leaves)]
    while stack:
        start, end = stack.pop()
        for _ in range(draw_from(st.integers(1, 3))):  # a unary chain
            tree.labels.append(draw_from(st.sampled_from(["S", "NP", "VP", "ROOT"])))
            tree.starts.append(start)
            tree.ends.append(end)
        cuts = sorted(draw_from(st.sets(st.integers(start + 1, end - 1), max_size=4))) if end - start > 1 else []
        edges = [start, *cuts, end]
        children = [(a, b) for a, b in zip(edges, edges[1:], strict=False) if (a, b) != (start, end) and draw_from(st.booleans())]
        stack.extend(reversed(children))
    return tree, num_leaves


def reference_parents(tree: SpanTree) -> list[int]:
    """The paper's eq 25 by brute force: the ancestor whose subtree holds no other ancestor."""
    out = []
    for node in range(len(tree)):
        ancestors = [
            other for other in range(node) if tree.starts[other] <= tree.starts[node] and tree.ends[node] <= tree.ends[other]
        ]
        out.append(max(ancestors, default=-1))
    return out


@num_examples(200)
@given(span_trees())
def test_brackets_round_trip(case):
    tree, num_leaves = case
    words = [f"w{i}" if i % 3 else "(" for i in range(num_leaves)]
    tags = [f"T{i % 4}" for i in range(num_leaves)]
    check_tree(tree, num_leaves)
    assert read_brackets(write_brackets(tree, words, tags)) == (words, tags, tree)


@num_examples(200)
@given(span_trees())
def test_parents_are_the_lowest_ancestors(case):
    tree, _ = case
    parents, subtree_ends = parents_and_subtree_ends(tree)
    assert parents == reference_parents(tree)
    for node in range(len(tree)):
        below = {node}
        for other in range(node + 1, len(tree)):
            if parents[other] in below:
                below.add(other)
        assert sorted(below) == list(range(node, subtree_ends[node]))


@num_examples(100)
@given(span_trees(), st.data())
def test_split_words_adds_one_node_per_split_word(case, data):
    tree, num_leaves = case
    counts = data.draw(st.lists(st.integers(1, 3), min_size=num_leaves, max_size=num_leaves))
    tags = [f"T{i}" for i in range(num_leaves)]
    split = split_words(tree, tags, counts)
    check_tree(split, sum(counts))
    words = [i for i, count in enumerate(counts) if count > 1]
    added = [i for i, label in enumerate(split.labels) if label.startswith("POS=")]
    assert [split.labels[i] for i in added] == [f"POS=T{word}" for word in words]
    assert [split.ends[i] - split.starts[i] for i in added] == [counts[word] for word in words]
    rest = [label for label in split.labels if not label.startswith("POS=")]
    assert rest == tree.labels
    # The subtree of a split word is its pieces alone: it is the lowest node over them.
    parents, subtree_ends = parents_and_subtree_ends(split)
    assert all(subtree_ends[i] == i + 1 for i in added)


@num_examples(100)
@given(span_trees(), st.data())
def test_keep_leaves_keeps_the_rest_of_the_tree(case, data):
    tree, num_leaves = case
    kept = data.draw(st.lists(st.booleans(), min_size=num_leaves, max_size=num_leaves).filter(any))
    smaller = keep_leaves(tree, kept)
    check_tree(smaller, sum(kept))
    old = [i for i, keep in enumerate(kept) if keep]
    nodes = [(lab, [i for i in range(s, e) if kept[i]]) for lab, s, e in zip(tree.labels, tree.starts, tree.ends, strict=True)]
    assert [(lab, leaves) for lab, leaves in nodes if leaves] == [
        (lab, old[s:e]) for lab, s, e in zip(smaller.labels, smaller.starts, smaller.ends, strict=True)
    ]


def test_split_words_as_figure_7():
    words, tags, tree = read_brackets(TOM)
    split = split_words(normalise(tree, collapse_unary=True), tags, [1, 1, 1, 2, 1])
    assert split.labels == ["S", "NP", "VP", "NP", "POS=NN"]
    assert list(zip(split.starts, split.ends, strict=True)) == [(0, 6), (0, 1), (1, 5), (2, 5), (3, 5)]


@pytest.mark.parametrize(
    ("brackets", "collapse", "labels"),
    [
        (TOM, True, ["S", "NP", "VP", "NP"]),
        ("(ROOT (S (VP (VB Go))))", False, ["S", "VP"]),
        ("(ROOT (S (VP (VB Go))))", True, ["VP"]),
        ("(ROOT (NN Fire))", True, ["ROOT"]),
        ("((S (NP-SBJ-1 (PRP I)) (VP=2 (VBP go))))", True, ["S", "NP", "VP"]),
        ("(NN Fire)", True, ["X"]),
    ],
)
def test_normal_form(brackets, collapse, labels):
    words, _, tree = read_brackets(brackets)
    normal = normalise(tree, collapse_unary=collapse)
    assert normal.labels == labels
    check_tree(normal, len(words))


@num_examples(100)
@given(span_trees())
def test_collapsed_spans_are_distinct(case):
    normal = normalise(case[0], collapse_unary=True)
    spans = list(zip(normal.starts, normal.ends, strict=True))
    assert len(set(spans)) == len(spans)
    assert set(spans) == set(zip(case[0].starts, case[0].ends, strict=True))


@pytest.mark.parametrize(
    "text",
    ["", "x", "(", "(S", "(S)", "(S (NP))", "(S (N a) b)", "(S a (N b))", "(N a b)", "(S (N a)))", "(S (N a)) (S (N b))", ")"],
)
def test_bad_brackets_are_value_errors(text):
    with pytest.raises(ValueError):
        read_brackets(text)


def test_deep_nesting_does_not_recurse():
    depth = 10_000
    words, _, tree = read_brackets("(S " * depth + "(N a)" + ")" * depth)
    assert words == ["a"] and len(tree) == depth
    assert max(slow_depths(parents_and_subtree_ends(tree)[0])) == depth - 1
    assert len(normalise(tree, collapse_unary=True)) == 1


@pytest.mark.parametrize(
    ("tree", "num_leaves"),
    [
        (SpanTree(["S"], [0], [2]), 3),
        (SpanTree(["S", "A", "B"], [0, 0, 1], [3, 2, 3]), 3),
        (SpanTree(["S", "A"], [0, 2], [3, 2]), 3),
        (SpanTree(["S", "A", "B"], [0, 2, 0], [3, 3, 1]), 3),
        (SpanTree([], [], []), 1),
    ],
)
def test_check_tree_finds_bad_trees(tree, num_leaves):
    with pytest.raises(ValueError):
        check_tree(tree, num_leaves)


def test_all_short_brackets_that_can_be_read_are_trees():
    """The command verify checks no more of a parsed tree."""
    sizes = set()
    for inner in chain.from_iterable(product("()x", repeat=length) for length in range(9)):
        try:
            words, tags, tree = read_brackets(f"({' '.join(inner)})")
        except ValueError:
            continue
        sizes.add((len(words), len(tags), len(tree)))
        if len(tree):  # a bare pre-terminal has no nonterminal
            check_tree(tree, len(words))
    assert sizes == {(1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 2, 1)}


def control_trees(kind: str, lengths: list[int], seed: int = 1) -> list[SpanTree]:
    starts, ends = control_spans(kind, np.array(lengths), np.arange(len(lengths)), seed)
    trees = []
    for first, last in pairwise(np.cumsum([0, *lengths])):
        mine = (starts >= first) & (starts < last)
        trees.append(SpanTree(["X"] * int(mine.sum()), (starts[mine] - first).tolist(), (ends[mine] - first).tolist()))
    return trees


@pytest.mark.parametrize("kind", get_args(ControlTree))
def test_control_trees(kind):
    lengths = [1, 2, 0, 3, 8, 300]
    for tree, num_words in zip(control_trees(kind, lengths), lengths, strict=True):
        if num_words:
            check_tree(tree, num_words)
        if kind != "flat":
            assert len(tree) == (num_words - 1 if num_words > 1 else num_words)
        if num_words == 8:
            height = {"balanced": 2, "left": 6, "right": 6, "flat": 0}
            assert kind == "random" or max(slow_depths(parents_and_subtree_ends(tree)[0])) == height[kind]


def test_random_control_trees_follow_seed_and_example_alone():
    assert control_trees("random", [20, 5])[0] == control_trees("random", [20, 9, 7])[0]
    assert len({tuple(tree.starts) for tree in control_trees("random", [20] * 50)}) > 45
    assert len({tuple(control_trees("random", [20], seed)[0].starts) for seed in range(-25, 25)}) > 45


def test_random_control_trees_cut_anywhere_alike():
    cuts = Counter(tree.ends[1] if tree.starts[1] == 0 else 1 for tree in control_trees("random", [5] * 8000))
    assert sorted(cuts) == [1, 2, 3, 4]
    assert all(abs(count - 2000) < 200 for count in cuts.values())


def test_join_and_flat():
    joined = join([flat_tree(2), flat_tree(3)], [2, 3])
    assert (joined.starts, joined.ends) == ([0, 2], [2, 5])
    assert parents_and_subtree_ends(joined)[0] == [-1, -1]
    check_tree(joined, 5)


def test_draw():
    words, tags, tree = read_brackets(TOM)
    assert draw(normalise(tree, collapse_unary=True), words, tags) == "\n".join(
        ["S", "├─ NP", "│  └─ NNP Tom", "├─ VP", "│  ├─ VBZ is", "│  └─ NP", "│     ├─ DT a", "│     └─ NN student", "└─ . ."]
    )
