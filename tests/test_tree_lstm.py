"""Tree-LSTM cells by level: against slow recursion, against torch's LSTM, and what their maps refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_tree_lstm import reference_binary_tree_lstm, reference_child_sum
from strategies import binary_trees, governors, right_branching, trees
from test_recurrent import assert_same_with_gradients, random

from treenet.config import ClassifierConfig, ModelConfig
from treenet.layers.cells import binary_tree_lstm, child_sum_tree_lstm
from treenet.models import VocabSizes, build_classifier, build_model, names_for
from treenet.models.encoders.recurrent import _leaf_states
from treenet.structure import ArcLevels, SpanTable, TreeLevels
from treeproc.common.settings import UserError

WIDTH = 3


def build_levels(batch) -> TreeLevels:
    return TreeLevels.build(SpanTable.build([tree.num_leaves for tree in batch], [tree.span_array for tree in batch]))


@num_examples(40)
@given(batch=st.lists(binary_trees(), min_size=1, max_size=4))
def test_the_binary_cell_agrees_with_recursion(batch):
    longest = max(tree.num_leaves for tree in batch)
    hidden, cell = (random(len(batch), longest, WIDTH, seed=s) for s in (1, 2))
    weight, bias = random(2 * WIDTH, 5 * WIDTH, seed=3), random(5 * WIDTH, seed=4)
    levels = build_levels(batch)
    real = [x.flatten(0, 1).index_select(0, levels.leaf) for x in (hidden, cell)]
    tables = binary_tree_lstm(*real, weight, bias, levels.children, levels.edges)
    states, cells = (table[levels.row] for table in tables)
    nodes = [(b, slice(longest, longest + len(tree.spans))) for b, tree in enumerate(batch)]
    fast = torch.stack([torch.cat([table[place] for place in nodes]) for table in (states, cells)])
    slow = [
        reference_binary_tree_lstm(
            hidden[b, : tree.num_leaves], cell[b, : tree.num_leaves], weight, bias, tree.spans, tree.parents
        )
        for b, tree in enumerate(batch)
    ]
    slow = torch.stack([torch.stack(part) for part in zip(*(state for tree in slow for state in tree), strict=True)])
    assert_same_with_gradients(fast, slow, [hidden, cell, weight, bias])
    for b, tree in enumerate(batch):
        assert torch.equal(states[b, : tree.num_leaves], hidden[b, : tree.num_leaves])
        assert not states[b, tree.num_leaves : longest].any() and not states[b, longest + len(tree.spans) :].any()


@num_examples(40)
@given(batch=st.lists(governors(), min_size=1, max_size=4))
def test_the_child_sum_cell_agrees_with_recursion(batch):
    width = max(map(len, batch)) + 1
    projected, weight = random(len(batch), width, 4 * WIDTH, seed=1), random(WIDTH, 4 * WIDTH, seed=2)
    levels = ArcLevels.build([np.arange(len(row)) for row in batch], [np.array(row) for row in batch])
    inputs = projected.flatten(0, 1).index_select(0, levels.place)
    tables = child_sum_tree_lstm(inputs, weight, levels.child, levels.governor, levels.edges, levels.arc_edges)
    table = torch.cat(tables, dim=1)
    states = torch.cat([table.new_zeros(1, 2 * WIDTH), table])[levels.row]
    fast, slow = [], []
    for b, row in enumerate(batch):
        joined, places = row, list(range(len(row)))
        if row.count(-1) > 1:  # one more place governs the roots
            joined, places = [len(row) if g == -1 else g for g in row] + [-1], [*places, width - 1]
        assert int(levels.root[b]) == places[joined.index(-1)]
        slow += [torch.cat(state) for state in reference_child_sum(projected[b, places], weight, joined)]
        fast.append(states[b, places])
        assert levels.pad_mask[b].tolist() == [place not in places for place in range(width)]
    assert_same_with_gradients(torch.cat(fast), torch.stack(slow), [projected, weight])


def test_a_chain_through_the_child_sum_cell_is_an_lstm():
    lstm, length = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True).double(), 7
    x = random(1, length, WIDTH)
    order = [0, 3, 2, 1]  # torch has i, f, candidate, o; the cell i, o, candidate, f
    inner, recurrent = (torch.cat([w.chunk(4)[k] for k in order]) for w in (lstm.weight_ih_l0, lstm.weight_hh_l0))
    bias = torch.cat([(lstm.bias_ih_l0 + lstm.bias_hh_l0).chunk(4)[k] for k in order])
    levels = ArcLevels.build([np.arange(length)], [np.append(np.arange(1, length), -1)])  # each word governs the one before it
    inputs = (x[0] @ inner.t() + bias).index_select(0, levels.place)
    hidden, _ = child_sum_tree_lstm(inputs, recurrent.t(), levels.child, levels.governor, levels.edges, levels.arc_edges)
    states = torch.cat([hidden.new_zeros(1, WIDTH), hidden])[levels.row][0, :length]
    assert_same_with_gradients(states, lstm(x)[0][0], [x, *lstm.parameters()])


@num_examples(60)
@given(tree=trees(max_roots=1))
def test_trees_that_are_not_binary_are_refused(tree):
    most = 0
    for node, (start, end, _) in enumerate(tree.spans):
        below = [child for child, parent in enumerate(tree.parents) if parent == node]
        most = max(most, len(below) + (end - start) - sum(tree.spans[child][1] - tree.spans[child][0] for child in below))
    if most > 2:
        with pytest.raises(UserError, match=r"must have at most two children.*tree\.binarize: right"):
            build_levels([tree])
    else:
        assert build_levels([right_branching(3), tree]).children.shape[0] == len(tree.spans) + 2


def test_arcs_in_a_cycle_or_of_other_trees_are_refused():
    with pytest.raises(UserError, match="cycle"):
        ArcLevels.build([np.arange(3)], [np.array([-1, 2, 1])])
    with pytest.raises(ValueError, match="are of 2 and 1"):
        ArcLevels.build([np.arange(2), np.arange(1)], [np.array([-1, 0])])


@num_examples(40)
@given(batch=st.lists(governors(max_words=7), min_size=1, max_size=3), pieces=st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_spans_are_those_of_the_leaves_below_a_word(batch, pieces):
    words = [np.repeat(np.arange(len(row)), pieces[: len(row)]) for row in batch]
    levels = ArcLevels.build(words, [np.array(row) for row in batch])
    for b, row in enumerate(batch):
        for word in range(len(row)):
            below = {word}
            while more := {w for w, g in enumerate(row) if g in below} - below:
                below |= more
            leaves = [leaf for leaf, w in enumerate(words[b]) if w in below]
            whole = leaves[-1] - leaves[0] + 1 == len(leaves)
            assert levels.span[b, word].tolist() == ([leaves[0], leaves[-1] + 1] if whole else [0, 0])
            assert int(levels.pieces[b, word]) == pieces[word]
        assert levels.word[b, : len(words[b])].tolist() == (b * levels.row.shape[1] + words[b]).tolist()


@pytest.mark.parametrize(
    ("name", "bias"), [("tree_lstm", 0), ("child_sum_tree_lstm", 0), ("tree2seq", 1), ("child_sum_tree2seq", 1)]
)
def test_forget_gates_start_as_in_the_code_of_each_paper(name, bias):
    """0 in classifiers (Tai et al., 2015), 1 in Tree2Seq (Shi et al., 2018); all other biases of gates are 0."""
    config, vocab = ModelConfig(name=name, d_model=8, num_heads=2), VocabSizes(9, labels=4)
    classifies = name in names_for("classification")
    model = build_classifier(config, vocab, ClassifierConfig(), 5) if classifies else build_model(config, vocab)
    gates = model.encoder.word.bias if name.startswith("child_sum") else model.encoder.composer.bias
    forget = slice(24, 32) if name.startswith("child_sum") else slice(8, 24)
    assert (gates[forget] == bias).all()
    gates.data[forget] = 0
    assert not gates.any()


def test_a_leaf_has_an_output_gate_and_no_input_gate():
    torch.manual_seed(0)
    leaf, x = torch.nn.Linear(WIDTH, 2 * WIDTH).double(), random(1, 2, WIDTH)
    hidden, cell = _leaf_states(leaf, x)
    plain, gate = x @ leaf.weight[:WIDTH].t() + leaf.bias[:WIDTH], x @ leaf.weight[WIDTH:].t() + leaf.bias[WIDTH:]
    torch.testing.assert_close(cell, plain)
    torch.testing.assert_close(hidden, torch.tanh(plain) / (1 + torch.exp(-gate)))
