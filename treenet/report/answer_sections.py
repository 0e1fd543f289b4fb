"""The answer, on the first screen of a page, and the sections of studies: of data sizes, and of comparisons over seeds."""

from collections.abc import Callable

from matplotlib.figure import Figure

from treenet.evaluation.significance import FEWEST_SEEDS, show_p_values
from treenet.experiments.scaling_table import EXPLAIN_POINTS, describe_slopes, more_tables, point_columns
from treenet.experiments.seeds import MEASURES
from treenet.experiments.seeds_report import explain, other_tests, system_columns
from treenet.experiments.study import StudyForm, notes_about_cells, say_unlearned_cells
from treenet.report.answer import Answer
from treenet.report.figures import FAINT, INK, SERIES, name_rows
from treenet.report.report_model import Report
from treenet.tasks.tables import NONE, Column, numbers, show_interval
from treenet.tasks.translation_metrics import METRIC_TITLES, SECOND

ANSWER = "answer"
# The axis of the plot reaches so far to both sides at least: small differences look small.
_LEAST = 0.5


def answer_section(report: Report) -> dict:
    """Return every answer with its table, and what the caption says of differences and tests."""
    return {"answers": [(answer, *_table(answer)) for answer in report.answers], "fewest_seeds": FEWEST_SEEDS}


def _table(answer: Answer) -> tuple[list[Column], list[str], bool]:
    """Return the columns, the systems from which differences are, and whether there are tests."""
    rows, form, against = answer.shown_rows, f".{answer.digits}f", {row.against for row in answer.shown_rows if row.against}
    several, tests = len(rows) > 1, [row.test for row in rows]
    names = [row.system + " (baseline)" * (several and row.system == answer.baseline) for row in rows]
    columns = [Column("system", names), numbers(answer.title, [row.score for row in rows], form, answer.best_rows)]
    if several:
        columns.append(numbers("difference", [row.difference for row in rows], f"+{form}"))
        intervals = [test.interval if test else None for test in tests]
        columns.append(Column("95 % interval", [show_interval(one, f"+{form}") for one in intervals], "n"))
    if len(against) > 1:
        columns.append(Column("from", [row.against or NONE for row in rows]))
    if tested := any(test and test.p_value is not None for test in tests):
        p_values = [show_p_values(test)[1] if test else NONE for test in tests]
        columns.append(Column("p, Holm", p_values, "n"))
    columns.append(numbers("seeds", [len(row.seeds) for row in rows]))
    if answer.metric != SECOND and any(row.chrf is not None for row in rows):
        columns.append(numbers("chrF", [row.chrf for row in rows], ".2f"))
    return columns, list(against), tested


def draw_answer(answer: Answer) -> Figure | None:
    """Draw the differences to the baseline, the best system on top; None without a difference."""
    rows = [(row, row.difference) for row in answer.shown_rows if row.difference is not None][::-1]
    if not rows:
        return None
    figure = Figure(figsize=(7.2, 0.85 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color=FAINT, lw=1)
    for place, (row, difference) in enumerate(rows):
        if row.test is not None and row.test.interval is not None:
            axes.plot(row.test.interval, (place, place), color=SERIES[0], lw=2, solid_capstyle="butt")
        if len(row.seed_differences) > 1:
            axes.plot(row.seed_differences, [place] * len(row.seed_differences), "|", color=INK, ms=9, mew=1)
        axes.plot(difference, place, "o", color=SERIES[0], ms=6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -_LEAST), max(high, _LEAST))
    name_rows(axes, range(len(rows)), [row.system for row, _ in rows])
    axes.set(xlabel=f"{answer.title}, difference from {rows[0][0].against}", ylim=(-0.6, len(rows) - 0.4))
    return figure


def study_section(form: StudyForm, show: Callable[[dict], dict], report: Report) -> dict:
    """Return name of the figure, the study, and what `show` makes of its results, for each study of a form."""
    return {"studies": [(figure, one, one.report and show(one.report)) for figure, one in report.of_form(form)]}


def show_scaling(report: dict) -> dict:
    """Return caption, tables and notes of a study of the size of the training data."""
    points, metric = report["points"], report["metric"]
    tables = [(point_columns(report), EXPLAIN_POINTS, [*describe_slopes(report), *say_unlearned_cells(report)])]
    tables += [(columns, message, []) for columns, message in more_tables(report)]
    tables[-1][-1].extend(notes_about_cells(report))
    rules = [place for place in range(1, len(points)) if points[place]["fraction"] != points[place - 1]["fraction"]]
    said = f"{METRIC_TITLES[metric]} on {report['split']} by training pairs. Bars are the 95 % intervals of the table."
    return {"said": said, "tables": tables, "rules": rules}


def show_comparison(report: dict) -> dict:
    """Return caption, table and notes of a comparison over seeds."""
    first, *notes = explain(report)
    said = f"{MEASURES[report['task']].title} on test, every seed of every system."
    notes = [*other_tests(report), *say_unlearned_cells(report), *notes]
    return {"said": said, "tables": [(system_columns(report), first, notes)], "rules": []}
