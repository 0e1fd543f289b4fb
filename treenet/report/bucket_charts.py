"""Charts of scores by length of the source, by depth of its tree, and by frequency of the words, as compare-mt draws them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from treenet.report.compare import Bucket, ScoreTable, bucket_tables
from treenet.report.figures import FAINT
from treenet.report.formats import metric_name, result_name
from treenet.report.frequencies import Frequencies
from treenet.tasks.translation_metrics import MAIN

_MARKERS = "os^DvP"
_LEAST_SPAN = 1.0  # of the axis of scores
_AXES = {"words": "words of the source (sentences)", "depth": "depth of the source's tree (sentences)"}
FREQUENCY = "frequency"


@dataclass(frozen=True)
class ScoreSeries:
    """The scores of one result, one a bucket; None if it has none. A control of a run is `hollow`."""

    name: str
    color: str
    hollow: bool
    values: list[float | None]


def chart_name(number: int, kind: str) -> str:
    """Return the name of the chart of one kind of bucket, of a table of scores."""
    return f"scores_by_{kind}_{number + 1}"


def charted_metric(buckets: Sequence[Bucket]) -> str:
    """Return the metric that a chart shows: the first one. The table beside it has all."""
    return next((metric for bucket in buckets for values in bucket.values.values() for metric in values), MAIN)


def draw_scores(
    tables: Sequence[ScoreTable], frequencies: Sequence[Frequencies], colors: Mapping[str, str]
) -> Iterator[tuple[str, Figure]]:
    """Yield charts by name. A kind with a single bucket gets no chart: it would show nothing."""
    for number, (table, found) in enumerate(zip(tables, frequencies, strict=True)):
        for kind, buckets in bucket_tables(table).items():
            if len(buckets) > 1:
                metric = charted_metric(buckets)
                places = [place for place in range(len(table.rows)) if any(place in bucket.values for bucket in buckets)]
                values = [[bucket.values.get(place, {}).get(metric) for bucket in buckets] for place in places]
                names = [f"{bucket.name} ({bucket.num_examples:,})" for bucket in buckets]
                title = f"{metric_name(metric)} on {table.split}"
                figure = draw_buckets(
                    names, _series(table, places, values, colors), _AXES.get(kind, f"{kind} (sentences)"), title
                )
                yield chart_name(number, kind), figure
        if len(found.buckets) > 1:
            values = [[bucket.f1[column] for bucket in found.buckets] for column in range(len(found.rows))]
            names = [f"{bucket.name} ({bucket.words:,})" for bucket in found.buckets]
            series = _series(table, found.rows, values, colors)
            yield chart_name(number, FREQUENCY), draw_buckets(names, series, "times in training (words)", f"F1 on {table.split}")


def _series(
    table: ScoreTable, places: Sequence[int], values: Sequence[list[float | None]], colors: Mapping[str, str]
) -> list[ScoreSeries]:
    rows = [table.rows[place] for place in places]
    return [
        ScoreSeries(result_name(row, table.split), colors[row.run], row.result != table.split, own)
        for row, own in zip(rows, values, strict=True)
    ]


def draw_buckets(names: Sequence[str], series: Sequence[ScoreSeries], axis: str, value: str) -> Figure:
    """Draw a row a bucket, the first on top, and a dot a result. The axis does not begin at 0: differences are what counts."""
    figure = Figure(figsize=(7.2, 0.9 + len(names) * max(0.32, 0.15 * len(series))), layout="constrained")
    axes = figure.add_subplot()
    rows = np.arange(len(names))[::-1]
    for number, one in enumerate(series):
        at = rows + (0.6 / max(1, len(series))) * ((len(series) - 1) / 2 - number)
        shares = np.array([np.nan if score is None else score for score in one.values])
        marker = {"marker": _MARKERS[number % len(_MARKERS)], "ms": 5, "mfc": "#ffffff" if one.hollow else one.color}
        axes.plot(shares, at, color=one.color, lw=0.8, label=one.name, **marker)
    middle, span = np.mean(axes.get_xlim()), max(_LEAST_SPAN, np.ptp(axes.get_xlim()))  # small differences look small
    axes.set_xlim(middle - span / 2, middle + span / 2)
    axes.set_yticks(rows, names)
    axes.set(xlabel=value, ylim=(-0.6, len(names) - 0.4))
    axes.set_title(axis, loc="left", color=FAINT)  # beside the rows it would be longer than they are high
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="best")
    return figure
