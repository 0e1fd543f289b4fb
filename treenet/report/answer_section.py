"""The first screen of a page: the answer, a small table, what spoils it, and a plot of the differences."""

from html import escape

from matplotlib.figure import Figure

from treenet.evaluation.significance import FEWEST_SEEDS, SEEDS_TEST
from treenet.report.answer import Answer, SystemResult
from treenet.report.figures import FAINT, INK, SERIES
from treenet.report.markup import TableCell, bullets, code, number, paragraph, show_p_value, tag, text
from treenet.report.report_inputs import Missing
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
    title = METRIC_TITLES[answer.metric]
    tested = any(row.test is not None and row.test.p_value is not None for row in answer.rows)
    several = len({row.against for row in answer.rows if row.against}) > 1
    head = [text("system"), TableCell(title, "n")]
    head += [TableCell(name, "n") for name in ("difference", "95 % interval")] if len(answer.rows) > 1 else []
    head += [text("from")] if several else []
    head += [TableCell("p, Holm", "n")] if tested else []
    head += [TableCell("seeds", "n"), TableCell("chrF", "n")]
    rows = []
    for row in answer.rows:
        is_baseline = row.system == answer.baseline and len(answer.rows) > 1
        cells = [text(f"{row.system} (baseline)" if is_baseline else row.system)]
        cells.append(number(row.score, ".2f", "n best" if row is answer.best else "n"))
        if len(answer.rows) > 1:
            cells += [number(row.difference, "+.2f"), _interval(row.test.interval if row.test else None)]
        cells += [text(row.against or "–")] if several else []
        cells += [_p_value(row)] if tested else []
        rows.append([*cells, number(len(row.seeds)), number(row.chrf, ".2f")])
    against = {row.against for row in answer.rows if row.against}
    caption = f"{answer.about}. Means over seeds, highest {title} first{', after the baseline' if answer.baseline else ''}."
    if len(against) == 1:
        caption += f" Differences are in {title}, from {next(iter(against))}."
    caption += f" Interval and p: {SEEDS_TEST}." if tested else ""
    return page.table(caption, head, rows)


def _interval(interval: tuple[float, float] | None) -> TableCell:
    return TableCell("{:+.2f} to {:+.2f}".format(*interval).replace("-", "−") if interval else "–", "n")


def _p_value(row: SystemResult) -> TableCell:
    if row.test is None or row.test.p_value is None:
        return TableCell("–", "n")
    value = row.test.p_value if row.test.holm_p_value is None else row.test.holm_p_value
    return TableCell(show_p_value(value) + "*" * row.test.starred, "n")


def draw_answer(answer: Answer) -> Figure | None:
    """Draw the differences to the baseline, the highest system on top; None without a difference."""
    rows = [row for row in answer.rows if row.difference is not None][::-1]
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
    axes.set(xlabel=f"{METRIC_TITLES[answer.metric]}, difference from {rows[0].against}", ylim=(-0.6, len(rows) - 0.4))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return figure
