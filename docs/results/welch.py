"""Welch's interval of a difference over unpaired seeds and over sentences, and how often it finds what is not there.

    python docs/results/welch.py --deviations 0.009 0.055 --seeds 5 --level 0.975

prints, from a million studies without a difference, the share in which the interval lies beside 0, and its mean half-width.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STUDIES = 1_000_000


class Comparison(NamedTuple):
    """A mean difference, half of its interval, and the share of studies without a difference that such an interval misses."""

    difference: float
    half: float
    false: float


def welch(
    first: np.ndarray, second: np.ndarray, level: float, shared: float | np.ndarray = 0.0, drawn: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean differences [...] of values of seeds [..., n] and [..., m], and half of their intervals.

    `shared` is the variance that all seeds have in common, estimated from so many `drawn` sentences or articles:
    `sentence_variance`. The degrees of freedom are Satterthwaite's (Welch, 1947).
    """
    from scipy.special import stdtrit

    parts = [(values.var(axis=-1, ddof=1) / values.shape[-1], values.shape[-1]) for values in (first, second)]
    parts.append((np.asarray(shared), drawn))
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / (n - 1) for part, n in parts)
    return first.mean(axis=-1) - second.mean(axis=-1), stdtrit(freedom, (1 + level) / 2) * np.sqrt(variance)


def sentence_variance(
    first: np.ndarray, second: np.ndarray, tokens: np.ndarray, articles: np.ndarray | None = None
) -> tuple[float, float]:
    """Return the variance over sentences of the difference in nll a token, without the part that differs from seed to seed.

    Both systems have an nll for each seed and sentence [seeds, sentences]; sentences have so many `tokens`. The variance of the
    mean difference over sentences, S, is the jackknife's. The deviation over seeds already holds the part of S that each seed
    draws anew, R. At least 0. With `articles`, the article of each sentence, whole articles are drawn; the sentences of one
    follow each other. Also returns the number of equally long sentences or articles that would be as precise (Kish, 1965).
    """
    starts = np.arange(len(tokens)) if articles is None else np.flatnonzero(np.append(True, articles[1:] != articles[:-1]))
    shares = np.add.reduceat(tokens, starts) / tokens.sum()

    def without_one(nll: np.ndarray) -> np.ndarray:
        """Return how much the mean over tokens changes without each sentence or article."""
        mean = nll.sum(axis=-1, keepdims=True) / tokens.sum()
        return np.add.reduceat(nll - mean * tokens, starts, axis=-1) / tokens.sum() / (1 - shares)

    whole = without_one(first.mean(0) - second.mean(0))
    anew = sum(without_one(nll - nll.mean(0)).var(axis=0, ddof=1).sum() / len(nll) for nll in (first, second))
    return max(0.0, float((whole**2).sum() - anew) * (1 - 1 / len(starts))), float(1 / (shares**2).sum())


def simulate(
    deviations: Sequence[float],
    seeds: Sequence[int],
    level: float,
    shared: float = 0.0,
    drawn: float = np.inf,
    difference: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean differences [STUDIES] of studies with a true difference, and half of their intervals."""
    rng = np.random.default_rng(1)
    first, second = (rng.normal(size=(STUDIES, n)) * deviation for deviation, n in zip(deviations, seeds, strict=True))
    of_sentences = rng.normal(size=(STUDIES, 1)) * shared**0.5
    found = shared * rng.chisquare(drawn - 1, size=STUDIES) / (drawn - 1) if np.isfinite(drawn) else shared
    return welch(first + difference + of_sentences, second, level, found, drawn)


def compare(
    first: np.ndarray, second: np.ndarray, tokens: np.ndarray, level: float, most: float, articles: np.ndarray | None = None
) -> Comparison:
    """Compare the nll a token of two systems, from their nll for each seed and sentence [seeds, sentences].

    The level is simulated at the deviations found. If more than the share `most` of studies without a difference find one, the
    interval becomes as wide as the level asks.
    """
    means = [nll.sum(axis=-1) / tokens.sum() for nll in (first, second)]
    of_sentences = sentence_variance(first, second, tokens, articles)
    found, half = welch(*means, level, *of_sentences)
    deviations = [float(of_seeds.std(ddof=1)) for of_seeds in means]
    there, width = simulate(deviations, [len(first), len(second)], level, *of_sentences)
    ratios = np.abs(there) / width
    false = float((ratios > 1).mean())
    return Comparison(float(found), float(half) * (float(np.quantile(ratios, level)) if false > most else 1.0), false)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deviations", type=float, nargs=2, required=True, help="of both systems over seeds")
    parser.add_argument("--seeds", type=int, required=True, help="of each system")
    parser.add_argument("--level", type=float, default=0.95, help="of the interval")
    parser.add_argument("--shared", type=float, default=0.0, help="variance over sentences or articles that all seeds share")
    parser.add_argument("--drawn", type=float, default=np.inf, help="number of sentences or articles")
    parser.add_argument("--difference", type=float, default=0.0, help="true difference: the share is then the power")
    args = parser.parse_args()
    found, half = simulate(args.deviations, [args.seeds] * 2, args.level, args.shared, args.drawn, args.difference)
    print(f"found: {np.mean(np.abs(found) > half):.4f} of {STUDIES:,} studies; half-width {half.mean():.4f}")


if __name__ == "__main__":
    main()
