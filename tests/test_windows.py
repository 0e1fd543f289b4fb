"""Plans of several windows against a slow plan from the definition, which reads all rows."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treenet.config import BatchConfig
from treenet.data.batch import cut_batches, cut_runs
from treenet.data.plan import BatchPlan, plan_in_order
from treenet.data.windows import ShardSizes
from treeproc.common.settings import UserError
from treeproc.shards.lengths import Column, CountedLengths, SizeCounts
from treeproc.shards.rows import hash_ids, window_bounds
from treeproc.shards.store import fingerprint_of

SIZES = ("leaves", "tgt_pieces", "nodes")
# Rows by shard: leaves, target pieces and nodes of each.
SHARDS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)), max_size=12), min_size=1, max_size=8
).filter(lambda shards: sum(map(len, shards)))
SETTINGS = st.fixed_dictionaries(
    {
        "window_rows": st.integers(1, 40),
        "max_tokens": st.integers(16, 60),
        "max_leaves": st.sampled_from([5, 256]),
        "max_target_pieces": st.sampled_from([6, 256]),
        "fraction": st.sampled_from([0.2, 0.5, 0.9, 1.0]),
        "subset": st.sampled_from(["fixed", "by_seed"]),
        "budget_counts": st.sampled_from(["leaves", "leaves", "leaves_and_nodes"]),
    }
)


def column(pieces: list[np.ndarray]) -> Column:
    filled = [piece for piece in pieces if len(piece)]
    addresses, sizes = (np.array([f(piece) for piece in filled], dtype=np.int64) for f in (lambda piece: piece.ctypes.data, len))
    return Column(addresses, sizes, pieces[0].dtype, filled)


def rows_of(shards: list) -> tuple[dict[str, Column], ShardSizes]:
    """Lengths as a source has them, one piece a shard, with ids that have gaps."""
    sizes = np.array([len(shard) for shard in shards])
    edges = np.cumsum([0, *sizes])
    ids = np.arange(edges[-1], dtype=np.int64) * 3 + 1
    columns = {
        name: column([np.array([row[place] for row in shard], dtype=np.int32) for shard in shards])
        for place, name in enumerate(SIZES)
    }
    columns["example_id"] = column([ids[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)])
    return columns, ShardSizes(sizes, CountedLengths("lengths.arrow", columns, sizes).count)


def reference_bounds(sizes: list[int], window_rows: int) -> list[int]:
    """Rows where windows begin, and their end."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    windows = max(1, math.ceil(edges[-1] / window_rows))
    nearest = [min(edges, key=lambda edge: (abs(edge - edges[-1] * i // windows), edge)) for i in range(1, windows)]
    return sorted({0, *nearest, edges[-1]})


def seeded(value: int, seed: int | None) -> int:
    mixed = int(hash_ids(np.array([value], dtype=np.uint64))[0])
    return mixed if seed is None else seeded(mixed ^ seeded(seed, None), None)


def reference_share(rows: list[int], row: list[dict], window: int | None, batch: BatchConfig, seed: int) -> list[int]:
    """The rows of a window that a share has."""
    draw = seed if batch.subset == "by_seed" else None
    if batch.fraction == 1:
        return rows
    if window is None:
        return [i for i in rows if seeded(row[i]["example_id"], draw) < int(batch.fraction * 2**64)]
    chosen = []
    for leaves, targets in {(row[i]["leaves"], row[i]["tgt_pieces"]) for i in rows}:
        cell = [i for i in rows if (row[i]["leaves"], row[i]["tgt_pieces"]) == (leaves, targets)]
        u = (seeded(seeded(leaves * 2**32 + targets, None) ^ seeded(window, None), draw) >> 11) / 2**53
        cell.sort(key=lambda i: seeded(row[i]["example_id"], draw))
        chosen += cell[: math.floor(batch.fraction * len(cell) + u)]
    return sorted(chosen)


def reference_epoch(shards: list, batch: BatchConfig, seed: int, epoch: int) -> tuple[list[list[int]], dict[str, int]]:
    """All batches of an epoch, and how many rows are left out why."""
    every = [dict(zip(SIZES, sizes, strict=True)) for shard in shards for sizes in shard]
    for number, row in enumerate(every):
        row["example_id"] = 3 * number + 1
        source = row["leaves"] + (row["nodes"] if batch.budget_counts == "leaves_and_nodes" else 0)
        row["cost"] = max(source, row["tgt_pieces"] + 1)
    bounds = reference_bounds([len(shard) for shard in shards], batch.window_rows)
    windows, key = len(bounds) - 1, int(fingerprint_of("text", seed), 16)
    out, left_out = [], {"fraction": 0, "length": 0}
    for window in np.random.default_rng([key, epoch]).permutation(windows).tolist() if windows > 1 else [0]:
        rows = list(range(bounds[window], bounds[window + 1]))
        chosen = reference_share(rows, every, window if windows > 1 else None, batch, seed)
        left_out["fraction"] += len(rows) - len(chosen)
        used = [
            i for i in chosen if 1 <= every[i]["leaves"] <= batch.max_leaves and every[i]["tgt_pieces"] <= batch.max_target_pieces
        ]
        left_out["length"] += len(chosen) - len(used)
        random = np.random.default_rng([key, epoch, window] if windows > 1 else [key, epoch])
        shuffled = sorted([used[i] for i in random.permutation(len(used))], key=lambda i: every[i]["cost"])
        batches: list[list[int]] = []
        for i in shuffled:
            if batches and every[i]["cost"] * (len(batches[-1]) + 1) <= batch.max_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        out += [batches[i] for i in random.permutation(len(batches))]
    return out, left_out


@num_examples(150)
@given(SHARDS, SETTINGS, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_batches_are_those_of_the_definition(shards, values, seed, order):
    batch = BatchConfig(**values)
    epochs, left_out = zip(*(reference_epoch(shards, batch, seed, epoch) for epoch in range(3)), strict=True)
    lengths, sizes = rows_of(shards)
    assume(epochs[0])
    plan = BatchPlan.build(lengths, batch, text_fingerprint="text", seed=seed, shards=sizes)
    assert plan.left_out == left_out[0] and plan.num_batches == len(epochs[0]) == len(epochs[1]), "known without the rows"
    expected = [rows for epoch in epochs for rows in epoch]
    for step in np.random.default_rng(order).permutation(len(expected)).tolist():  # a run may begin at any step
        assert plan.batch(step).tolist() == expected[step]
        assert plan.epoch(step) == step // len(epochs[0])
    used = sorted(row for rows in epochs[0] for row in rows)
    assert plan.rows.tolist() == used == sorted(row for rows in epochs[1] for row in rows)
    sizes_used = plan.used_sizes()
    assert sizes_used.rows.sum() == len(used)
    assert (sizes_used.leaves * sizes_used.rows).sum() == np.asarray(lengths["leaves"])[used].sum()
    if batch.fraction == 1:
        assert sizes_used.nodes.sum() == np.asarray(lengths["nodes"])[used].sum()
    costs = np.maximum(
        np.asarray(lengths["leaves"]) + np.asarray(lengths["nodes"]) * (batch.budget_counts == "leaves_and_nodes"),
        np.asarray(lengths["tgt_pieces"]) + 1,
    )
    scores = [len(rows) * int(costs[rows].max()) ** 2 for rows in epochs[0]]
    hardest = plan.hardest_batch()
    assert len(hardest) * int(costs[hardest].max()) ** 2 == max(scores) and sorted(hardest) in map(sorted, epochs[0])


@given(SHARDS, SETTINGS, st.integers(0, 3))
def test_the_window_that_follows_is_known_before_it_begins(shards, values, seed):
    batch = BatchConfig(**values)
    lengths, sizes = rows_of(shards)
    try:
        plan = BatchPlan.build(lengths, batch, text_fingerprint="text", seed=seed, shards=sizes)
    except UserError:
        assume(False)
    bounds = reference_bounds([len(shard) for shard in shards], batch.window_rows)
    window_of = [int(np.searchsorted(bounds, plan.batch(step)[0], side="right")) - 1 for step in range(3 * plan.num_batches)]
    for step in range(plan.num_batches):
        rest = window_of[step : plan.num_batches]
        same = next((i for i, window in enumerate(rest) if window != window_of[step]), len(rest))  # batches of this window
        following = window_of[step + same]
        assert plan.next_rows(step) == range(bounds[following], bounds[following + 1])


@given(SHARDS, SETTINGS, st.integers(0, 3), st.integers(1, 3))
def test_control_trees_have_the_batches_of_their_text(shards, values, seed, more):
    """Other trees over the same pieces have other nodes, and nothing else."""
    batch = BatchConfig(**{**values, "budget_counts": "leaves"})
    others = [[(leaves, targets, nodes * more + 1) for leaves, targets, nodes in shard] for shard in shards]
    plans = []
    for data in (shards, others):
        lengths, sizes = rows_of(data)
        try:
            plans.append(BatchPlan.build(lengths, batch, text_fingerprint="text", seed=seed, shards=sizes))
        except UserError:
            assume(False)
    one, other = plans
    assert one.num_batches == other.num_batches
    for step in range(2 * one.num_batches):
        assert one.batch(step).tolist() == other.batch(step).tolist()


@given(SHARDS, SETTINGS, st.integers(0, 3))
def test_smaller_shares_nest_in_larger_ones(shards, values, seed):
    lengths, sizes = rows_of(shards)
    shares = []
    for fraction in (0.1, 0.3, 0.5, 0.8, 1.0):
        batch = BatchConfig(**{**values, "fraction": fraction})
        try:
            plan = BatchPlan.build(lengths, batch, text_fingerprint="text", seed=seed, shards=sizes)
        except UserError:
            continue
        shares.append(set(plan.rows.tolist()))
    assert all(smaller <= larger for smaller, larger in zip(shares, shares[1:], strict=False))


def test_a_share_of_several_windows_is_about_as_large_as_asked_for():
    random = np.random.default_rng(0)
    shards = [[tuple(row) for row in random.integers(1, 9, (1000, 3)).tolist()] for _ in range(8)]
    lengths, sizes = rows_of(shards)
    drawn = {}
    for seed in (0, 1):
        batch = BatchConfig(max_tokens=500, window_rows=2000, fraction=0.3, subset="by_seed")
        drawn[seed] = BatchPlan.build(lengths, batch, text_fingerprint="text", seed=seed, shards=sizes).rows
        assert len(drawn[seed]) == pytest.approx(2400, abs=60)
    assert len(np.intersect1d(*drawn.values())) == pytest.approx(720, abs=100), "independent draws"


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 400))
def test_bounds_of_windows_follow_from_rows_alone(sizes, window_rows):
    edges = np.cumsum([0, *sizes])
    bounds = window_bounds(np.array(sizes, dtype=np.int64), window_rows)
    assert sorted(set(edges[bounds].tolist())) == reference_bounds(sizes, window_rows)
    if sum(sizes) <= window_rows:
        assert bounds.tolist() == sorted({0, len(sizes)}), "one window"
    assert (np.diff(edges[bounds]) <= window_rows + max(sizes, default=0)).all()


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 120))
def test_cuts_over_runs_are_those_over_rows(costs, max_tokens):
    """Against adding one row after the other."""
    costs = sorted(costs)
    starts = []
    for i, cost in enumerate(costs):
        if not starts or max(1, cost) * (i + 1 - starts[-1]) > max_tokens:
            starts.append(i)
    expected = [*starts, len(costs)] if costs else [0]
    assert cut_batches(np.array(costs, dtype=np.int16), max_tokens).tolist() == expected
    values, counts = np.unique(costs, return_counts=True)
    assert cut_runs(values, counts, max_tokens).tolist() == expected


@given(st.lists(st.tuples(*[st.integers(0, 5) | st.integers(0, 2**31 - 1)] * 3), max_size=30), st.integers(0, 30))
def test_counts_are_those_of_the_rows_and_merge(rows, cut):
    def count(part: list) -> SizeCounts:
        return SizeCounts.of(*np.array(part, dtype=np.int32).reshape(-1, 3).T)

    counts = SizeCounts.merge([count(rows[:cut]), count(rows[cut:])])
    for found in (counts, count(rows)):
        cells = {(leaves, targets) for leaves, targets, _ in rows}
        assert list(zip(found.leaves.tolist(), found.tgt_pieces.tolist(), strict=True)) == sorted(cells)
        for leaves, targets, number, nodes in zip(*map(np.ndarray.tolist, vars(found).values()), strict=True):
            same = [row for row in rows if row[:2] == (leaves, targets)]
            assert (number, nodes) == (len(same), sum(row[2] for row in same))


@given(SHARDS, st.integers(1, 40), st.integers(10, 60))
def test_validation_sorts_a_window_at_a_time(shards, window_rows, max_tokens):
    lengths, _ = rows_of(shards)
    count, seen = len(lengths["leaves"]), []
    costs = [max(one, other + 1) for one, other in zip(lengths["leaves"][:], lengths["tgt_pieces"][:], strict=True)]  # with EOS
    for batch in plan_in_order(lengths, max_tokens, window_rows):
        rows = batch.tolist()
        assert rows and len({row // window_rows for row in rows}) == 1
        assert len(rows) == 1 or len(rows) * max(costs[row] for row in rows) <= max_tokens
        seen += rows
    assert seen == sorted(range(count), key=lambda row: (row // window_rows, costs[row]))


def test_counts_of_other_rows_are_refused():
    shards = [[(3, 3, 0)] * 10, [(4, 4, 0)] * 10]
    lengths, sizes = rows_of(shards)
    wrong = ShardSizes(sizes.rows, lambda first, last: SizeCounts(*(np.array([x]) for x in (8, 8, 10, 0))))
    plan = BatchPlan.build(lengths, BatchConfig(max_tokens=20, window_rows=10), text_fingerprint="text", seed=1, shards=wrong)
    with pytest.raises(UserError, match="does not fit lengths.arrow"):
        plan.batch(0)
