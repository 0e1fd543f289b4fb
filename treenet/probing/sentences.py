"""The sentences to probe and their syntax, from the parsed shards.

The labels are those of the parser, in one normal form: unary chains collapsed, no binarisation. They do not depend on the trees
that the model reads. So a model on control trees has the same labels as one on parses.

Shapes: n sentences, W words of all of them one after the other, N nodes of all of them.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from treenet.data.splits import read_rows, side_prefix
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import read_lengths
from treeproc.shards.rows import hash_ids
from treeproc.shards.store import stage_folder
from treeproc.trees.flat_trees import node_depths, normal_form, read_flat_trees

_PARSED = "parsed"  # parse_status of sentences that the parser analysed; all others are fallbacks


@dataclass(frozen=True)
class Syntax:
    """The syntax of n sentences, as parsed. Depths of trees count nonterminals, from 1. Depths of arcs count from 0."""

    word_edges: np.ndarray  # [n + 1], words of sentence i are [word_edges[i], word_edges[i + 1])
    depth: np.ndarray  # [n] nonterminals on the longest path from the root down to a word
    top: list[str]  # [n] labels of the root's children, and tags of its words
    form: list[str]  # [W] text of each word
    pos_tag: list[str]  # [W]
    phrase: list[str]  # [W] label of the smallest phrase that holds a word
    deprel: list[str] | None  # [W] relation to the governor; None if the data set has no arcs
    arc_depth: np.ndarray | None  # [W] arcs between a word and its root


@dataclass(frozen=True)
class ProbeSentences:
    """Sentences of a split. Rows are numbered as in `lengths.arrow`, ascending."""

    rows: np.ndarray  # [n]
    example_ids: np.ndarray  # [n]
    syntax: Syntax


def keys(ids: np.ndarray, *salts: int | np.ndarray) -> np.ndarray:
    """Return a random number for each id [n] uint64, a function of id and salts only."""
    mixed = hash_ids(ids)
    for salt in salts:
        mixed = hash_ids(mixed ^ hash_ids(np.asarray(salt)))
    return mixed


def choose_sentences(data: AnyPath, split: str, most: int, max_leaves: int, seed: int) -> ProbeSentences:
    """Choose at most `most` sentences of a split with one tree from the parser and up to `max_leaves` leaves.

    The choice depends only on their ids and `seed`. A smaller choice is a subset of a larger one. Raises UserError if there are
    none, or if parsed and encoded shards do not belong together.
    """
    lengths, prefix = read_lengths(data / "encoded", split), side_prefix(data)
    fits = np.flatnonzero((lengths["leaves"] >= 1) & (lengths["nodes"] >= 1) & (lengths["leaves"] <= max_leaves))
    order = fits[np.argsort(keys(lengths["example_id"][fits], seed), kind="stable")]
    found: dict[int, dict] = {}
    for row, example in zip(order.tolist(), read_rows(data, "parsed", split, lengths, order), strict=False):
        if example[f"{prefix}parse_status"] == _PARSED and len(example[f"{prefix}trees"]) == 1:
            found[row] = example
            if len(found) == most:
                break
    if not found:
        raise UserError(
            f"{data} has no sentence of {split} to probe: a sentence must have at most {max_leaves} leaves, and exactly one tree "
            "from the parser"
        )
    rows = sorted(found)
    try:
        syntax = read_syntax([found[row] for row in rows], prefix)
    except ValueError as error:
        raise UserError(f"{stage_folder(data, 'parsed')}: {split}: {error}; run tree-attention preprocess again") from None
    return ProbeSentences(np.array(rows), lengths["example_id"][rows], syntax)


def read_syntax(examples: list[dict], prefix: str = "") -> Syntax:
    """Read the syntax of parsed rows of one tree each. Raises ValueError if words, trees and arcs do not belong together."""
    brackets = read_flat_trees(pa.array([example[f"{prefix}trees"][0] for example in examples], pa.string()))
    trees, edges = normal_form(brackets, collapse_unary=True), brackets.leaf_edges
    words = [len(example[f"{prefix}words"]["text"]) for example in examples]
    if wrong := np.flatnonzero(np.diff(edges) != words).tolist():
        raise ValueError(f"line {examples[wrong[0]]['example_id'] + 1} has another number of words than its tree")
    tags = [brackets.tag_names[tag] for tag in brackets.tags.tolist()]
    labels = [trees.names[label] for label in trees.labels.tolist()]
    level = node_depths(trees.subtree_ends()) + 1
    lowest = np.zeros(edges[-1], dtype=np.int64)
    for node, (start, end) in enumerate(zip(trees.starts.tolist(), trees.ends.tolist(), strict=True)):
        lowest[start:end] = node  # pre-order: descendants come later

    children, bare = np.flatnonzero(level == 2), np.flatnonzero(level[lowest] == 1)
    start = np.concatenate([trees.starts[children], bare])
    names = [labels[node] for node in children.tolist()] + [tags[word] for word in bare.tolist()]
    top: list[list[str]] = [[] for _ in examples]
    for place in np.argsort(start, kind="stable").tolist():
        top[int(np.searchsorted(edges, start[place], side="right")) - 1].append(names[place])

    deprel = arc_depth = None
    if f"{prefix}arcs" in examples[0]:
        arcs = [example[f"{prefix}arcs"] for example in examples]
        deprel = [name for one in arcs for name in one["deprel"]]
        if wrong := [e["example_id"] for e, one, count in zip(examples, arcs, words, strict=True) if len(one["deprel"]) != count]:
            raise ValueError(f"line {wrong[0] + 1} has another number of arcs than words")
        arc_depth = np.concatenate(
            [_arc_depths(np.asarray(one["governor"]), e["example_id"]) for e, one in zip(examples, arcs, strict=True)]
        )
    return Syntax(
        word_edges=edges,
        depth=np.maximum.reduceat(level, trees.node_edges(edges)[:-1]),
        top=[" ".join(one) for one in top],
        form=[text for example in examples for text in example[f"{prefix}words"]["text"]],
        pos_tag=tags,
        phrase=[labels[node] for node in lowest.tolist()],
        deprel=deprel,
        arc_depth=arc_depth,
    )


def _arc_depths(governor: np.ndarray, example_id: int) -> np.ndarray:
    """Return the number of arcs between each word [w] and its root, whose governor is -1."""
    depth, above = np.zeros(len(governor), dtype=np.int64), governor.astype(np.int64)
    for _ in range(len(governor) + 1):
        if (above < 0).all():
            return depth
        depth += above >= 0
        above = np.where(above >= 0, governor[above], -1)
    raise ValueError(f"line {example_id + 1} has arcs that form a cycle")
