"""The layer benchmark: its slow baselines compute the same, its random trees are trees, its output is a line a figure."""

import json
from types import SimpleNamespace

import layer
import layer_baselines
import layer_trees
import measure
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from strategies import batches
from test_accumulation import build_structure
from test_tree_attention import randomise

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.layers.attention import SelfAttention


@pytest.mark.parametrize("rule", ["paper", "released"])
@given(sentences=batches())
@num_examples(15)
def test_baselines_equal_the_layer(rule, sentences):
    config = TreeAttentionConfig(accumulation_rule=rule, vertical_rows=3, horizontal_rows=4, leaf_weights="per_head")
    attention, structure = randomise(SelfAttention(8, 2, 0.0, config)), build_structure(sentences)
    accumulate = {"paper": layer_baselines.naive_accumulation, "released": layer_baselines.released_accumulation}[rule]
    slow = layer_baselines.SlowTreeAttention(attention, structure, accumulate)
    x = torch.randn(len(sentences), structure.num_leaves + structure.num_nodes, 8, dtype=torch.float64)
    real = ~torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
    torch.testing.assert_close(slow(x)[real], attention(x, None, structure)[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("leaves", "nodes", "document"), [(28, 20, False), (512, 420, True), (400, 330, False), (60, 44, True)])
def test_random_trees_have_the_sizes_asked_for(leaves, nodes, document):
    structure = layer_trees.random_structure(2, leaves, nodes, document)
    assert not structure.node_pad_mask.any() and not structure.leaf_pad_mask.any()
    assert (structure.num_leaves, structure.num_nodes) == (leaves, nodes)


def test_settings_are_the_defaults():
    ours = vars(layer.TreeDefaults())
    assert ours == dict(TreeAttentionConfig())
    sizes = ModelConfig(d_ff=1024, dropout=0.0)
    assert all(getattr(sizes, name) == value for name, value in vars(layer.LayerConfig()).items())


def test_one_json_line_per_figure(capsys):
    options = SimpleNamespace(data=None, device="cpu", dtype="float32", compile=False, slow=1, rounds=2, quick=True)
    for name, case in {"base": layer.LayerCase(2, 9, 6, 1), "decoder": layer.LayerCase(2, 9, 6, 1, decoder=True)}.items():
        layer.run_case(name, case, options)
        figures = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
        assert all(line["benchmark"] == "layer" and line["case"] == name and line["value"] > 0 for line in figures.values())
        assert {"time_ratio", "memory_ratio", "plain_to_torch"} <= figures.keys()
        assert ("naive_time_ratio" in figures) == (name == "base")


def test_peak_memory_counts_what_is_held_at_once():
    """Input gradient, output of one product and the gradient of the other: not what was freed, nor the old gradient."""
    x = torch.ones(2**20, requires_grad=True)

    def forward() -> torch.Tensor:
        for _ in range(3):
            torch.ones(2**20)  # freed before the next
        return (x.detach() + 1) * x  # the sum is kept for backward

    step = measure.Step([x], forward)
    step()
    assert measure.peak_bytes(step, torch.device("cpu")) == pytest.approx(3 * 4 * 2**20, rel=0.01)
    assert x.grad is not None


def test_ratios_of_rounds():
    times = measure.Times({"a": [2.0, 3.0, 4.0], "b": [1.0, 2.0, 2.0]})
    value, spread = times.ratio("a", "b")
    assert value == 2.0 and spread == {"min": 1.5, "median": 2.0, "max": 2.0, "rounds": 3}
    assert np.isclose(times.best("b"), 1.0)
