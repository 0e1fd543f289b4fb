"""Welch's interval of our pages (docs/results/welch.py)."""

import numpy as np
import pytest
from scipy.stats import ttest_ind
from welch import sentence_variance, welch


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
        found.append(sentence_variance(first, second, tokens, articles if in_article > 1 else None))
    wanted = shared**2 * (np.bincount(articles, tokens) ** 2).sum() / tokens.sum() ** 2
    noise = 2 * anew**2 / seeds * (tokens**2).sum() / tokens.sum() ** 2
    assert np.mean(found) == pytest.approx(wanted, abs=0.05 * wanted + 0.1 * noise)
