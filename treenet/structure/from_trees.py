"""Trees as people write them, in brackets, as spans or as dependency arcs: what `TreeStructure.from_...` reads.

Shapes: N nonterminals of a tree, W words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from treeproc.common.arguments import as_integer, as_list, check_flag, check_string
from treeproc.common.errors import UserError, quoted
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
    """Read trees in Penn Treebank brackets, in the normal form of data sets: no function tags, no ROOT above another root.

    Raises UserError with the tree and the character where brackets are wrong.
    """
    check_flag("collapse_unary", collapse_unary)
    out = []
    for number, text in enumerate(as_list("trees", trees, "bracketed trees, one an example")):
        if not isinstance(text, str):
            hint = "str(tree) of an nltk.Tree is one"
            raise UserError(f"tree {number} of the batch must be a string in brackets, but is {quoted(text)}; {hint}")
        try:
            words, _, tree = read_brackets(text)
        except ValueError as error:
            raise UserError(f"tree {number} of the batch: {error}") from None
        out.append(_number(len(words), normalise(tree, collapse_unary=collapse_unary)))
    return out


def read_spans(trees: Sequence[Sequence[Span]], num_leaves: Sequence[int] | None) -> list[NumberedTree]:
    """Read nodes of each tree in any order; the first of equal spans is the upper one.

    Without `num_leaves` a tree ends with its last span. Raises UserError unless spans are two integers, and perhaps a label. It
    also does so for a span outside of its tree or across another.
    """
    read = [_read_nodes(number, spans) for number, spans in enumerate(as_list("trees", trees, "trees, each a list of spans"))]
    if num_leaves is not None:
        given = as_list("num_leaves", num_leaves, "integers, one a tree")
        num_leaves = [as_integer(f"num_leaves[{number}]", count, 1, 2**31 - 1) for number, count in enumerate(given)]
        if len(num_leaves) != len(read):
            raise UserError(f"num_leaves must have a number for each of the {len(read)} trees, but has {len(num_leaves)}")
    out = []
    for number, spans in enumerate(read):
        count = num_leaves[number] if num_leaves is not None else max((end for _, end, _ in spans), default=1)
        ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
        tree = SpanTree([label for _, _, label in ordered], [start for start, _, _ in ordered], [end for _, end, _ in ordered])
        _check_spans(number, tree, count)
        out.append(_number(count, tree))
    return out


def _read_nodes(number: int, spans: Sequence[Span]) -> list[tuple[int, int, str]]:
    """Return start, end and label of the nodes of a tree, in the given order."""
    nodes: list[tuple[int, int, str]] = []
    for span in as_list(f"tree {number} of the batch", spans, "spans (start, end) or (start, end, label)"):
        name = f"tree {number} of the batch, span {len(nodes)}"
        parts = as_list(name, span, "start, end and perhaps a label")
        if len(parts) not in (2, 3):
            raise UserError(f"{name} must be (start, end) or (start, end, label), but is {quoted(span)}")
        start, end = (as_integer(f"{name}: {part}", parts[place], most=2**31 - 1) for place, part in enumerate(("start", "end")))
        label = parts[2] if len(parts) > 2 else UNANALYSED
        check_string(f"{name}: the label", label)
        nodes.append((start, end, label))
    return nodes


def read_arcs(
    governors: Sequence[Sequence[int]],
    shape: PhraseShape,
    relations: Sequence[Sequence[str]] | None,
    tags: Sequence[Sequence[str]] | None,
) -> list[NumberedTree]:
    """Read a tree of each sentence's arcs: `governors[b][w]` is the governor of word w, -1 of the root.

    Raises UserError if the arcs of a sentence do not form a tree with one root, or relations or tags are not one a word. Its
    message names other conventions of heads that would fit.
    """
    given = as_list("governors", governors, "sentences, each a list of governors")
    heads = [_read_governors(number, sentence) for number, sentence in enumerate(given)]
    if not heads:
        return []
    counts = [len(sentence) for sentence in heads]
    if 0 in counts:
        raise UserError(f"sentence {counts.index(0)} of the batch has no words")
    if shape == "layered" and (relations is None or tags is None):
        raise UserError("shape='layered' reads universal relations and tags: give relations and tags, or another shape")
    names = {name: _read_names(name, of_words, counts) for name, of_words in (("relations", relations), ("tags", tags))}
    for number, sentence in enumerate(heads):
        if problem := _problem(sentence):
            raise UserError(f"sentence {number} of the batch: {problem}{_other_conventions(heads)}")
    edges = np.concatenate([[0], np.cumsum(counts)])
    above = np.concatenate([np.array(sentence, dtype=np.int64) for sentence in heads])
    above = np.where(above < 0, -1, above + np.repeat(edges[:-1], counts))
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


def _read_governors(number: int, sentence: Sequence[int]) -> list[int]:
    name = f"sentence {number} of the batch"
    given = as_list(name, sentence, "governors, one a word")
    return [as_integer(f"{name}: the governor of word {word}", above) for word, above in enumerate(given)]


def _read_names(name: str, sentences: Sequence[Sequence[str]] | None, counts: list[int]) -> list[str]:
    """Return relations or tags of all words; empty ones if none are given."""
    if sentences is None:
        return [""] * sum(counts)
    given = as_list(name, sentences, "sentences, each a list of strings")
    read = [as_list(f"{name}[{number}]", own, "strings, one a word") for number, own in enumerate(given)]
    if [len(own) for own in read] != counts:
        raise UserError(f"{name} must be one a word, {counts}, but are {[len(own) for own in read]}")
    for number, own in enumerate(read):
        for word, value in enumerate(own):
            check_string(f"{name}[{number}][{word}]", value)
    return [value for own in read for value in own]


def _problem(heads: list[int]) -> str:
    """Return why governors are not a tree with one root, or an empty text."""
    for word, above in enumerate(heads):
        if not -1 <= above < len(heads):
            return f"the governor of word {word} must be from -1 (the root) to {len(heads) - 1}, but is {quoted(above)}"
    if (roots := heads.count(-1)) > 1:
        return f"{roots} words have no governor, but one must be the root"
    [problem] = check_arcs(np.array([0, len(heads)]), np.array(heads))
    return problem


def _other_conventions(sentences: list[list[int]]) -> str:
    """Return the end of a message that names the conventions of heads by which every sentence is a tree."""
    conll = [[above - 1 for above in heads] for heads in sentences]
    spacy = [[-1 if above == word else above for word, above in enumerate(heads)] for heads in sentences]
    hints = {"of CoNLL-U (from 1, and 0 is the root: subtract 1)": conll, "of spaCy (the root is its own head: write -1)": spacy}
    counted = all(min(heads) >= 0 for heads in sentences)
    fitting = [hint for hint, heads in hints.items() if counted and not any(map(_problem, heads))]
    return f"; governors count from 0, and -1 is the root, but these fit the heads {' and '.join(fitting)}" if fitting else ""


def _number(num_leaves: int, tree: SpanTree) -> NumberedTree:
    columns = [tree.starts, tree.ends, parents_and_subtree_ends(tree)[1]]
    return NumberedTree(num_leaves, np.array(columns, dtype=np.int64).reshape(3, -1).T, tuple(tree.labels))


def _check_spans(number: int, tree: SpanTree, num_leaves: int) -> None:
    """Raise UserError for a span that is empty, leaves the tree or crosses another."""
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
