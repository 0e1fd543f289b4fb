"""The table and the plots of a data-size study, and its unpaired tests; how comparisons are read from scaling.json.

The plots are curves by number of pairs, or with a single size, one line per model. The unpaired tests compare all models with the
baseline at every size, with one variance over seeds for all of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from treenet.evaluation.significance import (
    EXPLAINED,
    FEWEST_SEEDS,
    LEVEL,
    SeedTest,
    compare_with_baseline,
    p_columns,
    sampled_variance,
    show_p_values,
)
from treenet.experiments.results import SAMPLED, Results
from treenet.experiments.study import UNLEARNED, notes_about_cells, say_unlearned_cells, unlearned_in
from treenet.tasks.tables import Column, align, number, numbers, show_interval, show_p_value, shown
from treenet.tasks.translation_metrics import COMPARED, MAIN, METRIC_TITLES, METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# For people, below a table.
EXPLAIN_POINTS = f'Differences: over shared seeds. "± 95 %", p, "p, weights" and stars mean: {EXPLAINED}'
EXPLAIN_POOLED = f"Dunnett's test of all systems of a size against the baseline. A low nll is good. More: {EXPLAINED}"
_HEAD = ("pairs", "unpaired", "metric", "difference", "95 %", "p", "seen")
Table = tuple[Sequence[str], Sequence[Sequence[str]], str]  # its head, its rows, and their meaning
_TITLES = {**METRIC_TITLES, "nll": "nll a token"}


def compare_sizes(table: Results, baseline: str, num_sentences: int, level: float = LEVEL) -> Iterator[dict]:
    """Yield the tests of scaling.json, by size, metric and model, from the SAMPLED scores of so many sentences."""
    for fraction, here in sorted(table.by("size").items()):
        pairs = fmean(row.value for row in here.where(metric="pairs"))
        for metric, of_metric in here.where(split=SAMPLED).by("metric").items():
            found = {model: np.stack([row.value for row in rows]) for model, rows in of_metric.by("system").items()}
            if baseline not in found:
                continue
            means = {model: scores[:, 1:].mean(0) for model, scores in found.items()}
            variances = {model: sampled_variance(mean - means[baseline], num_sentences) for model, mean in means.items()}
            values = {model: scores[:, 0].tolist() for model, scores in found.items()}
            for model, test in compare_with_baseline(values, baseline, variances, level, num_sentences).items():
                yield {
                    "fraction": fraction,
                    "pairs": pairs,
                    "metric": metric,
                    "model": model,
                    "against": baseline,
                    **asdict(test),
                    **unlearned_in(here),  # one variance of all systems: one that learned nothing falsifies it
                }


def list_pooled(report: Mapping) -> Table:
    """Return the table: pairs, difference, metric, its value, interval, p, and what the design sees."""
    rows: list[tuple[str, ...]] = []
    for test in report["pooled"]:
        digits = 3 if test["metric"] == "nll" else 2
        low, high = test["interval"]
        inference = f"[{low:+.{digits}f}, {high:+.{digits}f}]", show_p_value(test["p_value"]), f"{test['seen']:.{digits}f}"
        name, difference = f"{test['model']} - {test['against']}", f"{test['difference']:+.{digits}f}"
        shown = ("-",) * len(inference) if UNLEARNED in test else inference
        rows.append((f"{test['pairs']:,.0f}", name, _TITLES[test["metric"]], difference, *shown))
    return _HEAD, rows, EXPLAIN_POOLED


SCALING = "scaling.json"  # in the folder of a study
# Values of a cell, and of a point over its seeds: the lowest nll on valid, the last of training batches, the time of training.
VALID_NLL, TRAIN_NLL, SECONDS = OF_TRAINING = ("valid_nll", "train_nll", "seconds")
NLL_COMPARISON = "valid_nll_comparison"  # of a point
ABOUT_VALID = "training with other seeds, by the lowest nll on these sentences of valid (two-sided t over paired seeds)"
NLL_HEAD = ("pairs", "by nll on valid", "difference", "95 %", "p")
EXPLAIN_BY_SEED = (
    "Values of each seed: the scores, the lowest nll on valid, the last nll of training batches, minutes of training."
)
EXPLAIN_NLL = f"The lowest nll on valid: exploratory, over seeds alone. A low nll is good. More: {EXPLAINED}"
_NAMES = ("model", "unpaired", "metric", "by nll on valid")  # columns of names in the tables below the first


def read_test(comparison: Mapping) -> SeedTest:
    """Return the test over seeds of a comparison of scaling.json."""
    return SeedTest(**{field.name: comparison[field.name] for field in fields(SeedTest) if field.name in comparison})


def shown_test(comparison: Mapping) -> SeedTest:
    """Return the test over seeds as tables show it: the difference alone if a compared cell learned nothing."""
    test = read_test(comparison)
    return test.without_inference() if UNLEARNED in comparison else test


def read_comparison(point: dict) -> tuple[SeedTest, float | None] | None:
    """Return `shown_test` of a point of scaling.json, and the p of its weights if it is shown; None for a baseline."""
    test = point.get("comparison")
    if test is None:
        return None
    return shown_test(test), None if UNLEARNED in test else test["weights"]["p_two_sided"]


def others_of(metric: str) -> list[str]:
    """Return the metrics that a table has beside the one that a study compares."""
    return [name for name in COMPARED if name not in (MAIN, metric)]


def point_columns(report: dict) -> list[Column]:
    """Return the table: for each size and model its scores, and the tested difference. A star marks p < 0.05 over seeds."""
    points, metric = report["points"], report["metric"]
    found = [read_comparison(point) for point in points]
    tests = [one and one[0] for one in found]
    means = [metric, *(name for name in others_of(metric) if all(name in point for point in points))]
    first, *others = (numbers(METRIC_TITLES[name], [point[name]["mean"] for point in points], ".2f") for name in means)
    return [
        Column("model", [point["model"] for point in points]),
        numbers("pairs", [point["pairs"] for point in points], ",.0f"),
        numbers("share", [point["fraction"] for point in points], ".4g"),
        numbers("seeds", [len(point["seeds"]) for point in points]),
        first,
        numbers("± 95 %", [point[metric]["half_interval"] for point in points], ".2f"),
        *others,
        shown("difference", tests, lambda test: number(test.difference, "+.2f")),
        Column("from", [(point.get("comparison") or {}).get("against", "") for point in points]),
        shown("95 %", tests, lambda test: show_interval(test.interval)),
        *p_columns(tests),
        shown("p, weights", found, lambda one: show_p_value(one[1])),
    ]


def more_tables(report: dict) -> Iterator[tuple[list[Column], str]]:
    """Yield the tables below: their columns, and their meaning."""
    for titles, rows, message in (list_pooled(report), list_by_seed(report), list_nll(report)):
        if rows:
            table = zip(titles, *rows, strict=True)
            yield [Column(title, cells, "n" * (title not in _NAMES)) for title, *cells in table], message


def format_table(report: dict) -> str:
    """Return all tables for a terminal, the slopes, and notes about the numbers."""
    if not report["points"]:
        return "no cell is done yet"
    lines = [*align(point_columns(report)), *describe_slopes(report), *say_unlearned_cells(report), EXPLAIN_POINTS]
    signature = report[f"{report['metric']}_signature"]
    lines.append(f"{report['num_examples']:,} examples of {report['split']}; {signature}")
    for columns, message in more_tables(report):
        lines += [*align(columns), message]
    return "\n".join([*lines, *notes_about_cells(report)])


def list_by_seed(report: Mapping) -> Table:
    """Return a table with the values of every seed."""
    metric = report["metric"]
    columns = {  # the title, the name in the report, a unit, and digits
        METRIC_TITLES[metric]: (metric, 1, 2),
        **{METRIC_TITLES[name]: (name, 1, 1) for name in others_of(metric)},
        "nll a token": ("nll", 1, 3),
        "nll on valid": (VALID_NLL, 1, 3),
        "nll of training": (TRAIN_NLL, 1, 2),
        "minutes": (SECONDS, 60, 0),
    }
    columns = {title: one for title, one in columns.items() if all(one[0] in point for point in report["points"])}
    rows = []
    for point in report["points"]:
        cells = [f"{point['pairs']:,.0f}", point["model"], ", ".join(map(str, point["seeds"]))]
        for name, unit, digits in columns.values():
            cells.append(", ".join(f"{value / unit:.{digits}f}" for value in point[name]["values"]))
        rows.append(tuple(cells))
    return ("pairs", "model", "seeds", *columns), rows, EXPLAIN_BY_SEED


def list_nll(report: Mapping) -> Table:
    """Return a table of the differences in nll on valid."""
    rows = []
    for point in report["points"]:
        if NLL_COMPARISON in point:
            test = shown_test(point[NLL_COMPARISON])
            interval = "[{:+.3f}, {:+.3f}]".format(*test.interval) if test.interval else "-"
            name = f"{point['model']} - {point['comparison']['against']}"
            rows.append((f"{point['pairs']:,.0f}", name, f"{test.difference:+.3f}", interval, show_p_value(test.p_value)))
    return NLL_HEAD, rows, EXPLAIN_NLL


def describe_slopes(report: dict) -> list[str]:
    """Return one line about the slope of every model."""
    lines, metric = [], report["metric"]
    unit = METRICS[MAIN if METRICS[metric].kind == METRICS[MAIN].kind else metric].title
    for slope in report["slopes"]:
        test = shown_test(slope["comparison"])
        what = f"{slope['model']} - {slope['comparison']['against']}, {test.seeds} seeds, {len(slope['fractions'])} sizes"
        values = f"{test.difference:+.2f} {unit} a doubling"
        if test.interval:
            (low, high), (p_value, holm) = test.interval, show_p_values(test)
            values += f", 95 % [{low:+.2f}, {high:+.2f}], p {p_value}, p, Holm {holm}"
        elif test.seeds < FEWEST_SEEDS:
            values += f"; an interval needs {FEWEST_SEEDS} seeds"
        lines.append(f"slope of {what}: {values}")
    return lines


def draw(report: dict) -> "Figure":
    """Draw the scores of all models, and the differences that the study tests.

    Bars are 95 % intervals, and crosses are single seeds.
    """
    sizes = {point["fraction"] for point in report["points"]}
    return _draw_by_size(report) if len(sizes) > 1 else _draw_by_model(report)


def _draw_by_size(report: dict) -> "Figure":
    """Draw mean BLEU by number of pairs for each model, and below it the differences, as in figure 5a of the paper."""
    from matplotlib.figure import Figure

    metric = report["metric"]
    compared = any(map(read_comparison, report["points"]))
    figure = Figure(figsize=(6.4, 6.4 if compared else 4.4), layout="constrained")
    panels = figure.subplots(2 if compared else 1, sharex=True, squeeze=False)[:, 0]
    models = list(dict.fromkeys(point["model"] for point in report["points"]))
    for index, model in enumerate(models):
        points = [point for point in report["points"] if point["model"] == model]
        aside, color = 1.02 ** (index - (len(models) - 1) / 2), f"C{index}"  # so that bars of two models do not hide each other
        scores = [point[metric] for point in points]
        means, halves, seeds = zip(*((one["mean"], one["half_interval"], one["values"]) for one in scores), strict=True)
        _draw_line(panels[0], [point["pairs"] * aside for point in points], means, halves, seeds, color, model)
        if tested := [(point, found[0]) for point in points if (found := read_comparison(point))]:
            against = tested[0][0]["comparison"]["against"]
            _draw_line(
                panels[1],
                [point["pairs"] * aside for point, _ in tested],
                [test.difference for _, test in tested],
                [test.interval and test.interval[1] - test.difference for _, test in tested],
                [_single_differences(report, point, against) for point, _ in tested],
                color,
                f"{model} - {against}",
            )
    panels[0].set_ylabel(f"{METRIC_TITLES[metric]} on {report['split']}")
    if compared:
        panels[1].set_ylabel("difference")
        panels[1].axhline(0, color="0.5", linewidth=0.8)
    sizes = sorted({round(point["pairs"]) for point in report["points"]})
    panels[-1].set(xscale="log", xlabel="training pairs")
    panels[-1].set_xticks(sizes, [_short(size) for size in sizes])
    panels[-1].minorticks_off()
    for axes in panels:
        axes.margins(x=0.1, y=0.15)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _draw_line(
    axes: "Axes",
    pairs: Sequence[float],
    means: Sequence[float],
    halves: Sequence[float | None],
    seeds: Sequence[Sequence[float]],
    color: str,
    label: str,
) -> None:
    """Draw the means of a model by number of pairs, half their intervals where there are any, and the values of single seeds."""
    bars = [math.nan if half is None else half for half in halves]
    axes.errorbar(pairs, means, yerr=bars, marker="o", markersize=5, capsize=3, linewidth=1.5, color=color, label=label)
    for at, values in zip(pairs, seeds, strict=True):
        axes.plot([at] * len(values), values, "x", markersize=4, color=color)


def _draw_by_model(report: dict) -> "Figure":
    """Draw one line per model, the first on top: on the left its BLEU, on the right its difference from another model."""
    from matplotlib.figure import Figure

    metric, points = report["metric"], report["points"]
    compared = any(map(read_comparison, points))
    figure = Figure(figsize=(9.0 if compared else 6.4, 1.1 + 0.32 * len(points)), layout="constrained")
    panels = figure.subplots(1, 2 if compared else 1, sharey=True, squeeze=False)[0]
    for place, point in enumerate(points):
        score, color = point[metric], "C0" if point["model"] == report["baseline"] else "C7"
        _draw_mean(panels[0], place, score["mean"], score["half_interval"], score["values"], color)
        if found := read_comparison(point):
            test, against = found[0], point["comparison"]["against"]
            half = test.interval and test.interval[1] - test.difference
            _draw_mean(panels[1], place, test.difference, half, _single_differences(report, point, against), color)
            panels[1].annotate(f"from {against}", (1.0, place), (4, 0), ("axes fraction", "data"), "offset points", va="center")
    panels[0].set_yticks(range(len(points)), [point["model"] for point in points])
    panels[0].set_ylim(len(points) - 0.4, -0.6)
    pairs = max(point["pairs"] for point in points)
    panels[0].set_xlabel(f"{METRIC_TITLES[metric]} on {report['split']}, {_short(round(pairs))} training pairs")
    if compared:
        panels[1].axvline(0, color="0.5", linewidth=0.8)
        panels[1].set_xlabel("difference")
    for axes in panels:
        axes.grid(axis="x", alpha=0.3)
    return figure


def _draw_mean(axes: "Axes", place: int, mean: float, half: float | None, seeds: Sequence[float], color: str) -> None:
    axes.errorbar(mean, place, xerr=half, marker="o", markersize=5, capsize=3, linewidth=1.5, color=color)
    axes.plot(seeds, [place] * len(seeds), "x", markersize=5, color="black", zorder=3)  # above the bar


def _single_differences(report: dict, point: dict, against: str) -> list[float]:
    """Return the difference of each seed that both models have at the size of a point."""
    metric = report["metric"]
    there = next(other for other in report["points"] if (other["model"], other["fraction"]) == (against, point["fraction"]))
    ours, theirs = (dict(zip(one["seeds"], one[metric]["values"], strict=True)) for one in (point, there))
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _short(count: int) -> str:
    """Shorten `1020` to `1.0k`, `4500000` to `4.5M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)
