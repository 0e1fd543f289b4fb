"""Trees as people write them, in brackets, as spans or as dependency arcs: what `TreeStructure.from_...` reads.

Shapes: N nonterminals of a tree, W words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from treeproc.common.errors import UserError
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.arcs import check_arcs
from treeproc.trees.dependency_trees import DependencySentences, PhraseShape, dependency_phrases
from treeproc.trees.spans import SpanTree, normalise, parents_and_subtree_ends, read_brackets

# (start, end) or (start, end, label): leaves [start, end).
Span = tuple[int, int] | tuple[int, int, str]


class NumberedTree(NamedTuple):
    """A tree over leaves that have numbers for names."""

    num_leaves: int
    spans: np.ndarray  # [N, 3] int64: start, end, subtree_end of nodes in pre-order
    labels: tuple[str, ...]  # [N]


def read_bracketed(trees: Sequence[str], *, collapse_unary: bool) -> list[NumberedTree]:
    """Trees in Penn Treebank brackets, in the normal form of data sets: no function tags, no ROOT above another root.

    Raises UserError with the tree and the character where brackets are wrong.
    """
    _refuse_one(trees, "trees", "bracketed trees")
    out = []
    for number, text in enumerate(trees):
        try:
            words, _, tree = read_brackets(text)
        except ValueError as error:
            raise UserError(f"tree {number} of the batch: {error}") from None
        out.append(_number(len(words), normalise(tree, collapse_unary=collapse_unary)))
    return out


def read_spans(trees: Sequence[Sequence[Span]], num_leaves: Sequence[int] | None) -> list[NumberedTree]:
    """Nodes of each tree in any order; of equal spans the first is the upper one.

    Without `num_leaves` a tree ends with its last span. Raises UserError for a span outside of its tree or across another.
    """
    if num_leaves is not None and len(num_leaves) != len(trees):
        raise UserError(f"num_leaves must have a number for each of the {len(trees)} trees, but has {len(num_leaves)}")
    out = []
    for number, spans in enumerate(trees):
        ends = [span[1] for span in spans]
        count = num_leaves[number] if num_leaves is not None else max(ends, default=1)
        ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
        labels = [span[2] if len(span) > 2 else UNANALYSED for span in ordered]
        tree = SpanTree(labels, [span[0] for span in ordered], [span[1] for span in ordered])
        _check_spans(number, tree, count)
        out.append(_number(count, tree))
    return out


def read_arcs(
    governors: Sequence[Sequence[int]],
    shape: PhraseShape,
    relations: Sequence[Sequence[str]] | None,
    tags: Sequence[Sequence[str]] | None,
) -> list[NumberedTree]:
    """A tree of each sentence's arcs: `governors[b][w]` is the governor of word w, -1 of the root.

    Raises UserError if the arcs of a sentence do not form a tree with one root, or relations or tags are not one a word.
    """
    counts = [len(sentence) for sentence in governors]
    if 0 in counts:
        raise UserError(f"sentence {counts.index(0)} of the batch has no words")
    if shape == "layered" and (relations is None or tags is None):
        raise UserError("shape='layered' reads universal relations and tags: give relations and tags, or another shape")
    names = {}
    for name, given in (("relations", relations), ("tags", tags)):
        names[name] = [word for sentence in given for word in sentence] if given is not None else [""] * sum(counts)
        if given is not None and [len(sentence) for sentence in given] != counts:
            raise UserError(f"{name} must be one a word, {counts}, but are {[len(sentence) for sentence in given]}")
    edges = np.concatenate([[0], np.cumsum(counts)])
    above = np.concatenate([np.asarray(sentence, dtype=np.int64) for sentence in governors])
    above = np.where(above < 0, -1, above + np.repeat(edges[:-1], counts))
    for number, problem in enumerate(check_arcs(edges, above)):
        if problem:
            raise UserError(f"sentence {number} of the batch: {problem}")
    relation_names, relation = np.unique(names["relations"], return_inverse=True)
    tag_names, tag = np.unique(names["tags"], return_inverse=True)
    words = pa.array([""] * sum(counts), pa.string())
    sentences = DependencySentences(edges, above, relation, relation_names.tolist(), tag, tag_names.tolist(), words)
    found, _ = dependency_phrases(sentences, shape, "upos" if tags is not None or relations is None else "deprel")
    out = []
    cuts = found.node_edges(edges)
    for number, (first, last) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        labels = [found.names[label] for label in found.labels[first:last]]
        starts, ends = (column[first:last] - edges[number] for column in (found.starts, found.ends))
        out.append(_number(counts[number], SpanTree(labels, starts.tolist(), ends.tolist())))
    return out


def _number(num_leaves: int, tree: SpanTree) -> NumberedTree:
    columns = [tree.starts, tree.ends, parents_and_subtree_ends(tree)[1]]
    return NumberedTree(num_leaves, np.array(columns, dtype=np.int64).reshape(3, -1).T, tuple(tree.labels))


def _check_spans(number: int, tree: SpanTree, num_leaves: int) -> None:
    """Raises UserError for a span that is empty, leaves the tree or crosses another."""
    parents, _ = parents_and_subtree_ends(tree)
    for node, (start, end) in enumerate(zip(tree.starts, tree.ends, strict=True)):
        above = parents[node]
        if not 0 <= start < end <= num_leaves:
            raise UserError(
                f"tree {number} of the batch: a span (start, end) must lie within (0, {num_leaves}), but one is ({start}, {end})"
            )
        if above >= 0 and end > tree.ends[above]:
            raise UserError(
                f"tree {number} of the batch: spans must nest, but ({start}, {end}) crosses "
                f"({tree.starts[above]}, {tree.ends[above]})"
            )


def _refuse_one(given: object, name: str, what: str) -> None:
    if isinstance(given, str):
        raise UserError(f"{name} must be a list of {what}, one an example, but is one string")
