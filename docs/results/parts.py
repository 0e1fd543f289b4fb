"""The figures of the study of parts of a tree: the mean of the accuracies on singular and plural verbs, on each part of test.

The protocol is protocols/parts.md. In records, each part has its singular verbs first.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from figures import Cell, Figures, records

from treenet.evaluation.significance import PRIMARY, SeedTest, compare_over_seeds, correct_family

STUDY, SST5, OWN, PRIMARIES = "parts", "parts_sst5", "own", ("unlabelled", "other_shape")
EXPLORATORY = ("shuffled", "permuted_labels", "flat_tags", "right", "linearized", "attention", "layer")
MEANS = ("unlabelled_mean", "other_shape_mean")
SIZES = {"test.2": (2195, 7185), "test.1": (4365, 6155), "test.3": (305, 1746)}  # singular, plural
_ENDS = np.cumsum([size for both in SIZES.values() for size in both])


@cache
def right(system: str) -> dict[int, dict[str, list[np.ndarray]]]:
    """Return 1 for each sentence that a system has right, else 0, by seed and part of test: singular verbs, then plural ones."""
    found = {}
    for one in records(STUDY):
        if one["labels"]["system"] == system:
            pieces = np.split(np.array(one["sentences"]["test"].split(), dtype=float), _ENDS)
            assert not len(pieces.pop()), f"{one['cell']} has other sentences than its protocol"
            found[one["labels"]["seed"]] = {part: pieces[2 * place : 2 * place + 2] for place, part in enumerate(SIZES)}
    return found


def statistic(both: Sequence[np.ndarray]) -> float:
    """Return the mean of the accuracies on both numbers, in per cent."""
    return 50 * float(sum(one.mean() for one in both))


def of_system(system: str, part: str) -> Figures:
    """The statistic, as mean and deviation over seeds."""
    values = [statistic(of_seed[part]) for of_seed in right(system).values()]
    return [float(np.mean(values)), float(np.std(values, ddof=1))]


def own_of(system: str) -> str:
    """Return the arm with own trees that reads the same states as a system."""
    return f"{OWN}_mean" if system.endswith("_mean") else OWN


def own_minus(system: str, part: str, own: str = "") -> SeedTest:
    """Test own trees, or the arm `own`, against a system on a part of test, over the seeds that both have."""
    ours, theirs = right(own or own_of(system)), right(system)
    by_seed = [
        [one - other for one, other in zip(ours[i][part], theirs[i][part], strict=True)] for i in sorted(ours.keys() & theirs)
    ]
    over_seeds = [np.mean(number, axis=0) for number in zip(*by_seed, strict=True)]  # of each sentence
    variance = 50**2 * sum(one.var(ddof=1) / len(one) for one in over_seeds)
    return compare_over_seeds([statistic(both) for both in by_seed], variance, sum(map(len, over_seeds)))


def primaries() -> dict[str, SeedTest]:
    """Return the two primary tests, corrected together."""
    return dict(zip(PRIMARIES, correct_family([own_minus(system, "test.2") for system in PRIMARIES], PRIMARY), strict=True))


def difference(system: str, part: str, own: str = "") -> Figures:
    test = own_minus(system, part, own)
    assert test.interval is not None
    return [test.difference, *test.interval]


def seen(system: str) -> Figures:
    return [own_minus(system, "test.2").seen]


def holm(system: str) -> Figures:
    return [primaries()[system].holm_p_value]


def accuracy(system: str) -> float:
    """Return the share of test.2 that is right, in per cent: the mean over seeds."""
    return 100 * float(np.mean([np.concatenate(of_seed["test.2"]).mean() for of_seed in right(system).values()]))


def hours(study: str) -> float:
    """Return the wall time of all trainings of a study."""
    return sum(one["training"]["seconds"] for one in records(study)) / 3600


def on_two_machines() -> Figures:
    """The accuracy on test of a cell that ran on both machines."""
    both = (*records(STUDY), *records("parts_other_processor"))
    return [100 * one["scores"]["test"]["accuracy"] for one in both if one["cell"] == "own_mean-seed9"]


def table(systems: Sequence[str]) -> list[list[Cell]]:
    """Return the rows of the page: own trees, then the systems against them."""

    def row(system: str) -> list[Cell]:
        of_own = system == own_of(system)
        return [
            None,
            lambda: of_system(system, "test.2"),
            *[None if of_own else lambda part=part: difference(system, part) for part in SIZES],
            None if of_own else lambda: seen(system),
            (lambda: holm(system)) if system in PRIMARIES else None,
        ]

    return [row(system) for system in (own_of(systems[0]), *systems)]
