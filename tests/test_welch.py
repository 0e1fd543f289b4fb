"""Welch's interval of our pages (docs/results/welch.py)."""

import numpy as np
import pytest
from scipy.stats import ttest_ind
from welch import compare, sentence_variance, welch


def test_without_sentences_it_is_that_of_scipy():
    rng = np.random.default_rng(3)
    for n, m in ((5, 5), (3, 5), (2, 9)):
        first, second = rng.normal(size=n), rng.normal(1.0, 4.0, size=m)
        wanted = ttest_ind(first, second, equal_var=False).confidence_interval(0.975)
        found, half = welch(first, second, 0.975)
        np.testing.assert_allclose([found - half, found + half], wanted, rtol=1e-9)


@pytest.mark.parametrize("in_article", [1, 8])
@pytest.mark.parametrize(("shared", "anew"), [(0.5, 0.2), (0.0, 0.4), (0.3, 0.0)])
def test_sentence_variance_is_what_all_seeds_share(shared, anew, in_article):
    """Sentences, or articles, are easier for one system by `shared` deviations a token, and drawn `anew` for each seed."""
    rng, seeds, sentences, found = np.random.default_rng(4), 5, 400, []
    tokens, articles = rng.integers(5, 30, size=sentences), np.arange(sentences) // in_article
    for _ in range(300):
        of_sentence = 3 + rng.normal(size=sentences)  # equal for both systems
        first, second = (
            (of_sentence + own + anew * rng.normal(size=(seeds, sentences)) + 0.1 * rng.normal(size=(seeds, 1))) * tokens
            for own in (shared * rng.normal(size=sentences)[articles], 0.0)
        )
        found.append(sentence_variance(first, second, tokens, articles if in_article > 1 else None)[0])
    wanted = shared**2 * (np.bincount(articles, tokens) ** 2).sum() / tokens.sum() ** 2
    noise = 2 * anew**2 / seeds * (tokens**2).sum() / tokens.sum() ** 2
    assert np.mean(found) == pytest.approx(wanted, abs=0.05 * wanted + 0.1 * noise)


@pytest.mark.parametrize(("of_article", "of_seed"), [(0.0, 0.02), (0.15, 0.01), (0.2, 0.005)])
def test_the_level_holds_over_few_articles_of_unequal_length(of_article, of_seed):
    """Half of the tokens are in six of thirty articles. Both systems are equal on average over all articles that there are."""
    rng, studies, beside = np.random.default_rng(5), 4000, 0
    articles = np.arange(30)
    tokens = np.where(articles < 6, 4000, 1000)
    for _ in range(studies):
        of_articles = 3 + 0.3 * rng.normal(size=30)  # equal for both systems
        first, second = (
            (of_articles + own + of_seed * rng.normal(size=(3, 1)) + 0.02 * rng.normal(size=(3, 30))) * tokens
            for own in (of_article * rng.normal(size=30), 0.0)
        )
        means = [nll.sum(-1) / tokens.sum() for nll in (first, second)]
        found, half = welch(*means, 0.975, *sentence_variance(first, second, tokens, articles))
        beside += abs(found) > half
    assert 0.01 < beside / studies < 0.033


def test_the_number_drawn_is_that_of_equal_articles_as_precise():
    tokens = np.array([2, 1, 3, 3, 3])
    _, sentences = sentence_variance(np.ones((2, 5)), np.ones((2, 5)), tokens)
    _, articles = sentence_variance(np.ones((2, 5)), np.ones((2, 5)), tokens, np.array([0, 0, 1, 2, 3]))
    assert sentences == pytest.approx(144 / 32) and articles == pytest.approx(4)


def test_an_interval_that_misses_too_often_becomes_wider():
    """Three seeds with deviations of 0.009 and 0.055: 3.4 % of the intervals of 97.5 % miss, which is more than 3 %."""
    rng, tokens = np.random.default_rng(6), np.full(50, 20)
    steady, unsteady = (scale * np.array([-1.0, 0.0, 1.0]) for scale in (0.009, 0.055))
    nll = [(3 + of_seeds[:, None] + np.zeros(50)) * tokens for of_seeds in (steady, unsteady)]
    plain, wider = (compare(*nll, tokens, 0.975, most) for most in (1.0, 0.03))
    assert plain.false == wider.false == pytest.approx(0.0336, abs=0.001) and plain.difference == wider.difference == 0

    there, half = welch(*(rng.normal(size=(200_000, 3)) * scale for scale in (0.009, 0.055)), 0.975)
    assert np.mean(np.abs(there) > half) == pytest.approx(0.0336, abs=0.0015)
    assert np.mean(np.abs(there) > half * wider.half / plain.half) == pytest.approx(0.025, abs=0.0015)
