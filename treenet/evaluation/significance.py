"""Significance of differences between two systems: between two sets of weights, or over training seeds.

A paired bootstrap over sentences is about two given sets of weights: other sentences, the same weights. Whether one system is
better than another is also a question about other seeds of training, and needs several of them. With fewer than three seeds there
is no interval and no star.

If several comparisons are made together, they are a family. Their p-values are corrected for their number, after Holm (1979).
Dunnett's test (1955) compares several systems with one baseline, unpaired, with one variance over seeds for all of them. One
variance from all systems is far less uncertain than one from the differences of a few pairs of seeds. It holds if the seeds of
two systems have nothing in common. The p and the interval of a system hold for all comparisons together.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import itemgetter
from statistics import fmean, stdev, variance
from typing import Self

import numpy as np

from treenet.tasks.tables import Column, show_p_value, shown

ABOUT_WEIGHTS = "these two sets of weights on these sentences"
ABOUT_WEIGHTS_OF_SEEDS = "the weights of these very seeds on these sentences"
PAIRED_BOOTSTRAP = "two-sided paired bootstrap over sentences"
ABOUT_SEEDS = "training with other seeds, scored on other sentences"
PRIMARY, SYSTEMS, EXPLORATORY = "primary", "systems", "exploratory"  # families of comparisons
SIGNIFICANT = 0.05
FEWEST_SEEDS = 3
SEED = 12345  # of bootstraps, as that of sacrebleu
LEVEL = 0.95  # of every interval
_SMALLEST_P = 1e-12
# For people, below a table. It names titles, because the installed package has no docs/.
EXPLAINED = 'the page "How to compare two systems", "Which interval"'


@dataclass(frozen=True)
class SeedTest:
    """The mean difference of systems from baselines that share seeds, and the inference about other seeds and sentences.

    `interval`, `p_value` and `seen` are None with fewer than `FEWEST_SEEDS` seeds, with one sentence, or if nothing varies. There
    are two standard errors of the difference, over seeds and over sentences. The one over seeds is None with one seed. `seen` is
    the smallest true difference that as many seeds and sentences find with probability 0.8, with the variance that was observed.
    """

    difference: float
    seeds: int
    interval: tuple[float, float] | None
    p_value: float | None
    seeds_error: float | None
    sentences_error: float
    about: str = ABOUT_SEEDS
    family: str = ""  # of comparisons that are corrected together; `EXPLORATORY` means no family
    holm_p_value: float | None = None
    seen: float | None = None

    @property
    def starred(self) -> bool:
        p_value = self.p_value if self.holm_p_value is None else self.holm_p_value
        return self.family != EXPLORATORY and p_value is not None and p_value < SIGNIFICANT

    def without_inference(self) -> Self:
        """Return the difference alone, as tables show it if one of the two systems learned nothing."""
        return replace(self, interval=None, p_value=None, holm_p_value=None, seen=None)


def show_p_values(test: SeedTest) -> list[str]:
    """Return p and Holm's p over seeds. A star is of the p that counts."""
    p_values = [show_p_value(value) for value in (test.p_value, test.holm_p_value)]
    p_values[test.holm_p_value is not None] += "*" * test.starred
    return [p_values[0], "exploratory"] if test.family == EXPLORATORY else p_values


def p_columns(tests: Iterable[SeedTest | None]) -> list[Column]:
    p_values = [show_p_values(test) if test else None for test in tests]
    return [shown(title, p_values, itemgetter(place)) for place, title in enumerate(("p", "p, Holm"))]


def summarize(values: Sequence[float]) -> dict:
    """Return the mean, and half of its 95 % interval over seeds on the same sentences (Student's t); None for one or two."""
    count = len(values)
    half = t_quantile(count - 1) * stdev(values) / math.sqrt(count) if count >= FEWEST_SEEDS else None
    return {"mean": fmean(values), "half_interval": half, "values": list(values)}


def compare_over_seeds(differences: Sequence[float], sentence_variance: float, num_sentences: int | None) -> SeedTest:
    """Return test and interval of the mean of `differences`, one per seed, all on the same `num_sentences` sentences.

    With None, the test is about other seeds on these very sentences. One sentence tells nothing about others: it has no test.

    `sentence_variance` is the variance of the mean difference over new samples of sentences, the same for all seeds. It is added
    to the variance over seeds, divided by their number. The sum is a little too large, because the variance between seeds also
    contains each seed's noise on these sentences.

    The critical value is that of Cochran and Cox (1950). It is a mean of Student's t for seeds and for sentences, weighted by the
    two variances. The degrees of freedom for seeds are their number less one. With the first value alone, intervals of three
    seeds are twice too wide if sentences make up most of the variance. Satterthwaite's degrees of freedom, estimated from three
    seeds, cover 92 % at worst.
    """
    count, difference = len(differences), fmean(differences)
    over_seeds = variance(differences) / count if count > 1 else None
    interval = p_value = seen = None
    enough = count >= FEWEST_SEEDS and num_sentences != 1
    if enough and over_seeds is not None and (total := over_seeds + sentence_variance):
        error, share = math.sqrt(total), over_seeds / total
        freedoms = count - 1, (num_sentences or 2) - 1

        def critical(level: float) -> float:
            return share * t_quantile(freedoms[0], level) + (1 - share) * t_quantile(freedoms[1], level)

        half = critical(LEVEL) * error
        interval, p_value = (difference - half, difference + half), p_value_of(critical, abs(difference) / error)
        seen = error * _shift(critical(LEVEL), freedoms[0] if share > 0.5 else None)
    seeds_error = math.sqrt(over_seeds) if over_seeds is not None else None
    return SeedTest(difference, count, interval, p_value, seeds_error, math.sqrt(sentence_variance), seen=seen)


def sample_counts(num_sentences: int, num_samples: int) -> np.ndarray:
    """Return how often each sentence counts [1 + samples, sentences]: once, then as in each sample of a bootstrap."""
    chosen = np.random.default_rng(SEED).choice(num_sentences, size=(num_samples, num_sentences), replace=True)
    return np.stack([np.bincount(sample, minlength=num_sentences) for sample in (np.arange(num_sentences), *chosen)])


@lru_cache(maxsize=1)  # the systems of a comparison have the same samples
def sample_weights(num_sentences: int, num_samples: int) -> np.ndarray:
    """Return `sample_counts` as floats. Their products are ten times as fast as those of integers."""
    return sample_counts(num_sentences, num_samples).astype(float)


def compare_examples(differences: np.ndarray) -> SeedTest:
    """Apply `compare_over_seeds` to a score that is a mean over sentences, from its differences [seeds, sentences]."""
    num_sentences = differences.shape[1]
    over_sentences = differences.mean(0).var(ddof=1) / num_sentences if num_sentences > 1 else 0.0
    return compare_over_seeds(differences.mean(1).tolist(), float(over_sentences), num_sentences)


def compare_correlations(baselines: np.ndarray, systems: np.ndarray, scores: np.ndarray, samples: int = 1000) -> SeedTest:
    """Apply `compare_over_seeds` to Pearson's correlation with `scores` [sentences].

    The predictions of both sides are [seeds, sentences]. The variance over sentences is that of a paired bootstrap. Each sample
    takes the same sentences for all seeds.
    """
    num_sentences, counts = len(scores), sample_weights(len(scores), samples)
    differences = correlate(systems, scores, counts) - correlate(baselines, scores, counts)  # [seeds, 1 + samples]
    return compare_over_seeds(
        differences[:, 0].tolist(), sampled_variance(differences[:, 1:].mean(0), num_sentences), num_sentences
    )


def sampled_variance(samples: np.ndarray, num_sentences: int) -> float:
    """Return the variance over new sentences, from values of bootstrap samples, which vary less: (n - 1) / n as much."""
    return float(samples.var()) * num_sentences / max(1, num_sentences - 1)


def correlate(predicted: np.ndarray, scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation [seeds, samples] of predictions [seeds, n] with scores [n]; 0 if one does not vary.

    `counts` [samples, n] has how often each place counts.
    """
    x, y = predicted - predicted.mean(1, keepdims=True), scores - scores.mean()
    columns = np.concatenate([np.stack([np.ones_like(y), y, y * y]), x, x * x, x * y])
    total, y_sum, yy, *sums = (counts @ columns.T).T  # reads the counts once
    x_sum, xx, xy = np.split(np.stack(sums), 3)
    spread = (total * xx - x_sum**2) * (total * yy - y_sum**2)
    return np.where(spread > 0, (total * xy - x_sum * y_sum) / np.sqrt(np.where(spread > 0, spread, 1)), 0.0)


def correct_family(tests: Sequence[SeedTest], family: str) -> list[SeedTest]:
    """Add Holm's p-values to the tests of a family. Exploratory tests get none."""
    p_values = [test.p_value for test in tests if test.p_value is not None and family != EXPLORATORY]
    corrected: dict[float | None, float] = dict(zip(p_values, holm(p_values), strict=True))
    return [replace(test, family=family, holm_p_value=corrected.get(test.p_value)) for test in tests]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's p-values of a family: m p for the smallest of m, (m - 1) p for the next. They never decrease."""
    corrected: dict[float, float] = {}
    reached = 0.0
    for rank, p_value in enumerate(sorted(p_values)):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_value))
        corrected.setdefault(p_value, reached)
    return [corrected[p_value] for p_value in p_values]


def slopes(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return least-squares slopes of `values` over `places` along the last axis."""
    centred = places - places.mean(-1, keepdims=True)
    return (values * centred).sum(-1) / (centred**2).sum(-1)


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return the value that |t| of Student's t stays below with probability `level`."""
    from scipy.special import stdtrit  # here, as below: only commands with tests need it. scipy.stats would take a second more

    return float(stdtrit(freedom, (1 + level) / 2))


def p_value_of(critical: Callable[[float], float], value: float, smallest: float = _SMALLEST_P) -> float:
    """Return 1 minus the level at which the increasing function `critical` reaches `value`; at least `smallest`."""
    from scipy.optimize import brentq

    highest = 1 - smallest
    return smallest if critical(highest) <= value else 1 - brentq(lambda level: critical(level) - value, 0.0, highest)


POWER = 0.8
DUNNETT = "two-sided Dunnett test over unpaired seeds, one variance for all systems, with the variance over sentences added"
_NODES = 48  # of each quadrature; for similar numbers of seeds, at usual levels, 96 give the same values to 1e-7
_LARGEST = 1e9  # the largest critical value that is searched for
_SMALLEST_DUNNETT_P = 1e-6  # the quadrature is rough from 1e-3 on; tables show "< 0.001"


@dataclass(frozen=True)
class ArmTest:
    """The difference of a system from the baseline.

    `seen` is the smallest true difference that a design like this one finds with probability 0.8, with the variance that was
    observed.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    seen: float
    deviation: float  # of one seed, pooled
    freedom: int
    test: str = DUNNETT


def compare_with_baseline(
    values: Mapping[str, Sequence[float]],
    baseline: str,
    sentence_variances: Mapping[str, float],
    level: float = LEVEL,
    num_sentences: int | None = None,
) -> dict[str, ArmTest]:
    """Compare every system of `values`, which have one value per seed, with the baseline, by intervals of this level.

    `sentence_variances` has, of each system, the variance of the difference of means over new samples of sentences, found from
    `num_sentences`, or known. It is added, and the critical value is a mean weighted by both variances (Cochran and Cox, 1950),
    as in `compare_over_seeds`. Returns nothing without a second system, a system of two seeds, or two sentences.
    """
    freedom = sum(len(one) - 1 for one in values.values())
    others = [name for name in values if name != baseline]
    if baseline not in values or not others or freedom < 1 or num_sentences == 1:
        return {}
    squares = sum(float(((np.array(one) - fmean(one)) ** 2).sum()) for one in values.values())
    variance = squares / freedom
    counts, count = tuple(len(values[name]) for name in others), len(values[baseline])
    of_sentences = None if num_sentences is None else num_sentences - 1
    quantiles = [partial(critical_value, counts, count, degrees) for degrees in (freedom, of_sentences)]
    tests = {}
    for name in others:
        over_seeds = variance * (1 / len(values[name]) + 1 / count)
        total = over_seeds + sentence_variances[name]
        if not total:
            continue
        error, share = math.sqrt(total), over_seeds / total

        def critical(level: float, share: float = share) -> float:
            return share * quantiles[0](level) + (1 - share) * quantiles[1](level)

        at_level = critical(level)
        difference, half = fmean(values[name]) - fmean(values[baseline]), at_level * error
        seen = error * _shift(at_level, freedom if share > 0.5 else None)
        p_value = p_value_of(critical, abs(difference) / error, _SMALLEST_DUNNETT_P)
        tests[name] = ArmTest(difference, (difference - half, difference + half), p_value, seen, math.sqrt(variance), freedom)
    return tests


@lru_cache(maxsize=1000)  # a report asks again for each share of the data
def critical_value(counts: tuple[int, ...], baseline_count: int, freedom: int | None, level: float = LEVEL) -> float:
    """Return the value that all |t| stay below with probability `level`, without any true difference.

    The systems have `counts` seeds. `freedom` are the degrees of freedom of their common variance; None means that it is known.
    """
    from scipy.optimize import brentq

    if level <= 0:
        return 0.0
    return float(brentq(lambda value: probability_below(value, counts, baseline_count, freedom) - level, 0.0, _LARGEST))


def probability_below(value: float, counts: Sequence[int], baseline_count: int, freedom: int | None) -> float:
    """Return the probability that all |t| stay below `value`, by quadrature over the baseline's mean and the deviation.

    Given both, the means of the systems are independent (Dunnett, 1955, equation 5).
    """
    from scipy.special import ndtr

    mean, mean_weight = _means()
    deviation, weight = _deviations(freedom)
    own = np.array(counts, dtype=float)
    half = value * deviation[:, None] * np.sqrt(1 + own / baseline_count)  # [deviations, systems], in errors of a system's mean
    middle = mean[:, None, None] * np.sqrt(own / baseline_count)
    inside = (ndtr(middle + half) - ndtr(middle - half)).prod(2)  # [means, deviations]
    return float(mean_weight @ inside @ weight / math.sqrt(2 * math.pi))


@cache
def _means() -> tuple[np.ndarray, np.ndarray]:
    """Return observed means of a true one of 0, and their weights."""
    return np.polynomial.hermite_e.hermegauss(_NODES)


@cache
def _deviations(freedom: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return observed deviations of a true one of 1, and their weights."""
    from scipy.special import gammaincinv

    if freedom is None:
        return np.ones(1), np.ones(1)
    place, weight = np.polynomial.legendre.leggauss(_NODES)
    # Of u in [0, 1]; u = v^2 (3 - 2 v) has more nodes at both ends, where the quantile is steep.
    v = (place + 1) / 2
    return np.sqrt(2 * gammaincinv(freedom / 2, v * v * (3 - 2 * v)) / freedom), weight / 2 * 6 * v * (1 - v)


def _shift(critical: float, freedom: int | None) -> float:
    """Return the true difference, in standard errors, that one test with this critical value finds with probability POWER."""
    from scipy.optimize import brentq
    from scipy.special import ndtr

    deviation, weight = _deviations(freedom)

    def missed(shift: float) -> float:
        return float(weight @ (ndtr(shift - critical * deviation) + ndtr(-shift - critical * deviation))) - POWER

    return float(brentq(missed, 0.0, critical * 10 + 10))
