"""Dunnett's test (1955): several systems against one baseline, unpaired, with one variance over seeds for all of them.

One variance from all systems is far less uncertain than one from the differences of a few pairs of seeds. The test needs no
pairs: it holds if the seeds of two systems have nothing in common. The p and the interval of a system hold for all comparisons
together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import numpy as np

from treenet.evaluation.significance import LEVEL, p_value_of

POWER = 0.8
DUNNETT = "two-sided Dunnett test over unpaired seeds, one variance for all systems, with the variance over sentences added"
_NODES = 48  # of each quadrature; 96 give the same values to 1e-7
_LARGEST = 1e9  # the largest critical value that is searched for
_SMALLEST_P = 1e-6  # beyond it, the quadrature is rough


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
    values: Mapping[str, Sequence[float]], baseline: str, sentence_variances: Mapping[str, float], level: float = LEVEL
) -> dict[str, ArmTest]:
    """Compare every system of `values`, which have one value per seed, with the baseline, by intervals of this level.

    `sentence_variances` has, of each system, the variance of the difference of means over new samples of sentences. It is added,
    and the critical value is a mean weighted by both variances (Cochran and Cox, 1950), as in `compare_over_seeds`. Returns
    nothing without a second system, or without a system of two seeds.
    """
    freedom = sum(len(one) - 1 for one in values.values())
    others = [name for name in values if name != baseline]
    if baseline not in values or not others or freedom < 1:
        return {}
    squares = sum(float(((np.array(one) - fmean(one)) ** 2).sum()) for one in values.values())
    variance = squares / freedom
    counts, count = [len(values[name]) for name in others], len(values[baseline])
    quantiles = [partial(critical_value, counts, count, degrees) for degrees in (freedom, None)]
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
        p_value = p_value_of(critical, abs(difference) / error, _SMALLEST_P)
        tests[name] = ArmTest(difference, (difference - half, difference + half), p_value, seen, math.sqrt(variance), freedom)
    return tests


def critical_value(counts: Sequence[int], baseline_count: int, freedom: int | None, level: float = LEVEL) -> float:
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
    from scipy.stats import chi2

    if freedom is None:
        return np.ones(1), np.ones(1)
    place, weight = np.polynomial.legendre.leggauss(_NODES)
    # Of u in [0, 1]; u = v^2 (3 - 2 v) has more nodes at both ends, where the quantile is steep.
    v = (place + 1) / 2
    return np.sqrt(chi2.ppf(v * v * (3 - 2 * v), freedom) / freedom), weight / 2 * 6 * v * (1 - v)


def _shift(critical: float, freedom: int | None) -> float:
    """Return the true difference, in standard errors, that one test with this critical value finds with probability POWER."""
    from scipy.optimize import brentq
    from scipy.special import ndtr

    deviation, weight = _deviations(freedom)

    def missed(shift: float) -> float:
        return float(weight @ (ndtr(shift - critical * deviation) + ndtr(-shift - critical * deviation))) - POWER

    return float(brentq(missed, 0.0, critical * 10 + 10))
