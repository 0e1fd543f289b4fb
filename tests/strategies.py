"""Random trees for Hypothesis."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st


@dataclass
class Tree:
    """A sentence or document: nodes in pre-order; `spans` [N, 3] = start, end, subtree_end; several roots are legal."""

    num_leaves: int
    spans: list[list[int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @property
    def span_array(self) -> np.ndarray:
        return np.array(self.spans, dtype=np.int32).reshape(-1, 3)

    @property
    def leaf_spans(self) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self.spans]

    def open(self, start: int, end: int, parent: int) -> int:
        """Add a node; `close` it when its children are there."""
        self.spans.append([start, end, -1])
        self.parents.append(parent)
        return len(self.spans) - 1

    def close(self, node: int) -> None:
        self.spans[node][2] = len(self.spans)


def tree_from_spans(num_leaves: int, spans: list[tuple[int, int]], parents: list[int]) -> tuple[Tree, list[int]]:
    """Nodes in any order to a pre-order tree, and the old index of each new node."""
    order: list[int] = []
    tree = Tree(num_leaves)

    def visit(old: int, parent: int) -> None:
        node = tree.open(*spans[old], parent)
        order.append(old)
        for child in sorted((c for c, p in enumerate(parents) if p == old), key=lambda c: spans[c]):
            visit(child, node)
        tree.close(node)

    for root in sorted((c for c, p in enumerate(parents) if p == -1), key=lambda c: spans[c]):
        visit(root, -1)
    return tree, order


def binarised(tree: Tree) -> Tree:
    """The tree with a node more over all but the first child wherever there are more than two."""
    spans, parents = [(start, end) for start, end, _ in tree.spans], list(tree.parents)
    for node in range(len(tree.spans)):
        while True:
            below = {spans[child]: child for child, parent in enumerate(parents) if parent == node}
            inside = {leaf for start, end in below for leaf in range(start, end)}
            children = sorted([*below, *((leaf, leaf + 1) for leaf in set(range(*spans[node])) - inside)])
            if len(children) <= 2:
                break
            spans.append((children[1][0], spans[node][1]))
            parents.append(node)
            for child in children[1:]:
                if child in below:
                    parents[below[child]] = len(spans) - 1
            node = len(spans) - 1
    return tree_from_spans(tree.num_leaves, spans, parents)[0]


def right_branching(num_leaves: int) -> Tree:
    """A chain: node i covers leaves i to the end."""
    depth = max(1, num_leaves - 1)
    return Tree(num_leaves, [[i, num_leaves, depth] for i in range(depth)], list(range(-1, depth - 1)))


@st.composite
def trees(draw, max_leaves: int = 9, max_roots: int = 3) -> Tree:
    """n-ary trees with unary chains, nodes of one leaf, one-leaf sentences, several roots, bare leaves and no node at all."""
    tree = Tree(draw(st.integers(1, max_leaves)))

    def grow(start: int, end: int, parent: int, budget: int) -> None:
        node = tree.open(start, end, parent)
        if budget and draw(st.integers(0, 3)) == 0:
            grow(start, end, node, budget - 1)
        else:
            grow_children(start, end, node, budget)
        tree.close(node)

    def grow_children(start: int, end: int, node: int, budget: int) -> None:
        cuts = draw(st.sets(st.integers(start + 1, end - 1), max_size=3)) if end - start > 1 else set()
        bounds = [start, *sorted(cuts), end]
        for left, right in pairwise(bounds):
            if right - left < end - start and draw(st.booleans()):
                grow(left, right, node, budget)

    roots = draw(st.integers(0, min(max_roots, tree.num_leaves)))
    cuts = sorted(draw(st.sets(st.integers(1, tree.num_leaves - 1), max_size=roots - 1))) if roots > 1 else []
    bounds = [0, *cuts, tree.num_leaves]
    for start, end in pairwise(bounds) if roots else ():
        grow(start, end, -1, 3)
    return tree


def batches(max_size: int = 3, **kwargs) -> st.SearchStrategy[list[Tree]]:
    return st.lists(trees(**kwargs), min_size=1, max_size=max_size)


@st.composite
def binary_trees(draw, max_leaves: int = 9) -> Tree:
    """Trees of one root whose nodes have one child or two, down to bare leaves; unary chains, one-leaf sentences."""
    tree = Tree(draw(st.integers(1, max_leaves)))

    def grow(start: int, end: int, parent: int, budget: int) -> None:
        node = tree.open(start, end, parent)
        if budget and draw(st.integers(0, 4)) == 0:
            grow(start, end, node, budget - 1)
        elif end - start > 1:
            middle = draw(st.integers(start + 1, end - 1))
            for left, right in ((start, middle), (middle, end)):
                if right - left > 1 or draw(st.integers(0, 3)) == 0:
                    grow(left, right, node, budget)
        tree.close(node)

    grow(0, tree.num_leaves, -1, 2)
    return tree


@st.composite
def governors(draw, max_words: int = 9, max_roots: int = 3) -> list[int]:
    """The governor of every word of one text, in any order; -1 is a root, of which there may be several."""
    order = draw(st.permutations(range(draw(st.integers(1, max_words)))))
    out = [-1] * len(order)
    roots = draw(st.integers(1, max_roots))
    for place, word in enumerate(order):
        if place >= roots:
            out[word] = order[draw(st.integers(0, place - 1))]
    return out
