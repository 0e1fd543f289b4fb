"""Dunnett's test against SciPy's, Student's t, and simulations."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import gammaincinv, ndtr

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
    for num_sentences, of_sentences in ((None, 1.96), (6, 2.5706)):
        half = (0.6 * 2.7764 + 0.4 * of_sentences) * np.sqrt(2 / 3 + 4 / 9)
        found = compare_with_baseline(values, "base", {"a": 4 / 9}, num_sentences=num_sentences)["a"]
        assert found.interval[1] - found.difference == pytest.approx(half, rel=1e-3)


def test_a_huge_difference_has_a_p():
    values = {"base": [0.0, 1.0], "a": [1e6, 1e6 + 1]}
    assert compare_with_baseline(values, "base", {"a": 0.0})["a"].p_value == 1e-6


def test_too_few_runs_have_no_test():
    assert compare_with_baseline({"base": [1.0], "a": [2.0]}, "base", {"a": 0.0}) == {}
    assert compare_with_baseline({"base": [1.0, 2.0]}, "base", {}) == {}
    assert compare_with_baseline({"base": [1.0, 2.0], "a": [2.0]}, "base", {"a": 0.1}, num_sentences=1) == {}
    assert probability_below(0.0, [3], 3, 4) == pytest.approx(0.0, abs=1e-12)


def found_with(critical: float, freedom: int | None, shift: float) -> float:
    """The share of tests with |t| above `critical`, at a true difference of `shift` errors: a mean over many deviations."""
    shares = (np.arange(20_000) + 0.5) / 20_000
    deviation = np.ones(1) if freedom is None else np.sqrt(2 * gammaincinv(freedom / 2, shares) / freedom)
    return float((ndtr(shift - critical * deviation) + ndtr(-shift - critical * deviation)).mean())


@pytest.mark.parametrize("level", [0.3, 0.5, 0.9, 0.95])
@pytest.mark.parametrize(("base", "a"), [([1.0, 2.0, 4.0], [2.0, 5.0, 3.0, 9.0, 4.0]), ([1.0], [2.0, 4.0]), ([1.0, 4.0], [6.0])])
def test_one_system_has_the_test_of_students_t_for_unequal_numbers(base, a, level):
    found = compare_with_baseline({"base": base, "a": a}, "base", {"a": 0.0}, level)["a"]
    freedom = len(base) + len(a) - 2
    pooled = (np.var(base) * len(base) + np.var(a) * len(a)) / freedom
    error, difference = math.sqrt(pooled * (1 / len(base) + 1 / len(a))), np.mean(a) - np.mean(base)
    half = t_quantile(freedom, level) * error
    assert (found.difference, found.deviation, found.freedom) == pytest.approx((difference, math.sqrt(pooled), freedom))
    assert found.interval == pytest.approx((difference - half, difference + half), rel=1e-4)
    assert t_quantile(freedom, 1 - found.p_value) == pytest.approx(abs(difference) / error, rel=1e-3)
    assert found_with(t_quantile(freedom, level), freedom, found.seen / error) == pytest.approx(0.8, abs=2e-3)
    assert len({found, replace(found)}) == 1  # a value


@pytest.mark.parametrize(("of_sentences", "freedom"), [(0.6, 4), (2 / 3, None), (2.0, None)])
def test_the_critical_value_and_power_follow_the_larger_variance(of_sentences, freedom):
    """The variance over seeds is 2 / 3. Up to one half of the whole, the test counts as normal."""
    found = compare_with_baseline({"base": [1.0, 2.0, 3.0], "a": [2.0, 3.0, 4.0]}, "base", {"a": of_sentences})["a"]
    total = 2 / 3 + of_sentences
    critical = (2.776445 * 2 / 3 + 1.959964 * of_sentences) / total
    assert found.interval == pytest.approx((1 - critical * math.sqrt(total), 1 + critical * math.sqrt(total)), rel=1e-5)
    assert found_with(critical, freedom, found.seen / math.sqrt(total)) == pytest.approx(0.8, abs=1e-4)
    at_p = (t_quantile(4, 1 - found.p_value) * 2 / 3 + t_quantile(10**9, 1 - found.p_value) * of_sentences) / total
    assert at_p == pytest.approx(1 / math.sqrt(total), rel=1e-3)


def test_critical_values_of_small_levels():
    assert critical_value((3,), 3, 4, 0.5) == pytest.approx(t_quantile(4, 0.5), rel=1e-6)
    assert critical_value((3, 3), 3, 4, 0.0) == critical_value((3, 3), 3, 4, -1.0) == 0
    assert critical_value((2, 3), 3, 4, 0.9) is critical_value((2, 3), 3, 4, 0.9)  # it is computed once
    assert 0 < critical_value((3, 3), 3, 4, 0.01) < critical_value((3, 3), 3, 4, 0.02)


def test_all_t_are_below_a_value_as_often_as_in_draws():
    """Three systems with other numbers of seeds than the baseline has, with the variance known and estimated."""
    random, counts, draws = np.random.default_rng(1), np.array([2, 4, 7]), 200_000
    means = random.normal(size=(draws, 4)) / np.sqrt([3, *counts])
    t = (means[:, 1:] - means[:, :1]) / np.sqrt(1 / 3 + 1 / counts)
    for freedom in (None, 3):
        deviation = np.ones(draws) if freedom is None else np.sqrt(random.chisquare(freedom, draws) / freedom)
        for value in (0.8, 2.0):
            share = (np.abs(t).max(1) < value * deviation).mean()
            assert probability_below(value, counts.tolist(), 3, freedom) == pytest.approx(share, abs=0.005)


def test_systems_without_any_variance_are_left_out():
    values = {"base": [1.0, 1.0], "a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert list(compare_with_baseline(values, "base", {"a": 0.0, "b": 1.0})) == ["b"]
    assert compare_with_baseline(values, "none", {"a": 1.0, "b": 1.0, "base": 1.0}) == {}
    assert list(compare_with_baseline({"a": [1.0, 2.0], "base": [3.0]}, "base", {"a": 0.0})) == ["a"]
    for few in ({"base": [1.0, 2.0]}, {"base": [1.0], "a": [2.0], "b": [3.0]}, {"a": [1.0, 2.0]}):
        assert compare_with_baseline(few, "base", dict.fromkeys(few, 1.0)) == {}
