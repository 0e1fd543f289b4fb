"""Constituent attention against the formulas of the paper, by loops, sentence by sentence; values and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treenet.config import ConstituentConfig, TrainConfig, TreeAttentionConfig
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.constituents import NeighbouringAttention, constituent_prior
from treeproc.common.settings import load_settings

D_MODEL, HEADS, LAYERS = 8, 2, 3


def reference_joined(module: NeighbouringAttention, x: torch.Tensor, below: list | None) -> list:
    """a^l of one sentence [n, D]: softmax over the neighbours that are there, geometric mean, hierarchical constraint."""
    queries, keys = module.queries_keys(F.layer_norm(x, (D_MODEL,), module.norm.weight, module.norm.bias)).split(D_MODEL, dim=1)

    def chooses(leaf: int, neighbour: int) -> torch.Tensor:
        neighbours = [j for j in (neighbour, 2 * leaf - neighbour) if 0 <= j < len(x)]
        scores = torch.stack([torch.dot(queries[leaf], keys[j]) / module.scale for j in neighbours])
        return scores.softmax(0)[0]

    out = []
    for k in range(len(x) - 1):
        both = torch.sqrt(chooses(k, k + 1) * chooses(k + 1, k))
        out.append(both if below is None else below[k] + (1 - below[k]) * both)
    return out


def reference_prior(link_probs: list, length: int, diagonal: torch.Tensor) -> torch.Tensor:
    """C by products; `diagonal` is what stands for the empty one."""
    rows = [
        [math.prod(link_probs[min(i, j) : max(i, j)], start=diagonal / diagonal) if i != j else diagonal for j in range(length)]
        for i in range(length)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def reference_attention(attention: SelfAttention, x: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """E = C * softmax(Q K^T / sqrt(K)), not normalised again, head by head."""
    heads = [part.chunk(HEADS, dim=1) for part in attention.queries_keys_values(x).chunk(3, dim=1)]
    mixed = [prior * (q @ k.t() / math.sqrt(D_MODEL // HEADS)).softmax(1) @ v for q, k, v in zip(*heads, strict=True)]
    return attention.output(torch.cat(mixed, dim=1))


def released_diagonal(layer: int) -> float:
    """The released code's sqrt(0 + 1e-9) of a leaf and itself, under the hierarchical constraint."""
    own = 0.0
    for _ in range(layer + 1):
        own += (1 - own) * 1e-9**0.5
    return own


@pytest.mark.parametrize("config", [{}, {"neighbour_scale": 0.5, "diagonal": "official"}], ids=["paper", "released"])
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3))
@num_examples(10)
def test_three_layers_equal_the_formulas(config, lengths):
    config = ConstituentConfig(**config)
    torch.manual_seed(sum(lengths))
    modules = [NeighbouringAttention(D_MODEL, config).double() for _ in range(LAYERS)]
    attentions = [SelfAttention(D_MODEL, HEADS, 0.0).double() for _ in range(LAYERS)]
    states = torch.randn(LAYERS, len(lengths), max(lengths) + 1, D_MODEL, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(states)
    pad_mask = torch.arange(states.shape[2]) >= torch.tensor(lengths)[:, None]
    fast, slow, link_probs = 0.0, 0.0, None
    below: list = [None] * len(lengths)
    for layer, (module, attention) in enumerate(zip(modules, attentions, strict=True)):
        link_probs = module(states[layer], ~pad_mask[:, 1:], link_probs)
        prior = constituent_prior(link_probs, layer, config)
        out = attention(states[layer], padding_to_attend_mask(pad_mask), prior=prior)
        for row, length in enumerate(lengths):
            x = states[layer, row, :length]
            below[row] = reference_joined(module, x, below[row])
            diagonal = torch.tensor(released_diagonal(layer) if config.diagonal == "official" else 1.0, dtype=torch.float64)
            expected = reference_prior(below[row], length, diagonal)
            torch.testing.assert_close(prior[row, :length, :length], expected, rtol=1e-10, atol=1e-14)
            expected = reference_attention(attention, x, expected)
            torch.testing.assert_close(out[row, :length], expected, rtol=1e-10, atol=1e-12)
            fast = fast + (out[row, :length] * weight[layer, row, :length]).sum()
            slow = slow + (expected * weight[layer, row, :length]).sum()
    parameters = [states, *(p for module in (*modules, *attentions) for p in module.parameters())]
    gradients = (torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True) for total in (fast, slow))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_joined_neighbours_stay_joined_in_higher_layers():
    torch.manual_seed(1)
    config, link_probs, links = ConstituentConfig(neighbour_scale=1.0), None, torch.ones(2, 11, dtype=torch.bool)
    for layer in range(6):
        above = NeighbouringAttention(D_MODEL, config)(3 * torch.randn(2, 12, D_MODEL), links, link_probs)
        assert link_probs is None or (above >= link_probs).all()
        link_probs, prior = above, constituent_prior(above, layer, config)
        assert (prior >= 0).all() and (prior <= 1).all() and torch.equal(prior, prior.transpose(1, 2))


@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_scores_far_apart_have_finite_gradients(scale):
    """Leaves that choose each other never, or always, in float32: no logarithm of 0, no 0 times infinity."""
    torch.manual_seed(2)
    config = ConstituentConfig(neighbour_scale=scale)
    modules = [NeighbouringAttention(D_MODEL, config) for _ in range(3)]
    x, links, link_probs = torch.randn(4, 30, D_MODEL, requires_grad=True), torch.ones(4, 29, dtype=torch.bool), None
    total = 0.0
    for layer, module in enumerate(modules):
        link_probs = module(x, links, link_probs)
        prior = constituent_prior(link_probs, layer, config)
        total = total + (prior * torch.randn_like(prior)).sum()
    assert prior.isfinite().all()
    gradients = torch.autograd.grad(total, [x, *(p for module in modules for p in module.parameters())])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_configuration_for_translation_differs_in_the_model_alone(repository):
    configs = repository / "workflows" / "configs"
    base, ours = (
        load_settings(TrainConfig, configs / f"iwslt14_en_de{end}.yaml", ["data=somewhere"]).model_dump()
        for end in ("", "_constituent_transformer")
    )
    own = {"name": "constituent_transformer", "constituents": ConstituentConfig().model_dump()}
    assert {name: ours["model"].pop(name) for name in own} == own
    assert base["model"].pop("name") == "tree_transformer" and base["model"].pop("tree") == TreeAttentionConfig().model_dump()
    assert ours == base
