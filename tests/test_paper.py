"""The equations of `treenet.paper` against loops and golden vectors, and models that compute by them against the fast ones."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import VOCAB, batch_of
from reference import may_attend, reference_accumulation, reference_attention, reference_interpolation
from strategies import Tree, right_branching, trees
from test_accumulation import FIGURE_1, UNARY, check_close_with_grads, golden_cases, real_rows

from treenet.config import ClassifierConfig, DecodingConfig, ModelConfig, TrainConfig, TreeAttentionConfig
from treenet.data.input_kinds import TREES
from treenet.layers.accumulation import HierarchicalAccumulation
from treenet.layers.core import share_dropout_keys
from treenet.models import build_model
from treenet.models.registry import build_classifier
from treenet.paper import equations
from treenet.translation.search import search_batch
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID

WIDTH = 6


@st.composite
def trees_in_any_order(draw) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Leaves, spans and parents of a tree whose nodes are in any order."""
    tree = draw(trees(max_leaves=7))
    order = draw(st.permutations(range(len(tree.spans))))
    parents = [tree.parents[old] for old in order]
    return tree.num_leaves, [tree.leaf_spans[old] for old in order], [order.index(p) if p >= 0 else -1 for p in parents]


def draw_tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("rule", "embeds"), product(["paper", "released"], [True, False]))
@given(tree=trees_in_any_order())
@num_examples(25)
def test_accumulation_equals_the_loops(rule, embeds, tree):
    """Values and gradients, with tables that end before the counts."""
    n, spans, parents = tree
    inputs = draw_tensors((n, WIDTH), (len(spans), WIDTH), (n,), (2, WIDTH // 2), (4, WIDTH // 2))
    L, N, w, *tables = inputs
    found = equations.accumulate(L, N, w, equations.Tree(*tree, rule), tables if embeds else None)
    expected = reference_accumulation(L, N, w, spans, parents, tables if embeds else None, rule)
    check_close_with_grads([(torch.cat([L, found]), torch.cat([L, expected]))], inputs)


@pytest.mark.parametrize("masked", [True, False])
@given(tree=trees_in_any_order())
@num_examples(25)
def test_attention_equals_the_loops(masked, tree):
    """Encoder and decoder, values and gradients."""
    n, spans, parents = tree
    whole = n + len(spans), WIDTH
    Q, K, V, asked = inputs = draw_tensors(whole, whole, whole, (3, WIDTH))
    keys_values = K[n:], K[:n], V[n:], V[:n]
    att_N, att_L = equations.attend_within(Q[n:], Q[:n], *keys_values, tree=equations.Tree(*tree) if masked else None)
    expected = reference_attention(Q, K, V, lambda query, key: not masked or may_attend(query, key, n, spans, parents))
    across = reference_attention(asked, K, V, lambda query, key: True)
    pairs = [(torch.cat([att_L, att_N]), expected), (equations.attend_across(asked, *keys_values), across)]
    check_close_with_grads(pairs, inputs)


@pytest.mark.parametrize("case", golden_cases())
def test_golden_equations(case):
    """Every tensor of equations 5 to 18 and 21 to 24."""
    given_, golden, params = case["inputs"], case["accumulation"], case["params"]
    L, N, w, tables = given_["L"], given_["N"], given_["w"], (given_["E_v"], given_["E_h"])
    rules = [equations.Tree(case["n"], case["spans"], case["parents"], rule) for rule in ("paper", "released")]
    tree = rules[0]
    S, E = equations.interpolate(L, N, tree), equations.embed(tables, tree)
    counts = torch.where(tree.leaves, tree.vertical_count, 0), torch.where(tree.leaves, tree.horizontal_count, 0)
    zeros = torch.zeros(len(N), len(N) + len(L)), torch.zeros(len(L), len(N) + len(L))
    found = {
        **{"S": S, "E": E, "S_hat": equations.average_upwards(S, tree), "S_hat_E": equations.average_upwards(S + E, tree)},
        **{"N_bar": equations.accumulate(L, N, w, tree, None), "N_bar_prime": equations.accumulate(L, N, w, tree, tables)},
        **dict(zip(("V_count", "H_count"), counts, strict=True)),
        "mask": torch.cat(equations.mask(*zeros, tree)) == 0,
    }
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, golden[name].to(tensor.dtype), rtol=1e-10, atol=1e-10, msg=name)
    for name, given_tables in (("N_bar", None), ("N_bar_prime", tables)):
        other = equations.accumulate(L, N, w, rules[1], given_tables)
        torch.testing.assert_close(other, case["authors_rules"][name], rtol=1e-10, atol=1e-10)
    K_N, K_L, V_N, V_L = N @ params["WK"], L @ params["WK"], N @ params["WV"], L @ params["WV"]
    for name, given_tree, given_tables in (("", tree, tables), ("_nomask", None, tables), ("_nohier", tree, None)):
        N_bar = equations.accumulate(V_L, V_N, L @ params["u_s"], tree, given_tables)  # (16)
        attended = equations.attend_within(N @ params["WQ"], L @ params["WQ"], K_N, K_L, N_bar, V_L, tree=given_tree)
        for part, tensor in zip("NL", attended, strict=True):
            torch.testing.assert_close(tensor, case[f"self_attention{name}"][f"att_{part}"], rtol=1e-10, atol=1e-10)
    N_bar = equations.accumulate(V_L, V_N, L @ params["u_c"], tree, tables)  # (23)
    attended = equations.attend_across(case["cross_queries"] @ params["WQ"], K_N, K_L, N_bar, V_L)
    torch.testing.assert_close(attended, case["cross_attention"]["att_Q"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", golden_cases())
def test_golden_loops(case):
    """The loops too agree with the golden tensors S + E, N-bar' and mask (nodes first there)."""
    given_, n, m = case["inputs"], case["n"], case["m"]
    spans, parents = [tuple(s) for s in case["spans"]], list(case["parents"])
    tables = (given_["E_v"], given_["E_h"])
    rows = reference_interpolation(given_["L"], given_["N"], spans, tables, "paper", parents)
    zero = torch.zeros(case["d"], dtype=torch.float64)
    stacked = torch.stack([torch.stack([zero if cell is None else cell for cell in row]) for row in rows])
    torch.testing.assert_close(stacked, case["accumulation"]["S"] + case["accumulation"]["E"], rtol=1e-12, atol=1e-12)
    for rule, expected in (("paper", case["accumulation"]), ("released", case["authors_rules"])):
        nodes = reference_accumulation(given_["L"], given_["N"], given_["w"], spans, parents, tables, rule)
        torch.testing.assert_close(nodes, expected["N_bar_prime"], rtol=1e-10, atol=1e-10)
    order = [*range(n, n + m), *range(n)]
    mask = torch.tensor([[may_attend(q, k, n, spans, parents) for k in order] for q in order])
    assert torch.equal(mask, case["accumulation"]["mask"])


def test_dropout_of_weights():
    """A weight is dropped or doubled; all are there with p = 0."""
    tree, size = equations.Tree(5, FIGURE_1.leaf_spans, FIGURE_1.parents), 9
    Q, K = (torch.randn(size, size, dtype=torch.float64) for _ in range(2))
    parts, values = (Q[5:], Q[:5], K[5:], K[:5]), torch.eye(size, dtype=torch.float64).split([4, 5])
    calls = [
        lambda p: torch.cat(equations.attend_within(*parts, *values, tree=tree, p=p)),
        lambda p: equations.attend_across(Q, *parts[2:], *values, p=p),
    ]
    for attend in calls:
        weights, dropped = attend(0.0), attend(0.5)
        torch.testing.assert_close(weights.sum(1), torch.ones(size, dtype=torch.float64))
        kept = dropped > 0
        torch.testing.assert_close(dropped[kept], 2 * weights[kept])
        assert 0.3 < kept.sum() / (weights > 0).sum() < 0.7


SIZES = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)
# The last is deeper than the tables of the second case.
SENTENCES = [Tree(1), UNARY, FIGURE_1, Tree(4), Tree(4, [[0, 2, 1], [2, 4, 2]], [-1, -1]), right_branching(9)]
MODELS = {
    "paper": {},
    "released": {"accumulation_rule": "released", "leaf_weights": "per_head", "vertical_rows": 4, "horizontal_rows": 3},
    "ablated": {"subtree_mask": False, "hierarchical_embeddings": False, "nodes": "labels_and_leaves"},
    "keys": {"accumulate_on": "key"},
    "scores": {"accumulate_on": "scores", "leaf_weights": "per_head"},
}


def both(build, **settings) -> list:
    """The fast model and the one by the equations, in float64, with the same weights from the same seed."""
    models = []
    for implementation in ("fast", "reference"):
        torch.manual_seed(0)
        tree = settings.get("tree", {}) | {"implementation": implementation}
        models.append(build(ModelConfig(**SIZES, **settings | {"tree": tree})).double().eval())
    first, second = (model.state_dict() for model in models)
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
    return models


def translation(config: ModelConfig) -> torch.nn.Module:
    return build_model(config, VOCAB)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tree", MODELS.values(), ids=MODELS.keys())
def test_translation_models_are_equal(tree, device):
    """Logits and gradients, with the same dropout of states, from both forms of batches. Equations read no maps of branches."""
    batch, found = batch_of(SENTENCES, TREES.for_device(device)), []
    for model, without_maps in zip(both(translation, tree=tree, dropout=0.3), ({}, {"branches": None}), strict=True):
        batch.structure = replace(batch.structure, **without_maps)
        share_dropout_keys(model.train()).set(np.arange(len(SENTENCES), dtype=np.uint64))
        logits = model(batch)[batch.tgt_out != PAD_ID]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(slow, fast, rtol=1e-9, atol=1e-9)


def test_classifiers_are_equal():
    options = ClassifierConfig(supervision="all_phrases")
    batch = batch_of(SENTENCES)
    found = [model(batch) for model in both(lambda config: build_classifier(config, VOCAB, options, 3), norm="pre")]
    real = real_rows(batch.structure)
    torch.testing.assert_close(found[1].examples, found[0].examples, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1].positions[real], found[0].positions[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tree", [MODELS["paper"], MODELS["keys"]], ids=["paper", "keys"])
def test_searches_find_the_same(tree):
    """Hypotheses of several sentences grow, change places and end; every step reads the prefix again."""
    batch, decoding = batch_of(SENTENCES), DecodingConfig(beam_size=3, max_length_offset=5)
    fast, slow = (search_batch(model, batch, decoding, num_best=3) for model in both(translation, tree=tree))
    for expected, found in zip(fast, slow, strict=True):
        assert [one.ids for one in found] == [one.ids for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-9)
    assert len({len(one.ids) for hypotheses in slow for one in hypotheses}) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_only_inputs_and_outputs(dtype):
    batch = batch_of([right_branching(40), FIGURE_1])
    model = both(translation)[1].float()
    expected = model(batch)
    with torch.autocast("cpu", dtype=dtype):
        found = model(batch)
    assert (found - expected).norm() / expected.norm() < 0.03
    module = next(one for one in model.modules() if isinstance(one, HierarchicalAccumulation))
    positions = batch.leaf_pieces.shape[1] + batch.node_labels.shape[1]
    states = torch.randn(2, positions, module.leaf_weight.shape[0])
    vectors = torch.randn(states.shape).to(dtype)
    exact = module.accumulate(states, vectors.float(), batch.structure)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(module.accumulate(states, vectors, batch.structure), exact.to(dtype))


def test_dropout_of_attention_is_active_in_training_alone():
    batch, model = batch_of(SENTENCES), both(translation, dropout=0.0, attention_dropout=0.5)[1]
    memory = model.encode(batch)
    assert torch.equal(model.encode(batch).states, memory.states)
    for layer in model.decoder.layers:
        layer.self_attention.dropout = 0.0
    model.train()
    assert not torch.equal(model.encode(batch).states, memory.states)
    assert not torch.equal(model.decoder(batch.tgt_in, memory), model.decoder(batch.tgt_in, memory))


def test_the_setting():
    """A run may change it, records of other runs do not have it, and the paper has no relative positions."""
    runs = [TrainConfig(data="data", model={"tree": {"implementation": value}}) for value in ("fast", "reference")]
    assert runs[0].lasting() == runs[1].lasting() == TrainConfig(data="data").lasting()
    assert "implementation" not in runs[0].model.tree.model_dump()
    with pytest.raises(UserError, match="implementation must be fast with relative_positions"):
        TreeAttentionConfig(implementation="reference", relative_positions=4)
