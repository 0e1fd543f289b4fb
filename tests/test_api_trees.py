"""The library over trees: constructors agree with each other, layers with slow oracles, mistakes are one sentence."""

import copy
import re
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from strategies import Tree, batches, governors, trees
from test_accumulation import by_equations, check_close_with_grads, real_rows
from test_tree_attention import CONFIGS, D_MODEL, HEADS, randomise

import treenet
from treenet import ModelConfig, TreeAttention, TreeAttentionConfig, TreeEncoder, TreeStructure, UserError, collate
from treenet.analysis.attention_stats import run_attention
from treenet.config import RelationsConfig
from treenet.data.batch import TreeBatch
from treenet.data.labelled import LabelledSource
from treenet.data.windows import example_costs
from treenet.layers.backend import computing_in
from treenet.layers.recurrent import build_recurrence
from treenet.layers.relations import Relations
from treenet.layers.scaled_dot_product import merge_heads
from treenet.models import VocabSizes
from treenet.models.encoders.base import PieceEmbedding
from treenet.models.encoders.tree import TreeEncoder as BatchEncoder
from treenet.models.registry import names_for
from treenet.probing.inputs import build_probe_task
from treenet.runs.averaging import choose_checkpoints
from treeproc.readers import read_rows
from treeproc.trees.controls import control_spans
from treeproc.trees.dependency_trees import dependency_phrases
from treeproc.trees.flat_trees import binarise
from treeproc.trees.spans import SpanTree, write_brackets

WITH_ROOT = trees(max_roots=1).filter(lambda tree: len(tree.spans) > 0)


def name_labels(tree: Tree) -> list[str]:
    """A name of its own for every node."""
    return [f"N{number}" for number in range(len(tree.spans))]


def check_same(found: TreeStructure, expected: TreeStructure) -> None:
    for name in ("start", "end", "subtree_end", "leaf_pad_mask", "node_pad_mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.attend_mask(), expected.attend_mask())


@num_examples(30)
@given(sentences=st.lists(WITH_ROOT, min_size=1, max_size=3), random=st.randoms(use_true_random=False))
def test_brackets_and_spans_are_the_same_trees(sentences, random):
    labels = [name_labels(tree) for tree in sentences]
    brackets, spans = [], []
    for tree, names in zip(sentences, labels, strict=True):
        starts, ends = zip(*tree.leaf_spans, strict=True)
        words = [f"w{leaf}" for leaf in range(tree.num_leaves)]
        brackets.append(write_brackets(SpanTree(names, list(starts), list(ends)), words, ["T"] * len(words)))
        nodes = [(*span, name) for span, name in zip(tree.leaf_spans, names, strict=True)]
        by_span = {span: [node for node in nodes if node[:2] == span] for span in random.sample(tree.leaf_spans, len(nodes))}
        spans.append([node for group in by_span.values() for node in group])  # any order, but for equal spans
    expected = TreeStructure.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])
    for found in (TreeStructure.from_brackets(brackets, collapse_unary=False), TreeStructure.from_spans(spans)):
        check_same(found, expected)
        assert found.labels == tuple(map(tuple, labels))


@num_examples(30)
@given(sentences=st.lists(governors(max_words=7, max_roots=1), min_size=1, max_size=3))
def test_arcs_make_a_phrase_of_every_head_and_what_is_below_it(sentences):
    spans = []
    for above in sentences:
        below: list[set[int]] = [{word} for word in range(len(above))]
        for word in range(len(above)):
            head = word
            while (head := above[head]) >= 0:
                below[head].add(word)
        assume(all(max(words) - min(words) + 1 == len(words) for words in below))  # no arcs cross
        root = above.index(-1)
        spans.append([(min(words), max(words) + 1) for word, words in enumerate(below) if len(words) > 1 or word == root])
    check_same(TreeStructure.from_arcs(sentences), TreeStructure.from_spans(spans))


def test_arcs_that_cross_are_lifted_and_relations_name_phrases():
    crossing = TreeStructure.from_arcs([[2, 3, -1, 2]])
    check_same(crossing, TreeStructure.from_spans([[(0, 4)]]))
    named = TreeStructure.from_arcs([[1, 2, -1]], relations=[["det", "nsubj:pass", "root"]])
    assert named.labels == (("root", "nsubj"),)
    layered = TreeStructure.from_arcs(
        [[1, 2, -1]], shape="layered", relations=[["det", "nsubj", "root"]], tags=[["DET", "NOUN", "VERB"]]
    )
    assert layered.labels == (("S", "NP", "VP"),)


def test_normal_form_of_brackets_is_that_of_data_sets():
    found = TreeStructure.from_brackets(["( (S (NP-SBJ (NP (NNP Ann))) (VP (VBD ran))))"])
    assert found.labels == (("S", "NP", "VP"),) and found.num_leaves == 2


@num_examples(30)
@given(sentences=batches(max_leaves=6))
def test_node_means(sentences):
    structure = TreeStructure.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])
    leaves = torch.randn(len(sentences), structure.num_leaves, 3, dtype=torch.float64)
    leaves[structure.leaf_pad_mask] = torch.nan  # states of padding reach nothing
    means = structure.node_means(leaves)
    for number, tree in enumerate(sentences):
        for node, (start, end) in enumerate(tree.leaf_spans):
            torch.testing.assert_close(means[number, node], leaves[number, start:end].mean(0), rtol=1e-13, atol=1e-13)
        assert not means[number, len(tree.spans) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@num_examples(6)
@given(sentences=batches(max_leaves=6), average=st.booleans())
def test_self_attention_equals_the_equations(config, sentences, average):
    module = randomise(TreeAttention(D_MODEL, HEADS, tree=TreeAttentionConfig(**config)))
    structure = TreeStructure.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])
    shape = len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, weights = module(states, structure=structure, need_weights=True, average_attn_weights=average)
    assert torch.equal(out, module(states, states, states, structure=structure)[0])
    assert weights.shape == ((shape[0], shape[1], shape[1]) if average else (shape[0], HEADS, shape[1], shape[1]))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    with by_equations(module):
        slow, real = module(states, structure=structure)[0], real_rows(structure)
    check_close_with_grads([(out[real], slow[real])], [states, *module.parameters()])


@num_examples(10)
@given(sentences=batches(max_leaves=6))
def test_weights_times_values_are_the_output(sentences):
    structure = TreeStructure.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])
    states = torch.randn(len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL, dtype=torch.float64)
    queries = torch.randn(len(sentences), 3, D_MODEL, dtype=torch.float64)
    whole, cross = (randomise(TreeAttention(D_MODEL, HEADS, cross=cross)) for cross in (False, True))
    out, weights = whole(states, structure=structure, need_weights=True, average_attn_weights=False)
    layer = whole.attention
    values = layer.split_heads(layer.project(states, structure)[2])
    torch.testing.assert_close(layer.output(merge_heads(weights @ values)), out)
    out, weights = cross(queries, states, structure=structure, need_weights=True, average_attn_weights=False)
    values = cross.attention.project_memory(states, structure)[1]
    torch.testing.assert_close(cross.attention.output(merge_heads(weights @ values)), out)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    assert torch.equal(cross(queries, states, states, structure=structure)[0], out)
    with by_equations(cross):
        torch.testing.assert_close(cross(queries, states, structure=structure)[0], out)
    turned = TreeAttention(D_MODEL, HEADS, cross=True, batch_first=False).double()
    turned.load_state_dict(cross.state_dict())
    first = turned(queries.transpose(0, 1), states.transpose(0, 1), structure=structure)[0]
    assert torch.equal(first.transpose(0, 1), out)


@num_examples(20)
@given(sentences=batches(max_leaves=6), bias=st.booleans(), batch_first=st.booleans(), cross=st.booleans())
def test_weights_of_multihead_attention_give_its_output(sentences, bias, batch_first, cross):
    """For leaves of any trees, and for queries of trees without nodes: values and gradients."""
    theirs = randomise(torch.nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=batch_first)).eval()
    ours = TreeAttention.from_multihead_attention(theirs, cross=cross)
    assert not ours.training and ours.batch_first is batch_first
    frozen = [one for one in theirs.parameters() if one is not theirs.in_proj_weight]
    for one in frozen:
        one.requires_grad_(False)
    kept = TreeAttention.from_multihead_attention(theirs, cross=cross).attention
    assert [one.requires_grad for one in kept.output.parameters()] == [False] * (1 + bias)
    of_inputs = [kept.queries, kept.keys_values] if cross else [kept.queries_keys_values]
    assert all([one.requires_grad for one in linear.parameters()] == [True, False][: 1 + bias] for linear in of_inputs)
    theirs.requires_grad_(True)
    counts = [tree.num_leaves for tree in sentences]
    structure = TreeStructure.build(counts, [tree.span_array[: 0 if cross else None] for tree in sentences])
    leaves = torch.randn(len(counts), max(counts), D_MODEL, dtype=torch.float64, requires_grad=True)
    queries = torch.randn(len(counts), 3, D_MODEL, dtype=torch.float64, requires_grad=True) if cross else leaves

    def turn(states):
        return states if batch_first else states.transpose(0, 1)

    nodes = torch.randn(len(counts), structure.num_nodes, D_MODEL, dtype=torch.float64)
    states = turn(torch.cat([leaves, nodes], dim=1))
    out, weights = ours(*((turn(queries), states) if cross else (states,)), structure=structure, need_weights=True)
    pad_mask = structure.leaf_pad_mask
    expected, their_weights = theirs(turn(queries), turn(leaves), turn(leaves), key_padding_mask=pad_mask)
    real = slice(None) if cross else ~pad_mask
    found = turn(out)[:, : queries.shape[1]][real], turn(expected)[real]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights[:, : queries.shape[1], : max(counts)][real], their_weights[real], rtol=1e-12, atol=1e-12)
    factors = torch.randn_like(found[0])
    inputs = [leaves, queries]
    inner, names = ours.attention, ["weight", "bias"] if bias else ["weight"]
    for name in names:
        inputs += [getattr(theirs, f"in_proj_{name}"), getattr(theirs.out_proj, name)]
    wanted = torch.autograd.grad((found[1] * factors).sum(), inputs)
    mine = [leaves, queries]
    for name in names:
        linears = (inner.queries, inner.keys_values, inner.output) if cross else (inner.queries_keys_values, inner.output)
        mine += [getattr(linear, name) for linear in linears]
    gradients = list(torch.autograd.grad((found[0] * factors).sum(), mine))
    if cross:
        joined = [torch.cat(gradients[at : at + 2]) for at in range(2, len(gradients), 3)]
        gradients = [*gradients[:2], *(one for at, cat in enumerate(joined) for one in (cat, gradients[4 + 3 * at]))]
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_encoder_is_that_of_the_tree_transformer():
    """The same weights give the same states to the last bit, and a batch-mate changes nothing that is real."""
    config = ModelConfig(d_model=D_MODEL, d_ff=16, num_heads=HEADS, num_encoder_layers=2, dropout=0.0)
    torch.manual_seed(0)
    model = BatchEncoder(config, VocabSizes(9, 5), PieceEmbedding(9, D_MODEL)).eval()
    model.add_tables(VocabSizes(9, 5))
    structure = TreeStructure.from_spans([[(0, 4), (0, 2), (2, 4)], [(0, 3), (1, 3)]])
    pieces, labels = torch.randint(4, 9, (2, 4)), torch.randint(1, 5, (2, 3))
    none = torch.zeros(2, 1, dtype=torch.int64)
    masks = structure.leaf_pad_mask, structure.node_pad_mask
    batch = TreeBatch(torch.arange(2), pieces, masks[0], labels, masks[1], structure, none, none)
    memory = model(batch)
    encoder = TreeEncoder(config).eval()
    encoder.layers.load_state_dict(model.layers.state_dict())
    nodes = model.embedding.scale * model.label_embedding(labels)
    found = encoder(model.embed_leaves(batch), structure, nodes)
    assert torch.equal(torch.cat(found, dim=1), memory.states)
    leaves = torch.randn(2, 4, D_MODEL)
    alone = encoder(leaves[1:, :3], TreeStructure.from_spans([[(0, 3), (1, 3)]]))
    together = encoder(leaves, structure)
    torch.testing.assert_close(together.leaves[1, :3], alone.leaves[0])
    torch.testing.assert_close(together.nodes[1, :2], alone.nodes[0])


TREES = TreeStructure.from_spans([[(0, 3), (0, 2)], [(0, 2)]])
SMALL = ModelConfig(d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1)
MISTAKES = {
    "trees are missing": lambda: TreeAttention(8, 2)(torch.zeros(2, 5, 8)),
    r"tree\.relative_positions must be 0": lambda: TreeAttention(8, 2, tree=TreeAttentionConfig(relative_positions=3)),
    r"^tree\.nodes must be 'labels' in TreeAttention.* but is 'labels_and_leaves'": lambda: TreeAttention(
        8, 2, tree=TreeAttentionConfig(nodes="labels_and_leaves")
    ),
    r"^config\.tree\.nodes must be 'labels' in TreeEncoder": lambda: TreeEncoder(
        ModelConfig(d_model=8, num_heads=2, tree=TreeAttentionConfig(nodes="labels_and_leaves"))
    ),
    r"^config\.name must be 'tree_transformer' in TreeEncoder, but is 'transformer'; .*nn\.TransformerEncoder$": lambda: (
        TreeEncoder(ModelConfig(name="transformer", d_model=8, num_heads=2))
    ),
    r"structure must be a TreeStructure, but is a list": lambda: TreeAttention(8, 2)(torch.zeros(2, 5, 8), structure=[]),
    r"\[2, 3, 8\] have no nodes: 3 leaves come first, then 2 nodes": lambda: TreeAttention(8, 2)(
        torch.zeros(2, 3, 8), structure=TREES
    ),
    r"must be \[2, 5, 8\], but are \[2, 6, 8\]": lambda: TreeAttention(8, 2)(torch.zeros(2, 6, 8), structure=TREES),
    r"self-attention takes key and value from the query": lambda: TreeAttention(8, 2)(
        torch.zeros(2, 5, 8), torch.zeros(2, 5, 8), structure=TREES
    ),
    r"key and value must be one tensor": lambda: TreeAttention(8, 2, cross=True)(torch.zeros(2, 5, 8), structure=TREES),
    r"queries must be \[2, any number, 8\], but are \[1, 4, 8\]": lambda: TreeAttention(8, 2, cross=True)(
        torch.zeros(1, 4, 8), torch.zeros(2, 5, 8), structure=TREES
    ),
    r"multiple of 2 \* num_heads = 6, but is 8": lambda: TreeAttention(8, 3),
    r"states of the leaves must be \[2, 3, 8\], but are \[2, 5, 8\]": lambda: TreeEncoder(SMALL)(torch.zeros(2, 5, 8), TREES),
    r"states of the nodes must be \[2, 2, 8\], but are \[2, 3, 8\]": lambda: TreeEncoder(SMALL)(
        torch.zeros(2, 3, 8), TREES, torch.zeros(2, 3, 8)
    ),
    "tree 1 of the batch: unbalanced": lambda: TreeStructure.from_brackets(["(S (N a))", "(S (N a)))"]),
    "trees must be a list of bracketed trees": lambda: TreeStructure.from_brackets("(S (N a))"),
    "at least one tree": lambda: TreeStructure.from_brackets([]),
    r"tree 0 of the batch: spans must nest, but \(1, 4\) crosses \(0, 2\)": lambda: TreeStructure.from_spans([[(0, 2), (1, 4)]]),
    r"must lie within \(0, 3\), but one is \(2, 4\)": lambda: TreeStructure.from_spans([[(0, 3), (2, 4)]], [3]),
    r"a span \(start, end\) must have at least one leaf, and the end is one past its last leaf, but one is \(0, 0\)": lambda: (
        TreeStructure.from_spans([[(0, 0, "A")]])
    ),
    "num_leaves must have a number for each of the 1 trees, but has 2": lambda: TreeStructure.from_spans([[(0, 3)]], [3, 3]),
    "sentence 1 of the batch: the arcs form a cycle": lambda: TreeStructure.from_arcs([[-1], [1, 0, -1]]),
    "sentence 0 of the batch: 2 words have no governor": lambda: TreeStructure.from_arcs([[-1, -1, 0]]),
    r"sentence 0 of the batch: the governor of word 1 must be from -1 \(the root\) to 1, but is 5": lambda: (
        TreeStructure.from_arcs([[-1, 5], [-1, 0]])
    ),
    "sentence 1 of the batch: it has no words": lambda: TreeStructure.from_arcs([[-1], []]),
    r"tags must be one a word, \[1\], but are \[2\]": lambda: TreeStructure.from_arcs([[-1]], tags=[["A", "B"]]),
    "shape='layered' reads universal relations and tags": lambda: TreeStructure.from_arcs([[-1]], shape="layered"),
    # Choices
    "shape must be flat, left, right or layered, but is 'Right'": lambda: TreeStructure.from_arcs([[-1, 0]], shape="Right"),
    "shape must be flat, left, right or layered, but is None": lambda: TreeStructure.from_arcs([[-1, 0]], shape=None),
    "collapse_unary must be True or False, but is 'no'": lambda: TreeStructure.from_brackets(["(S (N a))"], collapse_unary="no"),
    "cross must be True or False, but is 'no'": lambda: TreeAttention(8, 2, cross="no"),
    "bias must be True or False, but is 1": lambda: TreeAttention(8, 2, 0.0, 1),
    "attention must be of type MultiheadAttention, but is a Linear": lambda: TreeAttention.from_multihead_attention(
        torch.nn.Linear(8, 8)
    ),
    "must not have add_bias_kv or add_zero_attn": lambda: TreeAttention.from_multihead_attention(
        torch.nn.MultiheadAttention(8, 2, add_zero_attn=True)
    ),
    "kdim and vdim must be embed_dim, 8, but are 4 and 8": lambda: TreeAttention.from_multihead_attention(
        torch.nn.MultiheadAttention(8, 2, kdim=4)
    ),
    r"multiple of 2 \* num_heads = 16, but is 8": lambda: TreeAttention.from_multihead_attention(
        torch.nn.MultiheadAttention(8, 8)
    ),
    "batch_first must be True or False, but is 1": lambda: TreeAttention(8, 2, batch_first=1),
    # Heads
    "0 of the batch: 3 words have no governor, but one must be the root": lambda: TreeStructure.from_arcs([[-1, -1, -1]]),
    r"form a cycle; governors count from 0, .* fit the heads of CoNLL-U \(.*\)$": lambda: TreeStructure.from_arcs([[2, 3, 0, 3]]),
    r"from -1 .* but is 3; .* fit the heads of CoNLL-U \(.*: subtract 1\)$": lambda: TreeStructure.from_arcs([[2, 3, 0], [0]]),
    r"form a cycle; .* fit the heads of spaCy \(the root .* -1\)$": lambda: TreeStructure.from_arcs([[1, 2, 2, 2], [0]]),
    r"cycle; .* fit the heads of CoNLL-U \(.*\) and of spaCy \(.*\)$": lambda: TreeStructure.from_arcs([[2, 0, 2]]),
    "sentence 0 of the batch: the arcs form a cycle$": lambda: TreeStructure.from_arcs([[1, 0, 1]]),
    # Integers
    "the governor of word 1 must be an integer, but is None": lambda: TreeStructure.from_arcs([[-1, None]]),
    "the governor of word 0 must be an integer, but is '1'": lambda: TreeStructure.from_arcs([["1", "-1"]]),
    "the governor of word 0 must be an integer, but is 1.0": lambda: TreeStructure.from_arcs([[1.0, -1]]),
    "the governor of word 1 must be an integer, but is nan": lambda: TreeStructure.from_arcs([[-1, float("nan")]]),
    "the governor of word 1 must be an integer, but is False": lambda: TreeStructure.from_arcs([[-1, False]]),
    "the governor of word 0 must be an integer, but is np.True_": lambda: TreeStructure.from_arcs([np.array([True])]),
    "the governor of word 0 must be an integer, but is tensor": lambda: TreeStructure.from_arcs([torch.tensor([1.0, -1.0])]),
    r"word 1 must be from -1 .* but is 1[0-9]*\.\.\.": lambda: TreeStructure.from_arcs([[-1, 10**99]]),
    "span 0: start must be an integer, but is 0.0": lambda: TreeStructure.from_spans([[(0.0, 2.9, "A")]]),
    "span 1: end must be an integer, but is '2'": lambda: TreeStructure.from_spans([[(0, 2), (0, "2")]]),
    "span 0: end must be at most 1048576, but is 1000": lambda: TreeStructure.from_spans([[(0, 10**30)]]),
    "embed_dim must be from 1 to 2147483647, but is 1000": lambda: TreeAttention(10**30, 2),
    "span 0: end must be an integer, but is True": lambda: TreeStructure.from_spans([[(0, True)]]),
    "tree 1 of the batch has no spans, so its number of leaves is unknown": lambda: TreeStructure.from_spans([[(0, 2)], []]),
    r"num_leaves\[0\] must be an integer, but is 2.0": lambda: TreeStructure.from_spans([[(0, 2)]], [2.0]),
    r"num_leaves\[0\] must be from 1 to 1048576, but is 0": lambda: TreeStructure.from_spans([[]], [0]),
    "embed_dim must be an integer, but is '8'": lambda: TreeAttention("8", 2),
    "num_heads must be an integer, but is 2.0": lambda: TreeAttention(8, 2.0),
    "num_heads must be at least 1, but is 0": lambda: TreeAttention(8, 0),
    "dropout must be a number from 0 to below 1, but is nan": lambda: TreeAttention(8, 2, float("nan")),
    "dropout must be a number from 0 to below 1, but is True": lambda: TreeAttention(8, 2, True),
    # Lists
    "governors must be a list of sentences, each a list of governors, but is None": lambda: TreeStructure.from_arcs(None),
    "sentence 0 of the batch must be a list of governors, one a word, but is 1": lambda: TreeStructure.from_arcs([1, -1]),
    "but is a generator": lambda: TreeStructure.from_arcs([(head for head in (1, -1))]),
    "governors .* but is a dict": lambda: TreeStructure.from_arcs({0: [-1]}),
    r"governors .* but is a ndarray of one value": lambda: TreeStructure.from_arcs(np.array(1)),
    "a batch must have at least one tree, but has none": lambda: TreeStructure.from_arcs([]),
    "relations must be a list of sentences, each a list of strings": lambda: TreeStructure.from_arcs([[-1]], relations="root"),
    r"relations\[0\]\[0\] must be a string, but is None": lambda: TreeStructure.from_arcs([[-1]], relations=[[None]]),
    r"tags\[0\] must be a list of strings, one a word, but is one string": lambda: TreeStructure.from_arcs([[-1]], tags=["A"]),
    "tree 0 of the batch must be a string in brackets, but is None; str": lambda: TreeStructure.from_brackets([None]),
    "trees must be a list of bracketed trees, one an example, but is a generator": lambda: TreeStructure.from_brackets(
        tree for tree in ["(S (N a))"]
    ),
    "tree 0 of the batch, span 0 must be a list of start, end and perhaps a label, but is 0": lambda: TreeStructure.from_spans(
        [(0, 2)]
    ),
    r"span 0 must be \(start, end\) or \(start, end, label\), but is \(0,\)": lambda: TreeStructure.from_spans([[(0,)]]),
    "span 0: the label must be a string, but is 7": lambda: TreeStructure.from_spans([[(0, 2, 7)]]),
    "num_leaves must be a list of integers, one a tree, but is 2": lambda: TreeStructure.from_spans([[(0, 2)]], 2),
    "examples must be a list of rows of an encoded stage, but is None": lambda: collate(None),
    "a batch must have at least one row, but has none": lambda: collate([]),
    "rows of an encoded stage that are read as trees, but one lacks 'leaves'": lambda: collate(
        [{"example_id": 0, "source": "a"}]
    ),
    "rows of an encoded stage that are read as trees, but one is not a dictionary": lambda: collate([1]),
    "reads must be of type InputKind, but is one string": lambda: collate([{}], "trees"),
    # Places, devices and types
    "a place in the batch must be an integer, but is 0.0": lambda: TREES[0.0],
    r"at least one tree, but slice\(2, None, None\) chooses none of 2": lambda: TREES[2:],
    "device must be a device of PyTorch, such as 'cpu' or 'cuda:1', but is 'gpu'": lambda: TREES.to("gpu"),
    "such as 'cpu' or 'cuda:1', but is None": lambda: TREES.to(None),
    "such as 'cpu' or 'cuda:1', but is torch.float16": lambda: TREES.to(torch.float16),
    "device must be one of this machine, where PyTorch finds [0-9]+ GPUs, but is cuda:99": lambda: TREES.cuda("cuda:99"),
    "where PyTorch finds [0-9]+ GPUs, but is cuda:98": lambda: TreeAttention(8, 2, device="cuda:98"),
    "dtype must be a floating-point type of PyTorch, .* but is torch.int64": lambda: TreeAttention(8, 2, dtype=torch.int64),
    "the states of the leaves must be floating-point numbers, but are torch.int64": lambda: TREES.node_means(
        torch.zeros(2, 3, 8, dtype=torch.int64)
    ),
    r"the states of the leaves must be a tensor \[2, 3, any number\], but are \[2, 4, 8\]": lambda: TREES.node_means(
        torch.zeros(2, 4, 8)
    ),
    r"query must be floating-point numbers in three dimensions, but are torch.int64 \[2, 5, 8\]": lambda: TreeAttention(8, 2)(
        torch.zeros(2, 5, 8, dtype=torch.int64), structure=TREES
    ),
    r"query must be floating-point numbers in three dimensions, but are torch.float32 \[8\]": lambda: TreeAttention(
        8, 2, batch_first=False
    )(torch.zeros(8), structure=TREES),
    "query must be a tensor, but is a list": lambda: TreeAttention(8, 2)([[1.0]], structure=TREES),
    "key must be a tensor, but is a list": lambda: TreeAttention(8, 2, cross=True)(torch.zeros(2, 1, 8), [1], structure=TREES),
    "the states of the leaves must be a tensor, but is a list": lambda: TreeEncoder(SMALL)([1], TREES),
    # Settings
    "^ModelConfig: dmodel: unknown key; did you mean d_model": lambda: ModelConfig(dmodel=16),
    "^ModelConfig: xyz: unknown key; the keys are name, d_model, ": lambda: ModelConfig(xyz=16),
    "^ModelConfig: tree.leaf_weights: must be 'shared' or 'per_head', but is 'each'": lambda: ModelConfig(
        tree={"leaf_weights": "each"}
    ),
    "^TreeAttentionConfig: vertical_rows: must be a valid integer": lambda: TreeAttentionConfig(vertical_rows=None),
    "tree must be of type TreeAttentionConfig, but is a dict": lambda: TreeAttention(8, 2, tree={"subtree_mask": False}),
    "tree: accumulation_rule: must be 'paper' or 'released', but is 'Paper'": lambda: TreeAttention(
        8, 2, tree=TreeAttentionConfig().model_copy(update={"accumulation_rule": "Paper"})
    ),
    "config must be of type ModelConfig, but is a dict": lambda: TreeEncoder({"d_model": 8}),
}
# Choices of functions that the library calls, with one that is in no list.
CHOICES = {
    "shape must be flat, left, right or layered": lambda: dependency_phrases(None, "foo", "upos"),
    "labels must be upos or deprel": lambda: dependency_phrases(None, "flat", "foo"),
    "kind must be balanced, left, right, flat or random": lambda: control_spans("foo", np.array([2]), np.array([0]), 0),
    "side must be left or right": lambda: binarise(None, 2, "foo"),
    "attention_path must be one, two or window": lambda: TreeStructure.build([1], [np.array([[0, 1, 1]])], attention_path="foo"),
    "cell must be on_lstm or lstm": lambda: build_recurrence("foo", 4, 4, 2),
    "choice must be last, best or ema": lambda: choose_checkpoints(None, "foo", 1),
    "targets must be reference or translation": lambda: run_attention(None, "test", "foo"),
    "name must be depth, top_constituents, ": lambda: build_probe_task("foo", {}),
    "budget_counts must be leaves or leaves_and_nodes": lambda: example_costs({}, "foo"),
    "split_words must be pieces, node or both": lambda: LabelledSource(None, "train", None, phrases=False, split_words="foo"),
    "format_name must be parallel, text, documents, sgm, ": lambda: read_rows("foo", [], []),
    "tokenized must be none or moses": lambda: read_rows("parallel", [], [], "foo"),
    "precision must be bf16, fp16, float32, tf32 or auto": lambda: computing_in("foo", torch.device("cpu")),
    "use must be translation, classification, masked_lm or causal_lm": lambda: names_for("foo"),
    "a relation of words must be tree_distance, tree_traversal or structural": lambda: Relations(RelationsConfig())._of_words(
        "foo", 1, Namespace(up=torch.zeros(1, 1, 1), down=torch.zeros(1, 1, 1))
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_sentence(message):
    with pytest.raises(UserError, match=message) as error:
        MISTAKES[message]()
    assert not re.search(r"\n|--|workflows/", str(error.value))


@pytest.mark.parametrize("message", CHOICES)
def test_a_choice_that_is_in_no_list_is_refused(message):
    with pytest.raises(UserError, match=f"^{message}.*, but is '?foo'?$"):
        CHOICES[message]()


def test_integers_of_numpy_and_pytorch_are_integers():
    expected = TreeStructure.from_arcs([[1, -1]])
    for heads in (np.array([1, -1]), np.array([1, -1], dtype=np.int8), torch.tensor([1, -1]), (np.int32(1), -1)):
        check_same(TreeStructure.from_arcs([heads]), expected)
    check_same(TreeStructure.from_spans(np.array([[[0, 2]]]), torch.tensor([2])), expected)
    assert TreeAttention(np.int64(8), np.int32(2)).embed_dim == 8


@num_examples(30)
@given(sentences=batches(max_leaves=6), data=st.data())
def test_trees_of_a_batch_are_those_of_a_batch_of_them(sentences, data):
    def build(chosen, kind):
        return getattr(TreeStructure, kind)([tree.num_leaves for tree in chosen], [tree.span_array for tree in chosen])

    places = data.draw(st.lists(st.integers(-len(sentences), len(sentences) - 1), min_size=1, max_size=4))
    for kind in ("build", "build_compact"):
        structure = build(sentences, kind)
        assert len(structure) == len(sentences)
        check_same(structure[places], build([sentences[place] for place in places], kind))
        check_same(structure[torch.tensor(places)], structure[places])
        for first in (places[0], np.int64(places[0]), torch.tensor(places[0])):
            check_same(structure[first], build([sentences[places[0]]], kind))
        check_same(structure[: len(sentences)], structure)
        for one, tree in zip(structure, sentences, strict=True):  # a loop ends
            check_same(one, build([tree], kind))


def test_small_things_that_a_tensor_has():
    trees = TreeStructure.from_spans([[(0, 3, "S"), (0, 2, "NP")], [(0, 2, "X")]])
    assert repr(trees) == "TreeStructure(trees=2, leaves=3, nodes=2, device='cpu')" and trees.device == torch.device("cpu")
    assert trees[1].labels == (("X",),) and trees[::-1].labels == (("X",), ("S", "NP"))
    for same in (trees.to("cpu", non_blocking=True), trees.pin_memory()):
        check_same(same, trees)
        assert same.labels == trees.labels
    assert trees.to("meta").device.type == "meta"
    with pytest.raises(IndexError):
        trees[2]
    layer = TreeAttention(8, 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    encoder = TreeEncoder(SMALL, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in encoder.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize("tree", [{}, {"relative_positions": 2}, {"relative_positions": 2, "subtree_mask": False}])
def test_an_encoder_of_half_precision_computes_as_one_of_rounded_weights(tree):
    torch.manual_seed(0)
    half = TreeEncoder(SMALL.model_copy(update={"tree": TreeAttentionConfig(**tree)}), dtype=torch.bfloat16).eval()
    leaves = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    found = half(leaves, TREES)
    found.nodes.sum().backward()
    assert found.leaves.dtype == torch.bfloat16 and leaves.grad.isfinite().all()
    expected = copy.deepcopy(half).double()(leaves.double(), TREES)
    for one, other, padding in zip(found, expected, (TREES.leaf_pad_mask, TREES.node_pad_mask), strict=True):
        torch.testing.assert_close(one[~padding].double(), other[~padding], atol=0.1, rtol=0)


def test_the_library_offers_these_names():
    for name in treenet.__all__:
        assert getattr(treenet, name) is not None and name in dir(treenet)
    with pytest.raises(AttributeError, match="no attribute 'TreeLSTM'"):
        treenet.TreeLSTM  # noqa: B018
