"""Trees as people write them, in brackets, as spans or as dependency arcs: what `TreeStructure.from_...` reads.

`from_packages.py` reads those of other packages.

Shapes: N nonterminals of a tree, W words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from treeproc.common.errors import UserError, as_integer, as_list, check_flag, check_string, quoted
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.arcs import UNIVERSAL_RELATIONS, check_arcs, plain_relation
from treeproc.trees.dependency_trees import DependencySentences, PhraseLabels, PhraseShape, dependency_phrases
from treeproc.trees.spans import EMPTY_TAG, SpanTree, keep_leaves, normalise, parents_and_subtree_ends, read_brackets

# (start, end) or (start, end, label): leaves [start, end).
Span = tuple[int, int] | tuple[int, int, str]


_MOST_LEAVES = 2**20  # of a tree: a wrong number must not take all memory


class NumberedTree(NamedTuple):
    """A tree over leaves that have numbers for names."""

    num_leaves: int
    spans: np.ndarray  # [N, 3] int64: start, end, subtree_end of nodes in pre-order
    labels: tuple[str, ...]  # [N]


class Arcs(NamedTuple):
    """The arcs of a sentence: lists with one item a word [W]. Relations, tags and words are empty where they are not known."""

    governors: list[int]  # from 0; -1 of the root
    relations: list[str]
    tags: list[str]
    words: list[str]


def read_bracketed(trees: Sequence[str], *, collapse_unary: bool) -> list[NumberedTree]:
    """Read trees in Penn Treebank brackets, in the normal form of data sets.

    Raises UserError with the tree and the character where brackets are wrong.
    """
    check_flag("collapse_unary", collapse_unary)
    out = []
    for number, text in enumerate(as_list("trees", trees, "bracketed trees, one an example")):
        if not isinstance(text, str):
            hint = "str(tree) of an nltk.Tree is one"
            raise UserError(f"tree {number} of the batch must be a string in brackets, but is {quoted(text)}; {hint}")
        try:
            _, tags, tree = read_brackets(text)
        except ValueError as error:
            raise UserError(f"tree {number} of the batch: {error}") from None
        out.append(in_normal_form(number, tags, tree, collapse_unary=collapse_unary))
    return out


def in_normal_form(number: int, tags: Sequence[str], tree: SpanTree, *, collapse_unary: bool) -> NumberedTree:
    """Return a tree as data sets have it: no empty elements, no function tags, no ROOT above another root.

    Raises UserError if the tree has empty elements alone.
    """
    kept = [tag != EMPTY_TAG for tag in tags]
    if not any(kept):
        raise UserError(f"tree {number} of the batch has no words, only empty elements")
    return _number(sum(kept), normalise(keep_leaves(tree, kept), collapse_unary=collapse_unary))


def read_spans(trees: Sequence[Sequence[Span]], num_leaves: Sequence[int] | None) -> list[NumberedTree]:
    """Read nodes of each tree in any order; the first of equal spans is the upper one.

    Without `num_leaves` a tree ends with its last span. Raises UserError unless spans are two integers, and perhaps a label. It
    also does so for a span outside of its tree or across another, and for a tree without spans and number of leaves.
    """
    read = [_read_nodes(number, spans) for number, spans in enumerate(as_list("trees", trees, "trees, each a list of spans"))]
    if num_leaves is not None:
        given = as_list("num_leaves", num_leaves, "integers, one a tree")
        num_leaves = [as_integer(f"num_leaves[{number}]", count, 1, _MOST_LEAVES) for number, count in enumerate(given)]
        if len(num_leaves) != len(read):
            raise UserError(f"num_leaves must have a number for each of the {len(read)} trees, but has {len(num_leaves)}")
    out = []
    for number, spans in enumerate(read):
        if num_leaves is None and not spans:
            raise UserError(f"tree {number} of the batch has no spans, so its number of leaves is unknown; give num_leaves")
        count = num_leaves[number] if num_leaves is not None else max(end for _, end, _ in spans)
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
        start, end = (
            as_integer(f"{name}: {part}", parts[place], most=_MOST_LEAVES) for place, part in enumerate(("start", "end"))
        )
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
    if shape == "layered" and (relations is None or tags is None):
        raise UserError("shape='layered' reads universal relations and tags: give relations and tags, or another shape")
    counts = [len(sentence) for sentence in heads]
    relation_names = _read_names("relations", relations, counts)
    tag_names = _read_names("tags", tags, counts)
    for number, sentence in enumerate(heads):
        if problem := _problem(sentence):
            raise UserError(f"sentence {number} of the batch: {problem}{_other_conventions(heads)}")
    sentences = [
        Arcs(own, of_words, own_tags, [""] * len(own))
        for own, of_words, own_tags in zip(heads, relation_names, tag_names, strict=True)
    ]
    return phrases_of(sentences, shape, "upos" if tags is not None or relations is None else "deprel")


def phrases_of(sentences: Sequence[Arcs], shape: PhraseShape, labels: PhraseLabels = "upos") -> list[NumberedTree]:
    """Return the phrases of each sentence. Raises UserError if its arcs do not form a tree, or a shape cannot read its names."""
    for number, sentence in enumerate(sentences):
        if problem := _problem(sentence.governors) or _unread(sentence, shape):
            raise UserError(f"sentence {number} of the batch: {problem}")
    if not sentences:
        return []
    counts = [len(sentence.governors) for sentence in sentences]
    edges = np.concatenate([[0], np.cumsum(counts)])
    governors, relations, tags, words = (
        [value for column in columns for value in column] for columns in zip(*sentences, strict=True)
    )
    above = np.array(governors, dtype=np.int64)
    above = np.where(above < 0, -1, above + np.repeat(edges[:-1], counts))
    relation_names, relation = np.unique(relations, return_inverse=True)
    tag_names, tag = np.unique(tags, return_inverse=True)
    joined = DependencySentences(
        edges, above, relation, relation_names.tolist(), tag, tag_names.tolist(), pa.array(words, pa.string())
    )
    found, _ = dependency_phrases(joined, shape, labels)
    out = []
    cuts = found.node_edges(edges)
    for number, (first, last) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        names = [found.names[label] for label in found.labels[first:last]]
        starts, ends = (column[first:last] - edges[number] for column in (found.starts, found.ends))
        out.append(_number(counts[number], SpanTree(names, starts.tolist(), ends.tolist())))
    return out


def _read_governors(number: int, sentence: Sequence[int]) -> list[int]:
    name = f"sentence {number} of the batch"
    given = as_list(name, sentence, "governors, one a word")
    return [as_integer(f"{name}: the governor of word {word}", above) for word, above in enumerate(given)]


def _read_names(name: str, sentences: Sequence[Sequence[str]] | None, counts: list[int]) -> list[list[str]]:
    """Return relations or tags of the words of each sentence; empty ones if none are given."""
    if sentences is None:
        return [[""] * count for count in counts]
    given = as_list(name, sentences, "sentences, each a list of strings")
    read = [as_list(f"{name}[{number}]", own, "strings, one a word") for number, own in enumerate(given)]
    if [len(own) for own in read] != counts:
        raise UserError(f"{name} must be one a word, {counts}, but are {[len(own) for own in read]}")
    for number, own in enumerate(read):
        for word, value in enumerate(own):
            check_string(f"{name}[{number}][{word}]", value)
    return read


def _problem(heads: list[int]) -> str:
    """Return why governors are not a tree with one root, or an empty text."""
    if not heads:
        return "it has no words"
    for word, above in enumerate(heads):
        if not -1 <= above < len(heads):
            return f"the governor of word {word} must be from -1 (the root) to {len(heads) - 1}, but is {quoted(above)}"
    if (roots := heads.count(-1)) > 1:
        return f"{roots} words have no governor, but one must be the root"
    [problem] = check_arcs(np.array([0, len(heads)]), np.array(heads))
    return problem


def _unread(sentence: Arcs, shape: PhraseShape) -> str:
    """Return why the layers of a sentence cannot be told, or an empty text."""
    if shape != "layered":
        return ""
    for word, (above, relation) in enumerate(zip(sentence.governors, sentence.relations, strict=True)):
        if above >= 0 and plain_relation(relation) not in UNIVERSAL_RELATIONS:
            return f"shape='layered' reads universal relations, but word {word} has {quoted(relation)}; choose another shape"
    return "" if any(sentence.tags) else "shape='layered' reads universal tags, but no word has one; choose another shape"


def _other_conventions(sentences: list[list[int]]) -> str:
    """Return the end of a message that names the conventions of heads by which every sentence is a tree."""
    conll = [[above - 1 for above in heads] for heads in sentences]
    spacy = [[-1 if above == word else above for word, above in enumerate(heads)] for heads in sentences]
    hints = {"of CoNLL-U (from 1, and 0 is the root: subtract 1)": conll, "of spaCy (the root is its own head: write -1)": spacy}
    counted = all(heads and min(heads) >= 0 for heads in sentences)
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
        if start >= end:
            raise UserError(
                f"tree {number} of the batch: a span (start, end) must have at least one leaf, and the end is one past its last "
                f"leaf, but one is ({start}, {end})"
            )
        if start < 0 or end > num_leaves:
            raise UserError(
                f"tree {number} of the batch: a span (start, end) must lie within (0, {num_leaves}), but one is ({start}, {end})"
            )
        if above >= 0 and end > tree.ends[above]:
            raise UserError(
                f"tree {number} of the batch: spans must nest, but ({start}, {end}) crosses "
                f"({tree.starts[above]}, {tree.ends[above]})"
            )
