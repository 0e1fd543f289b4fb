"""The sections of scores and of ablations, and the charts of scores by buckets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from treenet.evaluation.buckets import BUCKETS, bucket_columns, gather_buckets
from treenet.report.class_sections import classes_section
from treenet.report.compare import ScoreRow, ScoreTable, comparable_buckets
from treenet.report.figures import begin_rows
from treenet.report.lines import Frequencies
from treenet.report.report_model import Report
from treenet.runs.result_provenance import ResultStatus, data_fingerprint, describe_decoding, describe_weights, short
from treenet.tasks.scores import SCORES
from treenet.tasks.tables import NONE, Column, number, numbers, show_p_value, shown
from treenet.tasks.translation_metrics import MAIN, METRIC_TITLES, METRICS
from treeproc.common.provenance import describe_software

_MARKERS = "os^DvPX"  # seven: with the six colours, runs look alike after 42
_LEAST_SPAN = 1.0  # of the axis of scores


@dataclass(frozen=True)
class Breakdown:
    """Scores by bucket: the name and axes of their chart, the names of buckets, what it shows by row of scores, and a table."""

    chart: str
    what: str
    axis: str
    value: str
    names: list[str]
    rows: dict[int, list[float | None]]
    columns: list[Column]


def metric_name(name: str) -> str:
    """Return `tokenised BLEU` for `bleu_tokenized`. Metrics that are not known here keep the words of their names."""
    return "nll a token (nats)" if name == "nll" else METRIC_TITLES.get(name, name.replace("_", " "))


def _form(metric: str) -> str:
    return ".3f" if metric == "nll" else ".2f"


def _break_down(order: int, scores: ScoreTable, frequencies: Frequencies) -> Iterator[Breakdown]:
    """Yield the scores of table `order` by every kind of bucket, then those of words by their frequency."""
    names = [row.name(scores.split) for row in scores.rows]
    for kind, results in comparable_buckets(scores).items():
        buckets, what = gather_buckets(list(results.values())), BUCKETS[kind]
        columns = bucket_columns(what, buckets, [names[row] for row in results])
        known = {name for one in buckets[0].scores for name in one}
        first = next((name for name in METRICS if name in known), MAIN)  # of the chart
        shown = f"{what} (sentences)", f"{metric_name(first)} on {scores.split}"
        counts = [f"{bucket.name} ({bucket.num_examples:,})" for bucket in buckets]
        of_rows = {row: [bucket.scores[place].get(first) for bucket in buckets] for place, row in enumerate(results)}
        yield Breakdown(f"scores_by_{kind}_{order}", what, *shown, counts, of_rows, columns)
    if frequencies.missing:
        return
    groups = frequencies.buckets
    of_rows = {row: [group.f1[place] for group in groups] for place, row in enumerate(frequencies.rows)}
    different = [{value for value in group.f1 if value is not None} for group in groups]
    best = [max(values) if len(values) > 1 else math.nan for values in different]
    columns = [Column("times in training", [group.name for group in groups]), numbers("words", [group.words for group in groups])]
    for row, values in of_rows.items():
        bold = [place for place, value in enumerate(values) if value == best[place]]
        columns.append(numbers(names[row], values, ".2f", bold))
    shown = "times in training (words)", f"F1 on {scores.split}"
    counts = [f"{group.name} ({group.words:,})" for group in groups]
    yield Breakdown(f"scores_by_frequency_{order}", "", *shown, counts, of_rows, columns)


def draw_scores(
    tables: Sequence[ScoreTable], frequencies: Sequence[Frequencies], colors: Mapping[str, str]
) -> Iterator[tuple[str, Figure]]:
    """Yield charts by name. A kind with a single bucket gets no chart: it would show nothing."""
    for order, (scores, found) in enumerate(zip(tables, frequencies, strict=True), 1):
        for one in _break_down(order, scores, found):
            if len(one.names) > 1:
                yield one.chart, _draw(one, scores, colors)


def _draw(shown: Breakdown, scores: ScoreTable, colors: Mapping[str, str]) -> Figure:
    """Draw a row a bucket, the first on top, and a dot a result, hollow for a control of a run.

    The axis does not begin at 0: differences are what counts.
    """
    figure, axes, places = begin_rows(shown.names, len(shown.rows), shown.axis, shown.value)
    for order, (at, (place, values)) in enumerate(zip(places, shown.rows.items(), strict=True)):
        row = scores.rows[place]
        shares = np.array([np.nan if score is None else score for score in values])
        fill = colors[row.run] if row.result == scores.split else "#ffffff"
        marker, label = _MARKERS[order % len(_MARKERS)], row.name(scores.split)
        axes.plot(shares, at, color=colors[row.run], lw=0.8, label=label, marker=marker, ms=5, mfc=fill)
    middle, span = np.mean(axes.get_xlim()), max(_LEAST_SPAN, np.ptp(axes.get_xlim()))  # small differences look small
    axes.set_xlim(middle - span / 2, middle + span / 2)
    axes.legend(loc="best")
    return figure


def scores_section(report: Report) -> dict:
    """Return scores, their origins, signatures and charts, by table; and what is known of classifiers."""
    pairs = zip(report.scored.tables, report.scored.frequencies, strict=True)
    return {"scores": [(*one, _show(place, *one)) for place, one in enumerate(pairs, 1)], **classes_section(report)}


def _show(place: int, scores: ScoreTable, frequencies: Frequencies) -> dict:
    rows, base, signatures = scores.rows, scores.baseline, scores.signatures()
    learned = [not (row.unlearned or (base and base.unlearned)) for row in rows]
    fresh = [not row.status.changed and not row.unlearned for row in rows]
    columns, signed = [Column("result", [row.name(scores.split) for row in rows])], list[tuple[str, list[str]]]()
    for metric in scores.metrics:
        values = [row.values.get(metric) for row in rows]
        best = best_value(metric, [value for value, own in zip(values, fresh, strict=True) if own and value is not None])
        comparable = len(rows) > 1 and len(signatures.get(metric, ())) < 2 and (metric != "nll" or _of_one_vocabulary(rows))
        bold = [row for row, value in enumerate(values) if comparable and fresh[row] and value is not None and value == best]
        columns.append(numbers(metric_name(metric), values, _form(metric), bold))
        tests = [row.tests.get(metric) if own else None for row, own in zip(rows, learned, strict=True)]
        if any(tests):
            columns.append(shown("difference", tests, lambda test: number(test.difference, "+.2f")))
            columns.append(shown("p", tests, lambda test: show_p_value(test.p_two_sided)))
            signed = signed or [("test", [next(row.tests[metric].signature for row in rows if metric in row.tests)])]
    return {
        "columns": columns,
        "count": max((row.record.get("num_examples", 0) for row in rows), default=0),
        "tested": signed,
        "origins": _origins(scores),
        "signatures": [(metric_name(metric), found) for metric, found in signatures.items()] + signed,
        "breakdowns": _break_down(place, scores, frequencies),
    }


def _of_one_vocabulary(rows: Sequence[ScoreRow]) -> bool:
    """Return whether no two results are known to be of other pieces: an nll a token then has other tokens."""
    data = [row.record.get("data") for row in rows]
    return len({one.get("vocab_fingerprint") for one in data if isinstance(one, dict)} - {None}) < 2


def best_value(metric: str, values: list[float]) -> float | None:
    """Return the best value: the highest, or the lowest where lower is better, such as for TER and nll."""
    return (min if metric in SCORES and SCORES[metric].lower_is_better else max)(values, default=None)


def _origins(scores: ScoreTable) -> list[Column]:
    records = [row.record for row in scores.rows]
    software = [record.get("software") for record in records]
    return [
        Column("result", [row.name(scores.split) for row in scores.rows]),
        Column("weights", list(map(describe_weights, records))),
        Column("data", [short(data_fingerprint(record)) for record in records]),
        Column("decoding", [describe_decoding(record) or NONE for record in records]),
        Column("software", [describe_software(one) if isinstance(one, dict) else "not recorded" for one in software]),
    ]


def ablations_section(report: Report) -> dict:
    """Return Table 3 of the paper."""
    names, runs = zip(*report.ablations, strict=True) if report.ablations else ((), ())
    records = [run.scores.get(report.split, {}) for run in runs]
    metrics = dict.fromkeys(m for scores in report.scored.tables for m in scores.metrics if any(m in one for one in records))
    columns = [
        Column("model", names),
        Column("run", [run.statuses.get(report.split, ResultStatus()).marked(run.name) for run in runs]),
        numbers("updates", [run.step for run in runs]),
        *(numbers(metric_name(metric), [record.get(metric) for record in records], _form(metric)) for metric in metrics),
    ]
    seeds = dict.fromkeys(run.config.get("seed", 1) for run in runs)
    alone = f" One run each, of seed {', '.join(map(str, seeds))}." if runs else ""
    caption = f"What each part of the tree attention gives (as Table 3 of the paper), on {report.split}.{alone}"
    return {"columns": metrics and columns, "caption": caption}
