"""Constituents from arcs: against the rules one head at a time, on random trees and on sentences that anybody can check."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_dependency import ReferenceSentence, reference_contraction, reference_projective
from reference_encoding import check_tree

from treeproc.shards.rows import edges_of
from treeproc.trees.arcs import check_arcs, contract, depths, make_projective
from treeproc.trees.dependency_trees import DependencySentences, dependency_phrases
from treeproc.trees.spans import SpanTree, draw

RELATIONS = [
    *("nsubj", "obj", "obl", "advmod", "amod", "det", "case", "mark", "aux", "cop", "conj", "cc", "nmod", "compound"),
    *("punct", "acl", "appos", "xcomp", "ccomp", "expl", "nmod:poss", "flat", "nummod", "parataxis", "root"),
]
TAGS = [
    *("NOUN", "VERB", "ADJ", "ADV", "PRON", "DET", "CCONJ", "ADP", "PART", "AUX", "PUNCT", "X"),
    *("NN", "VBD", "TO", "NNP"),
]
WORDS = ["a", "b", "(", ")", ",", "[", "]"]


@st.composite
def sentences(draw_):
    """One sentence: a tree of arcs with relations, tags and words. Some have the relations of coordination alone."""
    relations = draw_(st.sampled_from([RELATIONS, RELATIONS, ["conj", "cc", "obj"]]))
    size = draw_(st.integers(1, 12))
    order = draw_(st.permutations(range(size)))
    governors = [-1] * size
    for rank in range(1, size):
        governors[order[rank]] = order[draw_(st.integers(0, rank - 1))]
    columns = [draw_(st.lists(st.sampled_from(names), min_size=size, max_size=size)) for names in (relations, TAGS, WORDS)]
    return governors, *columns


def side_by_side(examples):
    """Sentences in one `Sentences`, with numbers for names."""
    edges = edges_of(np.array([len(e[0]) for e in examples]))
    governors = [g + first if g >= 0 else -1 for e, first in zip(examples, edges.tolist(), strict=False) for g in e[0]]
    codes = []
    for column, names in ((1, RELATIONS), (2, TAGS)):
        codes.append(np.array([names.index(name) for e in examples for name in e[column]], dtype=np.int64))
    words = pa.array([word for e in examples for word in e[3]], pa.string())
    return DependencySentences(edges, np.array(governors, dtype=np.int64), codes[0], RELATIONS, codes[1], TAGS, words)


def trees(examples, shape, labels="upos"):
    """The nodes of every sentence as (start, end, label), and the arcs lifted."""
    found = side_by_side(examples)
    trees, lifted = dependency_phrases(found, shape, labels)
    cuts = np.searchsorted(trees.starts, found.edges)
    out = []
    for first, low, high in zip(found.edges.tolist(), cuts, cuts[1:], strict=False):
        rows = zip(trees.starts[low:high], trees.ends[low:high], trees.labels[low:high], strict=True)
        out.append([(int(start) - first, int(end) - first, trees.names[label]) for start, end, label in rows])
    return out, lifted.tolist()


# "Tom is a friend": the subject is no part of the noun phrase.
NOMINAL = ([3, 3, 3, -1], ["nsubj", "cop", "det", "root"], ["NNP", "AUX", "DET", "NOUN"], ["a", "a", "a", "b"])


@num_examples(150)
@example([NOMINAL], "layered", "upos")
@given(
    st.lists(sentences(), min_size=1, max_size=4),
    st.sampled_from(["flat", "left", "right", "layered"]),
    st.sampled_from(["upos", "deprel"]),
)
def test_phrases_are_those_of_the_rules_one_head_at_a_time(examples, shape, labels):
    found, lifted = trees(examples, shape, labels)
    for sentence, nodes, lifts in zip(examples, found, lifted, strict=True):
        reference = ReferenceSentence(*sentence, shape)
        assert nodes == reference.tree(labels)
        assert lifts == reference.lifted
        check_tree(SpanTree([n[2] for n in nodes], [n[0] for n in nodes], [n[1] for n in nodes]), len(sentence[0]))
        assert nodes[0][:2] == (0, len(sentence[0])) and len({n[:2] for n in nodes}) == len(nodes)


@given(st.lists(sentences(), min_size=1, max_size=4))
def test_arcs_are_lifted_as_one_sentence_at_a_time(examples):
    found = side_by_side(examples)
    governors, lifted = make_projective(found.edges, found.governors)
    wanted = [reference_projective(example[0]) for example in examples]
    assert lifted.tolist() == [lifts for _, lifts in wanted]
    flat = [g + first if g >= 0 else -1 for (own, _), first in zip(wanted, found.edges.tolist(), strict=False) for g in own]
    assert governors.tolist() == flat


@num_examples(200)
@given(sentences(), st.data())
def test_contracted_arcs_are_those_of_the_topmost_words_and_a_tree(sentence, data):
    governors = sentence[0]
    leaf_of = np.cumsum([0, *(data.draw(st.integers(0, 1)) for _ in governors[1:])]).tolist()
    found = contract(governors, leaf_of)
    assert found == reference_contraction(governors, leaf_of)
    assert check_arcs(np.array([0, len(found[0])]), np.array(found[0])) == [""] and found[0].count(-1) == 1
    for leaf, word in enumerate(found[1]):  # the arc leaves the leaf, and all words of the leaf are at or below its ends
        assert leaf_of[word] == leaf and (governors[word] < 0 or leaf_of[governors[word]] != leaf)
    roots = contract([-1] * len(governors), leaf_of)
    assert roots[0] == [-1] * (leaf_of[-1] + 1)


@pytest.mark.parametrize(
    ("governors", "leaf_of", "above", "topmost"),
    [
        ([2, -1, 1], [0, 0, 1], [-1, 0], [1, 2]),  # the first word's arc would close a cycle
        ([2, 3, 3, -1], [0, 0, 1, 2], [2, 2, -1], [1, 2, 3]),  # two arcs leave the token: the one nearer to the root counts
        ([2, 2, -1], [0, 0, 1], [1, -1], [0, 2]),  # both are as near: the first
        ([3, 0, 0, -1], [0, 0, 0, 1], [1, -1], [0, 3]),
    ],
)
def test_the_arc_of_a_token_of_several_words(governors, leaf_of, above, topmost):
    assert contract(governors, leaf_of) == (above, topmost)


def test_a_chain_of_200_words():
    governors = [*range(1, 200), -1]
    example = (governors, ["nmod"] * 200, ["NOUN"] * 200, ["a"] * 200)
    for shape in ("flat", "left", "right"):
        (nodes,), _ = trees([example], shape)
        assert [n[:2] for n in nodes] == [(0, end) for end in range(200, 1, -1)]
    assert depths(np.array(governors)).tolist() == list(range(199, -1, -1))


SENTENCE = (
    # The dogs of my neighbour have not eaten and slept .
    [1, 7, 4, 4, 1, 7, 7, -1, 9, 7, 7],
    ["det", "nsubj", "case", "nmod:poss", "nmod", "aux", "advmod", "root", "cc", "conj", "punct"],
    ["DET", "NOUN", "ADP", "DET", "NOUN", "AUX", "PART", "VERB", "CCONJ", "VERB", "PUNCT"],
    ["The", "dogs", "of", "my", "neighbour", "have", "not", "eaten", "and", "slept", "."],
)


def test_a_sentence_in_layers():
    (nodes,), _ = trees([SENTENCE], "layered")
    tree = SpanTree([n[2] for n in nodes], [n[0] for n in nodes], [n[1] for n in nodes])
    assert draw(tree, SENTENCE[3]).splitlines() == [
        "S",
        "├─ S",
        "│  ├─ NP",
        "│  │  ├─ NP",
        "│  │  │  ├─ The",
        "│  │  │  └─ dogs",
        "│  │  └─ PP",
        "│  │     ├─ of",
        "│  │     └─ NP",
        "│  │        ├─ my",
        "│  │        └─ neighbour",
        "│  └─ VP",
        "│     ├─ have",
        "│     ├─ not",
        "│     └─ VP",
        "│        └─ eaten",
        "├─ and",
        "├─ slept",
        "└─ .",
    ]


def test_shapes_and_labels_of_the_same_sentence():
    (flat,), _ = trees([SENTENCE], "flat")
    assert flat == [(0, 11, "S"), (0, 5, "NP"), (2, 5, "NP"), (8, 10, "VP")]
    (left,), _ = trees([SENTENCE], "left", "deprel")
    assert left[:4] == [(0, 11, "root"), (0, 8, "root"), (0, 5, "nsubj"), (0, 2, "nsubj")]
    (right,), _ = trees([SENTENCE], "right")
    assert [n for n in right if n[1] == 10] == [(5, 10, "VP"), (6, 10, "VP"), (7, 10, "VP"), (8, 10, "VP")]


def test_brackets_hold_a_phrase_and_commas_do_not():
    example = (
        [2, 2, -1, 4, 2, 4, 2],
        ["punct", "nsubj", "root", "punct", "obj", "punct", "punct"],
        ["PUNCT", "PRON", "VERB", "PUNCT", "NOUN", "PUNCT", "PUNCT"],
        [",", "we", "see", "(", "them", ")", "."],
    )
    (nodes,), _ = trees([example], "flat")
    assert nodes == [(0, 7, "S"), (3, 6, "PRN")]


def test_a_root_that_is_called_a_conjunct_keeps_its_conjunction():
    found = []
    for root in ("root", "conj"):
        example = ([2, 2, -1, 2], ["cc", "det", root, "obj"], ["CCONJ", "DET", "VERB", "NOUN"], ["a", "a", "b", "b"])
        found.append(trees([example], "layered"))
    assert found[0] == found[1] and len(found[0][0][0]) > 1


def test_a_sentence_without_an_analysis_gets_a_flat_tree():
    example = ([-1, -1, -1], ["root"] * 3, ["X"] * 3, ["a", "b", "a"])
    found, lifted = trees([example, SENTENCE], "layered")
    assert found[0] == [(0, 3, "X")] and lifted == [0, 0]


@pytest.mark.parametrize(
    ("governors", "problem"),
    [
        ([1, 2, 0], "the arcs form a cycle"),
        ([-1, -1, 0], "2 words have no governor, but one must be the root"),
        ([3, -1, 0], "a governor is in another sentence"),
    ],
)
def test_arcs_that_are_no_tree_are_named_by_sentence(governors, problem):
    assert check_arcs(np.array([0, 3, 5]), np.array([*governors, 4, -1])) == [problem, ""]
