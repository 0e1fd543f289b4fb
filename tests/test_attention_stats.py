"""Attention statistics: weights are those of the model, and sums over a split are those of a slow count."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from strategies import trees
from toydata import encode_row, write_toy_data
from toyruns import make_config

from treenet.analysis.attention_stats import (
    SPLIT_WORD,
    SentenceAttention,
    attend_examples,
    collect_attention,
    node_heights,
    read_labels,
    run_attention,
    translated,
)
from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.data.batch import collate
from treenet.data.splits import read_split
from treenet.jobs.train_run import run_training
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.scaled_dot_product import merge_heads
from treenet.models import VocabSizes, build_model
from treenet.models.composed import compute_weights, record_attention
from treenet.runs.loading import load_run

pytestmark = pytest.mark.slow

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 3, "dropout": 0.0}
ABLATIONS = [
    ("transformer", {}),
    ("tree_transformer", {}),
    ("tree_transformer", {"accumulate_on": "key", "subtree_mask": False}),
    ("tree_transformer", {"accumulation_rule": "released", "leaf_weights": "per_head", "hierarchical_embeddings": False}),
]


def make_model(name: str = "tree_transformer", **tree):
    torch.manual_seed(3)
    config = ModelConfig(name=name, **SIZES, tree=TreeAttentionConfig(**tree))
    return build_model(config, VocabSizes(60, 6)).eval()


def make_examples(sizes: list[tuple[int, int]], seed: int = 0) -> list[dict]:
    """Examples of (leaves, target pieces) with random trees, as shards give them."""
    random = np.random.default_rng(seed)
    rows = []
    for number, (num_leaves, num_targets) in enumerate(sizes):
        leaves, target = (random.integers(4, 60, count).tolist() for count in (num_leaves, num_targets))
        row = encode_row(number, leaves, target, random)
        for name in ("leaves", "nodes", "spans"):
            row[name] = {key: np.array(values, dtype=np.int32) for key, values in row[name].items()}
        rows.append({**row, "tgt_pieces": np.array(target, dtype=np.int32)})
    return rows


SENTENCES = make_examples([(5, 4), (9, 12), (1, 0), (2, 3), (14, 7)])


def test_even_attention_counts_both_brackets_of_a_node():
    """A linearised tree has two positions for a node, and the weights of a node are their sum."""
    model = make_model("linearized_transformer")
    for layer in model.decoder.layers:
        torch.nn.init.zeros_(layer.cross_attention.queries.weight)
        torch.nn.init.zeros_(layer.cross_attention.queries.bias)
    stats = collect_attention(attend_examples(model, SENTENCES), [f"label {n}" for n in range(6)], "reference")
    assert len(stats.by_label) > 1
    for group in (*stats.by_label, *stats.by_height):
        assert group.mass == pytest.approx(np.full_like(group.mass, group.even), abs=1e-6)


@pytest.mark.parametrize(("name", "tree"), ABLATIONS)
def test_weights_times_values_are_the_output_of_the_fast_path(name, tree):
    model, compared = make_model(name, **tree), []

    def compare(module, inputs, output):
        weights = compute_weights(module, *inputs[:3])
        compared.append((module.output(merge_heads(weights @ inputs[1][1])) - output).abs().max())
        assert torch.allclose(weights.sum(3), torch.ones(1), atol=1e-6)

    for layer in model.decoder.layers:
        layer.cross_attention.register_forward_hook(compare)
    with torch.inference_mode():
        model(collate(SENTENCES))
    assert len(compared) == 3 and max(compared) < 1e-6


def test_weights_are_those_of_a_hand_made_oracle():
    """Every weight of the first layer by exp and loops over queries, keys and head columns, in plain Python."""
    model, example = make_model(), SENTENCES[0]
    layer = model.decoder.layers[0]
    with torch.inference_mode():
        batch = collate([example])
        memory = model.encode(batch)
        x = model.decoder.positions(model.decoder.embedding(batch.tgt_in))
        attended, _ = layer.self_attention(x)
        x = layer.self_attention_norm(x + attended)
        queries = layer.cross_attention.queries(x)[0].tolist()
        keys = layer.cross_attention.keys_values(memory.states)[0, :, :16].tolist()
    found = next(attend_examples(model, [example])).weights[0]
    assert found.shape == (2, 5, 5 + len(example["nodes"]["label"]))
    for head in range(2):
        columns = range(8 * head, 8 * head + 8)
        for t, query in enumerate(queries):
            powers = [np.exp(sum(query[c] * key[c] for c in columns) / 8**0.5) for key in keys]
            expected = [power / sum(powers) for power in powers]
            np.testing.assert_allclose(found[head, t], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer", "tree_transformer"])
def test_neither_padding_nor_batch_mates_matter(name):
    model = make_model(name)
    together = {s.example["example_id"]: s.weights for s in attend_examples(model, SENTENCES)}
    assert list(together) == [0, 1, 2, 3, 4]
    for example in SENTENCES:
        (alone,) = attend_examples(model, [example])
        nodes = len(example["nodes"]["label"]) if name == "tree_transformer" else 0
        assert alone.num_nodes == nodes and alone.num_leaves == len(example["leaves"]["piece"])
        assert alone.weights.shape == (3, 2, len(example["tgt_pieces"]) + 1, alone.num_leaves + nodes)
        np.testing.assert_allclose(alone.weights.sum(axis=3), 1, atol=1e-5)
        np.testing.assert_allclose(together[example["example_id"]], alone.weights, atol=1e-6)
    by_budget = [s for max_tokens in (1, 30) for s in attend_examples(model, SENTENCES, max_tokens=max_tokens)]
    for sentence in by_budget:
        np.testing.assert_allclose(sentence.weights, together[sentence.example["example_id"]], atol=1e-6)


def test_recording_leaves_the_model_as_it_was():
    model, batch = make_model(), collate(SENTENCES)
    with torch.inference_mode():
        before = model(batch)
        with record_attention(model) as recorded:
            assert torch.equal(model(batch), before)
        assert [tuple(w.shape[:3]) for w in recorded] == [(5, 2, 13)] * 3
        model(batch)
    assert len(recorded) == 3


def test_padding_gets_no_attention():
    model, batch = make_model(), collate(SENTENCES)
    with torch.inference_mode(), record_attention(model) as recorded:
        model(batch)
    pad_mask = torch.cat([batch.leaf_pad_mask, batch.node_pad_mask], dim=1)
    attend_mask = padding_to_attend_mask(pad_mask).expand_as(recorded[0])
    assert all(weights[~attend_mask].eq(0).all() for weights in recorded) and not attend_mask.all()


def test_examples_without_leaves_are_left_out():
    empty = make_examples([(2, 2)])[0]
    for name in ("leaves", "nodes", "spans"):
        empty[name] = {key: values[:0] for key, values in empty[name].items()}
    assert list(attend_examples(make_model(), [empty])) == []
    assert len(list(attend_examples(make_model(), [empty, SENTENCES[0]]))) == 1
    stats = collect_attention([], ["<unk>"], "reference")
    assert stats.sentences == 0 and stats.node_share == 0 and stats.mean == 0


@given(trees())
@num_examples(60)
def test_heights_are_the_longest_way_down(tree):
    ends = tree.span_array[:, 2]
    children = [[c for c, parent in enumerate(tree.parents) if parent == node] for node in range(len(tree.parents))]

    def height(node: int) -> int:
        return 1 + max(map(height, children[node]), default=0)

    assert node_heights(ends).tolist() == [height(node) for node in range(len(children))]


@given(st.integers(0, 10**6))
@num_examples(25)
def test_statistics_are_those_of_a_slow_count(seed):
    random = np.random.default_rng(seed)
    labels = ["<unk>", "S", "POS=NN", "NP", "POS=VB"]
    sizes = [(int(random.integers(1, 7)), int(random.integers(0, 6))) for _ in range(4)]
    sentences = []
    for example in make_examples(sizes, seed):
        width = len(example["leaves"]["piece"]) + len(example["nodes"]["label"])
        weights = random.dirichlet(np.ones(width), size=(2, 3, len(example["tgt_pieces"]) + 1)).astype(np.float32)
        sentences.append(SentenceAttention(example, weights))
    stats = collect_attention(sentences, labels, "reference")

    targets = sum(s.weights.shape[2] for s in sentences)
    on_nodes, mass, even, heights = np.zeros((2, 3)), {}, {}, {}
    for s in sentences:
        tall = node_heights(s.example["spans"]["subtree_end"])
        for t in range(s.weights.shape[2]):
            for position in range(s.weights.shape[3]):
                node = position - s.num_leaves
                share = s.weights[:, :, t, position] / targets
                height = "0" if node < 0 else str(tall[node])
                heights[height] = heights.get(height, 0) + share
                if node >= 0:
                    on_nodes += share
                    label = labels[s.example["nodes"]["label"][node]]
                    label = SPLIT_WORD if label.startswith("POS=") else label
                    mass[label] = mass.get(label, 0) + share
                    even[label] = even.get(label, 0) + 1 / targets / s.weights.shape[3]
    np.testing.assert_allclose(stats.node_mass, on_nodes, rtol=1e-6)
    assert stats.mean == pytest.approx(on_nodes.mean()) and stats.deviation == pytest.approx(on_nodes.std())
    assert {g.name for g in stats.by_label} == set(mass)
    for group in stats.by_label:
        np.testing.assert_allclose(group.mass, mass[group.name], rtol=1e-6)
        assert group.even == pytest.approx(even[group.name])
    for group in stats.by_height:
        np.testing.assert_allclose(group.mass, heights[group.name], rtol=1e-6)
    assert [int(g.name) for g in stats.by_height] == sorted(map(int, heights))
    assert stats.leaves == sum(s.num_leaves for s in sentences) and stats.target_positions == targets
    assert stats.node_share == stats.nodes / (stats.nodes + stats.leaves)
    assert sum(g.mass.mean() for g in stats.by_height) == pytest.approx(1, abs=1e-5)
    assert sum(g.even for g in stats.by_height) == pytest.approx(1)
    assert json.loads(json.dumps(stats.to_json()))["target_to_nodes"]["mean"] == stats.mean


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("run")
    data = write_toy_data(folder / "data", train=20, valid=4, test=6)
    run_training(make_config(data, "max_steps=2", "checkpoint_every=1", "validate_every=2"), folder / "run")
    return load_run(folder / "run")


def test_a_run_attends_over_its_references_or_its_own_translations(run):
    examples = list(read_split(run.data, "encoded", "test"))
    forced = run_attention(run, "test")
    assert forced.targets == "reference" and forced.sentences == 6 and forced.node_mass.shape == (1, 2)
    assert forced.target_positions == sum(len(e["tgt_pieces"]) + 1 for e in examples)
    assert forced.leaves == sum(len(e["leaves"]["piece"]) for e in examples)
    assert forced.nodes == sum(len(e["nodes"]["label"]) for e in examples)
    own = translated(run, examples)
    assert [e["example_id"] for e in own] == [e["example_id"] for e in examples]
    free = run_attention(run, "test", "translation")
    assert free.targets == "translation" and free.target_positions == sum(len(e["tgt_pieces"]) + 1 for e in own)
    assert {g.name for g in forced.by_label} <= set(read_labels(run.data))
