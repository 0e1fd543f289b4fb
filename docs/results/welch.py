"""Welch's interval of a difference over unpaired seeds and over sentences, and how often it finds what is not there.

    python docs/results/welch.py --deviations 0.009 0.055 --seeds 5 --level 0.975

prints, from a million studies without a difference, the share in which the interval lies beside 0, and its mean half-width.
"""

import argparse

import numpy as np

STUDIES = 1_000_000


def welch(first: np.ndarray, second: np.ndarray, level: float, shared: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return mean differences [...] of values of seeds [..., n] and [..., m], and half of their intervals.

    `shared` is the variance that all seeds have in common: `sentence_variance`. The degrees of freedom are Satterthwaite's, with
    that variance taken as known (Welch, 1947).
    """
    from scipy.special import stdtrit

    parts = [values.var(axis=-1, ddof=1) / values.shape[-1] for values in (first, second)]
    variance = parts[0] + parts[1] + shared
    freedom = variance**2 / sum(part**2 / (values.shape[-1] - 1) for part, values in zip(parts, (first, second), strict=True))
    return first.mean(axis=-1) - second.mean(axis=-1), stdtrit(freedom, (1 + level) / 2) * np.sqrt(variance)


def sentence_variance(first: np.ndarray, second: np.ndarray, tokens: np.ndarray, articles: np.ndarray | None = None) -> float:
    """Return the variance over sentences of the difference in nll a token, without the part that differs from seed to seed.

    Both systems have an nll for each seed and sentence [seeds, sentences]; sentences have so many `tokens`. The variance of the
    mean difference over sentences is S. The deviation over seeds already holds the part of S that each seed draws anew, R. At
    least 0. With `articles`, the article of each sentence, whole articles are drawn; the sentences of one follow each other.
    """
    total = tokens.sum()
    starts = np.arange(len(tokens)) if articles is None else np.flatnonzero(np.append(True, articles[1:] != articles[:-1]))

    def around_its_mean(nll: np.ndarray) -> np.ndarray:
        return np.add.reduceat(nll - nll.sum(axis=-1, keepdims=True) / total * tokens, starts, axis=-1)

    whole = around_its_mean(first.mean(0) - second.mean(0))
    anew = sum(around_its_mean(nll - nll.mean(0)).var(axis=0, ddof=1).sum() / len(nll) for nll in (first, second))
    return max(0.0, float((whole**2).sum() - anew) / float(total) ** 2 * len(starts) / (len(starts) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deviations", type=float, nargs=2, required=True, help="of both systems over seeds")
    parser.add_argument("--seeds", type=int, required=True, help="of each system")
    parser.add_argument("--level", type=float, default=0.95, help="of the interval")
    parser.add_argument("--shared", type=float, default=0.0, help="variance over sentences that all seeds share")
    parser.add_argument("--difference", type=float, default=0.0, help="true difference: the share is then the power")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    first, second = (rng.normal(size=(STUDIES, args.seeds)) * deviation for deviation in args.deviations)
    found, half = welch(
        first + args.difference + rng.normal(size=(STUDIES, 1)) * args.shared**0.5, second, args.level, args.shared
    )
    print(f"found: {np.mean(np.abs(found) > half):.4f} of {STUDIES:,} studies; half-width {half.mean():.4f}")


if __name__ == "__main__":
    main()
