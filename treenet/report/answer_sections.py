"""The answer, on the first screen of a page, and the sections of studies: of data sizes, and of comparisons over seeds."""

from collections.abc import Callable
from operator import itemgetter

from matplotlib.figure import Figure

from treenet.evaluation.significance import EXPLORATORY, FEWEST_SEEDS, SeedTest
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
from treenet.report.answer import Answer
from treenet.report.figures import FAINT, INK, SERIES, name_rows
from treenet.report.report_model import Report
from treenet.report.tables import NONE, Column, number, numbers, show_interval, show_p_value, shown
from treenet.tasks.translation_metrics import METRIC_TITLES

ANSWER = "answer"
# The axis of the plot reaches so far to both sides at least: small differences look small.
_LEAST = 0.5


def answer_section(report: Report) -> dict:
    """Return every answer with its table, and what the caption says of differences and tests."""
    return {"answers": [(answer, *_table(answer)) for answer in report.answers], "fewest_seeds": FEWEST_SEEDS}


def _table(answer: Answer) -> tuple[list[Column], list[str], bool]:
    """Return the columns, the systems from which differences are, and whether there are tests."""
    rows, form, against = answer.shown_rows, f".{answer.digits}f", {row.against for row in answer.rows if row.against}
    several, tests = len(rows) > 1, [row.test for row in rows]
    names = [row.system + " (baseline)" * (several and row.system == answer.baseline) for row in rows]
    best = [] if answer.unlearned else [[row.system for row in rows].index(answer.best.system)]
    columns = [Column("system", names), numbers(answer.title, [row.score for row in rows], form, best)]
    if several:
        columns.append(numbers("difference", [row.difference for row in rows], f"+{form}"))
        intervals = [test.interval if test else None for test in tests]
        columns.append(Column("95 % interval", [show_interval(one, f"+{form}") for one in intervals], "n"))
    if len(against) > 1:
        columns.append(Column("from", [row.against or NONE for row in rows]))
    if tested := any(test and test.p_value is not None for test in tests):
        p_values = [show_p_values(test)[test.holm_p_value is not None] if test else NONE for test in tests]
        columns.append(Column("p, Holm", p_values, "n"))
    columns.append(numbers("seeds", [len(row.seeds) for row in rows]))
    if any(row.chrf is not None for row in rows):
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


def show_p_values(test: SeedTest) -> list[str]:
    """Return p and Holm's p over seeds. A star is of the p that counts."""
    p_values = [show_p_value(value) if value is not None else NONE for value in (test.p_value, test.holm_p_value)]
    p_values[test.holm_p_value is not None] += "*" * test.starred
    return [p_values[0], "exploratory"] if test.family == EXPLORATORY else p_values


_NAMES = ("model", "unpaired", "metric", "by nll on valid")  # columns of names in the tables below the first


def study_section(form: StudyForm, show: Callable[[dict], dict], report: Report) -> dict:
    """Return name of the figure, the study, and what `show` makes of its results, for each study of a form."""
    return {"studies": [(figure, one, one.report and show(one.report)) for figure, one in report.of_form(form)]}


def show_scaling(report: dict) -> dict:
    """Return caption, tables and notes of a study of the size of the training data."""
    points, metric = report["points"], report["metric"]
    found = [read_comparison(point) for point in points]
    tests = [one and one[0] for one in found]
    means = [metric, *(name for name in others_of(metric) if all(name in point for point in points))]
    first, *others = (numbers(METRIC_TITLES[name], [point[name]["mean"] for point in points], ".2f") for name in means)
    columns = [
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
        *_p_columns(tests),
        shown("p, weights", found, lambda one: NONE if one[1] is None else show_p_value(one[1])),
    ]
    tables = [(columns, EXPLAIN_POINTS, [*describe_slopes(report), *say_unlearned_cells(report)])]
    for titles, rows, message in (list_pooled(report), list_by_seed(report), list_nll(report)):
        if rows:
            cells = zip(titles, zip(*rows, strict=True), strict=True)
            tables.append(([Column(title, column, "n" * (title not in _NAMES)) for title, column in cells], message, []))
    tables[-1][-1].extend(notes_about_cells(report))
    rules = [place for place in range(1, len(points)) if points[place]["fraction"] != points[place - 1]["fraction"]]
    said = f"{METRIC_TITLES[metric]} on {report['split']} by training pairs. Bars are the 95 % intervals of the table."
    return {"said": said, "tables": tables, "rules": rules}


def _p_columns(tests: list[SeedTest | None]) -> list[Column]:
    p_values = [show_p_values(test) if test else None for test in tests]
    return [shown(title, p_values, itemgetter(place)) for place, title in enumerate(("p", "p, Holm"))]


def show_comparison(report: dict) -> dict:
    """Return caption, table and notes of a comparison over seeds."""
    measures, rows = MEASURES[report["task"]], report["systems"]
    tests = [headline_test(row, measures) for row in rows]
    columns = [
        Column("system", [row["system"] for row in rows]),
        numbers("seeds", [len(row["seeds"]) for row in rows]),
        *(shown(title, [row.get(key) for row in rows], measures.show_mean) for key, title in shown_columns(report).items()),
        shown(f"− {report['baseline']}", tests, lambda test: measures.show(test.difference, "+").replace("-", "−")),
        shown("95 %", tests, lambda test: measures.show_interval(test.interval).replace("-", "−")),
        shown("seen", tests, lambda test: measures.show_seen(test).replace("-", "−")),
        *_p_columns(tests),
        numbers("parameters", [row["parameters"] for row in rows]),
        numbers("minutes", [row["seconds"] / 60 for row in rows], ".1f"),
    ]
    first, *notes = explain(report)
    said = f"{measures.title} on test, every seed of every system."
    return {"said": said, "tables": [(columns, first, [*say_unlearned_cells(report), *notes])], "rules": []}
