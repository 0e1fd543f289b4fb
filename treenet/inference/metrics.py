"""Translation scores by sacrebleu, on text that is at hand: nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass

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
