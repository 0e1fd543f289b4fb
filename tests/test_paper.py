"""The equations of `treenet.paper` against loops and golden vectors."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference import may_attend, reference_accumulation, reference_attention
from strategies import trees
from test_accumulation import FIGURE_1, golden_cases
from test_tree_attention import check_close_with_grads

from treenet.paper import equations

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
    counts = torch.where(tree.leaves, tree.height, 0), torch.where(tree.leaves, tree.rank, 0)
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
