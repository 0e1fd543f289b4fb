"""The library over trees: constructors agree with each other, layers with slow oracles, mistakes are one sentence."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference import may_attend
from strategies import Tree, batches, governors, trees
from test_tree_attention import CONFIGS, D_MODEL, HEADS, check_close_with_grads, randomise, reference_heads

import treenet
from treenet import ModelConfig, TreeAttention, TreeAttentionConfig, TreeEncoder, TreeStructure, UserError
from treenet.data.batch import TreeBatch
from treenet.layers.scaled_dot_product import merge_heads
from treenet.models import VocabSizes
from treenet.models.encoders.base import PieceEmbedding
from treenet.models.encoders.tree import TreeEncoder as BatchEncoder
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
            torch.testing.assert_close(means[number, node], leaves[number, start:end].mean(0))
        assert not means[number, len(tree.spans) :].any()


@pytest.mark.parametrize("config", CONFIGS)
@num_examples(6)
@given(sentences=batches(max_leaves=6), average=st.booleans())
def test_self_attention_equals_the_oracle(config, sentences, average):
    module = randomise(TreeAttention(D_MODEL, HEADS, tree=TreeAttentionConfig(**config)))
    structure = TreeStructure.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])
    shape = len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, weights = module(states, structure=structure, need_weights=True, average_attn_weights=average)
    assert torch.equal(out, module(states, states, states, structure=structure)[0])
    assert weights.shape == ((shape[0], shape[1], shape[1]) if average else (shape[0], HEADS, shape[1], shape[1]))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    pairs = []
    layer = module.attention
    for number, tree in enumerate(sentences):
        real = [*range(tree.num_leaves), *(structure.num_leaves + node for node in range(len(tree.spans)))]
        own = states[number, real]
        projected = layer.queries_keys_values(own).chunk(3, dim=1)

        def allowed(query, key, tree=tree):
            masked = config.get("subtree_mask", True)
            return not masked or may_attend(query, key, tree.num_leaves, tree.leaf_spans, tree.parents)

        pairs.append((out[number, real], reference_heads(layer, tree, own, *projected, allowed)))
    check_close_with_grads(pairs, [states, *module.parameters()])


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
    turned = TreeAttention(D_MODEL, HEADS, cross=True, batch_first=False).double()
    turned.load_state_dict(cross.state_dict())
    first = turned(queries.transpose(0, 1), states.transpose(0, 1), structure=structure)[0]
    assert torch.equal(first.transpose(0, 1), out)


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
MISTAKES = {
    "trees are missing": lambda: TreeAttention(8, 2)(torch.zeros(2, 5, 8)),
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
    r"states of the leaves must be \[2, 3, 8\], but are \[2, 5, 8\]": lambda: TreeEncoder(
        ModelConfig(d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1)
    )(torch.zeros(2, 5, 8), TREES),
    r"states of the nodes must be \[2, 2, 8\], but are \[2, 3, 8\]": lambda: TreeEncoder(
        ModelConfig(d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1)
    )(torch.zeros(2, 3, 8), TREES, torch.zeros(2, 3, 8)),
    "tree 1 of the batch: unbalanced": lambda: TreeStructure.from_brackets(["(S (N a))", "(S (N a)))"]),
    "trees must be a list of bracketed trees": lambda: TreeStructure.from_brackets("(S (N a))"),
    "at least one tree": lambda: TreeStructure.from_brackets([]),
    r"tree 0 of the batch: spans must nest, but \(1, 4\) crosses \(0, 2\)": lambda: TreeStructure.from_spans([[(0, 2), (1, 4)]]),
    r"must lie within \(0, 3\), but one is \(2, 4\)": lambda: TreeStructure.from_spans([[(0, 3), (2, 4)]], [3]),
    "num_leaves must have a number for each of the 1 trees, but has 2": lambda: TreeStructure.from_spans([[(0, 3)]], [3, 3]),
    "sentence 1 of the batch: the arcs form a cycle": lambda: TreeStructure.from_arcs([[-1], [1, 0, -1]]),
    "sentence 0 of the batch: 2 words have no governor": lambda: TreeStructure.from_arcs([[-1, -1, 0]]),
    "sentence 0 of the batch: a governor is in another sentence": lambda: TreeStructure.from_arcs([[-1, 5], [-1, 0]]),
    "sentence 1 of the batch has no words": lambda: TreeStructure.from_arcs([[-1], []]),
    r"tags must be one a word, \[1\], but are \[2\]": lambda: TreeStructure.from_arcs([[-1]], tags=[["A", "B"]]),
    "shape='layered' reads universal relations and tags": lambda: TreeStructure.from_arcs([[-1]], shape="layered"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_sentence(message):
    with pytest.raises(UserError, match=message) as error:
        MISTAKES[message]()
    assert "\n" not in str(error.value)


def test_the_library_offers_these_names():
    for name in treenet.__all__:
        assert getattr(treenet, name) is not None and name in dir(treenet)
    with pytest.raises(AttributeError, match="no attribute 'TreeLSTM'"):
        treenet.TreeLSTM  # noqa: B018
