"""Bootstraps over sentences: of the mean of single sentences, and of BLEU over training seeds and sizes of data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sacrebleu.metrics import BLEU

from treenet.evaluation.metrics import Comparison, build_tokenizer, check_lines
from treenet.evaluation.significance import SeedTest, compare_over_seeds, slopes

SEED = 12345  # sacrebleu's


@dataclass(frozen=True)
class SeedComparison:
    """Mean BLEU over seeds of systems and baselines. `weights_p_value` is from the paired bootstrap, for these weights only."""

    over_seeds: SeedTest
    weights_p_value: float


def compare_means(baseline: np.ndarray, system: np.ndarray, num_samples: int, signature: str, seed: int = SEED) -> Comparison:
    """Make the bootstrap of `compare_systems`, with its samples, of a metric that is the mean over sentences [lines]."""
    counts = sample_counts(len(baseline), num_samples, seed)
    first, second = (counts @ one / len(one) for one in (baseline, system))
    p_value = bootstrap_p_value((second - first)[1:], second[0] - first[0])
    return Comparison(float(first[0]), float(second[0]), p_value, f"{signature}|bs:{num_samples}|seed:{seed}")


def sample_counts(num_sentences: int, num_samples: int, seed: int = SEED) -> np.ndarray:
    """Return how often each sentence counts [1 + samples, sentences]: once, then as in each sample of a bootstrap."""
    chosen = np.random.default_rng(seed).choice(num_sentences, size=(num_samples, num_sentences), replace=True)
    return np.stack([np.bincount(sample, minlength=num_sentences) for sample in (np.arange(num_sentences), *chosen)])


def bootstrap_p_value(sampled: np.ndarray, difference: float) -> float:
    """Return the p-value of a difference, from those of samples, as sacrebleu and Moses count it; 1 if there is none."""
    spread = np.abs(sampled) - np.abs(sampled).mean()
    return (int((spread > abs(difference)).sum()) + 1) / (len(sampled) + 1) if difference else 1.0


NGRAMS = 4
BLEU_STATISTICS = (*(f"matches_{order}" for order in range(1, NGRAMS + 1)), "length", "reference_length")


def bleu_statistics(
    lines: Sequence[str],
    references: Sequence[str],
    tokenizer: str | None = None,
    more_references: Sequence[Sequence[str]] = (),
) -> np.ndarray:
    """Return the statistics of BLEU for each sentence [lines, BLEU_STATISTICS]: numbers of matching n-grams, and lengths.

    They are of detokenised lines, or with a `tokenizer` of tokenised BLEU. With `more_references`, an n-gram may match any of a
    line's references, and the reference of the closest length counts.
    """
    sides = [lines, references, *more_references]
    for one in sides[1:]:
        check_lines(lines, one)
    if tokenizer is not None:
        split = build_tokenizer(tokenizer)
        sides = [[split(line) for line in side] for side in sides]
    # Effective order concerns only the score of the single sentence, which is not used.
    metric = BLEU(tokenize="13a" if tokenizer is None else "none", effective_order=True)
    sentences = [metric.sentence_score(line, correct) for line, *correct in zip(*sides, strict=True)]
    return np.array([[*score.counts, score.sys_len, score.ref_len] for score in sentences], dtype=np.int64)


def sample_bleu(statistics: np.ndarray, num_samples: int, seed: int = SEED) -> np.ndarray:
    """Return corpus BLEU [1 + samples]: of all sentences, then of each sample of a bootstrap.

    All systems get the same samples.
    """
    counts = sample_counts(len(statistics), num_samples, seed)
    matches, lengths = statistics[:, :NGRAMS], statistics[:, NGRAMS:]
    totals = np.maximum(lengths[:, :1] - np.arange(NGRAMS), 0)
    sums = (counts @ np.concatenate([matches, totals, lengths], axis=1)).tolist()
    ends = NGRAMS, 2 * NGRAMS
    return np.array(
        [
            BLEU.compute_bleu(row[: ends[0]], row[ends[0] : ends[1]], row[ends[1]], row[ends[1] + 1], smooth_method="exp").score
            for row in sums
        ]
    )


def compare_seeds(baselines: Sequence[np.ndarray], systems: Sequence[np.ndarray], num_sentences: int) -> SeedComparison:
    """Compare mean BLEU of systems and baselines, from `sample_bleu` of one of each per seed: see `compare_over_seeds`.

    The variance over sentences is that of a paired bootstrap. Each sample takes the same sentences for all seeds. With one seed,
    the p-value of the weights is that of `compare_systems`.
    """
    differences = np.stack(systems) - np.stack(baselines)  # [seeds, 1 + samples]
    sampled = differences[:, 1:].mean(0)
    test = compare_over_seeds(differences[:, 0].tolist(), float(sampled.var()), num_sentences)
    return SeedComparison(test, bootstrap_p_value(sampled, test.difference))


def compare_slopes(baselines: np.ndarray, systems: np.ndarray, sizes: np.ndarray, num_sentences: int) -> SeedTest:
    """Compare the growth of the difference per doubling of the size, from `sample_bleu` [seeds, sizes, 1 + samples] of both.

    `sizes` are [seeds, sizes]. The slope of each seed is that of least squares over log2 of the size. The test of the mean slope
    is the same as that of a difference. Its variance over sentences comes from samples that all seeds and sizes share.
    """
    differences = np.moveaxis(systems - baselines, 1, 2)  # [seeds, 1 + samples, sizes]
    found = slopes(differences, np.log2(sizes)[:, None])
    return compare_over_seeds(found[:, 0].tolist(), float(found[:, 1:].mean(0).var()), num_sentences)
