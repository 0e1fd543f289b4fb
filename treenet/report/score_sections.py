"""The sections of scores and of ablations, and the charts of scores by buckets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from matplotlib.figure import Figure

from treenet.evaluation.significance import EXPLAINED
from treenet.report.compare import Bucket, ScoreTable, bucket_tables
from treenet.report.figures import FAINT
from treenet.report.lines import Frequencies
from treenet.report.markup import (
    TableCell,
    bullets,
    code,
    metric_name,
    number,
    paragraph,
    result_name,
    show_p_value,
    show_status,
    table,
    tag,
    text,
)
from treenet.report.report_model import Page
from treenet.runs.result_provenance import ResultStatus, data_fingerprint, describe_decoding, describe_weights, short
from treenet.tasks.translation_metrics import MAIN, METRICS
from treeproc.common.provenance import describe_software

_MARKERS = "os^DvP"
_LEAST_SPAN = 1.0  # of the axis of scores
_WHAT = {"words": "words of the source", "depth": "depth of the source's tree", "parse_score": "score of the source's parse"}
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
    for order, (scores, found) in enumerate(zip(tables, frequencies, strict=True)):
        for kind, buckets in bucket_tables(scores).items():
            if len(buckets) > 1:
                metric = charted_metric(buckets)
                places = [place for place in range(len(scores.rows)) if any(place in bucket.values for bucket in buckets)]
                values = [[bucket.values.get(place, {}).get(metric) for bucket in buckets] for place in places]
                names = [f"{bucket.name} ({bucket.num_examples:,})" for bucket in buckets]
                title = f"{metric_name(metric)} on {scores.split}"
                figure = draw_buckets(
                    names, _series(scores, places, values, colors), f"{_WHAT.get(kind, kind)} (sentences)", title
                )
                yield chart_name(order, kind), figure
        if len(found.buckets) > 1:
            values = [[bucket.f1[column] for bucket in found.buckets] for column in range(len(found.rows))]
            names = [f"{bucket.name} ({bucket.words:,})" for bucket in found.buckets]
            series = _series(scores, found.rows, values, colors)
            yield chart_name(order, FREQUENCY), draw_buckets(names, series, "times in training (words)", f"F1 on {scores.split}")


def _series(
    scores: ScoreTable, places: Sequence[int], values: Sequence[list[float | None]], colors: Mapping[str, str]
) -> list[ScoreSeries]:
    rows = [scores.rows[place] for place in places]
    return [
        ScoreSeries(result_name(row, scores.split), colors[row.run], row.result != scores.split, own)
        for row, own in zip(rows, values, strict=True)
    ]


def draw_buckets(names: Sequence[str], series: Sequence[ScoreSeries], axis: str, value: str) -> Figure:
    """Draw a row a bucket, the first on top, and a dot a result. The axis does not begin at 0: differences are what counts."""
    figure = Figure(figsize=(7.2, 0.9 + len(names) * max(0.32, 0.15 * len(series))), layout="constrained")
    axes = figure.add_subplot()
    rows = np.arange(len(names))[::-1]
    for order, one in enumerate(series):
        at = rows + (0.6 / max(1, len(series))) * ((len(series) - 1) / 2 - order)
        shares = np.array([np.nan if score is None else score for score in one.values])
        marker = {"marker": _MARKERS[order % len(_MARKERS)], "ms": 5, "mfc": "#ffffff" if one.hollow else one.color}
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


def show_scores(page: Page) -> list[str]:
    out = []
    for place, (scores, frequencies) in enumerate(zip(page.report.scored.tables, page.report.scored.frequencies, strict=True)):
        shown = [row for row in scores.rows if not (row.unlearned or (scores.baseline and scores.baseline.unlearned))]
        tested = [metric for metric in scores.metrics if any(metric in row.tests for row in shown)]
        head = [text("result")]
        for metric in scores.metrics:
            head.append(TableCell(escape(metric_name(metric)), "n"))
            head += [TableCell("difference", "n"), TableCell("p", "n")] if metric in tested else []
        rows, signatures = [], scores.signatures()
        comparable = [name for name in scores.metrics if len(scores.rows) > 1 and len(signatures.get(name, ())) < 2]
        fresh = [row for row in scores.rows if not row.status.changed and not row.unlearned]
        best = {name: best_value(name, [row.values[name] for row in fresh if name in row.values]) for name in comparable}
        for row in scores.rows:
            cells = [text(result_name(row, scores.split))]
            for metric in scores.metrics:
                value = row.values.get(metric)
                is_best = value is not None and value == best.get(metric) and row in fresh
                cells.append(number(value, ".3f" if metric == "nll" else ".2f", "n best" if is_best else "n"))
                if metric in tested:
                    test = row.tests.get(metric) if row in shown else None
                    cells.append(number(test and test.difference, "+.2f") if test else TableCell("", "n"))
                    cells.append(TableCell(show_p_value(test.p_two_sided), "n") if test else TableCell("", "n"))
            rows.append(cells)
        count = max((row.record.get("num_examples", 0) for row in scores.rows), default=0)
        caption = f"Scores on {scores.split}, {count:,} sentences."
        if tested:
            caption += (
                f" Differences are from {result_name(scores.baseline, scores.split)}. p is of these weights alone: {EXPLAINED}. "
                "The best value of a column is bold, also with a high p."
            )
        out.append(page.table(caption, head, rows))
        out += [paragraph(note, class_="note") for note in scores.notes]
        out.append(_origins(scores))
        lines = [f"{escape(metric_name(metric))}: {', '.join(map(code, found))}" for metric, found in signatures.items()]
        test = next((row.tests[metric] for metric in tested[:1] for row in scores.rows if metric in row.tests), None)
        lines += [f"test: {code(test.signature)}"] if test else []
        out.append(tag("details", tag("summary", "Signatures") + bullets(lines)) if lines else "")
        for kind, buckets in bucket_tables(scores).items():
            out += _buckets(page, scores, chart_name(place, kind), kind, buckets)
        out += _frequencies(page, scores, chart_name(place, FREQUENCY), frequencies)
    return out


def best_value(metric: str, values: list[float]) -> float | None:
    """Return the best value: the highest, or the lowest of TER and of nll."""
    lower = METRICS[metric].lower_is_better if metric in METRICS else metric == "nll"
    return (min if lower else max)(values, default=None)


def _origins(scores: ScoreTable) -> str:
    """Show the table of the origins of results."""
    head = [text(name) for name in ("result", "weights", "data", "decoding", "software")]
    rows = []
    for row in scores.rows:
        made_by = row.record.get("software")
        cells = [describe_weights(row.record), short(data_fingerprint(row.record)), describe_decoding(row.record) or "–"]
        cells.append(describe_software(made_by) if isinstance(made_by, dict) else "not recorded")
        rows.append([text(result_name(row, scores.split)), *map(text, cells)])
    caption = "Weights: first digits of the sha256. Data: first digits of the fingerprint."
    return tag("details", tag("summary", "Origin of each result") + table(caption, head, rows))


def _buckets(page: Page, scores: ScoreTable, chart: str, kind: str, buckets: list[Bucket]) -> list[str]:
    """Return one column a result and metric."""
    metrics = list(dict.fromkeys(name for bucket in buckets for values in bucket.values.values() for name in values))
    results = [result for result in range(len(scores.rows)) if any(result in bucket.values for bucket in buckets)]
    columns = [(result, metric) for result in results for metric in metrics]
    names = [result_name(scores.rows[r], scores.split) + (f", {metric_name(m)}" if len(metrics) > 1 else "") for r, m in columns]
    head = [text(kind), TableCell("sentences", "n"), *(TableCell(escape(name), "n") for name in names)]
    rows = []
    for bucket in buckets:
        values = (number(bucket.values.get(result, {}).get(metric), ".2f") for result, metric in columns)
        rows.append([text(bucket.name), number(bucket.num_examples), *values])
    message = f"by {_WHAT.get(kind, kind)}"
    shown, what = metric_name(charted_metric(buckets)), metric_name(metrics[0]) if len(metrics) == 1 else "Scores"
    caption = f"{what} on {scores.split} {message}."
    return _chart(
        page, chart, f"{shown} on {scores.split} {message}, with the number of sentences.", message, caption, head, rows
    )


def _chart(
    page: Page, chart: str, said: str, summary: str, caption: str, head: list[TableCell], rows: list[list[TableCell]]
) -> list[str]:
    """Return a figure and its numbers below; the table alone where nothing was drawn."""
    if chart not in page.figures:
        return [page.table(caption, head, rows)]
    numbers = tag("details", tag("summary", f"The same as a table, {summary}") + table(caption, head, rows))
    return [page.figure(chart, said), numbers]


def _frequencies(page: Page, scores: ScoreTable, chart: str, found: Frequencies) -> list[str]:
    if found.missing:
        return [paragraph(f"No scores by frequency of words on {scores.split}: {found.missing}.", class_="note")]
    names = [result_name(scores.rows[place], scores.split) for place in found.rows]
    head = [text("times in training"), TableCell("words", "n"), *(TableCell(escape(name), "n") for name in names)]
    rows = []
    for bucket in found.buckets:
        values = {value for value in bucket.f1 if value is not None}
        best = max(values) if len(values) > 1 else None
        cells = (number(value, ".2f", "n best" if value is not None and value == best else "n") for value in bucket.f1)
        rows.append([text(bucket.name), number(bucket.words), *cells])
    said = (
        f"F1 of words on {scores.split} by how often they occur in the {found.training_lines:,} lines of the training text, with "
        f"the number of words in the references. Words are tokens of sacrebleu's {found.tokenizer}. A word counts as right at "
        "most as often as the reference has it."
    )
    caption = f"{said} The highest value of a row is bold."
    out = _chart(page, chart, said, "by frequency of words", caption, head, rows)
    return [*out, *(paragraph(note, class_="note") for note in found.notes)]


def show_ablations(page: Page) -> str:
    """Show Table 3 of the paper."""
    chosen = page.report.ablations
    found = [(name, run, run.scores.get(page.report.split, {})) for name, run in chosen]
    metrics = list(dict.fromkeys(m for scores in page.report.scored.tables for m in scores.metrics))
    metrics = [metric for metric in metrics if any(metric in record for _, _, record in found)]
    if not metrics:
        return ""
    head = [
        text("model"),
        text("run"),
        TableCell("updates", "n"),
        *(TableCell(escape(metric_name(metric)), "n") for metric in metrics),
    ]
    rows = []
    for name, run, record in found:
        shown = run.name + show_status(run.statuses.get(page.report.split, ResultStatus()))
        cells = [text(name), text(shown), number(run.step)]
        rows.append([*cells, *(number(record.get(metric), ".2f") for metric in metrics)])
    caption = f"What each part of the tree attention gives (as Table 3 of the paper), on {page.report.split}."
    return page.table(caption, head, rows)
