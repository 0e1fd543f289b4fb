"""Sentences about the control, the probe and claims that are not the paper's, with differences that no report of a study has."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, stdev

import numpy as np
import parts
from figures import (
    DAMAGE,
    Figures,
    Row,
    difference,
    half_interval,
    of_control,
    records,
    sentence_nll,
)
from page_template import Sentences

from treenet.evaluation.significance import t_quantile
from treenet.experiments.records import Record


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
