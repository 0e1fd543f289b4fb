"""Hierarchical accumulation and tree structure: lists against the equations, golden vectors, figures of the paper."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from reference import branch, may_attend
from strategies import Tree, batches, right_branching, tree_from_spans

from treenet.config import TreeAttentionConfig
from treenet.layers.accumulation import HierarchicalAccumulation
from treenet.structure import TreeStructure, choose_sparse
from treeproc.common.settings import UserError

GOLDEN = Path(__file__).resolve().parent / "golden" / "golden_tree_attention.pt"
D_MODEL, HEADS = 8, 2

# Figures 1 and 2: f = (a b), h = (d e), g = (c h), root = (f g); leaves a b c d e; nodes in pre-order root f g h.
FIGURE_1 = Tree(5, [[0, 5, 4], [0, 2, 2], [2, 5, 4], [3, 5, 4]], [-1, 0, 0, 2])


def build_structure(sentences: list[Tree], **options) -> TreeStructure:
    return TreeStructure.build([t.num_leaves for t in sentences], [t.span_array for t in sentences], **options)


def build_accumulation(seed: int = 0, **config) -> HierarchicalAccumulation:
    torch.manual_seed(seed)
    return HierarchicalAccumulation(D_MODEL, HEADS, TreeAttentionConfig(**config)).double()


@cache
def golden_cases() -> list:
    return [pytest.param(case, id=case["name"]) for case in torch.load(GOLDEN, weights_only=True)]


def golden_tree(case: dict) -> tuple[Tree, list[int]]:
    return tree_from_spans(case["n"], [tuple(s) for s in case["spans"]], list(case["parents"]))


@contextmanager
def by_equations(module: torch.nn.Module) -> Iterator[None]:
    """The layers compute with `treenet.paper` within this context, on the same parameters."""
    accumulations = [part for part in module.modules() if isinstance(part, HierarchicalAccumulation)]
    assert accumulations
    for part in accumulations:
        part.by_equations = True
    yield
    for part in accumulations:
        part.by_equations = False


def real_rows(structure: TreeStructure) -> torch.Tensor:
    """[B, S] bool, True where a position is no padding."""
    return ~torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)


def real_positions(structure: TreeStructure, row: int) -> torch.Tensor:
    return (~torch.cat([structure.leaf_pad_mask[row], structure.node_pad_mask[row]])).nonzero()[:, 0]


def check_close_with_grads(pairs, inputs) -> None:
    """Pairs (fast, slow) agree, and so do the gradients of a random projection of them."""
    weights = [torch.randn_like(slow) for _, slow in pairs]
    for fast, slow in pairs:
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    totals = (sum((pair[k] * weight).sum() for pair, weight in zip(pairs, weights, strict=True)) for k in (0, 1))
    fast_grads, slow_grads = (torch.autograd.grad(t, inputs, allow_unused=True, materialize_grads=True) for t in totals)
    for fast_grad, slow_grad in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(fast_grad, slow_grad, rtol=1e-10, atol=1e-10)


def check_against_equations(structure: TreeStructure, module: HierarchicalAccumulation) -> None:
    """Values and gradients of the batched module equal those of the equations on each sentence alone."""
    shape = (len(structure), structure.num_leaves + structure.num_nodes, D_MODEL)
    states, vectors = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fast, real = module.accumulate(states, vectors, structure), real_rows(structure)
    with by_equations(module):
        slow = module.accumulate(states, vectors, structure)
    check_close_with_grads([(fast[real], slow[real])], [states, vectors, *module.parameters()])


CONFIGS = [
    dict(accumulation_rule=rule, leaf_weights=weights, hierarchical_embeddings=embeddings)
    for rule, weights, embeddings in product(("paper", "released"), ("shared", "per_head"), (True, False))
]


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@given(sentences=batches())
@num_examples(20)
def test_equals_the_equations(config, sparse, sentences):
    module = build_accumulation(vertical_rows=3, horizontal_rows=4, **config)
    check_against_equations(build_structure(sentences, sparse=sparse), module)


def document_of(*trees: Tree) -> Tree:
    """The trees side by side under one root."""
    spans, parents, leaves = [[0, sum(t.num_leaves for t in trees), 1 + sum(len(t.spans) for t in trees)]], [-1], 0
    for tree in trees:
        shift = len(spans)
        spans += [[start + leaves, end + leaves, last + shift] for start, end, last in tree.spans]
        parents += [parent + shift if parent >= 0 else 0 for parent in tree.parents]
        leaves += tree.num_leaves
    return Tree(leaves, spans, parents)


# A unary chain over a node of one leaf: (X (Y (Z a)) b).
UNARY = Tree(2, [[0, 2, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4]], [-1, 0, 1, 2])
# The one in the middle is the batch-mate whose numbers are bad; the last is deeper than 100.
MATES = [document_of(FIGURE_1, UNARY, FIGURE_1), FIGURE_1, FIGURE_1, UNARY]
MATE = 1


def spoil(x: torch.Tensor, bad: float) -> torch.Tensor:
    """`x` [B, S, D] with the batch-mate's numbers scaled by a finite factor, or replaced by what is not finite."""
    x = x.detach().clone()
    x[MATE] = x[MATE] * bad if math.isfinite(bad) else bad
    return x.requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1e9, math.inf, math.nan])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_batch_mate_changes_no_bit(config, sparse, bad):
    """Values and gradients of the others, in float64 as by the equations, in float32 too."""
    module = build_accumulation(vertical_rows=30, horizontal_rows=30, **config)
    for sentences in (MATES, [*MATES, right_branching(105)]):
        structure = build_structure(sentences, sparse=sparse)
        others = torch.arange(len(sentences)) != MATE
        shape = (len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL)
        plain = torch.randn(3, *shape, dtype=torch.float64)
        for dtype in (torch.float32, torch.float64):
            found = []
            for factor in (1.0, bad):
                states, vectors = (spoil(x.to(dtype), factor) for x in plain[:2])
                out = module.to(dtype).accumulate(states, vectors, structure)
                grads = torch.autograd.grad(out, [states, vectors], plain[2].to(dtype))
                found.append([x[others] for x in (out, *grads)])
            for tame, spoilt in zip(*found, strict=True):
                assert tame.isfinite().all() and torch.equal(spoilt, tame)
        with by_equations(module):
            slow, real = module.accumulate(*plain[:2], structure)[others], real_rows(structure)[others]
        torch.testing.assert_close(found[1][0][real], slow[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_leaves", [50, 400])
def test_maps_grow_with_spans_and_subtrees_alone(num_leaves):
    """No list is longer than all branches and pairs, about n^2 / 2 of a chain, not the n^3 / 6 of its branches' nodes."""
    structure = build_structure([right_branching(num_leaves)], attention_path="window")
    nodes = num_leaves - 1
    branches = structure.branches
    assert len(branches.leaf) == nodes * (num_leaves + 2) / 2
    assert len(branches.pair_first) == nodes * (nodes + 1) / 2
    lists = [x for maps in (branches, branches.entries, branches.paths) for x in vars(maps).values()]
    assert max(len(x) for x in lists if isinstance(x, torch.Tensor)) <= len(branches.leaf) + len(branches.pair_first)


def test_a_long_document_costs_what_its_sentences_cost():
    """One sentence more adds the same entries, whatever the document's length."""
    sizes = []
    sentence = right_branching(20).span_array
    for count in (2, 40, 160):
        spans = np.concatenate([sentence + np.array([20 * k, 20 * k, 19 * k]) for k in range(count)])
        structure = TreeStructure.build([20 * count], [spans])
        entries = structure.branches.entries
        assert (entries.cell is None) == (count > 2)
        sizes.append(len(entries.position) / count)
    assert sizes[1] == sizes[2]


def test_sparse_sums_are_for_sparse_trees():
    assert not choose_sparse(300, 1000) and choose_sparse(10, 1000)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", ["paper", "released"])
def test_counts_past_the_tables_use_their_last_row(rule, sparse):
    chain = right_branching(26)
    assert build_structure([chain]).branches.height.max() == 25
    module = build_accumulation(accumulation_rule=rule, vertical_rows=10, horizontal_rows=7)
    check_against_equations(build_structure([chain, FIGURE_1], sparse=sparse), module)


def test_deeper_than_the_default_tables():
    """A chain of depth 130: node 0 over its last leaf, by hand."""
    chain = right_branching(131)
    structure, module = build_structure([chain]), build_accumulation()
    states, vectors = torch.zeros(1, 261, D_MODEL).double(), torch.zeros(1, 261, D_MODEL).double()
    states[0, 130] = 1.0  # the last leaf alone has a weight
    out = module.accumulate(states, vectors, structure)[0, 131]
    levels = torch.arange(1, 131).clamp(max=100) - 1
    ranks = torch.arange(131, 1, -1).clamp(max=100) - 1
    rows = torch.cat([module.vertical[levels].sum(0), module.horizontal[ranks].sum(0)])
    expected = module.leaf_weight.sum() * rows / 131 / 131
    torch.testing.assert_close(out, expected.repeat(HEADS), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", golden_cases())
def test_golden_accumulation(case):
    tree, order = golden_tree(case)
    given_, structure = case["inputs"], build_structure([tree])
    d, n = case["d"], case["n"]
    vectors = torch.cat([given_["L"], given_["N"][order]])[None]
    # w is given, not L u: one state dimension carries it
    states = torch.zeros_like(vectors)
    states[0, :n, 0] = given_["w"]
    expected = {("paper", False): case["accumulation"]["N_bar"], ("paper", True): case["accumulation"]["N_bar_prime"]}
    expected |= {("released", False): case["authors_rules"]["N_bar"], ("released", True): case["authors_rules"]["N_bar_prime"]}
    for (rule, embeddings), nodes in expected.items():
        rows = dict(vertical_rows=len(given_["E_v"]), horizontal_rows=len(given_["E_h"]))
        config = TreeAttentionConfig(accumulation_rule=rule, hierarchical_embeddings=embeddings, **rows)
        module = HierarchicalAccumulation(d, 1, config).double()
        with torch.no_grad():
            module.leaf_weight.zero_()[0] = 1.0
            if embeddings:
                module.vertical.copy_(given_["E_v"])
                module.horizontal.copy_(given_["E_h"])
            out = module.accumulate(states, vectors, structure)[0]
        torch.testing.assert_close(out[:n], vectors[0, :n], rtol=0, atol=0)
        torch.testing.assert_close(out[n:], nodes[order], rtol=1e-10, atol=1e-10)


def test_figure_1_by_hand():
    """Each row of figure 1, with w = 1 and no embeddings."""
    module = build_accumulation(hierarchical_embeddings=False)
    vectors = torch.randn(1, 9, D_MODEL, dtype=torch.float64)
    a, b, c, d, e, root, f, g, h = vectors[0]
    states = torch.zeros_like(vectors)
    states[..., 0] = 1.0
    with torch.no_grad():
        module.leaf_weight.zero_()[0] = 1.0
    n_h = ((d + h) / 2 + (e + h) / 2) / 2
    n_g = ((c + g) / 2 + (d + h + g) / 3 + (e + h + g) / 3) / 3
    n_f = ((a + f) / 2 + (b + f) / 2) / 2
    n_root = ((a + f + root) / 3 + (b + f + root) / 3 + (c + g + root) / 3 + (d + h + g + root) / 4 + (e + h + g + root) / 4) / 5
    out = module.accumulate(states, vectors, build_structure([FIGURE_1]))
    torch.testing.assert_close(out[0], torch.stack([a, b, c, d, e, n_root, n_f, n_g, n_h]), rtol=1e-12, atol=1e-12)


def test_figure_2_by_hand():
    """Indices "vertical; horizontal" of figure 2 below node g: c 1;1, d 2;2 and e 2;3 in g, d 1;1 and e 1;2 in h."""
    module = build_accumulation()
    states = torch.zeros(1, 9, D_MODEL, dtype=torch.float64)
    states[..., 0] = 1.0
    with torch.no_grad():
        module.leaf_weight.zero_()[0] = 1.0
    v, h = module.vertical, module.horizontal
    vertical = v[0] / 2 + (v[0] + v[1]) / 3 + (v[0] + v[1]) / 3
    horizontal = h[0] / 2 + (h[1] + h[0]) / 3 + (h[2] + h[1]) / 3
    out = module.accumulate(states, torch.zeros_like(states), build_structure([FIGURE_1]))
    torch.testing.assert_close(out[0, 7], (torch.cat([vertical, horizontal]) / 3).repeat(HEADS), rtol=1e-12, atol=1e-12)
    assert build_structure([FIGURE_1]).branches.height.tolist() == [*(2, 2, 2, 3, 3), *(1, 1), *(1, 2, 2), *(1, 1)]


@given(sentences=batches())
@num_examples(40)
def test_structure_equals_definitions(sentences):
    structure = build_structure(sentences)
    attend_mask, heights = structure.attend_mask(), structure.branches.height.tolist()
    for b, tree in enumerate(sentences):
        for i, (start, end) in enumerate(tree.leaf_spans):
            for j in range(start, end):
                assert heights.pop(0) == len(branch(j, i, tree.leaf_spans, tree.parents))
        rows = real_positions(structure, b)
        count = len(rows)
        expected = [
            [may_attend(q, k, tree.num_leaves, tree.leaf_spans, tree.parents) for k in range(count)] for q in range(count)
        ]
        assert attend_mask[b][rows][:, rows].tolist() == expected
        padding = torch.ones(attend_mask.shape[1], dtype=torch.bool)
        padding[rows] = False
        assert not attend_mask[b][rows][:, padding].any()
        assert torch.equal(attend_mask[b][padding], torch.eye(len(padding), dtype=torch.bool)[padding])
    assert not heights


def test_no_nodes_and_no_leaves():
    structure = TreeStructure.build([3, 0], [np.zeros((0, 3)), np.zeros((0, 3))])
    assert structure.node_pad_mask.shape == (2, 1) and structure.node_pad_mask.all()
    vectors = torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    out = build_accumulation().accumulate(vectors, vectors, structure)
    torch.testing.assert_close(out[:, :3], vectors[:, :3], rtol=0, atol=0)
    assert not out[:, 3].any()


@pytest.mark.parametrize(
    "spans",
    [
        *([[0, 4, 1]], [[2, 2, 1]], [[0, 3, 2]], [[0, 3, 2], [0, 2, 1]], [[-1, 3, 1]]),
        *([[1, 3, 2], [0, 2, 2]], [[0, 2, 2], [1, 3, 2]], [[0, 3, 2], [0, 2, 3], [0, 1, 3]]),
        # siblings and roots that cross or have the wrong order
        *([[0, 3, 3], [0, 2, 2], [1, 3, 3]], [[0, 3, 3], [2, 3, 2], [0, 2, 3]], [[2, 3, 1], [0, 2, 2]], [[0, 2, 1], [1, 3, 2]]),
    ],
)
def test_wrong_spans_are_refused(spans):
    with pytest.raises(UserError, match="tree 1 of the batch, node"):
        TreeStructure.build([3, 3], [np.array([[0, 3, 1]]), np.array(spans)])


def test_structure_used_in_inference_mode_serves_training():
    structure, module = build_structure([FIGURE_1]), build_accumulation()
    vectors = torch.randn(1, 9, D_MODEL, dtype=torch.float64)
    with torch.inference_mode():
        expected = module.accumulate(vectors, vectors, structure)
    out = module.accumulate(vectors, vectors, structure.to("cpu"))
    torch.testing.assert_close(out, expected.clone(), rtol=0, atol=0)
    module.accumulate(vectors, vectors, structure).sum().backward()
    assert module.leaf_weight.grad.any() and module.vertical.grad.any() and module.horizontal.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulates_in_float32_under_autocast(dtype):
    """Autocast rounds only inputs and output, so the error does not grow with the depth of the sums."""
    chain = right_branching(80)
    structure, module = build_structure([chain]), build_accumulation().float()
    states, vectors = torch.randn(1, 159, D_MODEL), torch.randn(1, 159, D_MODEL).to(dtype)
    expected = module.accumulate(states, vectors.float(), structure)
    with torch.autocast("cpu", dtype=dtype):
        out = module.accumulate(states, vectors, structure)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
