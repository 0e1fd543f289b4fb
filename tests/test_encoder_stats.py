"""Statistics of the encoder's self-attention are those of a slow count over queries, keys and spans."""

import json

import numpy as np
import pytest
from test_attention_stats import ABLATIONS, SENTENCES, make_examples, make_model

from treenet.analysis.attention_stats import node_heights
from treenet.analysis.encoder_attention import collect_encoder_attention, encode_examples

LABELS = ["<unk>", "S", "POS=NN", "NP", "POS=VB"]


def may_attend(example: dict, tree: bool, mask: bool, query: int, key: int) -> bool:
    """Equation 11 by the spans of the example; without the mask, and without trees, all may attend to all."""
    num_leaves = len(example["leaves"]["piece"])
    if not tree or not mask:
        return True
    if query < num_leaves:
        return key < num_leaves
    start, end, subtree_end = (example["spans"][name][query - num_leaves] for name in ("start", "end", "subtree_end"))
    return start <= key < end if key < num_leaves else query <= key < num_leaves + subtree_end


@pytest.mark.parametrize(("name", "settings"), ABLATIONS)
def test_statistics_are_those_of_a_slow_count(name, settings):
    model, tree, mask = make_model(name, **settings), name == "tree_transformer", settings.get("subtree_mask", True)
    stats = collect_encoder_attention(model, SENTENCES, LABELS)
    kinds = {kind: {"queries": 0, "nodes": 0.0, "own": 0.0, "even_nodes": 0.0, "even_own": 0.0} for kind in ("leaves", "nodes")}
    by_label, by_height, total = {}, {}, 0
    for example, weights in zip(SENTENCES, encode_examples(model, SENTENCES), strict=True):
        num_leaves, positions = len(example["leaves"]["piece"]), weights.shape[2]
        heights = [0] * num_leaves + node_heights(example["spans"]["subtree_end"]).tolist()
        for query in range(positions):
            found = kinds["leaves" if query < num_leaves else "nodes"]
            found["queries"] += 1
            total += 1
            allowed = [key for key in range(positions) if may_attend(example, tree, mask, query, key)]
            for key in range(positions):
                weight, even = weights[:, :, query, key].astype(np.float64), (key in allowed) / len(allowed)
                assert key in allowed or (weight == 0).all()
                if key == query:
                    found["own"], found["even_own"] = found["own"] + weight, found["even_own"] + even
                if key >= num_leaves:
                    found["nodes"], found["even_nodes"] = found["nodes"] + weight, found["even_nodes"] + even
                    label = LABELS[example["nodes"]["label"][key - num_leaves]].partition("=")[0].replace("POS", "split word")
                    sums = by_label.setdefault(label, [0.0, 0.0])
                    sums[0], sums[1] = sums[0] + weight, sums[1] + even
                sums = by_height.setdefault(str(heights[key]), [0.0, 0.0])
                sums[0], sums[1] = sums[0] + weight, sums[1] + even
    assert stats.sentences == len(SENTENCES) and (stats.nodes.queries > 0) == tree
    for kind, found in kinds.items():
        own, count = getattr(stats, kind), max(1, found["queries"])
        assert own.queries == found["queries"]
        np.testing.assert_allclose(own.node_mass, found["nodes"] / count * np.ones_like(own.node_mass), atol=1e-6)
        np.testing.assert_allclose(own.own_mass, found["own"] / count * np.ones_like(own.own_mass), atol=1e-6)
        assert own.even_node_mass == pytest.approx(found["even_nodes"] / count)
        assert own.even_own_mass == pytest.approx(found["even_own"] / count)
    for groups, expected in ((stats.by_label, by_label), (stats.by_height, by_height)):
        assert {group.name for group in groups} == set(expected)
        for group in groups:
            mass, even = expected[group.name]
            np.testing.assert_allclose(group.mass, mass / total, atol=1e-6)
            assert group.even == pytest.approx(even / total)
    assert sum(group.mass.mean() for group in stats.by_height) == pytest.approx(1, abs=1e-5)
    written = json.loads(json.dumps(stats.to_json()))
    assert written["nodes"]["to_nodes"]["mean"] == pytest.approx(float(stats.nodes.node_mass.mean()))


def test_neither_batch_mates_nor_examples_without_leaves_matter():
    empty = make_examples([(2, 2)])[0]
    for name in ("leaves", "nodes", "spans"):
        empty[name] = {key: values[:0] for key, values in empty[name].items()}
    model, example = make_model(), SENTENCES[1]
    alone, mixed = (collect_encoder_attention(model, rows, LABELS) for rows in ([example], [empty, example]))
    assert alone.to_json() == mixed.to_json() and mixed.sentences == 1
    nothing = collect_encoder_attention(model, [empty], LABELS)
    assert nothing.sentences == nothing.leaves.queries == 0 and not nothing.by_label
