"""The figures of study L (docs/results/blimp.py)."""

import blimp
import numpy as np
import pytest
from scipy.stats import ttest_ind

# As BLiMP names them: 16 of 67 are of agreement.
NAMES = [f"anaphor_agreement_{i}" for i in range(16)] + [f"island_{i}" for i in range(51)]


@pytest.fixture
def found():
    rng = np.random.default_rng(1)
    runs = [("tree_reg", 5, 0.62), ("tree_reg_shuffled", 5, 0.6), ("tree_reg_right", 3, 0.59)]
    return [
        {
            "cell": f"{system}-seed{seed}",
            "labels": {"system": system, "seed": seed},
            "scores": {"pairs": {"groups": {"UID": {name: {"pair_accuracy": mean + rng.normal() / 10} for name in NAMES}}}},
        }
        for system, seeds, mean in runs
        for seed in range(seeds, 0, -1)  # not in order
    ]


def test_own_minus_other_trees_is_that_of_scipy(found):
    for measure, names in (("all paradigms", NAMES), ("agreement", NAMES[:16])):
        table = {
            (one["labels"]["system"], one["labels"]["seed"]): 100
            * np.mean([one["scores"]["pairs"]["groups"]["UID"][name]["pair_accuracy"] for name in names])
            for one in found
        }
        for system, seeds in (("tree_reg_shuffled", 5), ("tree_reg_right", 3)):
            ours, theirs = ([table[name, seed] for seed in range(1, n + 1)] for name, n in (("tree_reg", 5), (system, seeds)))
            assert blimp.values(found, system, measure) == pytest.approx(theirs)
            wanted = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
            assert blimp.own_minus(found, system, measure) == pytest.approx([np.mean(ours) - np.mean(theirs), *wanted])


def test_a_run_without_all_paradigms_has_no_figure(found):
    del found[0]["scores"]["pairs"]["groups"]["UID"][NAMES[0]]
    for measure in (blimp.of_all, blimp.of_agreement):
        with pytest.raises(AssertionError, match="tree_reg-seed5 has (66|15) paradigms"):
            measure(found[0])
