"""Dunnett's test against SciPy's, Student's t, and simulations."""

import numpy as np
import pytest

from treenet.evaluation.significance import compare_with_baseline, critical_value, probability_below, t_quantile


def no_sentences(values):
    return dict.fromkeys(values, 0.0)


@pytest.mark.parametrize("freedom", [2, 4, 15])
def test_one_system_is_students_t(freedom):
    from scipy import stats  # here: it loads for more than a second, in every process of pytest-xdist

    assert critical_value((3,), 3, freedom) == pytest.approx(t_quantile(freedom), rel=1e-6)
    assert critical_value((3,), 5, None) == pytest.approx(stats.norm.ppf(0.975), rel=1e-8)


def test_values_are_those_of_dunnetts_table():
    """Two-sided 5 % points of Dunnett (1964), equal numbers: k systems beside the control, degrees of freedom."""
    for systems, freedom, value in ((2, 10, 2.57), (3, 12, 2.68), (4, 20, 2.65), (2, 15, 2.44)):
        assert critical_value((5,) * systems, 5, freedom) == pytest.approx(value, abs=0.006)


def test_p_is_that_of_scipy():
    from scipy import stats

    rng = np.random.default_rng(3)
    values = {name: list(rng.normal(shift, 1, count)) for name, shift, count in (("base", 0, 6), ("a", 0.4, 5), ("b", 1.5, 6))}
    found = compare_with_baseline(values, "base", no_sentences(values))
    theirs = stats.dunnett(values["a"], values["b"], control=values["base"], rng=1)
    assert [found[name].p_value for name in "ab"] == pytest.approx(theirs.pvalue, abs=2e-3)
    interval = theirs.confidence_interval()
    for place, name in enumerate("ab"):
        assert found[name].interval == pytest.approx((interval.low[place], interval.high[place]), abs=0.02)
        assert found[name].freedom == 14


def test_intervals_hold_all_differences_together_and_power_is_as_told():
    """Over simulated studies of three systems with three seeds: all intervals hold 0 in 95 %, and `seen` is found in 80 %."""
    rng, critical = np.random.default_rng(0), critical_value((3, 3), 3, 6)
    seen = compare_with_baseline({"base": [0, 1, 2], "a": [0, 1, 2], "b": [0, 1, 2]}, "base", dict.fromkeys("ab", 0.0))["a"]
    studies = 4000
    draws = rng.normal(size=(studies, 3, 3))
    pooled = np.sqrt(draws.var(axis=2, ddof=1).mean(1))
    error = pooled * np.sqrt(2 / 3)
    t = (draws[:, 1:].mean(2) - draws[:, :1].mean(2)) / error[:, None]
    held = (np.abs(t).max(1) < critical).mean()
    found_it = (np.abs(t[:, 0] + seen.seen / error) > critical).mean()  # the deviation of one seed is 1 in both
    assert held == pytest.approx(0.95, abs=0.012) and found_it == pytest.approx(0.8, abs=0.02)


def test_variance_over_sentences_widens_an_interval():
    values = {"base": [1.0, 2.0, 3.0], "a": [2.0, 3.0, 4.0]}
    narrow, wide = (compare_with_baseline(values, "base", {"a": variance})["a"] for variance in (0.0, 1.0))
    assert wide.interval[1] - wide.interval[0] > narrow.interval[1] - narrow.interval[0] and wide.seen > narrow.seen
    half = (0.6 * 2.7764 + 0.4 * 1.96) * np.sqrt(2 / 3 + 4 / 9)
    found = compare_with_baseline(values, "base", {"a": 4 / 9})["a"]
    assert found.interval[1] - found.difference == pytest.approx(half, rel=1e-3)


def test_a_huge_difference_has_a_p():
    values = {"base": [0.0, 1.0], "a": [1e6, 1e6 + 1]}
    assert compare_with_baseline(values, "base", {"a": 0.0})["a"].p_value == 1e-6


def test_too_few_runs_have_no_test():
    assert compare_with_baseline({"base": [1.0], "a": [2.0]}, "base", {"a": 0.0}) == {}
    assert compare_with_baseline({"base": [1.0, 2.0]}, "base", {}) == {}
    assert probability_below(0.0, [3], 3, 4) == pytest.approx(0.0, abs=1e-12)
