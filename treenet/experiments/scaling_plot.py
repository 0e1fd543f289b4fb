"""The plots of a data-size study: curves by number of pairs, or with a single size, one line per model."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treenet.evaluation.significance import half_interval
from treenet.experiments.scaling_table import against_of, metric_of, read_comparison
from treenet.runs.learning_curves import write_png
from treenet.tasks.translation_metrics import METRIC_TITLES
from treeproc.common.files import atomic_write
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(report: dict, out: AnyPath) -> list[AnyPath]:
    """Write `draw` as scaling.png and scaling.svg."""
    import matplotlib

    paths = [out / "scaling.png", out / "scaling.svg"]
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none"}):
        figure = draw(report)
        write_png(figure, paths[0])
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        atomic_write(paths[1], svg.getvalue())
    return paths


def draw(report: dict) -> "Figure":
    """Draw the scores of all models, and the differences that the study tests.

    Bars are 95 % intervals, and crosses are single seeds.
    """
    sizes = {point["fraction"] for point in report["points"]}
    return _draw_by_size(report) if len(sizes) > 1 else _draw_by_model(report)


def _draw_by_size(report: dict) -> "Figure":
    """Draw mean BLEU by number of pairs for each model, and below it the differences, as in figure 5a of the paper."""
    from matplotlib.figure import Figure

    metric = metric_of(report)
    compared = any(map(read_comparison, report["points"]))
    figure = Figure(figsize=(6.4, 6.4 if compared else 4.4), layout="constrained")
    panels = figure.subplots(2 if compared else 1, sharex=True, squeeze=False)[:, 0]
    models = list(dict.fromkeys(point["model"] for point in report["points"]))
    for index, model in enumerate(models):
        points = [point for point in report["points"] if point["model"] == model]
        aside, color = 1.02 ** (index - (len(models) - 1) / 2), f"C{index}"  # so that bars of two models do not hide each other
        scores = [point[metric] for point in points]
        means, halves, seeds = zip(*((one["mean"], half_interval(one), one["values"]) for one in scores), strict=True)
        _draw_line(panels[0], [point["pairs"] * aside for point in points], means, halves, seeds, color, model)
        if tested := [(point, found[0]) for point in points if (found := read_comparison(point))]:
            against = against_of(report, tested[0][0])
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
        panels[1].axhline(0, color="C7", linewidth=0.8)
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
    bars = [half or 0.0 for half in halves]
    axes.errorbar(pairs, means, yerr=bars, marker="o", markersize=5, capsize=3, linewidth=1.5, color=color, label=label)
    for at, values in zip(pairs, seeds, strict=True):
        axes.plot([at] * len(values), values, "x", markersize=4, color=color)


def _draw_by_model(report: dict) -> "Figure":
    """Draw one line per model, the first on top: on the left its BLEU, on the right its difference from another model."""
    from matplotlib.figure import Figure

    metric, points = metric_of(report), report["points"]
    compared = any(map(read_comparison, points))
    figure = Figure(figsize=(9.0 if compared else 6.4, 1.1 + 0.32 * len(points)), layout="constrained")
    panels = figure.subplots(1, 2 if compared else 1, sharey=True, squeeze=False)[0]
    for place, point in enumerate(points):
        score, color = point[metric], "C0" if point["model"] == report["baseline"] else "C7"
        _draw_mean(panels[0], place, score["mean"], half_interval(score), score["values"], color)
        if found := read_comparison(point):
            test, against = found[0], against_of(report, point)
            half = test.interval and test.interval[1] - test.difference
            _draw_mean(panels[1], place, test.difference, half, _single_differences(report, point, against), color)
            panels[1].annotate(f"from {against}", (1.0, place), (4, 0), ("axes fraction", "data"), "offset points", va="center")
    panels[0].set_yticks(range(len(points)), [point["model"] for point in points])
    panels[0].set_ylim(len(points) - 0.4, -0.6)
    pairs = max(point["pairs"] for point in points)
    panels[0].set_xlabel(f"{METRIC_TITLES[metric]} on {report['split']}, {_short(round(pairs))} training pairs")
    if compared:
        panels[1].axvline(0, color="C7", linewidth=0.8)
        panels[1].set_xlabel("difference")
    for axes in panels:
        axes.grid(axis="x", alpha=0.3)
    return figure


def _draw_mean(axes: "Axes", place: int, mean: float, half: float | None, seeds: Sequence[float], color: str) -> None:
    axes.errorbar(mean, place, xerr=half or 0.0, marker="o", markersize=5, capsize=3, linewidth=1.5, color=color)
    axes.plot(seeds, [place] * len(seeds), "x", markersize=5, color="black", zorder=3)  # above the bar


def _single_differences(report: dict, point: dict, against: str) -> list[float]:
    """Return the difference of each seed that both models have at the size of a point."""
    metric = metric_of(report)
    there = next(other for other in report["points"] if (other["model"], other["fraction"]) == (against, point["fraction"]))
    ours, theirs = (dict(zip(one["seeds"], one[metric]["values"], strict=True)) for one in (point, there))
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _short(count: int) -> str:
    """Shorten `1020` to `1.0k`, `4500000` to `4.5M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)
