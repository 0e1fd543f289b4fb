"""Trees that decide the order of words, for the positive control: drawn, read as orders, and written for readers of data sets.

A binary tree with straight and inverted nodes is one of an inversion transduction grammar (Wu, 1997). `order_entropy` is exact,
because it adds the probabilities of all trees that give the same order.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treeproc.shards.schema import UNANALYSED
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends, write_brackets

STRAIGHT, INVERTED = "straight", "inverted"
TAG = "W"  # of every word
# What a binary tree says of its words. 'swap': an inverted node has its right child first. 'governor_first': the words are those
# of a dependency tree, and a word comes before all that depends on it. 'longer_first': the child with more words comes first.
Rule = Literal["swap", "governor_first", "longer_first"]
Places = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A nonterminal; a child that is a number is the place of a word."""

    label: str
    children: tuple["Tree", ...]


Tree = Node | int


def draw_tree(length: int, random: np.random.Generator, first: int = 0) -> Tree:
    """Draw a binary tree over so many words: every split point is as likely, and so are both labels."""
    if length == 1:
        return first
    split = int(random.integers(1, length))
    label = INVERTED if random.integers(2) else STRAIGHT
    return Node(label, (draw_tree(split, random, first), draw_tree(length - split, random, first + split)))


def depth_of(tree: Tree) -> int:
    """Return the most nodes above a word."""
    return 0 if isinstance(tree, int) else 1 + max(map(depth_of, tree.children))


def reorder(tree: Tree, reversed_labels: Collection[str]) -> Places:
    """Return the places of the words after the children of nodes with these labels were reversed."""
    if isinstance(tree, int):
        return (tree,)
    children = tree.children[::-1] if tree.label in reversed_labels else tree.children
    return tuple(place for child in children for place in reorder(child, reversed_labels))


def order_of(tree: Tree, rule: Rule) -> Places:
    """Return the places of the words in the order that a binary tree gives by this rule."""
    if isinstance(tree, int):
        return (tree,)
    left, right = (order_of(child, rule) for child in tree.children)
    return _combine(rule, left, right, tree.label == INVERTED)


def find_governors(tree: Tree) -> list[int]:
    """Return the governor of every word, -1 for the root, as the nodes of a binary tree give them.

    At a straight node, the topmost word on the left governs that on the right; at an inverted node, the other way round.
    """
    governors: dict[int, int] = {}

    def top(tree: Tree) -> int:
        if isinstance(tree, int):
            return tree
        left, right = map(top, tree.children)
        head, dependent = (right, left) if tree.label == INVERTED else (left, right)
        governors[dependent] = head
        return head

    governors[top(tree)] = -1
    return [governors[place] for place in sorted(governors)]


def _combine(rule: Rule, left: Places, right: Places, inverted: bool) -> Places:
    """Return the order at a node from those of its children."""
    if rule == "longer_first":
        return right + left if len(right) > len(left) else left + right
    if not inverted:
        return left + right
    return right + left if rule == "swap" else (right[0], *left, *right[1:])


def hidden_labels_entropy(length: int) -> float:
    """Return the entropy, in nats, of the order of `length` words by 'swap', for who knows the shape of the tree alone.

    Each label of a shape gives another order.
    """
    return (length - 1) * math.log(2)


def permuted_labels_entropy(length: int) -> float:
    """Return the same for who knows the shape, the label of the root, and how many of the other nodes are inverted."""
    inner = max(0, length - 2)
    return sum(math.comb(inner, count) * math.log(math.comb(inner, count)) for count in range(inner + 1)) / 2**inner


@functools.cache
def _orders(length: int, rule: Rule) -> dict[Places, np.ndarray]:
    """Return every order that trees of `draw_tree` give, with its probability together with a depth of at most 0, 1, ...

    The arrays have the form [length].
    """
    if length == 1:
        return {(0,): np.ones(1)}
    found: dict[Places, np.ndarray] = {}
    for split in range(1, length):
        lefts, rights = (
            [(order, np.pad(of, (1, length - 1 - len(of)), mode="edge")) for order, of in _orders(part, rule).items()]
            for part in (split, length - split)
        )
        moved = [(tuple(split + place for place in order), of) for order, of in rights]
        for left, of_left in lefts:
            for right, of_right in moved:
                together = of_left * of_right / (2 * (length - 1))
                together[0] = 0.0
                for inverted in (False, True):
                    order = _combine(rule, left, right, inverted)
                    found[order] = found.get(order, 0.0) + together
    return found


@functools.cache
def order_entropy(length: int, rule: Rule = "swap", depths: tuple[int, int] | None = None) -> float:
    """Return the entropy in nats of the order of so many different words, for someone who sees the words but not the tree.

    It is exact. With `depths`, only trees of these depths are drawn, both included.
    """
    low, high = depths or (0, length - 1)
    high = min(high, length - 1)
    joint = np.array([of[high] - (of[low - 1] if low else 0.0) for of in _orders(length, rule).values()])
    probabilities = joint[joint > 1e-15] / joint.sum()
    return -math.fsum(probabilities * np.log(probabilities))


def spans_of(tree: Tree) -> SpanTree:
    """Return the nodes as spans, in pre-order."""
    spans = SpanTree([], [], [])

    def add(tree: Tree) -> tuple[int, int]:
        if isinstance(tree, int):
            return tree, tree + 1
        node = len(spans)
        spans.labels.append(tree.label)
        for column in (spans.starts, spans.ends):
            column.append(0)
        inside = [add(child) for child in tree.children]
        spans.starts[node], spans.ends[node] = inside[0][0], inside[-1][1]
        return inside[0][0], inside[-1][1]

    add(tree)
    return spans


def tree_of(spans: SpanTree) -> Tree:
    """Return the tree of spans with one root; the inverse of `spans_of`."""
    parents = parents_and_subtree_ends(spans)[0]
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        below.setdefault(parent, []).append(node)

    def build(node: int) -> Node:
        children: list[Tree] = []
        place = spans.starts[node]
        for child in below.get(node, ()):
            children += [*range(place, spans.starts[child]), build(child)]
            place = spans.ends[child]
        return Node(spans.labels[node], (*children, *range(place, spans.ends[node])))

    return build(0)


def damage(tree: Tree, share: float, random: np.random.Generator) -> Tree:
    """Move a share of the brackets below the root: their children go up, and a bracket with the label covers other siblings.

    This is what a worse parser does: as many brackets, some in wrong places. A bracket without room elsewhere is lost.
    """
    if isinstance(tree, int):
        return tree
    children = [damage(child, share, random) for child in tree.children]
    for child in [child for child in children if isinstance(child, Node) and random.random() < share]:
        at = next((place for place, one in enumerate(children) if one is child), None)
        if at is None:  # a moved bracket covers it
            continue
        children[at : at + 1] = child.children
        if len(children) > 2:
            count = int(random.integers(2, len(children)))
            start = int(random.integers(len(children) - count + 1))
            children[start : start + count] = [Node(child.label, tuple(children[start : start + count]))]
    return Node(tree.label, tuple(children))


def hide_labels(tree: Tree, mark_inverted: bool = False) -> Tree:
    """Return the tree without labels. To mark an inverted node, a node with one child is put above it."""
    if isinstance(tree, int):
        return tree
    node = Node(UNANALYSED, tuple(hide_labels(child, mark_inverted) for child in tree.children))
    return Node(UNANALYSED, (node,)) if mark_inverted and tree.label == INVERTED else node


def to_brackets(tree: Tree, words: Sequence[str], tags: Sequence[str] = ()) -> str:
    """Return the tree in Penn Treebank brackets."""
    return write_brackets(spans_of(tree), words, tags or [TAG] * len(words))


def to_conllu(tree: Tree, words: Sequence[str]) -> str:
    """Return the arcs of `find_governors` in CoNLL-U. A word's relation tells the distance and the side of its governor."""
    return "".join(_conllu_lines(tree, words)) + "\n"


def _conllu_lines(tree: Tree, words: Sequence[str]) -> Iterator[str]:
    for place, (word, governor) in enumerate(zip(words, find_governors(tree), strict=True)):
        side = "left" if governor < place else "right"
        relation = "root" if governor < 0 else f"{side}{abs(governor - place)}"
        yield "\t".join([str(place + 1), word, "_", TAG, "_", "_", str(governor + 1), relation, "_", "_"]) + "\n"


WRITERS: dict[str, Callable[[Tree, Sequence[str]], str]] = {
    "labels": to_brackets,
    "shape": lambda tree, words: to_brackets(hide_labels(tree, mark_inverted=True), words),
    "levels": lambda tree, words: to_brackets(hide_labels(tree), words),
    "arcs": to_conllu,
}


def parse_infix(words: Sequence[str], precedence: Callable[[str], int], first: int = 0) -> Tree:
    """Return the tree of operands with operators between them. The highest precedence binds first, equal ones from the left."""
    if len(words) == 1:
        return first
    operators = range(1, len(words), 2)
    last = max(operators, key=lambda at: (-precedence(words[at]), at))  # of the loosest operators
    left, right = (parse_infix(words[a:b], precedence, first + a) for a, b in ((0, last), (last + 1, len(words))))
    return Node("E", (left, first + last, right))


def postfix(tree: Tree) -> Places:
    """Return the places of operands and operators in postfix notation."""
    if isinstance(tree, int):
        return (tree,)
    left, operator, right = tree.children
    return (*postfix(left), *postfix(right), *postfix(operator))
