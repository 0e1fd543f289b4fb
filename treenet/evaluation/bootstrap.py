"""Bootstraps over sentences: of metrics, of the mean of single sentences, and of BLEU over training seeds and sizes of data.

The p of two systems is two-sided: how often differences of samples lie as far from their mean as the observed difference from
0. Sacrebleu's p (`--paired-bs`, after a script of Moses) takes absolute values first. It is one-sided, about half of ours. So in
about 11 % of pairs of equally good systems, sacrebleu's p is below 0.05.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from sacrebleu.metrics.bleu import MAX_NGRAM_ORDER as NGRAM_ORDER

from treenet.evaluation.significance import (
    ABOUT_WEIGHTS,
    LEVEL,
    PAIRED_BOOTSTRAP,
    SEED,
    SeedTest,
    compare_over_seeds,
    sample_counts,
    sample_weights,
    sampled_variance,
    slopes,
    t_quantile,
)
from treenet.tasks.translation_metrics import METRICS, build_tokenizer, check_lines, name_tokenizer


@dataclass(frozen=True)
class Comparison:
    """A paired bootstrap test of one metric.

    The null hypothesis is that the two systems are equally good on other sentences. It does not concern seeds. `p_sacrebleu` is
    the p that sacrebleu computes from the same samples. `interval` is that of the difference: see `interval_of`.
    """

    baseline: float
    system: float
    p_two_sided: float
    p_sacrebleu: float
    signature: str
    test: str = PAIRED_BOOTSTRAP
    about: str = ABOUT_WEIGHTS
    interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, baseline: np.ndarray, system: np.ndarray, num_sentences: int, signature: str) -> Self:
        """Make the test from scores [1 + samples] of all sentences, then of each sample."""
        sampled, difference = (system - baseline)[1:], float(system[0] - baseline[0])
        p_values = two_sided_p(sampled, difference, num_sentences), sacrebleu_p(sampled, difference)
        interval = interval_of(sampled, difference, num_sentences)
        return cls(float(baseline[0]), float(system[0]), *p_values, signature, interval=interval)

    @property
    def difference(self) -> float:
        return self.system - self.baseline


@dataclass(frozen=True)
class SeedComparison:
    """Mean BLEU over seeds of systems and baselines. The p of the weights is from a paired bootstrap, for these weights only."""

    over_seeds: SeedTest
    weights_p_two_sided: float


def compare_systems(
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    num_samples: int = 1000,
    more_references: Sequence[Sequence[str]] = (),
    tokenizer: str | None = None,
) -> dict[str, Comparison]:
    """Make a paired bootstrap (Koehn 2004) of `system` against `baseline`, for the metrics with the mark `compared`.

    With a `tokenizer`, also for tokenised BLEU. The samples are those of sacrebleu. Their seed is fixed, and the signature states
    it.
    """
    for more in (references, *more_references):
        check_lines(baseline, more, "baseline translations")
        check_lines(system, more, "system translations")
    comparisons, forms = {}, {"lines": [baseline, system, references, *more_references]}
    if tokenizer is not None:
        split = build_tokenizer(tokenizer)
        forms["tokens"] = [list(map(split, lines)) for lines in forms["lines"]]
    for name, known in METRICS.items():
        if known.compared or (known.reads == "tokens" and tokenizer is not None):
            first, second, right, *others = forms[known.reads]
            sides = (sentence_statistics(name, lines, right, more_references=others) for lines in (first, second))
            before, after = (sample_metric(name, side, num_samples) for side in sides)
            metric = known.build(True)
            metric.num_refs = 1 + len(more_references)  # for its signature
            signature = metric.get_signature()
            signature.update("bs", num_samples)
            signature.update("seed", SEED)
            named = name_tokenizer(signature.format(), known, tokenizer or "")
            comparisons[name] = Comparison.of(before, after, len(references), named)
    return comparisons


def compare_means(baseline: np.ndarray, system: np.ndarray, num_samples: int, signature: str) -> Comparison:
    """Make the bootstrap of `compare_systems`, with its samples, of a metric that is the mean over sentences [lines]."""
    counts = sample_counts(len(baseline), num_samples)
    ours, theirs = (counts @ one / len(one) for one in (baseline, system))
    return Comparison.of(ours, theirs, len(baseline), f"{signature}|bs:{num_samples}|seed:{SEED}")


def two_sided_p(sampled: np.ndarray, difference: float, num_sentences: int) -> float:
    """Return the two-sided p of a difference, from those of samples: the share that is as far from its mean, or farther.

    Samples of few sentences vary too little: of equal systems on 10 sentences, 10 % had a share below 0.05. So the share is read
    as one of the normal distribution, and p is of Student's t (Hesterberg, 2015). It is at least 2^(1 - sentences): so often
    one of two equal systems is better on every sentence. Samples of one sentence are all the same.
    """
    from scipy.special import ndtri, stdtr  # here, as in `t_quantile`

    if num_sentences == 1:
        return 1.0
    value = ndtri(_p_of(np.abs(sampled - sampled.mean()) >= abs(difference)) / 2) * math.sqrt(1 - 1 / num_sentences)
    return max(2 * float(stdtr(num_sentences - 1, value)), 2.0 ** (1 - num_sentences))


def interval_of(sampled: np.ndarray, difference: float, num_sentences: int) -> tuple[float, float] | None:
    """Return the interval of the true differences whose `two_sided_p` is not below 0.05, from those of samples.

    It is None if no difference can have such a p, with fewer than six sentences, or if the samples do not vary.
    """
    from scipy.special import ndtr

    if 2.0 ** (1 - num_sentences) >= 1 - LEVEL or not np.ptp(sampled):
        return None
    share = 2 * ndtr(-t_quantile(num_sentences - 1) / math.sqrt(1 - 1 / num_sentences))
    rank = math.ceil(share * (len(sampled) + 1)) - 1
    if rank < 1:
        return None
    half = float(np.sort(np.abs(sampled - sampled.mean()))[-rank])
    return difference - half, difference + half


def sacrebleu_p(sampled: np.ndarray, difference: float) -> float:
    """Return the p of a difference, from those of samples, as sacrebleu and Moses count it; 1 if there is none."""
    return _p_of(np.abs(sampled) - np.abs(sampled).mean() > abs(difference)) if difference else 1.0


def _p_of(extreme: np.ndarray) -> float:
    """Return the share of samples [n] that are extreme. The observed difference counts as one of them."""
    return (int(extreme.sum()) + 1) / (len(extreme) + 1)


# Those of BLEU for a sentence, under the names that records of studies have, and their places among those of sacrebleu.
BLEU_STATISTICS = (*(f"matches_{order}" for order in range(1, NGRAM_ORDER + 1)), "length", "reference_length")
_PLACES = [*range(2, 2 + NGRAM_ORDER), 0, 1]


def statistics_of(metric: str) -> list[str]:
    """Return the names of the statistics of a sentence from which a metric of studies is computed."""
    known = METRICS[metric]
    if known.kind == "BLEU":
        return [f"{metric}.{name}" for name in BLEU_STATISTICS]
    return [f"{metric}.{place}" for place in range(len(known.build()._extract_corpus_statistics(["a"], [["a"]])[0]))]


def sentence_statistics(
    metric: str,
    lines: Sequence[str],
    references: Sequence[str],
    tokenizer: str | None = None,
    more_references: Sequence[Sequence[str]] = (),
) -> np.ndarray:
    """Return the statistics of a metric for each sentence [lines, statistics_of(metric)]. `tokenizer` is for one of tokens.

    With `more_references`, an n-gram of BLEU may match any of a line's references, and the reference of the closest length
    counts.
    """
    known, sides = METRICS[metric], [lines, references, *more_references]
    for one in sides[1:]:
        check_lines(lines, one)
    if known.reads == "tokens" and tokenizer is not None:
        split = build_tokenizer(tokenizer)
        sides = [list(map(split, side)) for side in sides]
    found = np.array(known.build(True)._extract_corpus_statistics(sides[0], sides[1:]), dtype=np.int64)
    return found[:, _PLACES] if known.kind == "BLEU" else found


def sample_metric(metric: str, statistics: np.ndarray, num_samples: int) -> np.ndarray:
    """Return the score of a corpus [1 + samples], from `sentence_statistics`: of all sentences, then of each bootstrap sample.

    All systems get the same samples.
    """
    known = METRICS[metric]
    if known.kind == "BLEU":  # in sacrebleu's order, with the numbers of n-grams
        matches, lengths = np.split(statistics, [NGRAM_ORDER], axis=1)
        statistics = np.concatenate([lengths, matches, np.maximum(lengths[:, :1] - np.arange(NGRAM_ORDER), 0)], axis=1)
    sums = sample_weights(len(statistics), num_samples) @ statistics.astype(float)  # exact: below 2^53
    build = known.build()
    return np.array([build._compute_score_from_stats(row).score for row in sums.astype(np.int64).tolist()])


def sample_nll(nll: np.ndarray, tokens: np.ndarray, num_samples: int) -> np.ndarray:
    """Return the nll a token [1 + samples], with the samples of `sample_metric`, from nll and tokens of each sentence [lines]."""
    weights = sample_weights(len(nll), num_samples)
    return (weights @ nll) / (weights @ tokens)


def compare_seeds(baselines: Sequence[np.ndarray], systems: Sequence[np.ndarray], num_sentences: int) -> SeedComparison:
    """Compare mean BLEU of systems and baselines, from `sample_metric` of one of each per seed: see `compare_over_seeds`.

    The variance over sentences is that of a paired bootstrap. Each sample takes the same sentences for all seeds. With one seed,
    the p of the weights is that of `compare_systems`.
    """
    differences = np.stack(systems) - np.stack(baselines)  # [seeds, 1 + samples]
    sampled = differences[:, 1:].mean(0)
    test = compare_over_seeds(differences[:, 0].tolist(), sampled_variance(sampled, num_sentences), num_sentences)
    return SeedComparison(test, two_sided_p(sampled, test.difference, num_sentences))


def compare_slopes(baselines: np.ndarray, systems: np.ndarray, sizes: np.ndarray, num_sentences: int) -> SeedTest:
    """Compare the growth of the difference per doubling of the size, from `sample_metric` [seeds, sizes, 1 + samples] of both.

    `sizes` are [seeds, sizes]. The slope of each seed is that of least squares over log2 of the size. The test of the mean slope
    is the same as that of a difference. Its variance over sentences comes from samples that all seeds and sizes share.
    """
    differences = np.moveaxis(systems - baselines, 1, 2)  # [seeds, 1 + samples, sizes]
    found = slopes(differences, np.log2(sizes)[:, None])
    return compare_over_seeds(found[:, 0].tolist(), sampled_variance(found[:, 1:].mean(0), num_sentences), num_sentences)
