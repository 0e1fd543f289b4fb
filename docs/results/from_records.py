"""Computes the figures of studies on our pages from their records: `python docs/results/from_records.py` writes them anew.

A page is its own template. In a table, the columns of `TABLES` give the figures of a cell. In a sentence, each `{}` is a figure.
A figure keeps its place and its digits. Everything else on a page stays as it is.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from treenet.config import OptimizerConfig
from treenet.evaluation.significance import LEVEL, SeedTest, t_quantile
from treenet.experiments.control import draw_corpora, systems_of
from treenet.experiments.control_table import Row as ControlRow
from treenet.experiments.control_table import build_result
from treenet.experiments.recorded_study import report_records, study_grid
from treenet.experiments.records import Record, read_records
from treenet.experiments.scaling_report import sample_scores
from treenet.experiments.scaling_table import NLL_COMPARISON, SECONDS, TRAIN_NLL, VALID_NLL, compare_sizes, metric_of, read_test
from treenet.experiments.seeds import MEASURES
from treenet.experiments.seeds_report import headline_test
from treenet.experiments.settings import ControlSettings
from treenet.training.optimizer import learning_rate

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


# What records say.


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

    def values(self, name: str = "") -> list[float]:
        """Return a score of every seed, in the unit of the pages; without a name, the score that a study compares."""
        unit = MEASURES[self.report["task"]].unit if "task" in self.report else 1
        return [unit * value for value in self.point[name or metric_of(self.report)]["values"]]

    def test(self, name: str = "") -> SeedTest:
        """Return the test of the score, or of the nll on valid."""
        if "task" not in self.report:
            return read_test(self.point[NLL_COMPARISON if name == VALID_NLL else "comparison"])
        found = headline_test(self.point, MEASURES[self.report["task"]])
        assert found is not None, f"{self} is a baseline"
        return found


def pairs(row: Row) -> Figures:
    found = [one["facts"]["examples"] for one in row.records]
    return [Range(min(found), max(found))]


def each(name: str, row: Row, unit: float = 1) -> Figures:
    return [unit * value for value in row.values(name)]


def mean(name: str, row: Row) -> Figures:
    return [fmean(row.values(name))]


def other_mean(name: str, row: Row) -> Figures:
    return mean(name, row.other)


def spread(name: str, row: Row) -> Figures:
    return [fmean(row.values(name)), stdev(row.values(name))]


def difference(name: str, row: Row) -> Figures:
    """The difference of a score, and its interval."""
    test = row.test(name)
    unit = MEASURES[row.report["task"]].unit if "task" in row.report else 1
    assert test.interval is not None
    return [unit * value for value in (test.difference, *test.interval)]


def p_value(name: str, row: Row) -> Figures:
    return [row.test(name).p_value]


def holm(row: Row) -> Figures:
    return [row.test().holm_p_value]


def seen_by_test(row: Row) -> Figures:
    """The smallest true difference that such a study finds with probability 0.8."""
    found = row.test().seen
    assert found is not None
    return [MEASURES[row.report["task"]].unit * found]


def from_model(baseline: str, row: Row) -> Figures:
    """The difference from another model than that of the report, with its interval."""
    return difference("", against(row, baseline))


def against(row: Row, baseline: str) -> Row:
    return Row(row.study, row.system, baseline=baseline, main=row.system, only=(row.system, baseline))


def power(row: Row, effect: float = 1.1) -> Figures:
    """The probability that a t test over the seeds finds a true difference, with the deviation that the seeds have."""
    from scipy.stats import nct

    test = row.test()
    assert test.seeds_error is not None
    return [float(nct.sf(t_quantile(test.seeds - 1, LEVEL), test.seeds - 1, effect / test.seeds_error))]


@cache
def dunnett(study: str, share: float, baseline: str | None, level: float) -> list[dict]:
    """Return the unpaired tests of a study at one size, by intervals of this level."""
    same_size = [one for one in records(study) if one["labels"]["fraction"] == share]
    grid = study_grid(same_size, baseline)
    cells = [{"cell": one["cell"], "pairs": one["facts"]["examples"], **one["labels"]} for one in same_size]
    return list(compare_sizes(cells, grid.baseline, sample_scores(same_size, grid), level))


def unpaired(metric: str, row: Row, names: Sequence[str] = ("difference", "interval"), level: float = LEVEL) -> Figures:
    """Facts of Dunnett's test against the baseline: the difference, its interval, p_value, or what the design has seen."""
    found = dunnett(row.study, row.share, row.baseline, level)
    test = next(one for one in found if (one["model"], one["metric"]) == (row.system, metric))
    return [figure for name in names for figure in (test[name] if name == "interval" else [test[name]])]


def seen(row: Row) -> Figures:
    """The smallest true difference that such a test finds with probability 0.8."""
    from scipy.optimize import brentq

    return [float(brentq(lambda effect: power(row, effect)[0] - 0.8, 0.01, 20))]


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


def convergence(row: Row) -> Figures:
    """The fall of the nll on valid in the last 500 updates; at a quarter, also how far it has risen above its lowest value."""
    same_size = [one for one in records(row.study) if one["labels"]["fraction"] == row.share]
    curves = [dict(zip(one["curve"]["valid"]["step"], one["curve"]["valid"]["nll"], strict=True)) for one in same_size]
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


def as_published(row: Row) -> Figures:
    return [*other_mean("", row), None]


def test_p_values(row: Row) -> Figures:
    """p, and Holm's p if there are other comparisons beside this one."""
    beside = [one for one in row.report["points"] if one.get("comparison", {}).get("family") == row.test().family]
    return [row.test().p_value, *([row.test().holm_p_value] if len(beside) > 1 else [])]


def batches_per_epoch(row: Row) -> Figures:
    return [row.records[0]["facts"]["batches_per_epoch"]]


def parameters(row: Row) -> Figures:
    return [row.point["parameters"] / 1000]


@cache
def control(rung: str) -> Mapping[tuple[str, str], ControlRow]:
    """Return the rows of the control by system and group of test sentences."""
    settings = ControlSettings.model_validate({"rung": rung, "all": rung == "a"})
    corpora = draw_corpora(settings)
    found = {corpus: records(f"control_{rung}/{corpus}") for corpus in corpora}
    return {(row.system, row.group): row for row in build_result(settings, systems_of(settings), corpora, found, {}).rows}


def of_control(rung: str, system: str, group: str, names: Sequence[str]) -> Figures:
    return [getattr(control(rung)[system, group], name) for name in names]


def control_grid(columns: Sequence[Sequence[str]], rung: str, *rows: tuple[str, str]) -> list[list[Cell]]:
    """A table of the control; a column without names is one of labels."""
    return [[partial(of_control, rung, *row, names) if names else None for names in columns] for row in rows]


TUNING = ("drop20_smooth10", "drop30_smooth10", "drop40_smooth10", "drop30_smooth30", "drop30_smooth10_rate1")
_tree = partial(Row, system="tree_transformer")
SIZES = (_tree("iwslt14"), _tree("iwslt14", share=0.5), _tree("iwslt14", share=0.25), _tree("multi30k"))
BY_SEED: tuple[Column, ...] = (
    *(partial(each, name) for name in ("", "chrf", VALID_NLL, TRAIN_NLL)),
    partial(each, SECONDS, unit=1 / 60),
)
ACCURACIES = tuple(partial(spread, f"{name}.accuracy") for name in ("valid", "test", "test.last"))
_two, _peak, _difference = partial(spread, "test.binary_accuracy"), partial(spread, "test.peak.accuracy"), partial(difference, "")
_p, _nll = partial(p_value, ""), partial(difference, VALID_NLL)
CLASSIFIERS = (
    "tree_transformer", "transformer_root", "transformer_phrases", "bilstm_root", "bilstm_phrases", "tree_lstm",
    "child_sum_tree_lstm",
)  # fmt: skip
VARIANTS = ("per_head", "released_rule", "released_rule_per_head", "no_hier_emb", "no_sub_mask", "no_hier_emb_no_sub_mask")
SICK = (
    "bilstm", "bilstm_2_layers", "lstm", "lstm_2_layers", "child_sum_tree_lstm", "tree_lstm", "transformer", "tree_transformer",
)  # fmt: skip
SPLIT_WORDS = [f"{model}_{place}" for model in ("tree_transformer", "tree_lstm") for place in ("pieces", "node", "both")]
ABOVE_ENCODER = ("tree", "tree_shuffled", "layer", "head", "child_sum")
CONTROL = (
    "tree_transformer", "other_trees", "transformer", "tree_relative_positions", "linearized_transformer", "tree2seq",
    "tree2seq_other_trees", "bilstm", "multi_granularity", "sinusoids", "structural_positions", "tree_distance",
    "tree_traversal", "deprel_head", "child_sum_tree2seq", "relative_positions",
)  # fmt: skip
NLL_OF_CONTROL = ("nll", "half")
_above = partial(Row, "sst5_pretrained_tuning", baseline="tree_r1_d3")
_sick = partial(Row, "sick", baseline="bilstm")
_split_words = partial(Row, "sst5_split_words", baseline="tree_transformer_pieces")
_windows = partial(Row, "windows", baseline="one_window")

TABLES: Mapping[tuple[str, str], list[list[Cell]]] = {
    ("translation.md", "Does the tree pay in translation?#0"): turned(
        (pairs, budget, convergence, rate, lowest_nll, as_published, power, seen), *SIZES
    ),
    ("translation.md", "What the records show#0"): grid(
        (None, pairs, partial(mean, ""), partial(other_mean, ""), _difference, _p, _nll, partial(p_value, VALID_NLL)), *SIZES
    ),
    ("translation.md", "What the records show#1"): grid(
        (None, None, partial(mean, ""), _difference, test_p_values, partial(from_model, "transformer")),
        Row("iwslt14", "shuffled"),
        Row("iwslt14", "relative_positions"),
        Row("multi30k", "shuffled"),
    ),
    ("translation.md", "The second study#1"): [
        *grid((None, partial(mean, "nll"), partial(mean, "")), *(Row("iwslt14_relative_tuning_gpu", cell) for cell in TUNING)),
        *grid((None, partial(mean, "nll"), partial(mean, "")), Row("iwslt14_relative_tuning", "drop30_smooth10")),
    ],
    ("translation.md", "IWSLT'14#0"): grid(
        (None, pairs, *BY_SEED),
        *(Row("iwslt14", model) for model in ("transformer", "tree_transformer", "shuffled", "relative_positions")),
        *(Row("iwslt14", model, share) for share in (0.5, 0.25) for model in ("transformer", "tree_transformer")),
    ),
    ("translation.md", "Multi30k#0"): grid(
        (None, *BY_SEED), *(Row("multi30k", model) for model in ("transformer", "tree_transformer", "shuffled"))
    ),
    ("classification.md", "Trained on two classes alone (SST-2)#0"): grid(
        (None, *ACCURACIES, None, _difference, holm), *(Row("sst2", system) for system in CLASSIFIERS)
    ),
    ("classification.md", "Words kept whole, and the best checkpoint on test#0"): grid(
        (None, *ACCURACIES, _two, _peak, _difference, holm),
        *(Row("sst5_whole_words", system) for system in (*CLASSIFIERS, *VARIANTS)),
    ),
    ("classification.md", "The place of a split word's class#0"): grid(
        (None, *ACCURACIES, _two, _difference, holm), *map(_split_words, SPLIT_WORDS)
    ),
    ("classification.md", "Relatedness: SICK#0"): grid(
        (
            None, parameters,
            *(partial(spread, name) for name in ("valid.pearson", "test.pearson", "test.spearman", "test.mse")),
            _difference, holm, None,
        ),
        *map(_sick, SICK),
    ),
    ("pretrained.md", "Results#0"): grid(
        (None, *ACCURACIES, _difference, seen_by_test, holm),
        *(Row("sst5_pretrained", name, baseline="tree") for name in ABOVE_ENCODER),
    ),
    ("pretrained.md", "Tuning#0"): [
        [None, *(partial(mean, "valid.accuracy", _above(f"{name}_{settings}")) for name in ("tree", "layer"))]
        for settings in ("r1_d3", "r1_d1", "r03_d3", "r03_d1")
    ],
    ("control.md", "Order decided by a tree alone#0"): control_grid(
        ((), (), NLL_OF_CONTROL, ("bound",), ("exact",), ("chrf",)), "a", *((system, "") for system in CONTROL[:3])
    ),
    ("control.md", "Every model that reads a tree#1"): control_grid(
        ((), (), (), ("bound",), NLL_OF_CONTROL, ("exact",), ("chrf",)), "a", *((system, "") for system in CONTROL[3:])
    ),
    ("control.md", "Deeper trees than in training#0"): control_grid(
        ((), (), (), ("bound",), NLL_OF_CONTROL, ("exact",)),
        "d",
        *((system, depth) for system in CONTROL[:3] for depth in ("depth to 4", "depth 6 to 8")),
    ),
    ("windows.md", "The effect of windows on quality#0"): [
        *grid(
            (None, batches_per_epoch, partial(each, VALID_NLL), partial(mean, ""), partial(mean, "chrf")),
            _windows("one_window"),
            _windows("eight_windows"),
        ),
        *grid((None, None, _nll, _difference, None), _windows("eight_windows")),
    ],
}  # fmt: skip
# Tables of figures and text, which sentences cover. Of each, the columns of published figures.
MIXED: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("results/README.md", "The paper's claims, one by one#0"): (0, 1, 4),
    ("translation.md", "Protocol#0"): (0,),
    ("translation.md", "Tuning#0"): (0, 1),
}


# Sentences and parts of them, with their figures, by page. A space stands for any white space.
Sentences = Iterator[tuple[str, Figures]]
IWSLT, HALF, QUARTER, MULTI30K = SIZES
RELATIVE, OTHERS, OTHER_CAPTIONS = Row("iwslt14", "relative_positions"), Row("iwslt14", "shuffled"), Row("multi30k", "shuffled")
SST2_PLAIN, SST2_LSTM = (Row("sst2", name) for name in ("transformer_root", "tree_lstm"))
WHOLE_PLAIN, WHOLE_LSTM = (Row("sst5_whole_words", name) for name in ("transformer_root", "tree_lstm"))
SPLIT_LSTM = _split_words("tree_lstm_pieces")
ON_SICK = Row("sick", "tree_transformer", baseline="transformer", only=("tree_transformer", "transformer"))
BLEU_A_NAT = 16.9  # of Multi30k, from the four points of multi30k.md, which have no record


def of_readme() -> Sentences:
    yield "the difference is {} BLEU (95 % interval {} to {})", _difference(IWSLT)
    yield "sees the paper's +1.1 BLEU with probability {}", power(IWSLT)


def of_translation() -> Sentences:
    yield "the interval of the nll is {} to {} BLEU", nll_as_bleu(MULTI30K)
    plain = against(RELATIVE, "transformer")
    yield "by {} BLEU, and by {} nats on valid ({} to {})", [plain.test().difference, *falls(plain, VALID_NLL)]
    correlations = [correlation(row.values(), row.other.values()) for row in SIZES]
    yield "correlates by {}, {} and {} over the seeds (100, 50 and 25 %), and {} on Multi30k", correlations
    yield "At full size, its interval is {} to {} (chosen afterwards", unpaired("bleu_tokenized", IWSLT, ("interval",))
    models = ("transformer", "tree_transformer", "shuffled")
    found = [one for model in models for one in Row("iwslt14", model).records]
    nll = [dict(zip(one["curve"]["valid"]["step"], one["curve"]["valid"]["nll"], strict=True)) for one in found]
    bleu = [one["scores"]["test"]["bleu_tokenized"] for one in found]
    of_nll = [correlation(bleu, [curve[step] for curve in nll]) for step in (3000, 1200)]
    yield "correlates by {} with the last nll on valid, and by {} with the nll after 1,200 of 3,000 updates", of_nll
    deviations = [stdev(Row("iwslt14", model).values()) for model in models]
    yield "deviation of {} over seeds, instead of {} to {}", [stdev(RELATIVE.values()), min(deviations), max(deviations)]
    yield "Ours has {} BLEU in that direction", mean("", Row("iwslt14_de_en", "transformer"))
    slope = read_test(IWSLT.report["slopes"][0]["comparison"])
    yield "| not decided | power {} |", power(IWSLT)
    yield (
        "| {}, {} to {} (p {}, Holm {}): no | none: two of its three sizes compare models as in points 1 and 2 |",
        [slope.difference, *(slope.interval or ()), slope.p_value, slope.holm_p_value],
    )
    elsewhere = Row("iwslt14_other_processor", "transformer", 0.5).values()
    yield "One cell ran on both: {} and {} BLEU", [HALF.other.values()[0], *elsewhere]
    counts = [row.records[0]["facts"]["parameters"] for row in (IWSLT.other, IWSLT, RELATIVE)]
    yield "{} (Transformer), {} (with trees), {} (relative positions)", counts
    yield "| {}; {}; {} | 4,096 |", [on_valid("iwslt14_batches", f"b{size}") for size in (1024, 2048, 4096)]
    yield "| {}; {} | 10,000 |", [on_valid(f"iwslt14_pieces_{count}", "plain_4_drop20") for count in (4000, 10000)]
    for start, name in (("rate and dropout, Transformer", "plain"), ("the same, Tree Transformer", "tree")):
        tried = [on_valid("iwslt14_tuning", f"{name}_2_drop{dropout}") for dropout in (20, 30)]
        yield start + " | 0.002, 0.2; 0.002, 0.3; 0.003, 0.3 (stopped) | {}; {}; – | 0.002, 0.2 |", tried
    small = [on_valid("multi30k_small_budget", model) for model in ("transformer", "tree_transformer")]
    yield "| Transformer; Tree Transformer | {}; {} | given up", small
    yield "reads its source: the nll on valid is {}, and", Row("iwslt14_tuning", "plain_2_drop20").values(VALID_NLL)


def of_classification() -> Sentences:
    test = ON_SICK.test()
    yield "It is {} below the Transformer with the same settings ([{}, {}], Holm's p {})", [
        -test.difference, *(test.interval or ()), *most_holm(ON_SICK),
    ]  # fmt: skip


def of_claims() -> Sentences:
    start = "the whole test set: {}, the Transformer {}: {}, 95 % interval {} to {} (3 seeds); nll on valid {}, {} to {} |"
    yield "an eighth of the pairs, 3,000 updates, " + start, _both_scores(IWSLT)
    yield "it sees +1.1 with probability {}", power(IWSLT)
    score, nll = _both_scores(MULTI30K)[:5], _both_scores(MULTI30K)[5:]
    yield (
        "{}, the Transformer {}: {}, 95 % interval {} to {} (3 seeds, power {} for +1.1); nll on valid {}, {} to {}, which is {} "
        "to {} BLEU | BLEU: not decided. The nll excludes the paper's +1.1",
        [*score, *power(MULTI30K), *nll, *nll_as_bleu(MULTI30K)],
    )
    wrong = [*_difference(OTHER_CAPTIONS), *_difference(OTHERS)]
    yield "{} on Multi30k ({} to {}), {} on IWSLT'14 ({} to {}), 3 seeds each", wrong
    yield "not decided: both intervals hold 0", []
    yield (
        "{}, which is {} over the Transformer ({} to {}, exploratory) and {} over the Tree Transformer ({} to {}, Holm's p {}), "
        "3 seeds",
        [*mean("", RELATIVE), *from_model("transformer", RELATIVE), *_difference(RELATIVE), *holm(RELATIVE)],
    )
    yield "whole words, 5 seeds: {}, {} to {}, Holm's p {}", [*falls(WHOLE_PLAIN), *holm(WHOLE_PLAIN)]
    lstm = [figure for row in (SPLIT_LSTM, WHOLE_LSTM) for figure in (*falls(row), *holm(row))]
    yield "5 seeds: {}, {} to {}, Holm's p {}; whole words {}, {} to {}, Holm's p {} |", lstm
    yield "on SST-2, below, it wins with Holm's p {}", holm(SST2_LSTM)
    systems = ("tree_transformer", "transformer_root", "tree_lstm")
    trained = [fmean(Row("sst2", system).values("test.accuracy")) for system in systems]
    yield "Trained on two classes alone: {}, {}, {} (5 seeds)", trained
    yield "Two classes alone: not decided (Holm's p {})", holm(SST2_PLAIN)
    child_sum, binary = _sick("child_sum_tree_lstm"), _sick("tree_lstm")
    correlations = [fmean(row.values("test.pearson")) for row in (child_sum, binary, _sick("bilstm"))]
    yield "{}, {}, {} without word vectors; 5 seeds", correlations
    found = [child_sum.test().difference, *holm(child_sum), *holm(binary)]
    yield "child-sum ({}, p {}); not decided for binary (p {})", found
    correlations = [fmean(_sick(system).values("test.pearson")) for system in ("tree_transformer", "transformer")]
    yield "{}, the Transformer {} (5 seeds, p {})", [*correlations, *most_holm(ON_SICK)]
    yield "have only 60 % of the labels to learn from", []
    sizes = [one["facts"]["examples"] for one in records("iwslt14")]
    yield "our sizes are {} to {} pairs. At a half (about 10,400): {}, {} to {} |", [min(sizes), max(sizes), *_difference(HALF)]
    yield "the models at 25 % (5,100 to 5,300 pairs)", []


SENTENCES: Mapping[str, Callable[[], Sentences]] = {
    "README.md": of_readme,
    "translation.md": of_translation,
    "classification.md": of_classification,
    "results/README.md": of_claims,
}


def _both_scores(row: Row) -> Figures:
    """The scores of a system and of the other one, their difference, and that in nll."""
    return [*mean("", row), *other_mean("", row), *_difference(row), *_nll(row)]


def on_valid(study: str, model: str) -> float:
    """The score of a study's only split and seed."""
    (record,) = (one for one in records(study) if one["labels"]["model"] == model)
    (scores,) = record["scores"].values()
    return scores["bleu_tokenized"]


def nll_as_bleu(row: Row) -> Figures:
    """The interval of the difference in nll, in BLEU."""
    _, low, high = _nll(row)
    return [-BLEU_A_NAT * high, -BLEU_A_NAT * low]


def most_holm(row: Row) -> Figures:
    """A value that Holm's p of a system of SICK is not above: p times the number of comparisons."""
    return [row.test().p_value * (len(SICK) - 1)]


def falls(row: Row, name: str = "") -> Figures:
    """The difference and its interval, the other way round."""
    value, low, high = difference(name, row)
    return [-value, -high, -low]


def correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float(np.corrcoef(ours, theirs)[0, 1])


# Pages as templates.


class PageTable(NamedTuple):
    """A table of a page: its place, and of each row below its head the cells, as ranges of the text."""

    place: str
    start: int
    rows: list[list[tuple[int, int]]]


def find_tables(text: str) -> Iterator[PageTable]:
    """Yield the tables of a page in order, without those in blocks of code."""
    heading, number, at, in_code, lines = "", 0, 0, False, list[tuple[int, str]]()
    for line in [*text.split("\n"), ""]:
        is_row = line.lstrip().startswith("|") and not in_code
        if lines and not is_row:
            yield PageTable(f"{heading}#{number}", lines[0][0], [_cells(*one) for one in lines[2:]])
            number, lines = number + 1, []
        in_code ^= line.lstrip().startswith("```")
        if is_row:
            lines.append((at, line))
        elif not in_code and (found := re.match(r"#+ (.*)", line)):
            heading, number = found[1], 0
        at += len(line) + 1


def _cells(at: int, line: str) -> list[tuple[int, int]]:
    bars = [at + found.start() for found in re.finditer(r"\|", line)]
    return [(start + 1, end) for start, end in zip(bars, bars[1:], strict=False)]


class Filled(NamedTuple):
    """A page with the figures of the records, what could not be filled, and the ranges of the text that are checked."""

    text: str
    problems: list[str]
    checked: list[tuple[int, int]]


def fill(page: str, text: str) -> Filled:
    """Write the figures of all tables and sentences of a page anew."""
    problems, changes = list[str](), list[tuple[int, int, str]]()

    def change(start: int, end: int, figures: Callable[[], Figures]) -> None:
        there = list(FIGURE.finditer(text, start, end))
        if there and (found := _write([one[0] for one in there], figures())) is not None:
            changes.extend((*one.span(), new) for one, new in zip(there, found, strict=True))
        elif there:
            problems.append(f"{page}: {text[start:end]!r} does not have as many figures as records give: {figures()}")

    places = dict[str, PageTable]()
    for table in find_tables(text):
        places[table.place] = table
        known = TABLES.get((page, table.place))
        if known and [len(row) for row in known] != [len(row) for row in table.rows]:
            problems.append(f"{page}, {table.place}: other rows or columns than in TABLES")
        elif known:
            for row, cells in zip(known, table.rows, strict=True):
                for cell, (start, end) in zip(row, cells, strict=True):
                    if cell is not None:
                        change(start, end, cell)
    problems += [f"{page}, {place}: no such table" for of, place in (*TABLES, *MIXED) if of == page and place not in places]
    checked = []
    for sentence, figures in SENTENCES[page]() if page in SENTENCES else ():
        pattern = r"((?:< )?[+-]?\d[\d,.]*\d|\d)".join(re.escape(part) for part in sentence.split("{}"))
        matches = list(re.finditer(pattern.replace(r"\ ", r"\s+"), text))
        written = _write(list(matches[0].groups()), figures) if len(matches) == 1 else None
        if written is None:
            problems.append(f"{page}: this must be there once, with {len(figures)} figures: {sentence!r}")
        else:
            checked.append(matches[0].span())
            changes += [(*matches[0].span(number + 1), new) for number, new in enumerate(written)]
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return Filled(text, problems, checked)


def _write(there: Sequence[str], figures: Figures) -> list[str] | None:
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


def path_of(page: str) -> Path:
    """Return the file of a page, which its name gives from the repository or from docs/results."""
    return REPOSITORY / page if page == "README.md" else RESULTS / page.removeprefix("results/")


def main() -> None:
    problems = list[str]()
    for page in sorted({*SENTENCES, *(page for page, _ in (*TABLES, *MIXED))}):
        before = path_of(page).read_text(encoding="utf-8")
        filled = fill(page, before)
        problems += filled.problems
        if filled.text != before:
            path_of(page).write_text(filled.text, encoding="utf-8")
            print(f"written: {page}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
