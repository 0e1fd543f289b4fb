"""Accumulation and attention over compact trees, as accelerators compute them, against the equations and the index lists."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from model_cases import VOCAB, batch_of, tiny_model
from reference import may_attend
from strategies import Tree, batches, right_branching
from test_accumulation import (
    CONFIGS,
    D_MODEL,
    HEADS,
    MATE,
    MATES,
    UNARY,
    build_accumulation,
    build_structure,
    check_against_equations,
    check_close_with_grads,
    real_positions,
    spoil,
)
from test_device_spans import build_compact
from test_tree_attention import randomise

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.data.input_kinds import TREES
from treenet.layers.attention import SelfAttention
from treenet.layers.blocks import prepare_trees
from treenet.models import build_model
from treenet.structure import TreeStructure
from treenet.structure.attention_maps import Blocks, OneCall
from treenet.structure.branches import BranchMaps, BranchMatrices
from treenet.structure.prepare import find_intervals, prepare
from treeproc.shards.schema import PAD_ID

SIZES = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)
TABLES = dict(vertical_rows=3, horizontal_rows=4)


def build_prepared(sentences: list[Tree], dtype: torch.dtype = torch.float64, **config) -> TreeStructure:
    return prepare(build_compact(sentences), TreeAttentionConfig(**{**TABLES, **config}), dtype, dtype)


def random_inputs(structure: TreeStructure, count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shape = len(structure.start), structure.num_leaves + structure.num_nodes, D_MODEL
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@given(sentences=batches())
@num_examples(15)
def test_equals_the_equations(config, sentences):
    """Values and gradients of a padded batch equal those of each sentence alone."""
    structure = build_prepared(sentences, **config)
    assert isinstance(structure.branches, BranchMatrices)
    check_against_equations(structure, build_accumulation(**TABLES, **config))


@pytest.mark.parametrize("config", CONFIGS[::3], ids=lambda c: "-".join(map(str, c.values())))
def test_deep_trees_equal_the_index_lists(config):
    """Deeper than both tables, with unary chains and nodes of one leaf."""
    trees = [right_branching(120), UNARY, right_branching(3)]
    module = build_accumulation(vertical_rows=100, horizontal_rows=50, **config)
    compact, lists = build_prepared(trees, vertical_rows=100, horizontal_rows=50, **config), build_structure(trees)
    states, vectors = random_inputs(compact, 2)
    places = torch.cat([torch.arange(lists.num_leaves), compact.num_leaves + torch.arange(lists.num_nodes)])
    fast = module.accumulate(states, vectors, compact)[:, places]
    slow = module.accumulate(states[:, places], vectors[:, places], lists)
    check_close_with_grads([(fast, slow)], [states, vectors, *module.parameters()])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_stays_close_to_float64(dtype, tolerance):
    """Vectors in bfloat16, as under autocast on an accelerator; weights in float32."""
    trees = [right_branching(60), *MATES]
    module = build_accumulation(vertical_rows=100, horizontal_rows=100)
    exact = build_prepared(trees, vertical_rows=100, horizontal_rows=100)
    rough = build_prepared(trees, torch.float32, vertical_rows=100, horizontal_rows=100)
    states, vectors = random_inputs(exact, 2)
    expected = module.accumulate(states, vectors, exact)
    found = module.float().accumulate(states.float(), vectors.to(dtype), rough)
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("bad", [1e9, math.inf, math.nan])
@pytest.mark.parametrize("config", CONFIGS[::3], ids=lambda c: "-".join(map(str, c.values())))
def test_a_batch_mate_changes_no_bit(config, bad):
    module, structure = build_accumulation(**TABLES, **config), build_prepared(MATES, **config)
    others = torch.arange(len(MATES)) != MATE
    plain, found = [x.detach() for x in random_inputs(structure, 3)], []
    for factor in (1.0, bad):
        states, vectors = (spoil(x, factor) for x in plain[:2])
        out = module.accumulate(states, vectors, structure)
        found.append([x[others] for x in (out, *torch.autograd.grad(out, [states, vectors], plain[2]))])
    for tame, spoilt in zip(*found, strict=True):
        assert tame.isfinite().all() and torch.equal(spoilt, tame)


def test_padding_changes_nothing():
    """More leaves, nodes and levels of padding, with whatever stands there."""
    alone, padded = (build_prepared(trees) for trees in ([UNARY], [UNARY, right_branching(30)]))
    module = build_accumulation(**TABLES)
    states, vectors = (x.detach() for x in random_inputs(padded, 2))
    rows = [real_positions(structure, 0) for structure in (alone, padded)]
    few = [torch.zeros(1, alone.num_leaves + alone.num_nodes, D_MODEL, dtype=torch.float64) for _ in range(2)]
    for part, whole in zip(few, (states, vectors), strict=True):
        part[0, rows[0]] = whole[0, rows[1]]
    expected, found = module.accumulate(*few, alone), module.accumulate(states, vectors, padded)
    torch.testing.assert_close(found[0, rows[1]], expected[0, rows[0]], rtol=1e-12, atol=1e-12)


@given(sentences=batches())
@num_examples(40)
def test_the_mask_is_that_of_equation_11(sentences):
    structure = build_prepared(sentences)
    seen = structure.attention.bias[:, 0] == 0
    assert seen.any(2).all()
    for b, tree in enumerate(sentences):
        rows = real_positions(structure, b)
        expected = [
            [may_attend(query, key, tree.num_leaves, tree.leaf_spans, tree.parents) for key in range(len(rows))]
            for query in range(len(rows))
        ]
        assert seen[b][rows][:, rows].tolist() == expected
        real = np.isin(np.arange(seen.shape[1]), rows)
        assert not seen[b][rows][:, ~real].any()  # nothing real sees padding
        assert torch.equal(seen[b][~real], torch.eye(seen.shape[1], dtype=torch.bool)[~real])


def build_long(sentences: list[Tree], config: TreeAttentionConfig, blocks: bool) -> TreeStructure:
    """Build the structure as for batches of long trees on accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treenet.structure.maps.COMPACT_BELOW_POSITIONS", 0)
        return prepare(build_compact(sentences), config, torch.float64, torch.float64, blocks)


@pytest.mark.parametrize("drops_weights", [False, True])
def test_models_on_a_cpu_have_no_blocks(drops_weights):
    """FlexAttention has no backward pass there."""
    config = TreeAttentionConfig(**TABLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treenet.structure.maps.COMPACT_BELOW_POSITIONS", 0)
        structure = prepare_trees(build_compact([UNARY]), config, torch.zeros(1), drops_weights=drops_weights)
    assert isinstance(structure.attention, OneCall) and isinstance(structure.branches, BranchMaps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(sentences=batches())
@num_examples(4)
def test_blocks_of_flex_attention_equal_the_mask(sentences):
    """The forward pass, the only one that CPUs have; the mask gives the gradients, by the test of index lists."""
    config = TreeAttentionConfig(**TABLES)
    module = randomise(SelfAttention(D_MODEL, HEADS, 0.0, config))
    dense, blocks = (build_long(sentences, config, form) for form in (False, True))
    assert isinstance(blocks.attention, Blocks) and isinstance(blocks.branches, BranchMaps)
    intervals = find_intervals(dense)
    tree, position = torch.arange(len(sentences)), torch.arange(dense.num_leaves + dense.num_nodes)
    seen = intervals.sees(tree[:, None, None], tree[0], position[:, None], position)
    assert torch.equal(seen, dense.attention.bias[:, 0] == 0)
    with torch.no_grad():
        (x,) = random_inputs(dense, 1)
        real = ~torch.cat([dense.leaf_pad_mask, dense.node_pad_mask], 1)
        torch.testing.assert_close(module(x, None, blocks)[real], module(x, None, dense)[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("on, weights", product(("value", "key", "scores"), ("shared", "per_head")))
def test_self_attention_equals_that_of_index_lists(on, weights):
    config = TreeAttentionConfig(accumulate_on=on, leaf_weights=weights, **TABLES)
    module = randomise(SelfAttention(D_MODEL, HEADS, 0.0, config))
    trees = [UNARY, right_branching(9), Tree(3)]
    compact, lists = prepare(build_compact(trees), config, torch.float64, torch.float64), build_structure(trees)
    (x,) = random_inputs(compact, 1)
    pairs = []
    for b in range(len(trees)):
        rows, places = real_positions(compact, b), real_positions(lists, b)
        small = x.new_zeros(len(trees), lists.num_leaves + lists.num_nodes, D_MODEL)
        small[b, places] = x[b, rows]
        pairs.append((module(x, None, compact)[b, rows], module(small, None, lists)[b, places]))
    check_close_with_grads(pairs, [x, *module.parameters()])


def test_prepared_structures_are_left_as_they_are():
    config = TreeAttentionConfig()
    lists = build_structure([UNARY])
    assert prepare(lists, config, torch.float32, torch.float32) is lists
    compact = prepare(build_compact([UNARY]), config, torch.float32, torch.float32)
    assert prepare(compact, config, torch.float32, torch.float32) is compact


@pytest.mark.parametrize("rules", [("paper", "released"), ("released", "paper")])
def test_matrices_of_another_rule_are_refused(rules):
    structure, module = build_prepared([UNARY], accumulation_rule=rules[0]), build_accumulation(accumulation_rule=rules[1])
    vectors = random_inputs(structure, 1)[0]
    with pytest.raises(ValueError, match=f"accumulation_rule={rules[0]} .* {rules[1]}"):
        module.accumulate(vectors, vectors, structure)


@pytest.mark.parametrize("name", ["plain", "subtree_mask", "released"])
def test_models_compute_the_same_from_both_forms(name):
    """Logits and gradients of a translation model of two layers, in batches padded otherwise."""
    tree = {"subtree_mask": {"subtree_mask": False}, "released": {"accumulation_rule": "released", **TABLES}}.get(name, {})
    model = tiny_model("tree_transformer", tree=tree)
    trees = [right_branching(9), UNARY, Tree(1)]
    pairs = []
    for kind in (TREES, TREES.for_device("cuda")):
        batch = batch_of(trees, kind)
        pairs.append(model(batch)[batch.tgt_out != PAD_ID])
    check_close_with_grads([tuple(pairs)], list(model.parameters()))


def test_nothing_asks_a_device_for_data():
    """The device "meta" has no values, so an operation that waits for them raises."""
    model = build_model(ModelConfig(**SIZES), VOCAB).to("meta")
    batch = batch_of([right_branching(9), UNARY], TREES.for_device("meta")).to("meta")
    model.decode(batch).sum().backward()
    assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())
