"""Self- and cross-attention over trees against the equations and the golden vectors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from reference import may_attend, reference_score_attention
from strategies import Tree, batches, right_branching, trees
from test_accumulation import (
    FIGURE_1,
    build_structure,
    by_equations,
    check_close_with_grads,
    golden_cases,
    golden_tree,
    real_positions,
    real_rows,
)

from treenet.config import TreeAttentionConfig
from treenet.layers.attention import (
    CausalSelfAttention,
    CrossAttention,
    GrowingPast,
    SelfAttention,
    StaticPast,
    padding_to_attend_mask,
)
from treenet.layers.scaled_dot_product import as_bias, attend, attend_subtrees, attention_weights
from treenet.structure import TreeStructure, choose_attention_path
from treenet.structure.attention_maps import WINDOW

D_MODEL, HEADS = 8, 2


def structure_masks(structure: TreeStructure, subtree_mask: bool) -> torch.Tensor | None:
    pad_mask = torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
    return None if subtree_mask else padding_to_attend_mask(pad_mask)


def build_on_path(sentences: list[Tree], path: str) -> TreeStructure:
    """With windows so small that short sentences need several, and have wide nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treenet.structure.attention_maps.CHUNK", 2)
        patch.setattr("treenet.structure.attention_maps.WINDOW", 3)
        return build_structure(sentences, attention_path=path)


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Biases too: they start at zero, where mistakes would not show."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double()


CONFIGS = [
    dict(accumulate_on="value"),
    dict(accumulate_on="value", subtree_mask=False, leaf_weights="per_head"),
    dict(accumulate_on="value", accumulation_rule="released", hierarchical_embeddings=False),
    dict(accumulate_on="key"),
    dict(accumulate_on="key", accumulation_rule="released", leaf_weights="per_head"),
    dict(accumulate_on="scores"),
    dict(accumulate_on="scores", accumulation_rule="released", leaf_weights="per_head", subtree_mask=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["one", "two", "window"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@given(sentences=batches(max_size=2, max_leaves=6))
@num_examples(8)
def test_self_attention_equals_the_equations(config, path, sentences):
    tree_config = TreeAttentionConfig(vertical_rows=3, horizontal_rows=3, **config)
    module = randomise(SelfAttention(D_MODEL, HEADS, 0.0, tree_config))
    structure = build_on_path(sentences, path)
    x = torch.randn(len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL, dtype=torch.float64, requires_grad=True)
    inputs, real = (x, structure_masks(structure, tree_config.subtree_mask), structure), real_rows(structure)
    fast = module(*inputs)
    assert fast.isfinite().all()
    with by_equations(module):
        slow = module(*inputs)
    check_close_with_grads([(fast[real], slow[real])], [x, *module.parameters()])


@pytest.mark.parametrize("config", [config for config in CONFIGS if config["accumulate_on"] == "scores"], ids=str)
@given(tree=trees(max_leaves=5))
@num_examples(10)
def test_accumulated_scores_equal_the_loops(config, tree):
    """Affinities accumulated as scalars, of which the equations say nothing (appendix 7.3): self- and cross-attention."""
    tree_config, n = TreeAttentionConfig(**config), tree.num_leaves
    structure = build_structure([tree])
    rows = real_positions(structure, 0)
    states = torch.randn(1, structure.num_leaves + structure.num_nodes, D_MODEL, dtype=torch.float64, requires_grad=True)
    asked = torch.randn(1, 3, D_MODEL, dtype=torch.float64)
    own, cross = (randomise(kind(D_MODEL, HEADS, 0.0, tree_config)) for kind in (SelfAttention, CrossAttention))

    def allowed(query, key):
        return not tree_config.subtree_mask or may_attend(query, key, n, tree.leaf_spans, tree.parents)

    def loops(module, projected, allowed):
        w, out = (states[0, :n] @ module.accumulation.leaf_weight).expand(-1, HEADS), []
        for head, parts in enumerate(zip(*(x.chunk(HEADS, dim=1) for x in projected), strict=True)):
            arguments = n, w[:, head], tree.leaf_spans, tree.parents, tree_config.accumulation_rule, allowed
            out.append(reference_score_attention(*parts, *arguments))
        return module.output(torch.cat(out, dim=1))

    found = own(states, structure_masks(structure, tree_config.subtree_mask), structure)[0, rows]
    expected = loops(own, own.queries_keys_values(states[0, rows]).chunk(3, dim=1), allowed)
    check_close_with_grads([(found, expected)], [states, *own.parameters()])
    found = cross(asked, cross.project_memory(states, structure), structure_masks(structure, subtree_mask=False))[0]
    expected = loops(cross, [cross.queries(asked[0]), *cross.keys_values(states[0, rows]).chunk(2, dim=1)], lambda q, k: True)
    check_close_with_grads([(found, expected)], [states, *cross.parameters()])


@pytest.mark.parametrize("bad", [1e9, np.inf, np.nan])
@pytest.mark.parametrize("path", ["one", "two", "window"])
@pytest.mark.parametrize("accumulate_on", ["value", "key", "scores"])
def test_a_batch_mate_that_is_not_finite_changes_no_bit(accumulate_on, path, bad):
    """Outputs and gradients of the sentences beside it."""
    module = randomise(SelfAttention(D_MODEL, HEADS, 0.0, TreeAttentionConfig(accumulate_on=accumulate_on)))
    structure = build_on_path([right_branching(6), FIGURE_1, right_branching(9)], path)
    x = torch.randn(3, structure.num_leaves + structure.num_nodes, D_MODEL, dtype=torch.float64)
    spoilt = x.clone()
    spoilt[1] = spoilt[1] * bad if np.isfinite(bad) else bad
    found = []
    for given_ in (x, spoilt):
        given_.requires_grad_()
        out = module(given_, None, structure)
        found.append([y[::2] for y in (out, *torch.autograd.grad(out.sum(), given_))])
    for expected, beside in zip(*found, strict=True):
        assert torch.equal(beside, expected)


@pytest.mark.parametrize("config", CONFIGS[::2], ids=lambda c: "-".join(map(str, c.values())))
@given(sentences=batches(max_size=2, max_leaves=5))
@num_examples(10)
def test_cross_attention_equals_the_equations(config, sentences):
    tree_config = TreeAttentionConfig(vertical_rows=3, horizontal_rows=3, **config)
    module = randomise(CrossAttention(D_MODEL, HEADS, 0.0, tree_config))
    structure = build_structure(sentences)
    shape = len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL
    memory = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x = torch.randn(len(sentences), 3, D_MODEL, dtype=torch.float64, requires_grad=True)

    def attended():
        mask = structure_masks(structure, subtree_mask=False)
        return module(x, module.project_memory(memory, structure), mask, structure=structure)

    fast = attended()
    with by_equations(module):
        slow = attended()
    check_close_with_grads([(fast, slow)], [x, memory, *module.parameters()])


def test_the_reference_refuses_what_it_does_not_compute():
    """A mask for each target position, and no trees; the fast layer takes both."""
    module = randomise(CrossAttention(D_MODEL, HEADS, 0.0, TreeAttentionConfig()))
    structure = build_structure([right_branching(3)])
    x, memory = (torch.randn(1, length, D_MODEL, dtype=torch.float64) for length in (2, 5))
    keys_values = module.project_memory(memory, structure)
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    mask[:, :, 1, :4] = False
    module(x, keys_values, mask)
    with by_equations(module):
        with pytest.raises(ValueError, match=r"must be \[B, 1, 1, S\], .* but is \[1, 1, 2, 5\]"):
            module(x, keys_values, mask, structure=structure)
        with pytest.raises(ValueError, match="give it the structure"):
            module(x, keys_values, mask[:, :, :1])


@pytest.mark.parametrize("with_prior", [False, True])
def test_a_mask_may_be_a_bias(with_prior):
    """Outputs of attention, and the weights that analyses read."""
    queries, keys, values = (torch.randn(2, HEADS, 3, 4, dtype=torch.float64) for _ in range(3))
    seen = torch.tensor([[True, False, True], [True, True, True], [False, True, False]]).expand(2, 1, 3, 3)
    bias, prior = as_bias(seen, queries.dtype), torch.rand(2, 3, 3, dtype=torch.float64) if with_prior else None
    masked, biased = (attend(queries, keys, values, mask, 0.0, prior=prior) for mask in (seen, bias))
    torch.testing.assert_close(biased, masked, rtol=1e-12, atol=1e-12)
    assert torch.equal(attention_weights(queries, keys, bias), attention_weights(queries, keys, seen))


def golden_config(case: dict, hierarchical_embeddings: bool = True) -> TreeAttentionConfig:
    rows = dict(vertical_rows=len(case["inputs"]["E_v"]), horizontal_rows=len(case["inputs"]["E_h"]))
    return TreeAttentionConfig(hierarchical_embeddings=hierarchical_embeddings, **rows)


def load_golden(module, case: dict, leaf_weight: str) -> None:
    """Copy one-head golden parameters; ours multiply from the left and have biases (0)."""
    params = case["params"]
    with torch.no_grad():
        if isinstance(module, SelfAttention):
            module.queries_keys_values.weight.copy_(torch.cat([params[k].T for k in ("WQ", "WK", "WV")]))
        else:
            module.queries.weight.copy_(params["WQ"].T)
            module.keys_values.weight.copy_(torch.cat([params[k].T for k in ("WK", "WV")]))
        module.output.weight.copy_(params["WO"].T)
        module.accumulation.leaf_weight.copy_(params[leaf_weight][:, None])
        if module.accumulation.embeds:
            module.accumulation.vertical.copy_(case["inputs"]["E_v"])
            module.accumulation.horizontal.copy_(case["inputs"]["E_h"])


@pytest.mark.parametrize("case", golden_cases())
@pytest.mark.parametrize("variant", ["self_attention", "self_attention_nomask", "self_attention_nohier"])
def test_golden_self_attention(case, variant):
    tree, order = golden_tree(case)
    structure = build_structure([tree])
    module = SelfAttention(case["d"], 1, 0.0, golden_config(case, variant != "self_attention_nohier")).double()
    load_golden(module, case, "u_s")
    x = torch.cat([case["inputs"]["L"], case["inputs"]["N"][order]])[None]
    out = module(x, structure_masks(structure, variant != "self_attention_nomask"), structure)[0]
    expected = torch.cat([case[variant]["out_L"], case[variant]["out_N"][order]])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", golden_cases())
def test_golden_cross_attention(case):
    tree, order = golden_tree(case)
    structure = build_structure([tree])
    module = CrossAttention(case["d"], 1, 0.0, golden_config(case)).double()
    load_golden(module, case, "u_c")
    memory = torch.cat([case["inputs"]["L"], case["inputs"]["N"][order]])[None]
    out = module(case["cross_queries"][None], module.project_memory(memory, structure), structure_masks(structure, False))
    torch.testing.assert_close(out[0], case["cross_attention"]["out_Q"], rtol=1e-10, atol=1e-10)


def test_plain_attention_equals_torch():
    ours = randomise(SelfAttention(D_MODEL, HEADS, 0.0))
    theirs = torch.nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.queries_keys_values.weight)
        theirs.in_proj_bias.copy_(ours.queries_keys_values.bias)
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x, pad_mask = torch.randn(2, 5, D_MODEL).double(), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected, _ = theirs(x, x, x, key_padding_mask=pad_mask)
    torch.testing.assert_close(ours(x, padding_to_attend_mask(pad_mask)), expected, rtol=1e-12, atol=1e-12)


def test_causal_attention_with_a_cache_equals_one_pass():
    module = randomise(CausalSelfAttention(D_MODEL, HEADS, 0.0))
    x = torch.randn(2, 4, D_MODEL).double()
    expected, (keys, values) = module(x)
    past = (keys[:, :, :0], values[:, :, :0])
    for t in range(4):
        out, past = module(x[:, t : t + 1], GrowingPast(*past))
        torch.testing.assert_close(out[:, 0], expected[:, t], rtol=1e-12, atol=1e-12)


def test_unused_keys_of_a_window_are_its_first_ones():
    key = TreeStructure.build([3], [np.array([[0, 3, 1]])], attention_path="window").attention.key[0].tolist()
    assert key == [0, 1, 2, *[0] * (WINDOW - 3), 3, *[3] * (WINDOW - 1)]


@pytest.mark.parametrize("position", [0, 2, 4])
def test_distances_to_a_past_of_a_fixed_size_are_those_to_one_that_grows(position):
    """For each of three hypotheses; what is after the position is masked."""
    static = StaticPast(torch.empty(1, 2, 3, 5, 4), torch.empty(1, 2, 3, 5, 4), torch.tensor([position]), torch.empty(0))
    growing = GrowingPast(torch.empty(1, 2, position, 4), torch.empty(1, 2, position, 4))
    assert static.distances().view(3, 5)[:, : position + 1].tolist() == [growing.distances().tolist()] * 3


def test_a_memory_of_padding_alone_gives_no_nan():
    module = randomise(CrossAttention(D_MODEL, HEADS, 0.0))
    memory = torch.randn(2, 3, D_MODEL, dtype=torch.float64, requires_grad=True)
    pad_mask = torch.tensor([[True, True, True], [False, False, True]])
    attend_mask = padding_to_attend_mask(pad_mask)
    assert attend_mask[:, 0, 0].tolist() == [[True, False, False], [True, True, False]]  # some kernels give NaN for no key
    out = module(torch.randn(2, 2, D_MODEL).double(), module.project_memory(memory), attend_mask)
    out.sum().backward()
    assert out.isfinite().all() and memory.grad.isfinite().all()


@pytest.mark.parametrize("path", ["two", "window"])
@given(sentences=batches(max_leaves=14))
@num_examples(15)
def test_fused_attention_equals_torch_operators(path, sentences):
    """The CPU's operator and what other devices and attention dropout get: results and gradients at real positions."""
    structure = build_on_path(sentences, path)
    shape = len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    real = ~torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
    outs = [attend_subtrees(*inputs, structure, HEADS, 0.0, fused=fused)[real] for fused in (True, False)]
    check_close_with_grads([tuple(outs)], inputs)


def test_paths_by_size():
    assert choose_attention_path(28, 20) == choose_attention_path(128, 100) == "one"
    assert choose_attention_path(200, 160) == "two"
    assert choose_attention_path(512, 420) == choose_attention_path(4096, 3500) == "window"


def test_windows_grow_with_the_document_alone():
    """Sentences of a document under a dummy root: a fixed number of cells a sentence, and one wide node."""
    cells = []
    for count in (20, 80):
        sentence, nodes = right_branching(25).span_array, 24
        sentences = [sentence + np.array([25 * k, 25 * k, 1 + nodes * k]) for k in range(count)]
        spans = np.concatenate([[[0, 25 * count, 1 + nodes * count]], *sentences])
        maps = TreeStructure.build([25 * count], [spans], attention_path="window").attention
        assert maps.wide_count.tolist() == [1] and (maps.ranges[:, 2] - maps.ranges[:, 1]).sum() == nodes * count
        cells.append(maps.mask.numel() / count)
    assert cells[0] == cells[1]


# Data types of autocast, and what states and gradients may differ by.
HALF = [(torch.bfloat16, 0.03), (torch.float16, 0.004)]


@pytest.mark.parametrize("path", ["one", "two", "window"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("dtype", "rounding"), HALF)
def test_paths_under_autocast(dtype, rounding, path, fused):
    """States and gradients stay within the rounding of bf16 and of fp16."""
    module = SelfAttention(64, 4, 0.0 if fused else 1e-9, TreeAttentionConfig())
    structure = build_on_path([right_branching(40), FIGURE_1], path)
    x = torch.randn(2, structure.num_leaves + structure.num_nodes, 64, requires_grad=True)
    real = ~torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
    outs, grads = [], []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            out = module(x, None, structure)[real]
        outs.append(out.float())
        grads.append(torch.autograd.grad(out.float().square().sum(), x)[0])
    for expected, found in (outs, grads):
        assert (found - expected).norm() / expected.norm() < rounding


def test_attention_dropout_is_active_in_training_alone():
    module = SelfAttention(D_MODEL, HEADS, 0.5, TreeAttentionConfig())
    structure, x = build_structure([FIGURE_1]), torch.randn(1, 9, D_MODEL)
    args = (x, structure_masks(structure, True), structure)
    torch.manual_seed(0)
    assert not torch.equal(module(*args), module(*args))
    module.eval()
    assert torch.equal(module(*args), module(*args))


@pytest.mark.parametrize(("dtype", "rounding"), HALF)
def test_deep_trees_in_half_precision_stay_close_to_float32(dtype, rounding):
    module = SelfAttention(64, 4, 0.0, TreeAttentionConfig())
    structure, x = build_structure([right_branching(120)]), torch.randn(1, 239, 64)
    expected = module(x, structure_masks(structure, True), structure)
    with torch.autocast("cpu", dtype=dtype):
        out = module(x, structure_masks(structure, True), structure)
    assert (out.float() - expected).norm() / expected.norm() < rounding


def test_queries_keys_and_values_begin_as_in_torch():
    """Whether fused or not, each map has the spread of torch.nn.MultiheadAttention's."""
    torch.manual_seed(0)
    spread = torch.nn.MultiheadAttention(256, 4).in_proj_weight.std()
    for layer in (SelfAttention(256, 4, 0.0), CausalSelfAttention(256, 4, 0.0)):
        for block in layer.queries_keys_values.weight.chunk(3):
            assert block.std().item() == pytest.approx(spread.item(), rel=0.02)
    cross = CrossAttention(256, 4, 0.0)
    for block in (cross.queries.weight, *cross.keys_values.weight.chunk(2)):
        assert block.std().item() == pytest.approx(spread.item(), rel=0.02)
