"""Tests and intervals over seeds: how often they hold the truth, and what they are about."""

import math
from dataclasses import replace

import numpy as np
import pytest

from treenet.evaluation.significance import (
    ABOUT_SEEDS,
    EXPLORATORY,
    SYSTEMS,
    SeedTest,
    compare_examples,
    compare_over_seeds,
    correct_family,
    summarize,
    t_quantile,
)
from treenet.experiments.tables import show_p_values

SENTENCES = 200
# Deviations of what differs between systems: of a seed on all sentences, of a sentence for all seeds, of a seed on a sentence.
SPREADS = {"mostly seeds": (0.1, 0.2, 0.2), "as much of each": (0.05, 0.7, 0.7), "mostly sentences": (0.02, 1.0, 0.5)}


def draw(random: np.random.Generator, seeds: int, spread: tuple[float, float, float]) -> np.ndarray:
    """Differences [seeds, sentences] between two systems that are equally good."""
    of_seeds, of_sentences, of_both = spread
    return (
        of_seeds * random.normal(size=(seeds, 1))
        + of_sentences * random.normal(size=(1, SENTENCES))
        + of_both * random.normal(size=(seeds, SENTENCES))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "name"), [*((3, name) for name in SPREADS), (5, "as much of each"), (10, "mostly seeds")])
def test_an_interval_of_95_percent_holds_the_truth_so_often(seeds, name):
    random, runs = np.random.default_rng(seeds), 600
    tests = [compare_examples(draw(random, seeds, SPREADS[name])) for _ in range(runs)]
    held = sum(test.interval[0] <= 0 <= test.interval[1] for test in tests)
    assert 0.93 <= held / runs <= 0.99
    assert all(test.starred == (not test.interval[0] <= 0 <= test.interval[1]) for test in tests)


def test_the_interval_is_students_t_where_sentences_do_not_vary():
    found = compare_over_seeds([1.0, 2.0, 3.0], 0.0, 500)
    half = 4.3027 / math.sqrt(3)
    assert found.difference == 2 and found.interval == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert found.p_value == pytest.approx(0.0742, abs=1e-4)  # t = 3.464 with 2 degrees of freedom
    assert (found.seeds_error, found.sentences_error) == (pytest.approx(1 / math.sqrt(3)), 0)
    assert found.about == ABOUT_SEEDS


def test_the_interval_is_that_of_sentences_where_seeds_do_not_vary():
    found = compare_over_seeds([2.0, 2.0, 2.0], 0.25, 500)
    assert found.interval == pytest.approx((2 - 1.9647 * 0.5, 2 + 1.9647 * 0.5), abs=1e-3) and found.starred


def test_both_variances_widen_the_interval():
    widths = []
    for variance in (0.0, 0.01, 0.1, 1.0):
        low, high = compare_over_seeds([1.0, 2.0, 3.0, 2.5], variance, 500).interval
        widths.append(high - low)
    assert widths == sorted(widths) and widths[-1] > widths[0]


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "of_sentences"), [(3, 0.0), (8, 0.1), (5, 10.0)])
def test_a_difference_of_the_size_seen_is_found_in_80_percent_of_studies(seeds, of_sentences):
    """Its variance is the true one here: that over seeds is 1, that over sentences is `of_sentences`."""
    values = np.arange(seeds) - (seeds - 1) / 2
    seen = compare_over_seeds(list(values / values.std(ddof=1)), of_sentences, 500).seen
    random, found = np.random.default_rng(1), 0
    for _ in range(500):
        differences = seen + random.normal(size=seeds) + math.sqrt(of_sentences) * random.normal()
        found += compare_over_seeds(differences.tolist(), of_sentences, 500).p_value < 0.05
    assert 0.74 < found / 500 < 0.9


@pytest.mark.parametrize("differences", [[5.0], [5.0, 5.1]])
def test_fewer_than_three_seeds_get_neither_interval_nor_star(differences):
    found = compare_over_seeds(differences, 1e-9, 500)
    assert (found.interval, found.p_value, found.seen, found.starred) == (None, None, None, False)
    assert summarize(differences)["half_interval"] is None


def test_constant_differences_are_not_tested():
    assert compare_over_seeds([0.0, 0.0, 0.0], 0.0, 500).p_value is None


def test_one_sentence_tells_nothing_about_others():
    found = compare_examples(np.array([[1.0], [0.0], [1.0]]))
    assert (found.interval, found.p_value, found.seen) == (None, None, None) and found.difference == pytest.approx(2 / 3)
    assert compare_over_seeds([1.0, 0.0, 1.0], 0.0, None).interval == compare_over_seeds([1.0, 0.0, 1.0], 0.0, 9).interval


def test_a_p_value_is_never_shown_as_0():
    shown = show_p_values(replace(make_tests(1e-5)[0], family="systems", holm_p_value=2e-4))
    assert shown == ["< 0.001", "< 0.001*"]


def test_t_quantiles_are_those_of_the_tables():
    for freedom, value in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423)):
        assert t_quantile(freedom) == pytest.approx(value, abs=2e-4)
    assert t_quantile(4, 0.99) == pytest.approx(4.6041, abs=2e-4) and t_quantile(499, 0.9) == pytest.approx(1.6479, abs=2e-4)


def test_intervals_of_means_are_over_seeds():
    found = summarize([1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["half_interval"] == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert summarize([1.0, 2.0])["half_interval"] is None


def make_tests(*p_values: float | None) -> list[SeedTest]:
    return [SeedTest(1.0, 3, None, p_value, None, None) for p_value in p_values]


def test_holms_p_values_are_those_of_the_definition():
    """Rejected at level alpha, stepping down from the smallest p until one is above alpha / (how many are left)."""
    random = np.random.default_rng(1)
    for _ in range(200):
        p_values = random.choice([0.001, 0.01, 0.012, 0.02, 0.04, 0.3, 0.9], size=random.integers(1, 7)).tolist()
        corrected = [test.holm_p_value for test in correct_family(make_tests(*p_values), SYSTEMS)]
        for alpha in (0.005, 0.05, 0.1, 0.5):
            rejected, left = set(), len(p_values)
            for place in sorted(range(len(p_values)), key=p_values.__getitem__):
                if p_values[place] > alpha / left:
                    break
                rejected.add(place)
                left -= 1
            assert {place for place, value in enumerate(corrected) if value <= alpha} == rejected


def test_a_family_is_of_those_with_a_p_value_and_its_stars_are_of_the_corrected_ones():
    found = correct_family(make_tests(0.03, None, 0.01, 0.04), SYSTEMS)
    assert [test.holm_p_value for test in found] == pytest.approx([0.06, None, 0.03, 0.06])
    assert [test.starred for test in found] == [False, False, True, False]
    assert {test.family for test in found} == {SYSTEMS} and correct_family([], SYSTEMS) == []
    alone = make_tests(0.03)[0]
    assert alone.starred and not replace(alone, family=EXPLORATORY).starred
