"""Sentences about the control, block A of translation and the probe, with differences that no report of a study has."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean, stdev

import numpy as np
import parts
from figures import (
    DAMAGE,
    WORTH,
    Figures,
    Row,
    correlation,
    difference,
    half_interval,
    of_control,
    records,
    sentence_nll,
    unpaired,
)
from page_template import Sentences
from welch import welch

from treenet.evaluation.significance import compare_with_baseline, t_quantile
from treenet.experiments.records import Record

PLANNED_SEEDS = 6  # of block A
_BLOCK_A = ("relative", "relative_tree", "relative_shuffled")


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds, and half its 95 % interval."""
    return fmean(values), t_quantile(len(values) - 1) * stdev(values) / len(values) ** 0.5


def over_seeds_of(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    """Return the mean difference over seeds, in pairs, and its 95 % interval."""
    mean, half = over_seeds([one - other for one, other in zip(ours, theirs, strict=True)])
    return [mean, mean - half, mean + half]


def of_control_page() -> Sentences:
    found = {one["labels"]["model"]: one for corpus in ("labels", *DAMAGE) for one in records(f"control_c/{corpus}")}

    def excess(system: str, other: str) -> Figures:
        found_here = sentence_nll(found[system]) - sentence_nll(found[other])
        return [float(found_here.mean()), half_interval(found_here)]

    yield "higher by {} ± {}.", excess("other_trees", "random_trees")
    against_none = [excess(system, "transformer") for system in ("damaged_40", "random_trees", "other_trees")]
    yield "40 % damage ({} ± {}) and random trees ({} ± {})", [*against_none[0], *against_none[1]]
    yield "Trees of other sentences are worse ({} ± {})", against_none[2]
    nll = {
        (one["labels"]["model"], one["facts"]["examples"], one["labels"]["seed"]): float(sentence_nll(one).mean())
        for one in records("control_b/labels")
    }
    for pairs, sentence in (
        (258, "the difference is {} ± {} from no trees, and {} ± {} from trees of other sentences"),
        (1003, "not decided over seeds either: {} ± {}, and {} ± {}."),
    ):
        others = ("transformer", "other_trees")
        found_here = [[nll["tree_transformer", pairs, seed] - nll[other, pairs, seed] for seed in (1, 2, 3)] for other in others]
        yield sentence, [*chain.from_iterable(map(over_seeds, found_here))]
    systems = ("linearized_transformer", "tree_transformer", "tree_relative_positions")
    best = [_nll_of_control(system) for system in systems]
    yield "the linearised tree has {} on the same data, tree attention {}, and {} with relative positions too", best
    of_a = [one for corpus in ("labels", "shape", "levels", "arcs") for one in records(f"control_a/{corpus}")]
    yield "The software of {} of the {} records", [sum(map(_has_changes, of_a)), len(of_a)]


def _has_changes(record: Record) -> bool:
    return any(software.get("clean") is False for software in record["training"].get("software", ()))


def of_block_a() -> Sentences:
    runs = [one for model in _BLOCK_A for one in Row("iwslt14_relative", model).records]
    bleu = [one["scores"]["test"]["bleu_tokenized"] for one in runs]
    nll = [value for model in _BLOCK_A for value in Row("iwslt14_relative", model).values("nll")]
    pooled = unpaired("nll", Row("iwslt14_relative", "relative_tree", baseline="relative"), ("deviation",))[0]
    so_far = fmean(nll[3:6]) - fmean(nll[:3])
    seeds = np.array([-1, 1] * (PLANNED_SEEDS // 2))
    planned = {model: list(pooled * seeds / seeds.std(ddof=1)) for model in _BLOCK_A}  # without a difference
    test = compare_with_baseline(planned, "relative", dict.fromkeys(_BLOCK_A, 0.0), 0.975)["relative_tree"]
    yield (
        'deviation of {} nats, six seeds see {} nats, not 0.03. For a "yes" to Q1, the differences of the next three seeds would '
        "have to average {}.",
        [pooled, test.seen, 2 * test.interval[0] - so_far],
    )
    late = [model == "relative_tree" and number == 2 for model in _BLOCK_A for number in range(3)]
    slopes = [-float(np.polyfit(x, y, 1)[0]) for x, y in ((nll, bleu), (_without(nll, late), _without(bleu, late)))]
    yield (
        "give {} BLEU a nat, so 1.1 BLEU are {} nats; without tree seed 3, they give {}, so {}.",
        [figure for slope in slopes for figure in (slope, WORTH / slope)],
    )
    curves = [dict(zip(one["curve"]["valid"]["step"], one["curve"]["valid"]["nll"], strict=True)) for one in runs]
    aligned = [next(step for step, value in curve.items() if value < 4.0) for curve in curves]
    yield "below 4.0 first at update {}, with relative positions alone at {}.", [aligned[5], fmean(aligned[:3])]
    yield "correlates with the nll on test by {}.", [correlation([curve[1000] for curve in curves], nll)]


def _without(values: Sequence[float], left_out: Sequence[bool]) -> list[float]:
    return [value for value, out in zip(values, left_out, strict=True) if not out]


def first_below(record: Record, nll: float) -> float:
    """Return the update at which the nll on valid first falls below a value, by a straight line between two validations.

    It is the last update if it never falls below.
    """
    updates, found = record["curve"]["valid"]["step"], record["curve"]["valid"]["nll"]
    after = next((number for number, value in enumerate(found) if value < nll), None)
    if after is None:
        return updates[-1]
    between = (found[after - 1] - nll) / (found[after - 1] - found[after])
    return updates[after - 1] + between * (updates[after] - updates[after - 1])


def of_alignment_protocol() -> Sentences:
    (own, others), (own_late, others_late) = (
        [[first_below(one, at) for one in Row("iwslt14_relative", model).records] for model in _BLOCK_A[1:]] for at in (4.5, 4.0)
    )
    yield (
        "block A has {}, {}, {} (own) and {}, {}, {} (others): a lag of {} updates, deviations of {} and {}.",
        [*own, *others, fmean(own) - fmean(others), stdev(own), stdev(others)],
    )
    yield "(own trees {}, {} and {}; others {}, {} and {})", [*own_late, *others_late]


def of_multi30k_protocol() -> Sentences:
    """Yield what the tuning decided: rates, and the worth of 1.1 BLEU, at equal updates."""
    from scipy.stats import linregress

    scores = {
        (rate, one["labels"]["model"], updates): [one["scores"]["valid"][name] for name in ("nll", "bleu_tokenized")]
        for rate in ("2.5e-3", "5e-3")
        for updates, folder in ((2000, f"{rate}_at_2000"), (2500, rate))
        for one in records(f"multi30k_tuning/{folder}")
    }
    low, high = ([scores[rate, model, 2500][0] for model in (*_BLOCK_A, "linearized")] for rate in ("2.5e-3", "5e-3"))
    yield (
        "The lower rate has an nll of {} instead of {} (`relative`), {} instead of {} (`relative_tree`), {} instead of {} "
        "(`relative_shuffled`), and {} instead of {} (`linearized`).",
        chain.from_iterable(zip(low, high, strict=True)),
    )
    more = [one - other for one, other in zip(low[:3], high[:3], strict=True)]
    yield "The differences of the first three lie {} apart", [max(more) - min(more)]
    nll, bleu = np.array([np.mean([scores[*run, 2000], found], axis=0) for (*run, at), found in scores.items() if at == 2500]).T
    fit = linregress(nll, bleu)
    half = t_quantile(len(nll) - 2) * fit.stderr
    ends = fit.slope - half, fit.slope + half
    yield (
        "**The bound is {} nats**: {} BLEU a nat (95 %: {} to {}), so 1.1 BLEU are worth {} to {} nats.",
        [min(WORTH / -fit.slope, 0.08), fit.slope, *ends, *(WORTH / -end for end in ends)],
    )


def of_seeds(measure: Callable[[Record], float], model: str) -> Figures:
    """Return a number of each run of the study of alignment, by seed."""
    return [measure(one) for one in sorted(Row("iwslt14_alignment", model).records, key=lambda one: one["labels"]["seed"])]


def lag(measure: Callable[[Record], float]) -> Figures:
    """Return the mean with own trees minus that with trees of other sentences, and Welch's 95 % interval over seeds."""
    own, others = (np.array(of_seeds(measure, model)) for model in _BLOCK_A[1:])
    found, half = welch(own, others, 0.95)
    return [float(found), float(found - half), float(found + half)]


def alignment_table() -> list[list[Callable[[], Figures] | None]]:
    """Return the rows of the page: the update where the nll on valid falls below 4.5, below 4.0, and the last nll."""
    measures = (partial(first_below, nll=4.5), partial(first_below, nll=4.0), lambda one: one["curve"]["valid"]["nll"][-1])
    return [[None, *(partial(of_seeds, measure, model) for model in _BLOCK_A[1:]), partial(lag, measure)] for measure in measures]


# The probe, by the mean of the accuracies on singular and plural verbs.


def accuracies(study: str, system: str, result: str = "test") -> np.ndarray:
    """Return the accuracies in per cent on singular and on plural verbs of test: [seeds, 2]."""
    tables = [one["scores"][result]["confusion"] for one in records(study) if one["labels"]["system"] == system]
    return np.array([[100 * counts[i] / sum(counts) for i, counts in enumerate(table)] for table in tables])


def mean_of_both(row: Row) -> Figures:
    """Return the mean of both numbers with its 95 % interval, over seeds and sentences."""
    found = accuracies(row.study, row.system)
    mean, over = over_seeds(found.mean(1).tolist())
    counts = [sum(one) for one in records(row.study)[0]["scores"]["test"]["confusion"]]
    variance = sum(share * (1 - share) / count for share, count in zip(found.mean(0) / 100, counts, strict=True))
    of_sentences = 1.96 * 50 * variance**0.5
    half = float(np.hypot(over, of_sentences))
    return [mean, mean - half, mean + half]


def of_probe() -> Sentences:
    own, other = (accuracies("agreement_pretrained_again", system) for system in ("tree", "tree_shuffled"))
    of_number = np.stack([own.mean(0), other.mean(0)], axis=1)
    yield "wholly on singular verbs**: {} against {}; plural ones, {} and {}.", of_number.ravel().tolist()
    yield "By the mean of both numbers, it is {} points ({} to {}, over seeds)", over_seeds_of(own.mean(1), other.mean(1))


def of_other_claims() -> Sentences:
    """Yield the claims that are not the paper's."""
    root = Row("agreement_pretrained_again", "tree_shuffled", baseline="tree")
    mean = Row("agreement_pretrained_mean_again", "tree_mean_shuffled", baseline="tree_mean")
    yield (
        "trees of other sentences: {} ({} to {}) if the classifier reads the root, {} ({} to {}) if it reads a mean.",
        [*difference("", root), *difference("", mean)],
    )
    by_both = [float(accuracies(root.study, system).mean()) for system in ("tree", "tree_shuffled")]
    yield "By the mean of both numbers, {} with own trees, {} with others", by_both
    parts_of_tree = [figure for system in parts.PRIMARIES for figure in parts.difference(system, "test.2")]
    yield "the own shape has {} less ({} to {}), the own labels on another shape {} less ({} to {}) |", parts_of_tree
    studies = ("sst5_pretrained", "sick_pretrained", "sst5_finetuned")
    yield (
        "trees of other sentences: {} ({} to {}); r {} ({} to {}). Fine-tuned, on SST-5: {} ({} to {})",
        [figure for study in studies for figure in difference("", Row(study, "tree_shuffled", baseline="tree"))],
    )
    nll = [_nll_of_control(system) for system in ("tree_transformer", "other_trees", "transformer", "linearized_transformer")]
    yield (
        "{} with right trees, {} with others, {} without; the best without the tree is {}. A linearised tree: {}",
        [*nll[:3], *of_control("a", "tree_transformer", "", ("bound",)), nll[3]],
    )


def _nll_of_control(system: str) -> float:
    (nll,) = of_control("a", system, "", ("nll",))
    assert isinstance(nll, float)
    return nll
