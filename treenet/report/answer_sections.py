"""The answer, on the first screen of a page, and the sections of studies: of data sizes, and of comparisons over seeds."""

import shlex
from collections.abc import Callable
from html import escape

from matplotlib.figure import Figure

from treenet.evaluation.significance import (
    EXPLAINED,
    EXPLORATORY,
    FEWEST_SEEDS,
    SeedTest,
)
from treenet.experiments.scaling_table import (
    EXPLAIN_POINTS,
    describe_slopes,
    list_by_seed,
    list_nll,
    list_pooled,
    others_of,
    read_comparison,
)
from treenet.experiments.seeds import MEASURES
from treenet.experiments.seeds_report import explain, headline_test, shown_columns
from treenet.experiments.study import StudyForm, notes_about_cells, say_unlearned_cells
from treenet.report.answer import Answer, SystemResult
from treenet.report.figures import FAINT, INK, SERIES
from treenet.report.markup import TableCell, bullets, code, number, paragraph, show_p_value, tag, text
from treenet.report.report_inputs import Missing, ReportStudy
from treenet.report.report_model import Page
from treenet.tasks.translation_metrics import METRIC_TITLES

ANSWER = "answer"
# The axis of the plot reaches so far to both sides at least: small differences look small.
_LEAST = 0.5


def show_answer(page: Page) -> list[str]:
    """Show the sentence and table of every answer, then doubts about them, then the plot."""
    report, out = page.report, []
    for answer in report.answers:
        out += [paragraph(answer.sentence, class_="answer"), _table(page, answer)]
    if report.warnings:
        message = paragraph("The runs differ in more than the model:") + bullets([escape(line) for line in report.warnings])
        out.append(tag("div", message, class_="callout", role="note"))
    stale = [(run.name, one) for run in report.runs for one in run.stale]
    if stale:
        lines = [escape(f"{name}: {one.said}") + _command("; to renew: ", one) for name, one in stale]
        message = paragraph("Stale results: the weights, data or settings of the run have changed since then.")
        out.append(tag("div", message + bullets(lines), class_="callout", role="note"))
    if ANSWER in page.figures:
        said = (
            "Difference of each system from the baseline. Short lines are single seeds. Bars are the 95 % intervals of the "
            f"table; they need {FEWEST_SEEDS} seeds."
        )
        out.append(page.figure(ANSWER, said))
    if missing := [(run.name, one) for run in report.runs for one in run.missing]:
        message = paragraph("Parts of this report are missing:")
        lines = [escape(f"{name}: {one.said}") + _command("; to add it: ", one) for name, one in missing]
        out.append(tag("div", message + bullets(lines), class_="callout", role="note"))
    return out


def _command(before: str, missing: Missing) -> str:
    return before + code(missing.command) if missing.command else ""


def _table(page: Page, answer: Answer) -> str:
    tested = any(row.test is not None and row.test.p_value is not None for row in answer.shown_rows)
    several = len({row.against for row in answer.rows if row.against}) > 1
    with_chrf = any(row.chrf is not None for row in answer.rows)
    head = [text("system"), TableCell(answer.title, "n")]
    head += [TableCell(name, "n") for name in ("difference", "95 % interval")] if len(answer.rows) > 1 else []
    head += [text("from")] if several else []
    head += [TableCell("p, Holm", "n")] if tested else []
    head += [TableCell("seeds", "n")]
    head += [TableCell("chrF", "n")] if with_chrf else []
    rows = []
    for row in answer.shown_rows:
        is_baseline = row.system == answer.baseline and len(answer.rows) > 1
        cells = [text(f"{row.system} (baseline)" if is_baseline else row.system)]
        is_best = row.system == answer.best.system and not answer.unlearned
        cells.append(number(row.score, f".{answer.digits}f", "n best" if is_best else "n"))
        if len(answer.rows) > 1:
            cells.append(number(row.difference, f"+.{answer.digits}f"))
            cells.append(_interval(row.test.interval if row.test else None, answer.digits))
        cells += [text(row.against or "–")] if several else []
        cells += [_p_value(row)] if tested else []
        cells.append(number(len(row.seeds)))
        rows.append([*cells, number(row.chrf, ".2f")] if with_chrf else cells)
    against = {row.against for row in answer.rows if row.against}
    after = ", after the baseline" if answer.baseline else ""
    caption = f"{answer.about}. Means over seeds, {answer.extreme} {answer.title} first{after}."
    if len(against) == 1:
        shared = (
            ", over the seeds that both have if there are any" if len({frozenset(row.seeds) for row in answer.rows}) > 1 else ""
        )
        caption += f" Differences are in {answer.title}, from {next(iter(against))}{shared}."
    caption += f" Interval and p: {EXPLAINED}." if tested else ""
    return page.table(caption, head, rows)


def _interval(interval: tuple[float, float] | None, digits: int = 2) -> TableCell:
    return TableCell(" to ".join(f"{end:+.{digits}f}" for end in interval).replace("-", "−") if interval else "–", "n")


def _p_value(row: SystemResult) -> TableCell:
    if row.test is None or row.test.p_value is None:
        return TableCell("–", "n")
    value = row.test.p_value if row.test.holm_p_value is None else row.test.holm_p_value
    return TableCell(show_p_value(value) + "*" * row.test.starred, "n")


def draw_answer(answer: Answer) -> Figure | None:
    """Draw the differences to the baseline, the best system on top; None without a difference."""
    rows = [row for row in answer.shown_rows if row.difference is not None][::-1]
    if not rows:
        return None
    figure = Figure(figsize=(7.2, 0.85 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color=FAINT, lw=1)
    for place, row in enumerate(rows):
        if row.test is not None and row.test.interval is not None:
            axes.plot(row.test.interval, (place, place), color=SERIES[0], lw=2, solid_capstyle="butt")
        if len(row.seed_differences) > 1:
            axes.plot(row.seed_differences, [place] * len(row.seed_differences), "|", color=INK, ms=9, mew=1)
        axes.plot(row.difference, place, "o", color=SERIES[0], ms=6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -_LEAST), max(high, _LEAST))
    axes.set_yticks(range(len(rows)), [row.system for row in rows])
    axes.set(xlabel=f"{answer.title}, difference from {rows[0].against}", ylim=(-0.6, len(rows) - 0.4))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return figure


_NAMES = ("model", "unpaired", "metric", "by nll on valid")  # columns of names in the tables below the first


def show_studies(page: Page, form: StudyForm, show: Callable[[Page, str, str, dict], list[str]]) -> list[str]:
    """Return picture, table and notes of every study of a form; `show` makes those of its report, with the figure's name."""
    out = []
    for figure, study in page.report.of_form(form):
        if study.report is None:
            message = f"{escape(study.name)}: no cell of the study is done yet; the command of the study continues it."
            out.append(tag("div", tag("p", message), class_="callout"))
        else:
            out += [*_tell_stale(study), *show(page, figure, study.name, study.report)]
    return out


def show_scaling(page: Page, figure: str, name: str, report: dict) -> list[str]:
    """Return picture, table and notes of a study of the size of the training data."""
    metric = report["metric"]
    title = METRIC_TITLES[metric]
    about = f"{name}: {title} on {report['split']} by training pairs. Bars are the 95 % intervals of the table."
    out = [page.figure(figure, about)]
    head = [text("model"), *(TableCell(name, "n") for name in ("pairs", "share", "seeds", title, "± 95 %"))]
    others = [name for name in others_of(metric) if all(name in point for point in report["points"])]
    head += [TableCell(METRIC_TITLES[name], "n") for name in others]
    head += [
        TableCell("difference", "n"),
        text("from"),
        *(TableCell(name, "n") for name in ("95 %", "p", "p, Holm", "p, weights")),
    ]
    rows, rules, last = [], [], None
    for point in report["points"]:
        if point["fraction"] != last and rows:
            rules.append(len(rows))
        last, found = point["fraction"], read_comparison(point)
        cells = [text(point["model"]), number(point["pairs"], ",.0f"), number(point["fraction"], ".4g")]
        cells += [number(len(point["seeds"])), number(point[metric]["mean"], ".2f")]
        cells.append(number(point[metric]["half_interval"], ".2f"))
        cells += [number(point[name]["mean"], ".2f") for name in others]
        rows.append(cells + (_study_test(*found, point["comparison"]["against"]) if found else [TableCell("", "n")] * 6))
    out.append(page.table(f"{name}. {EXPLAIN_POINTS}.", head, rows, rules=rules))
    out += [paragraph(f"{line}.", class_="note") for line in (*describe_slopes(report), *say_unlearned_cells(report))]
    for titles, values, message in (list_pooled(report), list_by_seed(report), list_nll(report)):
        if values:
            classes = ["" if name in _NAMES else "n" for name in titles]
            head, *cells = ([TableCell(escape(x), c) for x, c in zip(row, classes, strict=True)] for row in (titles, *values))
            out.append(page.table(f"{name}. {message.removesuffix('.')}.", head, cells))
    out += [paragraph(f"{note}.", class_="note") for note in notes_about_cells(report)]
    return out


def _study_test(test: SeedTest, of_weights: float | None, against: str) -> list[TableCell]:
    """Show difference, from what, interval, p and Holm's p over seeds, p of weights alone. A star is of the p that counts."""
    weights = "–" if of_weights is None else show_p_value(of_weights)
    cells = (TableCell(one, "n") for one in (*show_p_values(test), weights))
    return [number(test.difference, "+.2f"), text(against), _interval(test.interval), *cells]


def show_p_values(test: SeedTest) -> list[str]:
    """Return the markup of p and Holm's p over seeds. A star is of the p that counts."""
    p_values = [show_p_value(value) if value is not None else "–" for value in (test.p_value, test.holm_p_value)]
    p_values[test.holm_p_value is not None] += "*" * test.starred
    if test.family == EXPLORATORY:
        p_values[1] = "exploratory"
    return p_values


def _tell_stale(study: ReportStudy) -> list[str]:
    """Return the markup of a note if cells of a study have other weights now, with the command that renews the numbers."""
    if not study.stale:
        return []
    message = f"{study.name} is stale: the weights of {', '.join(study.stale)} have changed since its numbers; to renew: "
    config = shlex.quote(f"{study.given}/config.yaml")
    command = code(f"tree-attention {study.form.command} --config {config} --out {shlex.quote(study.given)}")
    return [tag("div", tag("p", escape(message) + command), class_="callout", role="note")]


def show_comparison(page: Page, figure: str, name: str, report: dict) -> list[str]:
    """Return picture, table and notes of a comparison over seeds."""
    measures = MEASURES[report["task"]]
    shown = shown_columns(report)
    out = [page.figure(figure, f"{name}: {measures.title} on test, every seed of every system.")]
    titles = ["seeds", *shown.values(), f"− {report['baseline']}", "95 %", "seen", "p", "p, Holm", "parameters", "minutes"]
    head = [text("system"), *(TableCell(title, "n") for title in titles)]
    rows = []
    for row in report["systems"]:
        cells = [text(row["system"]), number(len(row["seeds"]))]
        cells += [TableCell(measures.show_mean(row[key]) if key in row else "", "n") for key in shown]
        if test := headline_test(row, measures):
            signed = (measures.show(test.difference, "+"), measures.show_interval(test.interval), measures.show_seen(test))
            cells += [TableCell(value.replace("-", "−"), "n") for value in signed]
            cells += [TableCell(value, "n") for value in show_p_values(test)]
        else:
            cells += [TableCell("", "n")] * 5
        rows.append([*cells, number(row["parameters"]), number(row["seconds"] / 60, ".1f")])
    first, *notes = explain(report)
    out.append(page.table(f"{name}. {first}.", head, rows))
    out += [paragraph(f"{note.removesuffix('.')}.", class_="note") for note in (*say_unlearned_cells(report), *notes)]
    return out
