"""Bootstraps by hand: samples written out, ties, the ranks of intervals, statistics of sentences and their names."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr, ndtri, stdtr, stdtrit
from test_metrics import REFERENCES

from treenet.evaluation.bootstrap import (
    BLEU_STATISTICS,
    Comparison,
    SeedComparison,
    compare_means,
    compare_seeds,
    compare_slopes,
    compare_systems,
    interval_of,
    sacrebleu_p,
    sample_metric,
    sample_nll,
    sentence_statistics,
    statistics_of,
    two_sided_p,
)
from treenet.evaluation.significance import sample_counts
from treenet.tasks.translation_metrics import compute_scores
from treeproc.common.settings import UserError


def rows_of(count: int, samples: int) -> list[np.ndarray]:
    """The sentences of all, then of each sample. The seed is that of sacrebleu."""
    return [np.arange(count), *np.random.default_rng(12345).choice(count, size=(samples, count), replace=True)]


def of_share(share: float, count: int) -> float:
    """The p of Student's t for a share of samples that are as far from their mean, or farther."""
    return max(2 * stdtr(count - 1, ndtri(share / 2) * math.sqrt((count - 1) / count)), 0.5 ** (count - 1))


# Tests and intervals from samples.


def test_a_sample_as_far_as_the_difference_counts_as_farther():
    """Their mean is 0. Of five samples two are at least 2 away, and four at least 1; the observed difference is one more."""
    sampled = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    for difference, farther in ((2.0, 2), (-2.0, 2), (1.5, 2), (1.0, 4), (0.0, 5), (2.5, 0)):
        assert two_sided_p(sampled, difference, 30) == pytest.approx(of_share((farther + 1) / 6, 30))
        assert two_sided_p(sampled + 7, difference, 30) == pytest.approx(of_share((farther + 1) / 6, 30))
    assert two_sided_p(sampled, 0.0, 30) == 1


def test_sacrebleu_counts_only_what_is_farther():
    """The mean of the absolute values is 2, so the samples are 2, 1, -2, -1 and 0 from it."""
    sampled = np.array([-4.0, 3.0, 0.0, -1.0, 2.0])
    for difference, farther in ((2.0, 0), (-1.0, 1), (1.5, 1), (0.5, 2)):
        assert sacrebleu_p(sampled, difference) == (farther + 1) / 6
    assert sacrebleu_p(sampled, 0.0) == 1


@pytest.mark.parametrize(("count", "least"), [(1, 1.0), (2, 0.5), (3, 0.25), (6, 2**-5), (11, 2**-10)])
def test_the_smallest_p_is_how_often_one_system_is_better_on_every_sentence(count, least):
    assert two_sided_p(np.linspace(-1, 1, 9999), 2.0, count) == pytest.approx(max(least, of_share(1e-4, count)))
    assert two_sided_p(np.linspace(-1e-9, 1e-9, 9), 2.0, 1) == 1


def test_the_interval_has_the_differences_that_the_test_does_not_reject():
    sampled = np.random.default_rng(1).gamma(2.0, size=1000)
    for count in (6, 30, 1000):
        low, high = interval_of(sampled, 3.0, count)
        for end, sign in ((low, -1), (high, 1)):
            assert (
                two_sided_p(sampled, 3.0 - end + sign * 1e-9, count)
                >= 0.05
                > two_sided_p(sampled, 3.0 - end - sign * 1e-9, count)
            )
    assert interval_of(sampled, 3.0, 5) is interval_of(np.ones(9), 1.0, 30) is interval_of(sampled[:9], 3.0, 30) is None


@pytest.mark.parametrize(("samples", "rank"), [(18, 0), (25, 1), (39, 1), (41, 2), (199, 9), (1000, 50)])
def test_the_ends_of_an_interval_are_samples_of_a_rank(samples, rank):
    """With so many sentences that Student's t is normal: the share of samples that are as far away is at most 0.05."""
    sampled = np.random.default_rng(samples).normal(size=samples) + 3
    far = sorted(abs(sampled - sampled.mean()), reverse=True)
    found = interval_of(sampled, 0.5, 10**9)
    assert (found is None) == (rank == 0)
    if rank:
        assert found == pytest.approx((0.5 - far[rank - 1], 0.5 + far[rank - 1]))


def test_an_interval_needs_six_sentences_and_samples_that_vary():
    sampled = np.random.default_rng(2).normal(size=1000)
    assert [interval_of(sampled, 1.0, count) is None for count in (1, 2, 4, 5, 6, 7)] == [True] * 4 + [False] * 2
    assert interval_of(np.full(1000, 2.0), 2.0, 30) is None
    share = 2 * ndtr(-stdtrit(5, 0.975) / math.sqrt(5 / 6))
    rank = math.ceil(share * 1001) - 1
    half = sorted(abs(sampled - sampled.mean()))[-rank]
    assert interval_of(sampled, 1.0, 6) == pytest.approx((1 - half, 1 + half))


def test_a_comparison_has_the_scores_tests_and_interval_of_its_samples():
    random = np.random.default_rng(4)
    baseline, system = random.normal(size=12), random.normal(size=12) + 0.3
    found = compare_means(baseline, system, 100, "m")
    sampled = np.array([system[rows].mean() - baseline[rows].mean() for rows in rows_of(12, 100)])
    assert (found.baseline, found.system) == pytest.approx((baseline.mean(), system.mean()))
    assert found.difference == pytest.approx(sampled[0])
    assert found.p_two_sided == pytest.approx(two_sided_p(sampled[1:], sampled[0], 12))
    assert found.p_sacrebleu == sacrebleu_p(sampled[1:], sampled[0])
    assert found.interval == pytest.approx(interval_of(sampled[1:], sampled[0], 12))
    assert len({found, replace(found)}) == 1 and replace(found, interval=None) != found


def test_comparisons_of_seeds_are_values():
    one = np.array([[1.0, *np.linspace(0, 2, 9)], [2.0, *np.linspace(1, 3, 9)]])
    found = compare_seeds(one[:1], one[1:], 30)
    assert len({found, SeedComparison(found.over_seeds, found.weights_p_two_sided)}) == 1
    assert found.over_seeds.sentences_error == 0 and found.over_seeds.difference == 1


def test_the_error_of_seeds_is_that_of_means_of_samples():
    random = np.random.default_rng(6)
    baselines, systems = random.normal(size=(2, 4, 21))
    found = compare_seeds(list(baselines), list(systems), 8)
    means = [np.mean([systems[seed, place] - baselines[seed, place] for seed in range(4)]) for place in range(21)]
    test = found.over_seeds
    assert test.difference == pytest.approx(means[0]) and test.seeds == 4
    assert test.sentences_error == pytest.approx(np.std(means[1:]) * np.sqrt(8 / 7))  # samples of n vary less than new ones
    assert test.seeds_error == pytest.approx(np.std(systems[:, 0] - baselines[:, 0], ddof=1) / 2)
    assert found.weights_p_two_sided == pytest.approx(two_sided_p(np.array(means[1:]), means[0], 8))


def test_slopes_are_over_logarithms_of_sizes_and_share_samples():
    random = np.random.default_rng(7)
    sides, sizes = random.normal(size=(2, 3, 4, 11)), np.array([[100, 200, 400, 900], [90, 210, 400, 800], [100, 190, 380, 810]])
    found = compare_slopes(*sides, sizes, 50)
    differences = sides[1] - sides[0]
    fits = np.array([[np.polyfit(np.log2(sizes[s]), differences[s, :, place], 1)[0] for place in range(11)] for s in range(3)])
    assert found.difference == pytest.approx(fits[:, 0].mean())
    assert found.sentences_error == pytest.approx(fits[:, 1:].mean(0).std() * np.sqrt(50 / 49))
    assert found.seeds_error == pytest.approx(fits[:, 0].std(ddof=1) / math.sqrt(3))


# Statistics of sentences.


def test_statistics_of_bleu_are_counted_by_hand(caplog):
    lines = ["a b c d e", "a a", "", "x"]
    references = ["a b c x e f", "a b", "a", "x"]
    found = sentence_statistics("bleu", lines, references)
    assert found.tolist() == [[4, 2, 1, 0, 5, 6], [1, 0, 0, 0, 2, 2], [0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1]]
    assert BLEU_STATISTICS == ("matches_1", "matches_2", "matches_3", "matches_4", "length", "reference_length")
    assert statistics_of("bleu") == [f"bleu.{name}" for name in BLEU_STATISTICS]
    assert statistics_of("chrf")[:2] == ["chrf.0", "chrf.1"] and not caplog.records
    for wrong in ((lines, references[1:], ()), (lines, references, [references, references[1:]])):
        with pytest.raises(UserError, match="must have one line per reference"):
            sentence_statistics("bleu", *wrong[:2], None, wrong[2])


def test_short_lines_have_no_long_ngrams():
    """One token has no bigram: with the smoothing of sacrebleu, their number decides about the score."""
    for lines in (["a b c d e f", "g"], ["a b c d", "e f", "g h i"], ["a b c d e", "", ""]):
        references = [line or "z" for line in lines]
        spoiled = [lines[0].replace("b", "x"), *lines[1:]]
        [score] = sample_metric("bleu", sentence_statistics("bleu", spoiled, references), 0)
        assert score == pytest.approx(compute_scores(spoiled, references)["bleu"], abs=1e-9)


def test_statistics_follow_the_tokeniser_of_tokenised_bleu_alone():
    lines = [f"{line} it's 5-fold, e.g. <b>" for line in REFERENCES]
    spoiled = [line.replace("sat", "lay") for line in lines]
    plain = sentence_statistics("bleu", spoiled, lines, "none")
    assert np.array_equal(plain, sentence_statistics("bleu", spoiled, lines, "intl"))
    tokens = sentence_statistics("bleu_tokenized", spoiled, lines, "none")
    assert tokens[:, 4].sum() < plain[:, 4].sum()
    chrf = sentence_statistics("chrf", spoiled, lines, None)
    assert chrf.shape == (len(lines), len(statistics_of("chrf")))
    assert sample_metric("chrf", chrf, 3)[0] == pytest.approx(compute_scores(spoiled, lines)["chrf"])
    rows = rows_of(len(lines), 3)[-1]
    last = compute_scores([spoiled[row] for row in rows], [lines[row] for row in rows])
    assert sample_metric("chrf", chrf, 3)[3] == pytest.approx(last["chrf"])
    assert sample_metric("bleu", plain, 3)[3] == pytest.approx(last["bleu"]) and len(sample_metric("bleu", plain, 3)) == 4


def test_samples_of_nll_are_means_over_the_pieces_of_their_sentences():
    random = np.random.default_rng(8)
    nll, pieces = random.gamma(2.0, size=9), random.integers(1, 9, 9)
    expected = [nll[rows].sum() / pieces[rows].sum() for rows in rows_of(9, 20)]
    assert sample_nll(nll, pieces, 20) == pytest.approx(expected)
    assert sample_counts(9, 20).tolist() == [[(rows == place).sum() for place in range(9)] for rows in rows_of(9, 20)]


def test_systems_are_compared_by_every_metric_and_1000_samples():
    worse = [line.replace("looked at us", "left") for line in REFERENCES]
    found = compare_systems(worse, REFERENCES, REFERENCES)
    assert "tokenized" not in " ".join(found) and {"bleu", "chrf"} <= found.keys()
    assert all("|bs:1000|seed:12345" in one.signature for one in found.values())
    tokens = compare_systems(worse, REFERENCES, REFERENCES, 10, tokenizer="none")
    assert tokens.keys() > found.keys() and all("|bs:10|" in one.signature for one in tokens.values())
    assert isinstance(tokens["bleu"], Comparison) and tokens["bleu_tokenized"].system == pytest.approx(100)
    for lines in ((worse[1:], REFERENCES), (worse, REFERENCES[1:])):
        with pytest.raises(UserError, match="(baseline|system) translations: must have one line per reference"):
            compare_systems(*lines, REFERENCES)
