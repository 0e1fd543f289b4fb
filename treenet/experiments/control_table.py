"""The result of the positive control, from records: a table, and whether the instrument found the tree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.experiments.control import NONE, RIGHT, WORSE, System
from treenet.experiments.control_data import Corpus
from treenet.experiments.records import Record, read_numbers
from treenet.experiments.results import Results
from treenet.experiments.scaling_report import NLL, NLL_SCALE
from treenet.experiments.settings import RUNGS, ControlSettings
from treenet.tasks.tables import number
from treenet.tasks.translation_metrics import MAIN, SECOND
from treeproc.common.settings import UserError

_Z = 1.96  # of a 95 % interval
_LEAST_GAIN = 0.1  # in the nll of a sentence, as a share, where there is no bound: another seed changes the nll by less


@dataclass(frozen=True)
class Row:
    """A system at one size, on one group of test sentences. Intervals are over test sentences, for the mean over seeds."""

    system: str
    trees: str
    reads: str
    pairs: int
    seeds: int
    group: str
    nll: float  # of a sentence
    half: float  # half the 95 % interval of nll
    bound: float | None
    exact: float  # per cent of sentences in the exact order
    chrf: float | None  # of all test sentences; None for a group
    f1: float | None = None  # unlabelled brackets of its test trees against those that made the target

    @property
    def is_below(self) -> bool:
        """Whether the interval lies below the bound."""
        return self.bound is not None and self.nll + self.half < self.bound

    @property
    def is_above(self) -> bool:
        """Whether the nll is not below the bound, as far as the interval can tell."""
        return self.bound is not None and self.nll + self.half >= self.bound


@dataclass(frozen=True)
class Result:
    """The rows of all systems, and whether the control passed, with a sentence about it."""

    rows: Sequence[Row]
    found: bool
    verdict: str


def build_result(
    settings: ControlSettings,
    systems: Sequence[System],
    corpora: Mapping[str, Corpus],
    records: Mapping[str, Sequence[Record]],
    f1: Mapping[str, float],
) -> Result:
    """Return the result of finished studies. `records` has those of each corpus, `f1` the quality of each data set's trees."""
    rows, largest = [], settings.all_sizes[-1]
    tables = {name: Results.of(({**one["labels"], "record": one} for one in found), "model") for name, found in records.items()}
    for system in systems:
        corpus = corpora[system.corpus]
        bounds = np.array([system.bound(len(one.words)) for one in corpus.splits["test"]] if system.bound else corpus.bounds)
        own = tables[system.corpus].where(system=system.name, metric="record")
        for size in settings.all_sizes:
            found = [row.value for row in own if round(row.size * largest) == size and row.seed in settings.seeds]
            nll = np.mean([sentence_nll(record) for record in found], axis=0)
            exact = np.mean([_is_exact(record) for record in found], axis=0)
            names = list(dict.fromkeys(corpus.groups)) or [""]
            for group in names:
                chosen = np.array([one == group for one in corpus.groups] if group else [True] * len(nll))
                rows.append(
                    Row(
                        system=system.name,
                        trees=system.trees,
                        reads=system.reads,
                        pairs=round(np.mean([record["facts"]["examples"] for record in found])),  # about `size`
                        seeds=len(found),
                        group=group,
                        nll=float(nll[chosen].mean()),
                        half=half_interval(nll[chosen]),
                        bound=float(bounds[chosen].mean()) if len(bounds) else None,
                        exact=float(100 * exact[chosen].mean()),
                        chrf=float(np.mean([record["scores"]["test"][SECOND] for record in found])) if not group else None,
                        f1=f1.get(system.data) if system.trees != NONE else None,
                    )
                )
    judge = {"b": judge_sizes, "c": judge_parses}.get(settings.rung, judge_bounds)
    return Result(rows, *judge(rows))


def sentence_nll(record: Record) -> np.ndarray:
    """Return the nll of every test sentence in nats. Raises UserError for a record without it."""
    if NLL not in record["sentences"]:
        raise UserError(f"the record of {record['cell']} has no nll of sentences; remove it and run the same command again")
    return read_numbers(record, NLL, most=10**9) / NLL_SCALE


def _is_exact(record: Record) -> np.ndarray:
    """Return whether each sentence is the reference: all n-grams match, and so does the length."""
    length, reference = (read_numbers(record, f"{MAIN}.{name}") for name in ("length", "reference_length"))
    exact = length == reference
    for order in range(1, 5):
        exact &= read_numbers(record, f"{MAIN}.matches_{order}") == np.maximum(reference - order + 1, 0)
    return exact


def half_interval(values: np.ndarray) -> float:
    """Return half the 95 % interval of a mean over sentences."""
    return _Z * float(values.std(ddof=1)) / math.sqrt(len(values))


def judge_bounds(rows: Sequence[Row]) -> tuple[bool, str]:
    """Judge rungs a and d: right trees must be below the bound, and nothing else may be."""
    right = [row for row in rows if row.trees == RIGHT]
    misses = [row for row in right if not row.is_below]
    leaks = [row for row in rows if row.trees != RIGHT and not row.is_above]
    if leaks:
        names = ", ".join(_name(row) for row in leaks)
        return False, f"The control failed: {names} cannot know the order, but is below the bound. Something leaks it."
    if misses:
        names = ", ".join(f"{_name(row)} ({row.nll:.2f})" for row in misses)
        done = f"{len(right) - len(misses)} of {len(right)} rows with right trees are below the bound; not below"
        return False, f"The control failed: {done}: {names}."
    values = sorted({round(row.bound, 2) for row in right if row.bound is not None})
    bound = " and ".join(f"{value:.2f}" for value in values)
    best = " to ".join(dict.fromkeys(f"{extreme(row.nll for row in right):.2f}" for extreme in (min, max)))
    rest = min(row.nll - (row.bound or 0.0) for row in rows if row.trees != RIGHT)
    nearest = f"stays {rest:.2f} above its bound" if rest > 0 else "has its bound inside of its interval"
    return True, (
        f"The instrument finds a tree when there is one: with right trees, the nll of a sentence is {best}, below the bound of "
        f"{bound} nats. Without them, the nearest system {nearest}."
    )


def judge_sizes(rows: Sequence[Row]) -> tuple[bool, str]:
    """Judge rung b: right trees must help at one size, beside other trees and none, and less at the largest size."""
    others: dict[int, float] = {}
    for row in rows:
        if row.trees != RIGHT:
            others[row.pairs] = min(row.nll, others.get(row.pairs, math.inf))
    gains = {row.pairs: others[row.pairs] - row.nll for row in rows if row.trees == RIGHT}
    shown = ", ".join(f"{size:,} pairs {gain:+.2f}" for size, gain in gains.items())
    best, largest = max(gains, key=lambda size: gains[size]), max(gains)
    if all(gain < _LEAST_GAIN * others[size] for size, gain in gains.items()):
        return False, f"The control failed: right trees lower the nll of a sentence by less than a tenth at all sizes: {shown}."
    if len(gains) > 1 and gains[largest] > gains[best] / 2:
        return False, f"The control failed: the gain in nll does not fall to a half with more data: {shown}."
    return True, (
        "The instrument finds the tree, and the words replace it where data are many: gain in nll a sentence over the better of "
        f"other trees and none: {shown}."
    )


def judge_parses(rows: Sequence[Row]) -> tuple[bool, str]:
    """Judge rung c by its largest size: right trees must be best, and the nll must rise as the trees get worse."""
    rows = [row for row in rows if row.pairs == rows[-1].pairs]
    doses = [row for row in rows if row.trees in (RIGHT, WORSE)]
    shown = ", ".join(f"F1 {number(row.f1, '.0f')}: {row.nll:.2f}" for row in doses)
    close = [row for row in rows if row not in doses and doses[0].nll > (1 - _LEAST_GAIN) * row.nll]
    if close:
        names = ", ".join(f"{row.system} ({row.nll:.2f})" for row in close)
        return False, f"The control failed: right trees are not better than {names} by a tenth. nll of a sentence: {shown}."
    if [row.nll for row in doses] != sorted(row.nll for row in doses):
        return False, f"The control failed: the nll of a sentence does not rise as the trees get worse: {shown}."
    return True, f"The instrument finds the tree, and worse trees help less: nll of a sentence by quality of trees: {shown}."


def _name(row: Row) -> str:
    return f"{row.system} ({row.group})" if row.group else row.system


def format_result(settings: ControlSettings, result: Result) -> str:
    """Return the table and the verdict for a person."""
    wide = max(len(_name(row)) for row in result.rows)
    has_f1 = any(row.f1 is not None for row in result.rows)
    head = f"{'system':<{wide}}  {'trees':<6} {'reads':<24} {'pairs':>7} {'seeds':>5} {'nll':>7} {'± 95 %':>7} {'bound':>6}"
    head += f" {'exact':>7} {'chrF':>6}{'F1':>7}" if has_f1 else f" {'exact':>7} {'chrF':>6}"
    lines = [f"rung {settings.rung}: {RUNGS[settings.rung].shows}", "", head]
    for row in result.rows:
        line = f"{_name(row):<{wide}}  {row.trees:<6} {row.reads:<24} {row.pairs:>7,} {row.seeds:>5} {row.nll:>7.2f}"
        line += f" {row.half:>7.2f} {number(row.bound, '.2f'):>6} {row.exact:>6.1f}% {number(row.chrf, '.1f'):>6}"
        lines.append(line + (f"{number(row.f1, '.1f'):>7}" if has_f1 else ""))
    lines += ["", "nll: nats a sentence with its end, on test. The interval is over test sentences, not over seeds."]
    if any(row.bound is not None for row in result.rows):
        lines.append(
            "bound: the exact entropy of the order for someone who sees only the words, or this part of the trees, too. No model "
            "without the rest can pass it."
        )
    if has_f1:
        lines.append("F1: unlabelled brackets of the test trees, against the trees that made the target.")
    return "\n".join([*lines, "", result.verdict])
