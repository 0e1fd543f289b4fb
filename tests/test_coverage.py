"""The coverage penalty against the equation in plain Python, and the order of a beam against scores of its hypotheses."""

import math
from dataclasses import replace

import numpy as np
import pytest
from model_cases import example_of, tiny_model
from strategies import Tree

from treenet.analysis.attention_stats import attend_examples
from treenet.config import DecodingConfig
from treenet.translation.reranking import coverage_penalty, leaf_attention
from treenet.translation.translate import Ensemble, translate_examples
from treeproc.common.settings import UserError

TREES = [Tree(5, [(0, 5, 3), (0, 2, 2), (3, 5, 3)]), Tree(1, [(0, 1, 1)]), Tree(3, [(0, 3, 2), (1, 3, 2)])]


def examples_of(model) -> list[dict]:
    return [example_of(tree, number, reads=model.reads) for number, tree in enumerate(TREES)]


def reference_penalty(weights: np.ndarray, example: dict, beta: float) -> float:
    """Equation 14, term by term; the weight of a node counts at each of its leaves in equal parts."""
    num_layers, num_heads, num_targets, num_positions = weights.shape
    starts, ends = (example["spans"][name].tolist() for name in ("start", "end"))
    num_leaves, total = len(example["leaves"]["piece"]), 0.0
    for leaf in range(num_leaves):
        covered = 0.0
        for target in range(num_targets):
            for layer in range(num_layers):
                for head in range(num_heads):
                    row = weights[layer, head, target].tolist()
                    own = row[leaf] + sum(
                        row[num_leaves + node] / (ends[node] - starts[node])
                        for node in range(num_positions - num_leaves)
                        if starts[node] <= leaf < ends[node]
                    )
                    covered += own / (num_layers * num_heads)
        total += math.log(min(covered, 1.0))
    return beta * total


@pytest.mark.parametrize("case", ["transformer", "tree_transformer"])
def test_the_beam_is_ordered_by_the_score_with_the_penalty(case):
    model, beta = tiny_model(case), 3.0
    for layer in model.decoder.layers:  # attention far from even, so that coverage differs
        layer.cross_attention.queries.weight.data *= 30
    examples = examples_of(model)
    limits = {"max_length_factor": 0.6, "max_length_offset": 1}  # with many target positions, every leaf is covered
    config = DecodingConfig(beam_size=4, length_penalty=0.6, length_penalty_form="gnmt", **limits)
    plain = list(translate_examples(model, examples, config, num_best=4))
    found = list(translate_examples(model, examples, config.model_copy(update={"coverage_penalty": beta}), num_best=3))
    for example, own, hypotheses in zip(examples, plain, found, strict=True):
        expected = []
        for one in own:
            forced = {**example, "tgt_pieces": np.array(one.ids, dtype=np.int32)}
            [attended] = attend_examples(model, [forced])
            assert leaf_attention(attended.weights, example["spans"], attended.num_leaves).sum(-1) == pytest.approx(1)
            expected.append(replace(one, score=one.score + reference_penalty(attended.weights, example, beta)))
        expected.sort(key=lambda one: -one.score)
        assert [one.ids for one in hypotheses] == [one.ids for one in expected[:3]]
        assert [one.score for one in hypotheses] == pytest.approx([one.score for one in expected[:3]], abs=1e-5)
    alone = [
        next(translate_examples(model, [one], config.model_copy(update={"coverage_penalty": beta}), num_best=3))
        for one in examples
    ]
    assert [[one.ids for one in own] for own in alone] == [[one.ids for one in own] for own in found]
    assert [[one.ids for one in own[:3]] for own in plain] != [[one.ids for one in own] for own in found], "the penalty matters"


def test_full_coverage_costs_nothing_and_no_coverage_stays_finite():
    assert coverage_penalty(np.array([[0.5, 0.5], [0.5, 2.0]]), 0.3) == 0
    assert coverage_penalty(np.array([[0.5, 0.25]]), 2.0) == pytest.approx(2 * (math.log(0.5) + math.log(0.25)))
    assert math.isfinite(coverage_penalty(np.array([[0.0, 1.0]]), 1.0))


def test_models_without_one_such_attention_are_refused():
    config = DecodingConfig(coverage_penalty=0.2)
    for model in (tiny_model("bilstm"), Ensemble([tiny_model("transformer"), tiny_model("transformer")])):
        with pytest.raises(UserError, match="coverage_penalty needs one model with a Transformer decoder"):
            translate_examples(model, examples_of(model), config)
