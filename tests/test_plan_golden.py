"""Batches of one window stay what they were before there were windows: hashes taken from that version."""

import hashlib

import numpy as np
import pytest

from treenet.config import BatchConfig
from treenet.data.plan import BatchPlan, plan_in_order

# Settings, number of batches of an epoch, rows in use, and the hash of the batches.
GOLDEN = [
    ({"max_tokens": 200}, 317, 2957, "2640e6d78538125f"),
    ({"max_tokens": 4096}, 16, 2957, "d5766b0196dc50c7"),
    ({"max_tokens": 300, "max_leaves": 40, "max_target_pieces": 30}, 129, 2483, "44e1d65ea0fda2aa"),
    ({"max_tokens": 300, "fraction": 0.3}, 61, 861, "facd3a58ce75521b"),
    ({"max_tokens": 300, "fraction": 0.3, "subset": "by_seed", "max_leaves": 25}, 36, 689, "193f170c369de311"),
    ({"max_tokens": 500, "budget_counts": "leaves_and_nodes"}, 200, 2957, "c44540d052613b3e"),
    ({"max_tokens": 500, "budget_counts": "leaves_and_nodes", "fraction": 0.7}, 141, 2057, "c560498d6cdf53f7"),
]


def skewed_lengths(count: int) -> dict[str, np.ndarray]:
    """Sizes that are long-tailed, some empty, with ids that have gaps."""
    random = np.random.default_rng(11)
    leaves = np.minimum(random.poisson(random.gamma(2.0, 8.0, count)), 90)
    targets = np.minimum(random.poisson(leaves * 1.1), 120)
    ids = np.cumsum(random.integers(1, 4, count))
    sizes = {"leaves": leaves, "nodes": random.poisson(leaves * 0.9), "tgt_pieces": targets}
    return {"example_id": ids} | {name: column.astype(np.int32) for name, column in sizes.items()}


def digest(batches: list[np.ndarray]) -> str:
    lines = "\n".join(" ".join(map(str, rows.tolist())) for rows in batches)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("settings", "batches", "rows", "expected"), GOLDEN)
def test_batches_of_one_window_are_those_of_before(settings, batches, rows, expected):
    plan = BatchPlan.build(skewed_lengths(3000), BatchConfig(**settings), text_fingerprint="text", seed=7)
    every = [plan.batch(step) for step in range(2 * plan.num_batches)]
    assert (plan.num_batches, len(plan.rows)) == (batches, rows)
    assert digest([*every, plan.hardest_batch()]) == expected


def test_batches_of_a_validation_are_those_of_before():
    assert digest(list(plan_in_order(skewed_lengths(3000), 250))) == "defe07daf4ebfcee"
