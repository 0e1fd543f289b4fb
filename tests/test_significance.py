"""Tests and intervals over seeds: how often they hold the truth, and what they are about."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from test_dunnett import found_with

from treenet.evaluation.significance import (
    ABOUT_SEEDS,
    EXPLORATORY,
    PRIMARY,
    SYSTEMS,
    SeedTest,
    compare_correlations,
    compare_examples,
    compare_over_seeds,
    correct_family,
    correlate,
    holm,
    p_value_of,
    sample_weights,
    show_p_values,
    slopes,
    summarize,
    t_quantile,
)
from treenet.tasks.scores import SCORES
from treenet.tasks.tables import Score

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


def test_the_critical_value_is_a_mean_weighted_by_both_variances():
    """The values are those of Student's t for 3 seeds and for 5 sentences (Cochran and Cox, 1950), by quantiles of tables."""
    for sentence_variance in (0.1, 1 / 3, 2.0):
        found = compare_over_seeds([1.0, 2.0, 3.0], sentence_variance, 5)
        total = 1 / 3 + sentence_variance
        critical = (4.302653 / 3 + 2.776445 * sentence_variance) / total
        half = critical * math.sqrt(total)
        assert found.interval == pytest.approx((2 - half, 2 + half), rel=1e-6)
        assert (found.seeds_error, found.sentences_error) == pytest.approx((math.sqrt(1 / 3), math.sqrt(sentence_variance)))
        at_p = (t_quantile(2, 1 - found.p_value) / 3 + t_quantile(4, 1 - found.p_value) * sentence_variance) / total
        assert at_p == pytest.approx(2 / math.sqrt(total))
    assert found.holm_p_value is None and found.family == ""


@pytest.mark.parametrize(("sentence_variance", "freedom"), [(0.0, 2), (0.33, 2), (1 / 3, None), (1.0, None)])
def test_what_is_seen_is_found_with_a_probability_of_80_percent(sentence_variance, freedom):
    """With the degrees of freedom of the seeds if they make up more than half of the variance; else it is normal."""
    found = compare_over_seeds([1.0, 2.0, 3.0], sentence_variance, 100)
    error = math.sqrt(1 / 3 + sentence_variance)
    critical, shift = (found.interval[1] - 2) / error, found.seen / error
    assert found_with(critical, freedom, shift) == pytest.approx(0.8, abs=1e-4)


def test_how_many_seeds_and_sentences_have_a_test():
    for differences, sentences, tested in (
        ([1.0], 9, False),
        ([1.0, 2.0], 9, False),
        ([1.0, 2.0, 4.0], 1, False),
        ([1.0, 2.0, 4.0], 2, True),
        ([1.0, 2.0, 4.0], None, True),
        ([1.0, 2.0, 4.0, 4.0], 9, True),
    ):
        found = compare_over_seeds(differences, 0.0, sentences)
        assert (found.interval is not None, found.p_value is not None, found.seen is not None) == (tested,) * 3
        assert found.seeds == len(differences) and found.difference == pytest.approx(np.mean(differences))
    assert compare_over_seeds([1.0], 0.25, 9).seeds_error is None and compare_over_seeds([1.0], 0.25, 9).sentences_error == 0.5
    assert compare_over_seeds([1.0, 3.0], 0.0, 9).seeds_error == 1
    assert len({found, replace(found)}) == 1  # a value


def test_differences_of_examples_have_the_variance_of_their_means():
    differences = np.array([[1.0, 4.0], [0.0, 1.0], [5.0, 1.0]])
    found = compare_examples(differences)  # the means of the two sentences are 2 and 2, of the seeds 2.5, 0.5 and 3
    assert (found.difference, found.sentences_error) == (2, 0) and found.interval is not None
    assert found.seeds_error == pytest.approx(np.std([2.5, 0.5, 3.0], ddof=1) / math.sqrt(3))
    differences[0, 1] += 12  # now 2 and 6: their variance is 8
    assert compare_examples(differences).sentences_error == pytest.approx(2)
    assert compare_examples(differences[:, :1]).sentences_error == 0


@pytest.mark.parametrize("far", [0.0, 1e8])
def test_correlations_of_samples_are_those_of_numpy(far):
    """Also far from 0. What does not vary has a correlation of 0."""
    random = np.random.default_rng(3)
    scores, counts = 1e-3 * random.normal(size=12), random.integers(0, 3, (5, 12))
    predicted = far + np.stack([scores + 1e-3 * random.normal(size=12), random.normal(size=12), np.zeros(12)]) * (
        1e4 if far else 1
    )
    with np.errstate(all="raise"):
        found = correlate(predicted, scores + far / 1e4, counts)
        nothing = correlate(predicted, np.ones(12), counts)
    for seed in range(2):
        for place, count in enumerate(counts):
            x, y = (np.repeat(values, count) for values in (predicted[seed] - far, scores))
            assert found[seed, place] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    assert not found[2].any() and not nothing.any()


def test_correlations_are_compared_over_1000_samples():
    random = np.random.default_rng(5)
    scores = random.normal(size=8)
    sides = scores + random.normal(size=(2, 3, 8))
    found = compare_correlations(*sides, scores)
    rows = np.stack([np.arange(8), *np.random.default_rng(12345).choice(8, size=(1000, 8), replace=True)])

    def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))

    differences = pearson(sides[1][:, rows], scores[rows]) - pearson(sides[0][:, rows], scores[rows])
    assert found.difference == pytest.approx(differences[:, 0].mean()) and found.seeds == 3
    assert found.sentences_error == pytest.approx(differences[:, 1:].mean(0).std() * np.sqrt(8 / 7))
    assert sample_weights(8, 1000) is sample_weights(8, 1000)  # the systems of a comparison share them


def test_a_star_is_for_a_p_below_5_percent_that_is_corrected_where_it_can_be():
    [test] = make_tests(0.01)
    for p_value, holm_p_value, family, starred in (
        (0.049, None, "", True),
        (0.05, None, "", False),
        (0.01, 0.05, SYSTEMS, False),
        (0.01, 0.04, SYSTEMS, True),
        (0.01, 0.04, PRIMARY, True),
        (0.01, None, EXPLORATORY, False),
        (None, None, "", False),
        (None, None, SYSTEMS, False),
    ):
        assert replace(test, p_value=p_value, holm_p_value=holm_p_value, family=family).starred is starred
    alone = replace(test, interval=(1.0, 2.0), holm_p_value=0.01, seen=3.0).without_inference()
    assert (alone.interval, alone.p_value, alone.holm_p_value, alone.seen, alone.difference) == (None, None, None, None, 1.0)
    assert not alone.starred


def test_a_corrected_p_is_at_most_1_and_exploratory_tests_have_none():
    assert holm([0.9, 0.4, 0.02]) == pytest.approx([0.9, 0.8, 0.06]) and holm([0.6, 0.9]) == [1, 1] and holm([]) == []
    assert holm([0.01, 0.01, 0.5]) == pytest.approx([0.03, 0.03, 0.5]) and holm([0.0, 0.5]) == [0, 0.5]
    for test in correct_family(make_tests(0.01, None), EXPLORATORY):
        assert (test.holm_p_value, test.family, test.starred) == (None, EXPLORATORY, False)


def test_slopes_are_those_of_least_squares():
    random = np.random.default_rng(2)
    values, places = random.normal(size=(3, 4, 5)), random.normal(size=(3, 1, 5))
    expected = [[np.polyfit(places[i, 0], values[i, j], 1)[0] for j in range(4)] for i in range(3)]
    assert slopes(values, places) == pytest.approx(np.array(expected))


def test_a_p_is_1_minus_the_level_that_is_reached():
    for value in (0.0, 0.25, 0.999):
        assert p_value_of(lambda level: level, value) == pytest.approx(1 - value)
        assert p_value_of(lambda level: 10 * level**3, 10 * value**3) == pytest.approx(1 - value, abs=1e-9)
    assert p_value_of(lambda level: level, 5.0) == 1e-12 and p_value_of(lambda level: level, 0.9995, 1e-3) == 1e-3
    assert p_value_of(lambda level: level, 0.99, 1e-3) == pytest.approx(0.01)
    assert compare_over_seeds([1e9, 1e9, 1e9 + 1e-3], 0.0, 9).p_value == 1e-12


def test_normal_critical_values_follow_from_many_sentences():
    found = compare_over_seeds([2.0, 2.0, 2.0], 0.25, 10**9)
    assert found.p_value == pytest.approx(2 * NormalDist().cdf(-4), rel=1e-4)
    assert found.seen == pytest.approx(0.5 * (1.959964 + 0.841621), rel=1e-5)


def test_scores_are_shown_in_their_unit_and_places():
    names = ("accuracy", "macro_f1", "pearson", "pair_accuracy", "nll", "bleu")
    shown = {name: ((score := SCORES[name]).show(-0.12345), score.show(0.12345, "+"), score.lower_is_better) for name in names}
    assert shown == {
        "accuracy": ("-12.35", "+12.35", False),
        "macro_f1": ("-12.35", "+12.35", False),
        "pearson": ("-0.1235", "+0.1235", False),
        "pair_accuracy": ("-12.35", "+12.35", False),
        "nll": ("-0.123", "+0.123", True),
        "bleu": ("-0.12", "+0.12", False),
    }
    score = Score(title="BLEU", digits=1)
    assert (score.show(26.44), score.show_interval((-0.5, 1.25)), score.show_interval(None)) == ("26.4", "[-0.5, +1.2]", "-")
    assert len({score, Score(title="BLEU", digits=1)}) == 1
    with pytest.raises(TypeError):
        Score("BLEU", 1, 1)
