"""Translation scores by sacrebleu, on text that is at hand: nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from treeproc.settings import UserError


@dataclass(frozen=True)
class Comparison:
    """A paired bootstrap test of one metric. `p_value` is under the hypothesis of equal systems."""

    baseline: float
    system: float
    p_value: float
    signature: str

    @property
    def difference(self) -> float:
        return self.system - self.baseline


@dataclass(frozen=True)
class SeedComparison:
    """A paired bootstrap test of mean BLEU over seeds. `interval` holds the middle 95 % of the resampled differences."""

    difference: float
    interval: tuple[float, float]
    p_value: float


def check_lines(hypotheses: Sequence[str], references: Sequence[str], what: str = "translations") -> None:
    """Raises UserError when the two differ in number, or there is nothing to score."""
    if len(hypotheses) != len(references):
        raise UserError(f"{what}: must have one line per reference, that is {len(references)}, but have {len(hypotheses)}")
    if not references:
        raise UserError(f"{what}: there are no lines to score")


def compute_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict:
    """Corpus BLEU (13a, detokenised, cased) and chrF with their signatures, as scores.json holds them."""
    check_lines(hypotheses, references)
    scores: dict = {"num_examples": len(references)}
    for name, metric in (("bleu", BLEU(tokenize="13a")), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(hypotheses, [references]).score
        scores[f"{name}_signature"] = metric.get_signature().format()
    return scores


def compare_systems(
    baseline: Sequence[str], system: Sequence[str], references: Sequence[str], num_samples: int = 1000
) -> dict[str, Comparison]:
    """Paired bootstrap (Koehn 2004) of `system` against `baseline`, for `bleu` and `chrf`.

    Sacrebleu fixes the seed of the samples, and the signature states it.
    """
    check_lines(baseline, references, "baseline translations")
    check_lines(system, references, "system translations")
    test = PairedTest(
        [("baseline", baseline), ("system", system)],
        {"bleu": BLEU(tokenize="13a"), "chrf": CHRF()},
        [references],
        test_type="bs",
        n_samples=num_samples,
    )
    signatures, results = test()
    comparisons = {}
    for key, name in zip(("bleu", "chrf"), signatures, strict=True):
        first, second = results[name]
        # Sacrebleu counts samples that lie strictly above the difference: none for equal systems.
        p_value = 1.0 if first.score == second.score else second.p_value
        comparisons[key] = Comparison(first.score, second.score, p_value, signatures[name].format())
    return comparisons


def compare_seeds(
    baselines: Sequence[Sequence[str]],
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    *,
    num_samples: int = 1000,
    seed: int = 12345,
) -> SeedComparison:
    """Paired bootstrap over sentences of the difference in mean BLEU between systems and baselines, one of each a seed.

    One sample takes the same sentences for all seeds, so what it varies is the test set; the spread over seeds is
    another thing. With one seed the p-value is that of `compare_systems`.
    """
    for lines in (*baselines, *systems):
        check_lines(lines, references)
    random = np.random.default_rng(seed)
    chosen = random.choice(len(references), size=(num_samples, len(references)), replace=True)
    counts = np.stack([np.bincount(sample, minlength=len(references)) for sample in (np.arange(len(references)), *chosen)])
    means = [np.mean([_bleu_of_samples(lines, references, counts) for lines in group], axis=0) for group in (baselines, systems)]
    differences = means[1] - means[0]
    observed, sampled = float(differences[0]), differences[1:]
    spread = np.abs(sampled) - np.abs(sampled).mean()  # as sacrebleu and Moses count it
    p_value = 1.0 if observed == 0 else (int((spread > abs(observed)).sum()) + 1) / (num_samples + 1)
    low, high = np.quantile(sampled, [0.025, 0.975]).tolist()
    return SeedComparison(observed, (low, high), p_value)


def _bleu_of_samples(lines: Sequence[str], references: Sequence[str], counts: np.ndarray) -> np.ndarray:
    """Corpus BLEU [samples] where sentence n is taken counts[sample, n] times."""
    metric = BLEU(tokenize="13a", effective_order=True)  # of the sentence alone, whose score is not used
    sentences = [metric.sentence_score(line, [reference]) for line, reference in zip(lines, references, strict=True)]
    statistics = np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in sentences], dtype=np.int64)
    return np.array(
        [
            BLEU.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score
            for row in (counts @ statistics).tolist()
        ]
    )
