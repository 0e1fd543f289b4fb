"""The figures of cells and sentences on our pages, each computed from records in `docs/results/runs`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from treenet.config import OptimizerConfig
from treenet.evaluation.significance import LEVEL, SeedTest, t_quantile
from treenet.experiments.control import DAMAGE, draw_corpora, systems_of
from treenet.experiments.control_data import Corpus
from treenet.experiments.control_table import Row as ControlRow
from treenet.experiments.control_table import build_result, half_interval, sentence_nll
from treenet.experiments.recorded_study import report_records, study_grid
from treenet.experiments.records import Record, read_records
from treenet.experiments.results import Results
from treenet.experiments.scaling_report import sample_scores
from treenet.experiments.scaling_table import NLL_COMPARISON, VALID_NLL, compare_sizes, read_test
from treenet.experiments.seeds import MEASURES
from treenet.experiments.seeds_report import headline_test
from treenet.experiments.settings import ControlSettings
from treenet.training.optimizer import learning_rate

WORTH = 1.1  # BLEU, of the paper
RESULTS = Path(__file__).resolve().parent
REPOSITORY = RESULTS.parent.parent
RUNS = RESULTS / "runs"
# A figure, but not the digits of a name such as SST-5, IWSLT'14 or Multi30k. With "<" it is a bound.
FIGURE = re.compile(r"(?:< )?(?<![\w'’.-])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")


class Range(NamedTuple):
    """Two figures, or one if both are the same in the digits of the page."""

    low: float
    high: float


# Of one cell or sentence; None is a figure that no record can give, such as a published one.
Figures = Sequence[float | Range | None]
Column = Callable[["Row"], Figures] | None  # None: labels and published figures, which stay as they are
Cell = Callable[[], Figures] | None


@cache
def records(study: str) -> Sequence[Record]:
    return list(read_records(RUNS / study).values())


@cache
def report(study: str, baseline: str | None, main: str | None, only: tuple[str, ...]) -> dict:
    """Return the report of a study, or of `only` some of its systems, at full size."""
    chosen = records(study)
    if only:
        chosen = [one for one in chosen if {*only} & {*one["labels"].values()} and one["labels"].get("fraction", 1.0) == 1.0]
    return report_records(chosen, baseline, main)


@dataclass(frozen=True)
class Row:
    """A system of a study, at one size."""

    study: str
    system: str
    share: float = 1.0
    baseline: str | None = None
    main: str | None = None
    only: tuple[str, ...] = ()

    @property
    def report(self) -> dict:
        return report(self.study, self.baseline, self.main, self.only)

    @property
    def point(self) -> dict:
        if "systems" in self.report:
            return next(one for one in self.report["systems"] if one["system"] == self.system)
        return next(one for one in self.report["points"] if (one["model"], one["fraction"]) == (self.system, self.share))

    @property
    def records(self) -> list[Record]:
        labels = {"model": self.system, "fraction": self.share}
        return [one for one in records(self.study) if labels.items() <= one["labels"].items()]

    @property
    def other(self) -> "Row":
        """The system that this one is compared with."""
        return Row(self.study, self.point["comparison"]["against"], self.share, self.baseline, self.main, self.only)

    @property
    def unit(self) -> float:
        """A score times this is a figure of the pages."""
        return MEASURES[self.report["task"]].unit if "task" in self.report else 1

    def values(self, name: str = "") -> list[float]:
        """Return a score of every seed, in the unit of the pages; without a name, the score that a study compares."""
        return [self.unit * value for value in self.point[name or self.report["metric"]]["values"]]

    def test(self, name: str = "") -> SeedTest:
        """Return the test of the score, or of the nll on valid."""
        if "task" not in self.report:
            return read_test(self.point[NLL_COMPARISON if name == VALID_NLL else "comparison"])
        found = headline_test(self.point, MEASURES[self.report["task"]])
        assert found is not None, f"{self} is a baseline"
        return found


# Systems of a study, which its tables and sentences share.
SICK = (
    "bilstm", "bilstm_2_layers", "lstm", "lstm_2_layers", "child_sum_tree_lstm", "tree_lstm", "transformer", "tree_transformer",
)  # fmt: skip
CONTROL_TREES = ("parsed", "balanced", "left", "right", "random", "transformer")
SIZES = (*(Row("iwslt14", "tree_transformer", share) for share in (1.0, 0.5, 0.25)), Row("multi30k", "tree_transformer"))


def pairs(row: Row) -> Figures:
    found = [one["facts"]["examples"] for one in row.records]
    return [Range(min(found), max(found))]


def each(name: str, row: Row) -> Figures:
    return row.values(name)


def mean(name: str, row: Row) -> Figures:
    return [fmean(row.values(name))]


def other_mean(name: str, row: Row) -> Figures:
    return mean(name, row.other)


def spread(name: str, row: Row) -> Figures:
    return [fmean(row.values(name)), stdev(row.values(name))]


def by_class(row: Row) -> Figures:
    """Accuracy on test as the mean over classes, and its deviation over seeds."""
    tables = [one["scores"]["test"]["confusion"] for one in records(row.study) if one["labels"]["system"] == row.system]
    shares = [100 * fmean(counts[i] / sum(counts) for i, counts in enumerate(table)) for table in tables]
    return [fmean(shares), stdev(shares)]


def difference(name: str, row: Row) -> Figures:
    """The difference of a score, and its interval."""
    test = row.test(name)
    assert test.interval is not None
    return [row.unit * value for value in (test.difference, *test.interval)]


def p_value(name: str, row: Row) -> Figures:
    return [row.test(name).p_value]


def holm(row: Row) -> Figures:
    return [row.test().holm_p_value]


def seen(row: Row) -> Figures:
    """The smallest true difference that such a study finds with probability 0.8."""
    found = row.test().seen
    assert found is not None
    return [row.unit * found]


def from_model(baseline: str, row: Row) -> Figures:
    """The difference from another model than that of the report, with its interval."""
    return difference("", against(row, baseline))


def against(row: Row, baseline: str) -> Row:
    return Row(row.study, row.system, baseline=baseline, main=row.system, only=(row.system, baseline))


def power(row: Row) -> Figures:
    """The probability that a t test over the seeds finds a true difference of `WORTH`, with the deviation that the seeds have."""
    from scipy.stats import nct

    test = row.test()
    assert test.seeds_error is not None
    return [float(nct.sf(t_quantile(test.seeds - 1, LEVEL), test.seeds - 1, WORTH / test.seeds_error))]


@cache
def dunnett(study: str, share: float, baseline: str | None, level: float) -> list[dict]:
    """Return the unpaired tests of a study at one size, by intervals of this level."""
    same_size = [one for one in records(study) if one["labels"]["fraction"] == share]
    grid = study_grid(same_size, baseline)
    sampled = zip(same_size, sample_scores(same_size, grid), strict=True)
    cells = ({"pairs": one["facts"]["examples"], **one["labels"], **scores} for one, scores in sampled)
    sentences = same_size[0]["scores"][grid.split]["num_examples"]
    return list(compare_sizes(Results.of(cells, "model"), grid.baseline, sentences, level))


def unpaired(metric: str, row: Row, names: Sequence[str] = ("difference", "interval"), level: float = LEVEL) -> Figures:
    """Facts of Dunnett's test against the baseline: the difference, its interval, p_value, or what the design has seen."""
    found = dunnett(row.study, row.share, row.baseline, level)
    test = next(one for one in found if (one["model"], one["metric"]) == (row.system, metric))
    return [figure for name in names for figure in (test[name] if name == "interval" else [test[name]])]


# Tables by page and place, row by row. A place is a heading and the number of the table below it.


def grid(columns: Sequence[Column], *rows: Row) -> list[list[Cell]]:
    return [[column and partial(column, row) for column in columns] for row in rows]


def turned(lines: Sequence[Column], *rows: Row) -> list[list[Cell]]:
    """A table whose columns are systems, after a column of labels."""
    return [[None, *(line and partial(line, row) for row in rows)] for line in lines]


def both(row: Row) -> list[Record]:
    """The records of the Tree Transformer and of the Transformer of a size."""
    return [*row.records, *row.other.records]


def budget(row: Row) -> Figures:
    epochs = [one["training"]["updates"] / one["facts"]["batches_per_epoch"] for one in both(row)]
    return [fmean(one["training"]["updates"] for one in both(row)), Range(min(epochs), max(epochs))]


def valid_curve(record: Record) -> dict[int, float]:
    """The nll on valid by update."""
    return dict(zip(record["curve"]["valid"]["step"], record["curve"]["valid"]["nll"], strict=True))


def convergence(row: Row) -> Figures:
    """The fall of the nll on valid in the last 500 updates; at a quarter, also how far it has risen above its lowest value."""
    same_size = [one for one in records(row.study) if one["labels"]["fraction"] == row.share]
    curves = [valid_curve(one) for one in same_size]
    falls = [curve[2500] - curve[3000] for curve in curves]
    rises = [curve[3000] - min(curve.values()) for curve in curves]
    return [Range(min(falls), max(falls)), *([Range(min(rises), max(rises))] if row.share < 1 else [])]


def rate(row: Row) -> Figures:
    """The mean rate of the averaged checkpoints, in per cent of the highest rate."""
    shares = []
    for one in both(row):
        config = OptimizerConfig(**one["settings"]["optimizer"])
        rates = [learning_rate(config, step) for step in one["training"]["averaged_steps"]]
        shares.append(100 * fmean(rates) / config.learning_rate)
    return [fmean(shares)]


def lowest_nll(row: Row) -> Figures:
    found = [*row.values(VALID_NLL), *row.other.values(VALID_NLL)]
    return [Range(min(found), max(found))]


def batches_per_epoch(row: Row) -> Figures:
    return [row.records[0]["facts"]["batches_per_epoch"]]


def parameters(row: Row) -> Figures:
    return [row.point["parameters"] / 1000]


@cache
def control(rung: str) -> Mapping[tuple[str, str | int], ControlRow]:
    """Return the rows of the control by system and group of test sentences, or in rung b by system and pairs."""
    seeds = [1, 2, 3] if rung == "b" else [1]
    settings = ControlSettings.model_validate({"rung": rung, "all": rung == "a", "seeds": seeds})
    # The sentences of rung c come from a parser; their table needs no bounds and no groups.
    corpora = (
        {one.corpus: Corpus({}) for one in systems_of(settings)} if rung == "c" else draw_corpora(settings, ("train", "valid"))
    )
    found = {corpus: records(f"control_{rung}/{corpus}") for corpus in corpora}
    rows = build_result(settings, systems_of(settings), corpora, found, {}).rows
    return {(row.system, row.pairs if rung == "b" else row.group): row for row in rows}


def of_control(rung: str, system: str, group: str | int, names: Sequence[str]) -> Figures:
    return [getattr(control(rung)[system, group], name) for name in names]


def control_grid(columns: Sequence[Sequence[str]], rung: str, *rows: tuple[str, str | int]) -> list[list[Cell]]:
    """A table of the control; a column without names is one of labels."""
    return [[partial(of_control, rung, *row, names) if names else None for names in columns] for row in rows]


def above_right_trees(system: str) -> Figures:
    """The nll of a sentence in rung c above that of right trees, and half the interval over the sentences, in pairs."""
    found = {one["labels"]["model"]: one for corpus in ("labels", *DAMAGE) for one in records(f"control_c/{corpus}")}
    excess = sentence_nll(found[system]) - sentence_nll(found["tree_transformer"])
    return [float(excess.mean()), half_interval(excess)]


def falls(row: Row, name: str = "") -> Figures:
    """The difference and its interval, the other way round."""
    value, low, high = difference(name, row)
    return [-value, -high, -low]


def chain_of(groups: Iterable[Figures]) -> Figures:
    return [*chain.from_iterable(groups)]


def correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float(np.corrcoef(ours, theirs)[0, 1])


def write_like(there: Sequence[str], figures: Figures) -> list[str] | None:
    """Write figures in the form of those that are there; None if their numbers differ."""
    written = list[str]()
    for figure in figures:
        if len(written) == len(there):
            return None
        like = there[len(written)]
        if isinstance(figure, Range):
            low, high = _show(figure.low, like), _show(figure.high, like)
            written += [low] if low == high else [low, high]
        else:
            written.append(like if figure is None else _show(figure, like))
    return written if len(written) == len(there) else None


def _show(value: float, like: str) -> str:
    bound = like.removeprefix("< ")
    if bound != like and value < float(bound):
        return like
    digits, sign = len(bound.partition(".")[2]), "+" if bound[0] in "+-" else ""
    return f"{value:{sign},.{digits}f}"
