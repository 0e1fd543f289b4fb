"""The batch plan: a permutation of the examples, within the budget, the same for every number of workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treenet.config import BatchConfig
from treenet.data.batch import cut_batches
from treenet.data.hashed_sampling import choose_fraction
from treenet.data.plan import BatchPlan, plan_in_order
from treeproc.common.settings import UserError


def make_lengths(leaves, targets=None, nodes=None) -> dict[str, np.ndarray]:
    leaves = np.array(leaves, dtype=np.int32)
    targets = leaves if targets is None else np.array(targets, dtype=np.int32)
    nodes = leaves if nodes is None else np.array(nodes, dtype=np.int32)
    return {"leaves": leaves, "tgt_pieces": targets, "nodes": nodes, "example_id": np.arange(len(leaves), dtype=np.int64)}


def random_lengths(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return make_lengths(random.integers(1, 30, count), random.integers(1, 30, count), random.integers(0, 60, count))


def build(lengths, seed=1, text="text", **batch) -> BatchPlan:
    return BatchPlan.build(lengths, BatchConfig(**{"max_tokens": 120, **batch}), text_fingerprint=text, seed=seed)


pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=80)


@num_examples(60)
@given(pairs, st.integers(41, 300), st.integers(0, 3), st.integers(0, 5))
def test_every_epoch_is_a_permutation_within_the_budget(sizes, max_tokens, epoch, seed):
    lengths = make_lengths([leaves for leaves, _ in sizes], [targets for _, targets in sizes])
    plan = build(lengths, seed=seed, max_tokens=max_tokens)
    batches = [plan.batch(epoch * plan.num_batches + i) for i in range(plan.num_batches)]
    assert sorted(np.concatenate(batches)) == list(range(len(sizes)))
    for rows in batches:
        assert len(rows) * lengths["leaves"][rows].max() <= max_tokens
        assert len(rows) * (lengths["tgt_pieces"][rows].max() + 1) <= max_tokens


def test_batches_are_as_large_as_the_budget_allows():
    costs = np.sort(np.random.default_rng(0).integers(1, 50, 500))
    starts = cut_batches(costs, 200)
    for start, stop in zip(starts[:-2], starts[1:-1], strict=True):
        assert costs[stop - 1] * (stop - start) <= 200 < costs[stop] * (stop - start + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_ranks_share_the_same_global_batch(world_size):
    plan, workers = build(random_lengths(300)), [build(random_lengths(300)) for _ in range(world_size)]
    for step in range(2 * plan.num_batches):
        slices = [worker.batch(step)[rank::world_size] for rank, worker in enumerate(workers)]
        assert sorted(np.concatenate(slices)) == sorted(plan.batch(step))


def test_any_step_is_found_without_the_steps_before():
    plan, other = build(random_lengths(300)), build(random_lengths(300))
    steps = list(range(3 * plan.num_batches))
    forward = {step: plan.batch(step).tolist() for step in steps}
    for step in np.random.default_rng(0).permutation(steps):
        assert other.batch(int(step)).tolist() == forward[step]


def test_order_depends_on_seed_epoch_and_text():
    lengths = random_lengths(300)
    plan = build(lengths)
    first = [plan.batch(step).tolist() for step in range(plan.num_batches)]
    assert [plan.batch(plan.num_batches + step).tolist() for step in range(plan.num_batches)] != first
    assert [build(lengths, seed=2).batch(step).tolist() for step in range(plan.num_batches)] != first
    assert [build(lengths, text="other").batch(step).tolist() for step in range(plan.num_batches)] != first


def test_the_tree_does_not_change_the_batches_unless_nodes_count():
    flat, deep = random_lengths(300), random_lengths(300)
    deep["nodes"] = deep["nodes"] + 5
    assert [build(flat).batch(s).tolist() for s in range(5)] == [build(deep).batch(s).tolist() for s in range(5)]
    counted = build(deep, budget_counts="leaves_and_nodes")
    for step in range(counted.num_batches):
        rows = counted.batch(step)
        assert len(rows) * (deep["leaves"] + deep["nodes"])[rows].max() <= 120
    assert counted.num_batches > build(deep).num_batches


def test_fractions_nest_and_are_about_the_size_asked_for():
    ids = np.arange(20_000)
    masks = [choose_fraction(ids, fraction) for fraction in (0.02, 0.05, 0.3, 0.9, 1.0)]
    for smaller, larger in zip(masks, masks[1:], strict=False):
        assert not (smaller & ~larger).any()
    for mask, fraction in zip(masks, (0.02, 0.05, 0.3, 0.9, 1.0), strict=True):
        assert abs(mask.mean() - fraction) < 0.01
    plan = build(random_lengths(1000), fraction=0.3)
    assert set(plan.rows) == set(np.flatnonzero(choose_fraction(np.arange(1000), 0.3)))


def test_shares_that_are_drawn_by_the_seed_nest_within_it_and_differ_between_seeds():
    ids = np.arange(20_000)
    masks = {seed: [choose_fraction(ids, fraction, seed) for fraction in (0.05, 0.3, 0.9, 1.0)] for seed in (0, 1, 2**63 - 1)}
    for sizes in masks.values():
        for smaller, larger in zip(sizes, sizes[1:], strict=False):
            assert not (smaller & ~larger).any()
        assert [mask.mean() for mask in sizes] == pytest.approx([0.05, 0.3, 0.9, 1.0], abs=0.01)
    for one, other in ((0, 1), (1, 2**63 - 1)):
        assert (masks[one][1] & masks[other][1]).mean() == pytest.approx(0.09, abs=0.01), "independent draws"


def test_a_plan_draws_by_the_seed_where_it_is_told_to_and_else_as_ever():
    lengths, ids = random_lengths(1000), np.arange(1000)
    for seed in (1, 2):
        assert set(build(lengths, seed=seed, fraction=0.3).rows) == set(np.flatnonzero(choose_fraction(ids, 0.3)))
        drawn = build(lengths, seed=seed, fraction=0.3, subset="by_seed")
        assert set(drawn.rows) == set(np.flatnonzero(choose_fraction(ids, 0.3, seed)))
    full = [build(lengths, subset=subset).batch(5).tolist() for subset in ("fixed", "by_seed")]
    assert full[0] == full[1], "of all examples there is one draw"


def test_draws_stay_what_they_are():
    """Runs of any version continue on the batches that they began with."""
    assert np.flatnonzero(choose_fraction(np.arange(40), 0.2)).tolist() == [3, 10, 18, 21, 33]
    assert np.flatnonzero(choose_fraction(np.arange(40), 0.2, 1)).tolist() == [6, 9, 12, 22, 31, 36]
    plan = build(random_lengths(1000), seed=3, fraction=0.3)
    assert [plan.batch(step).tolist() for step in (0, 100)] == [[183, 224, 636, 263], [456, 33, 779, 233]]


def test_long_and_empty_examples_are_left_out_and_counted():
    plan = build(make_lengths([5, 0, 50, 7], [5, 3, 4, 60]), max_leaves=20, max_target_pieces=20)
    assert plan.rows.tolist() == [0]
    assert plan.left_out == {"fraction": 0, "length": 3}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"max_tokens": 20}, "max_tokens must be at least 31"),
        ({"max_leaves": 1, "max_target_pieces": 1}, "leave no training example"),
    ],
)
def test_impossible_budgets_are_refused(batch, message):
    with pytest.raises(UserError, match=message):
        build(make_lengths([30, 20]), **batch)


def test_plan_in_order_holds_every_row_once_and_isolates_what_exceeds_the_budget():
    lengths = make_lengths([3, 90, 4, 5, 3], [3, 2, 2, 2, 2])
    batches = list(plan_in_order(lengths, 12))
    assert sorted(np.concatenate(batches)) == [0, 1, 2, 3, 4]
    assert [1] in [rows.tolist() for rows in batches]
    assert list(plan_in_order(make_lengths([]), 12)) == []


def test_hardest_batch_has_the_most_attention_scores():
    lengths = random_lengths(300)
    plan = build(lengths)
    costs = np.maximum(lengths["leaves"], lengths["tgt_pieces"] + 1)
    scores = [len(rows) * int(costs[rows].max()) ** 2 for rows in map(plan.batch, range(plan.num_batches))]
    rows = plan.hardest_batch()
    assert len(rows) * int(costs[rows].max()) ** 2 == max(scores)
