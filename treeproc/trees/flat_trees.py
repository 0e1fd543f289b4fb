"""The trees of many examples as flat arrays: the operations of `spans.py` on all trees at once, without a Python loop.

The leaves of all trees are numbered in one sequence, so a span identifies its tree. Nodes are in pre-order, tree after tree.
Because subtrees are nested, starts never fall. A node's subtree ends at the first start that is not below the node's end.

Shapes: T trees, W leaves, N nodes.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from treeproc.common.errors import check_choice
from treeproc.shards.rows import cut_strings, edges_of, numbers_of, string_bytes
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED
from treeproc.trees.spans import EMPTY_TAG, ROOT_LABELS, plain_label, read_brackets

DOCUMENT_LABEL = "DOC"
BINARY_PREFIX = "@"

_TOKEN, _BLANK, _OPEN, _CLOSE, _END = range(5)
_KINDS = np.full(256, _TOKEN, dtype=np.uint8)
_KINDS[[ord(c) for c in " \t\n\r\f\v"]] = _BLANK
_KINDS[ord("(")], _KINDS[ord(")")] = _OPEN, _CLOSE


@dataclass(frozen=True)
class FlatTrees:
    """The nonterminals of a batch of trees, in pre-order.

    `names[labels[i]]` is the label of node i, which spans leaves [starts[i], ends[i]).
    """

    labels: np.ndarray  # [N]
    starts: np.ndarray  # [N]
    ends: np.ndarray  # [N]
    names: list[str]
    classes: np.ndarray | None = None  # [N] classification label of a node, -1 for no label

    def __len__(self) -> int:
        return len(self.labels)

    def node_edges(self, leaf_edges: np.ndarray) -> np.ndarray:
        """Return edges [n + 1]: nodes below leaves [leaf_edges[r], leaf_edges[r + 1]) are nodes [edges[r], edges[r + 1])."""
        return np.searchsorted(self.starts, leaf_edges)

    def subtree_ends(self) -> np.ndarray:
        """Return one past the last node of every subtree, [N]."""
        return np.searchsorted(self.starts, self.ends)

    def parents(self) -> np.ndarray:
        """Return the parent of every node [N], -1 for a root."""
        count, depth = len(self), node_depths(self.subtree_ends())
        node = np.arange(count)
        # The parent of a node is the last node before it that is one level higher.
        key = depth * (count + 1) + node
        ordered = np.sort(key)
        above = ordered[np.searchsorted(ordered, key - (count + 1)) - 1] % (count + 1) if count else key
        return np.where(depth > 0, above, -1)

    def above_same_span(self) -> np.ndarray:
        """Return whether the next node has the same span, [N]: all except the lowest node of a unary chain."""
        same = np.zeros(len(self), dtype=bool)
        same[:-1] = (self.starts[1:] == self.starts[:-1]) & (self.ends[1:] == self.ends[:-1])
        return same

    def keep(self, kept: np.ndarray) -> "FlatTrees":
        """Return the trees with only the kept nodes. Children of a removed node become children of its parent."""
        classes = None if self.classes is None else self.classes[kept]
        return FlatTrees(self.labels[kept], self.starts[kept], self.ends[kept], self.names, classes)

    def add(self, labels: np.ndarray, starts: np.ndarray, ends: np.ndarray, names: list[str], *, above: bool) -> "FlatTrees":
        """Return the trees with further nodes, above or below the nodes of the same span. New nodes have no class."""
        parts = [FlatTrees(labels + len(self.names), starts, ends, names), self]
        first, second = parts if above else parts[::-1]
        all_starts, all_ends = np.concatenate([first.starts, second.starts]), np.concatenate([first.ends, second.ends])
        longest = int((all_ends - all_starts).max(initial=0)) + 1
        # Pre-order is the order by start, longest first; the sort is stable, so unary chains keep theirs.
        order = np.argsort(all_starts * longest + (longest - (all_ends - all_starts)), kind="stable")
        classes = None
        if self.classes is not None:
            none = np.full(len(labels), -1, dtype=self.classes.dtype)
            classes = np.concatenate([none, self.classes] if above else [self.classes, none])[order]
        return FlatTrees(
            np.concatenate([first.labels, second.labels])[order], all_starts[order], all_ends[order], self.names + names, classes
        )


def node_depths(subtree_ends: np.ndarray) -> np.ndarray:
    """Return the depth of every node [N], 0 for a root: the nodes before it in pre-order whose subtree is still open."""
    count = len(subtree_ends)
    return np.arange(count) - np.cumsum(np.bincount(subtree_ends, minlength=count + 1)[:count])


@dataclass(frozen=True)
class Brackets:
    """Trees as read from brackets. `tag_names[tags[w]]` is the tag of leaf w."""

    trees: FlatTrees
    tags: np.ndarray  # [W]
    tag_names: list[str]
    leaf_edges: np.ndarray  # [T + 1]
    node_edges: np.ndarray  # [T + 1]


def read_flat_trees(texts: pa.Array) -> Brackets:
    """Read Penn Treebank brackets, one tree per string. Words tagged -NONE- are dropped, and so are nodes without leaves.

    Raises ValueError, with the number of the string and the character position, if a string is not one tree.
    """
    data, edges = string_bytes(texts)
    kinds = _KINDS[data]
    in_token = kinds == _TOKEN
    token_starts = np.flatnonzero(in_token & ~np.concatenate([[False], in_token[:-1]]))
    token_ends = np.flatnonzero(in_token & ~np.concatenate([in_token[1:], [False]])) + 1
    is_event = kinds >= _OPEN
    is_event[token_starts] = True
    at = np.flatnonzero(is_event)
    kind = np.concatenate([kinds[at], [_END, _END, _END]])
    opens = np.flatnonzero(kind == _OPEN)
    named = kind[opens + 1] == _TOKEN
    is_word = named & (kind[opens + 2] == _TOKEN)
    change = np.zeros(len(at), dtype=np.int32)
    change[opens] = 1
    change[kind[:-3] == _CLOSE] = -1
    depth = np.cumsum(change)
    last = np.searchsorted(at, edges[1:]) - 1
    valid = (
        np.all(kind[opens[is_word] + 3] == _CLOSE)
        and np.all(kind[opens[~is_word] + 1 + named[~is_word]] == _OPEN)
        and np.count_nonzero(kind == _TOKEN) == np.count_nonzero(named) + np.count_nonzero(is_word)
        and np.all(np.diff(last, prepend=-1) > 0)
        and np.all(depth[last] == 0)
        and np.count_nonzero(depth == 0) == len(texts)
        and depth.min(initial=0) >= 0
    )
    if not valid:
        _raise_error(texts)

    # Names of all brackets: the token after the bracket, or nothing. A word, which has tokens, is in every bracket.
    token = np.cumsum(kind[:-3] == _TOKEN)[opens]
    lengths = np.where(named, token_ends[token] - token_starts[token], 0)
    coded = cut_strings(data, token_starts[token], lengths).dictionary_encode()
    codes, names = numbers_of(coded.indices), coded.dictionary.to_pylist()
    is_leaf = is_word & (codes != names.index(EMPTY_TAG)) if EMPTY_TAG in names else is_word

    leaf_opens = np.zeros(len(at), dtype=np.int64)
    leaf_opens[opens[is_leaf]] = 1
    leaves_before = np.cumsum(leaf_opens)
    # The n-th bracket that opens at a depth matches the n-th that closes there.
    nodes = opens[~is_word]
    is_node_end = kind[:-3] == _CLOSE
    is_node_end[opens[is_word] + 3] = False
    node_ends = np.flatnonzero(is_node_end)
    levels = np.int16 if depth.max(initial=0) < 2**15 else np.int32
    close = np.empty_like(nodes)
    close[np.argsort(depth[nodes].astype(levels), kind="stable")] = node_ends[
        np.argsort((depth[node_ends] + 1).astype(levels), kind="stable")
    ]
    trees = FlatTrees(codes[~is_word].astype(np.int64), leaves_before[nodes], leaves_before[close], names)
    leaf_edges = np.concatenate([[0], leaves_before[last]]).astype(np.int64)
    return Brackets(trees, codes[is_leaf].astype(np.int64), names, leaf_edges, np.searchsorted(at[nodes], edges))


def _raise_error(texts: pa.Array) -> None:
    for number, text in enumerate(texts.to_pylist()):
        try:
            read_brackets(text)
        except ValueError as error:
            raise ValueError(f"tree {number}: {error}") from None
    raise ValueError("the brackets do not form trees")


def normal_form(
    brackets: Brackets, *, collapse_unary: bool, classes: np.ndarray | None = None, leaf_classes: np.ndarray | None = None
) -> FlatTrees:
    """Return the normal form of all trees, as `normalise` in `spans.py`. `classes` [N] belong to the original nodes.

    A unary chain, or a chain with ROOT, becomes one node. It keeps the lowest label, but the class of the topmost node with a
    class. A label describes the phrase, and a class the complete phrase. The node of a bare word has the word's class.
    """
    trees = replace(brackets.trees, classes=classes)
    trees = trees.keep(trees.starts < trees.ends)
    same = trees.above_same_span()
    names = [plain_label(name) for name in trees.names]
    if not collapse_unary:
        roots = np.array([name in ROOT_LABELS for name in names], dtype=bool)
        same &= roots[trees.labels] if len(names) else same
    if trees.classes is not None and len(trees):
        trees = replace(trees, classes=_first_classes(trees.classes, same))
    trees = replace(trees, names=[name or UNANALYSED for name in names]).keep(~same)
    tree_nodes = np.diff(trees.node_edges(brackets.leaf_edges))
    bare = np.flatnonzero((tree_nodes == 0) & (np.diff(brackets.leaf_edges) > 0))
    if len(bare):
        starts = brackets.leaf_edges[bare]
        is_bare = np.zeros(brackets.leaf_edges[-1] + 1, dtype=bool)
        is_bare[starts] = True
        trees = trees.add(np.zeros_like(starts), starts, brackets.leaf_edges[bare + 1], [UNANALYSED], above=True)
        if trees.classes is not None and leaf_classes is not None:
            mine = is_bare[trees.starts]
            trees.classes[mine] = leaf_classes[trees.starts[mine]]
    return trees


def with_classes(trees: FlatTrees, given: FlatTrees) -> FlatTrees:
    """Return the trees with classes. A node takes the class of the node of `given` over the same leaves, else -1."""
    if given.classes is None:
        return trees
    width = int(max(trees.ends.max(initial=0), given.ends.max(initial=0))) + 1
    labelled = np.flatnonzero(given.classes >= 0)
    keys = given.starts[labelled] * width + given.ends[labelled]
    order = np.argsort(keys, kind="stable")  # in a chain, the topmost comes first
    wanted = trees.starts * width + trees.ends
    at = np.searchsorted(keys[order], wanted)
    classes = np.full(len(trees), -1, dtype=given.classes.dtype)
    there = np.flatnonzero(at < len(keys))
    there = there[keys[order[at[there]]] == wanted[there]]
    classes[there] = given.classes[labelled[order[at[there]]]]
    return replace(trees, classes=classes)


def _first_classes(classes: np.ndarray, merged: np.ndarray) -> np.ndarray:
    """Return the class of every node after a merge: the first class of its run of nodes. All except the last are `merged`."""
    run = np.concatenate([[0], np.cumsum(~merged)[:-1]])
    first = np.full(run[-1] + 1, -1, dtype=classes.dtype)
    found = np.flatnonzero(classes >= 0)[::-1]
    first[run[found]] = classes[found]
    return first[run]


def join_documents(trees: FlatTrees, leaf_edges: np.ndarray, trees_per_row: np.ndarray) -> FlatTrees:
    """Add a node DOC over every row of several trees."""
    rows = np.flatnonzero(trees_per_row > 1)
    return trees.add(np.zeros_like(rows), leaf_edges[rows], leaf_edges[rows + 1], [DOCUMENT_LABEL], above=True)


def split_words(
    trees: FlatTrees, tags: np.ndarray, tag_names: list[str], pieces_per_word: np.ndarray, *, every_word: bool = False
) -> FlatTrees:
    """Return the trees over subword pieces instead of words (paper, section 7.4 and figure 7).

    A word of several pieces, or `every_word`, becomes a subtree. Its root is labelled with the word's tag.
    """
    edges = edges_of(pieces_per_word)
    over_pieces = replace(trees, starts=edges[trees.starts], ends=edges[trees.ends])
    split = np.flatnonzero(pieces_per_word > (0 if every_word else 1))
    names = [SPLIT_WORD_PREFIX + name for name in tag_names]
    return over_pieces.add(tags[split], edges[split], edges[split + 1], names, above=False)


def binarise(trees: FlatTrees, num_leaves: int, side: str) -> FlatTrees:
    """Return binarised trees, with at most two children per node. A new node is labelled @ and the label of the divided node.

    right: (NP a b c) -> (NP a (@NP b c)); left: (NP a b c) -> (NP (@NP a b) c). Raises UserError for another side.
    """
    check_choice("side", side, ("left", "right"))
    parents = trees.parents()
    # Children are nodes and the leaves that no lower node covers.
    lowest = _lowest_nodes(trees, num_leaves)
    bare = np.flatnonzero(lowest >= 0)
    below = np.flatnonzero(parents >= 0)
    parent = np.concatenate([parents[below], lowest[bare]])
    start = np.concatenate([trees.starts[below], bare])
    end = np.concatenate([trees.ends[below], bare + 1])
    order = np.lexsort((start, parent))
    parent, start, end = parent[order], start[order], end[order]
    count = np.bincount(parent, minlength=len(trees))
    rank = np.arange(len(parent)) - edges_of(count)[parent]
    new = (rank >= 1) & (rank <= count[parent] - 2)
    of = parent[new]
    starts, ends = (start[new], trees.ends[of]) if side == "right" else (trees.starts[of], end[new])
    return trees.add(trees.labels[of], starts, ends, [BINARY_PREFIX + name for name in trees.names], above=False)


def _lowest_nodes(trees: FlatTrees, num_leaves: int) -> np.ndarray:
    """Return the lowest node over every leaf [W]; -1 if there is none."""
    # Climb from the last node that starts at or before a leaf to the first node that reaches beyond the leaf.
    parents = trees.parents()
    leaf = np.arange(num_leaves)
    node = np.searchsorted(trees.starts, leaf, side="right") - 1
    while True:
        short = (node >= 0) & (trees.ends[node] <= leaf) if len(trees) else np.zeros(num_leaves, dtype=bool)
        if not short.any():
            return node
        node[short] = parents[node[short]]
