"""Weights of corpora: the examples of an epoch against a slow count, the same epochs in any order and with any windows."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_bpe_dropout import mix
from test_plan import build, make_lengths, random_lengths

from treenet.config import BatchConfig
from treenet.data.corpora import count_copies
from treenet.data.windows import ShardSizes
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.size_counts import SizeCounts

WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.5, 3.0]), min_size=1, max_size=4)


def reference_copies(example_id: int, examples: list[int | None], weights: list[float], seed: int | None) -> int:
    """How often an example occurs, one corpus after the other."""
    corpus, first = 0, 0
    while examples[corpus] is not None and example_id >= first + examples[corpus]:
        first += examples[corpus]
        corpus += 1
    key = mix(mix(0x636F70696573) ^ (0 if seed is None else seed + 1))
    draw = (mix(mix(example_id) ^ key) >> 11) / 2**53
    return int(weights[corpus]) + (draw < weights[corpus] % 1)


@num_examples(60)
@given(WEIGHTS, st.data())
def test_an_epoch_has_every_example_as_often_as_the_slow_count(weights, data):
    sizes = [data.draw(st.integers(1, 30)) for _ in weights[:-1]]
    corpora = [{"examples": n, "weight": w} for n, w in zip([*sizes, None], weights, strict=True)]
    lengths = random_lengths(sum(sizes) + data.draw(st.integers(0, 40)) + 1)
    subset, seed = data.draw(st.sampled_from([("fixed", None), ("by_seed", 5)])), 5
    expected = [reference_copies(i, [*sizes, None], weights, subset[1]) for i in lengths["example_id"].tolist()]
    if not any(expected):
        return
    plan = build(lengths, seed=seed, corpora=corpora, subset=subset[0])
    for epoch in (0, 3):
        steps = range(epoch * plan.num_batches, (epoch + 1) * plan.num_batches)
        rows = np.concatenate([build(lengths, seed=seed, corpora=corpora, subset=subset[0]).batch(step) for step in steps[:1]])
        assert rows.tolist() == plan.batch(steps[0]).tolist()  # a plan that was just made: resume
        found = Counter(np.concatenate([plan.batch(step) for step in steps]).tolist())
        assert [found[i] for i in range(len(expected))] == expected
    assert plan.used_sizes().rows.sum() == len(plan.rows) == sum(expected)
    assert plan.left_out.get("weight", 0) == expected.count(0)


def test_batches_stay_within_the_budget_and_copies_are_spread():
    lengths = random_lengths(200)
    plan = build(lengths, corpora=[{"examples": 50, "weight": 4}, {}])
    twice = 0
    for step in range(plan.num_batches):
        rows = plan.batch(step)
        assert len(rows) * lengths["leaves"][rows].max() <= 120 and len(rows) * (lengths["tgt_pieces"][rows].max() + 1) <= 120
        twice += len(rows) - len(set(rows.tolist()))
    assert twice < 120  # of 150 further copies, many are in other batches


def test_windows_count_the_same_rows():
    lengths = random_lengths(300)
    columns = (np.asarray(lengths[name]) for name in ("leaves", "tgt_pieces", "nodes"))
    leaves, targets, nodes = columns
    shards = ShardSizes(np.full(10, 30), lambda a, b: SizeCounts.of(*(c[30 * a : 30 * b] for c in (leaves, targets, nodes))))
    corpora = [{"examples": 100, "weight": 1.5}, {"weight": 0.5}]
    config = BatchConfig(max_tokens=120, corpora=corpora, window_rows=90)
    plan = type(build(lengths)).build(lengths, config, text_fingerprint="text", seed=1, shards=shards)
    expected = np.repeat(np.arange(300), count_copies(lengths["example_id"], config.corpora, None))
    epoch = np.concatenate([plan.batch(step) for step in range(plan.num_batches, 2 * plan.num_batches)])
    assert sorted(epoch.tolist()) == expected.tolist() == plan.rows.tolist()


def test_weight_one_is_the_plan_without_corpora():
    lengths = random_lengths(120)
    plain, weighted = build(lengths), build(lengths, corpora=[{"examples": 60}, {"weight": 1}])
    assert all(np.array_equal(plain.batch(step), weighted.batch(step)) for step in range(2 * plain.num_batches))
    assert "corpora" not in BatchConfig().model_dump() and plain.left_out == {"fraction": 0, "length": 0}


def test_refusals():
    with pytest.raises(UserError, match=r"batch.corpora has 5 examples, but train has example 8"):
        build(make_lengths([3] * 8), corpora=[{"examples": 2}, {"examples": 3}])
    with pytest.raises(UserError, match=r"corpus 2 begins after 8 examples, but train ends at 8;"):
        build(make_lengths([3] * 8), corpora=[{"examples": 8}, {"weight": 2}])
    with pytest.raises(UserError, match="each one except the last needs the number of its examples"):
        load_settings(BatchConfig, None, ["corpora=[{weight: 2}, {weight: 1}]"])
