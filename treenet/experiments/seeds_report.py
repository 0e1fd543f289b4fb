"""The report of a comparison over seeds: OUT/comparison.json, a table and a picture.

Means and deviations are over seeds. A difference from the baseline is over the seeds of both systems, which share the batch
order. Its test is about other seeds of training and other sentences. It needs three seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

from annotated_types import Predicate
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.evaluation.significance import (
    EXPLAINED,
    FEWEST_SEEDS,
    SYSTEMS,
    SeedTest,
    correct_family,
    p_columns,
    show_p_values,
    summarize,
)
from treenet.experiments.comparable import check_one_study, find_confounded, find_unlike
from treenet.experiments.records import Record, read_numbers
from treenet.experiments.results import Results
from treenet.experiments.seeds import MEASURES, SCORED, Measures, Numbers, SeedGridConfig, seed_work
from treenet.experiments.study import (
    UNLEARNED,
    StudyCell,
    StudyForm,
    note_unlearned,
    notes_about_cells,
    read_fresh_scores,
    say_unlearned_cells,
    unlearned_in,
)
from treenet.runs.result_provenance import recorded_origin
from treenet.tasks.scores import SCORES
from treenet.tasks.tables import Column, align, numbers, shown, typeset
from treeproc.common import folder_kinds
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARISON = "comparison.json"  # in the folder of a comparison
LABELS = {"system": str, "seed": int}


def read_result(measures: Measures, folder: AnyPath) -> tuple[dict[str, dict], dict[str, str]]:
    """Read the recorded results of a cell's predictions: their scores, and the numbers of single examples."""
    scores = read_fresh_scores(SCORED, folder)
    lines: dict[str, str] = {}
    for result in (*measures.results, *measures.others):
        if result in scores:
            lines |= measures.read(folder, result)
    for result in measures.others.keys() & scores.keys():  # a record names no files
        scores[result] = {name: value for name, value in scores[result].items() if name != "asked"}
    return scores, lines


def build_report(task: str, grid: SeedGridConfig, records: Sequence[Record]) -> dict:
    """Build the content of comparison.json from the records."""
    check_one_study(records, "system")
    measures = MEASURES[task]
    _refuse_other_pairs(records, measures)
    cells = [_read_cell(record, measures) for record in records]
    examples = {
        record["cell"]: {name: read_numbers(record, name, most=10**9) for name in record["sentences"]} for record in records
    }
    table = Results.of(cells, "system")
    base, of_system = table.where(system=grid.baseline), table.by("system")
    systems = [system for system in dict.fromkeys([*grid.systems, *of_system]) if system in of_system]
    rows = [_summarize_system(of_system[system], base, examples, measures) for system in systems]
    for measure in measures.tested():
        tested = [row for row in rows if measure in row.get("tests", {})]
        for row, test in zip(tested, correct_family([row["tests"][measure] for row in tested], SYSTEMS), strict=True):
            row["tests"][measure] = asdict(test)
    baselines = base.by_seed("cell")
    compared = (row for row in table.where(metric="cell") if row.system != grid.baseline and row.seed in baselines)
    pairs = [(row.value, baselines[row.seed]) for row in compared]
    peaks = {entry["chosen_from"] for one in records if "chosen_from" in (entry := one["scores"].get("test.peak", {}))}
    return {
        "task": task,
        "baseline": grid.baseline,
        "cells": cells,
        "systems": rows,
        "unlike": find_unlike(records, pairs),
        "confounded": find_confounded(records, pairs, "system"),
        **({"peaks_of": sorted(peaks)} if len(peaks) > 1 else {}),  # numbers of checkpoints
    }


def _refuse_other_pairs(records: Sequence[Record], measures: Measures) -> None:
    """Raise UserError if two cells were scored on other minimal pairs, which their results name."""
    for result in measures.others:
        found: dict[str, str] = {}
        for record in records:
            if (of := record["scores"].get(result, {}).get("pairs_fingerprint")) is not None:
                found.setdefault(of, record["cell"])
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise UserError(
                f"{one} and {other} were scored on other minimal pairs; remove the record of each one whose run is gone, and run "
                "compare-seeds with both in its grid, without --dry-run"
            )


class _Row(TypedDict):
    """The fields of a system that every comparison.json has."""

    system: str
    seeds: list[int]
    parameters: int
    seconds: float


class SeedsReport(TypedDict):
    """The fields of comparison.json that a report reads."""

    task: Annotated[str, Predicate(MEASURES.__contains__)]
    baseline: str
    cells: list[StudyCell]
    systems: list[_Row]


def _read_cell(record: Record, measures: Measures) -> dict:
    scores, training = record["scores"], record["training"]
    values = {f"{entry}.{name}": scores[entry][name] for entry, name in measures.columns if name in scores.get(entry, {})}
    return {
        "cell": record["cell"],
        **record["labels"],
        "parameters": record["facts"]["parameters"],
        "best_step": scores["test"]["steps"][-1] if "steps" in scores.get("test", {}) else None,
        "last_step": training["updates"],
        **recorded_origin(scores.get("test") or scores.get("valid", {})),
        "seconds": training["seconds"],
        **note_unlearned(scores.get("test", {})),
        **values,
    }


def _summarize_system(own: Results, base: Results, examples: Mapping[str, Numbers], measures: Measures) -> dict:
    """Build the row of a system, with tests that are not corrected yet."""
    row: dict = {"system": own[0].system, "seeds": list(own.by_seed("cell"))}
    for entry, name in measures.columns:
        if len(values := [*own.by_seed(name, entry).values()]) == len(row["seeds"]):  # a mean of some would seem that of all
            row[f"{entry}.{name}"] = summarize(values) | {"deviation": stdev(values) if len(values) > 1 else None}
    row["parameters"] = own.where(metric="parameters")[0].value
    row["seconds"] = fmean(own.by_seed("seconds").values())
    pairs = base.paired(own, "cell")
    tests = {}
    for measure, result in measures.tested().items():
        if own == base or measure not in row:
            continue
        # Cells of an earlier grid may lack minimal pairs.
        of_both = [cells for cells in pairs if result not in measures.others or all(result in examples[one] for one in cells)]
        if of_both:
            baselines, systems = zip(*of_both, strict=True)
            tests[measure] = _compare(baselines, systems, examples, result, measures)
    if tests:
        row |= {"tests": tests, **unlearned_in(own, base)}
    return row


def _compare(
    baselines: Sequence[str], systems: Sequence[str], examples: Mapping[str, Numbers], result: str, measures: Measures
) -> SeedTest:
    """Test the headline score over pairs of baseline and system, one pair per seed."""
    names = [*baselines, *systems]
    for name in names:
        if result not in examples[name] or len(examples[name][result]) != len(examples[names[0]][result]):
            raise UserError(f"{name} and {names[0]} have predictions for different examples of {result}; run one of them again")
    return measures.compare([examples[name] for name in baselines], [examples[name] for name in systems], result)


def shown_columns(report: dict) -> dict[str, str]:
    """Return the titles of the scores that a row of the report has, by their names, in the order of the table."""
    titles = {f"{entry}.{name}": title for (entry, name), title in MEASURES[report["task"]].columns.items()}
    return {key: title for key, title in titles.items() if any(key in row for row in report["systems"])}


def headline_test(row: dict, measures: Measures) -> SeedTest | None:
    """Return the test of a system's headline score against the baseline; None for the baseline itself."""
    return _test_of(row, f"test.{measures.headline}")


def _test_of(row: dict, score: str) -> SeedTest | None:
    """Return the test of a score of a system, if it has one: the difference alone if a cell of the two learned nothing."""
    found = row.get("tests", {}).get(score)
    test = SeedTest(**found) if found else None
    return test.without_inference() if test and UNLEARNED in row else test


def _say_partial(report: dict) -> list[str]:
    """Return a line for the scores that some cells of a system have and others lack, with these cells."""
    found: dict[tuple[str, ...], list[str]] = {}
    for (entry, name), title in MEASURES[report["task"]].columns.items():
        scored = [cell.get("system") for cell in report["cells"] if f"{entry}.{name}" in cell]
        lack = [one["cell"] for one in report["cells"] if one.get("system") in scored and f"{entry}.{name}" not in one]
        if lack:
            found.setdefault(tuple(lack), []).append(title)
    return [
        f"no mean of {', '.join(titles)}, because some cells have no such score: {', '.join(cells)}; remove the record of each "
        "one whose run is gone, and run compare-seeds with it in the grid, and with grid.pairs, grid.blimp or grid.peak_on_test "
        "of the others"
        for cells, titles in found.items()
    ]


def explain(report: dict) -> list[str]:
    """Return the lines below the table: its columns, its tests, and what makes a comparison doubtful."""
    columns = shown_columns(report)
    about = {
        "test.last.": "last: the last checkpoint, on test",
        "test.pearson": "r, rho: Pearson, Spearman",
        "pairs.pair_accuracy": "pairs: right minimal pairs in %",
        "pairs.paradigm_accuracy": "paradigms: the mean of its paradigms",
        ".binary_accuracy": "two: read as two classes",
        "perplexity": "ppl: perplexity of pieces; low is good, as for the nll",
        ".word_perplexity": "of words: of words and ends of sentences",
        ".perplexity_given_tree": "given tree: with the tree before each piece; else of sentence and tree, an upper bound",
    }
    said = [words for name, words in about.items() if any(name in key for key in columns)]
    trained = "valid, test: the trained model, which the setting average makes of the checkpoints"
    lines = ["; ".join([trained, *said]) + ". Mean ± deviation over seeds; differences are over the seeds that both have"]
    if any(key.startswith("test.peak.") for key in columns):
        lines.append(
            "peak on test!: the best kept checkpoint, chosen on test itself; this is not a result, but shows the effect of such "
            "a choice"
        )
        if "peaks_of" in report:
            lines.append(
                f"peak on test!: cells chose from {', '.join(map(str, report['peaks_of']))} checkpoints, and the best of more is "
                "higher; if keep_checkpoints has changed since the first cell, use another --out to compare peaks"
            )
    return [*lines, f"seen, p, p, Holm and stars: {EXPLAINED}", *_say_partial(report), *notes_about_cells(report)]


def system_columns(report: dict) -> list[Column]:
    """Return the table: for each system mean and deviation over seeds, the difference from the baseline, and its test."""
    measures, rows = MEASURES[report["task"]], report["systems"]
    tests = [headline_test(row, measures) for row in rows]
    return [
        Column("system", [row["system"] for row in rows]),
        numbers("seeds", [len(row["seeds"]) for row in rows]),
        *(
            shown(title, [row.get(key) for row in rows], partial(measures.show_mean, name=key.rpartition(".")[2]))
            for key, title in shown_columns(report).items()
        ),
        shown(f"− {report['baseline']}", tests, lambda test: typeset(measures.show(test.difference, "+"))),
        shown("95 %", tests, lambda test: typeset(measures.show_interval(test.interval))),
        shown("seen", tests, lambda test: typeset(measures.show_seen(test))),
        *p_columns(tests),
        numbers("parameters", [row["parameters"] for row in rows]),
        numbers("minutes", [row["seconds"] / 60 for row in rows], ".1f"),
    ]


def format_table(report: dict) -> str:
    """Return the table for a terminal, and its notes."""
    if not report["systems"]:
        return "no cell is done yet"
    return "\n".join([*align(system_columns(report)), *other_tests(report), *say_unlearned_cells(report), *explain(report)])


def other_tests(report: dict) -> list[str]:
    """Return a line for each system's test of a score that is not the headline: of minimal pairs."""
    lines = []
    for result, name in MEASURES[report["task"]].others.items():
        for row in report["systems"]:
            if test := _test_of(row, f"{result}.{name}"):
                score = SCORES[name]
                seen = "-" if test.seen is None else score.show(test.seen)
                p_value, holm = show_p_values(test)
                values = f"{score.show(test.difference, '+')} {score.show_interval(test.interval)}"
                lines.append(
                    f"{row['system']} - {report['baseline']}, {score.title}: {values}; seen {seen}; p {p_value}; p, Holm {holm}"
                )
    return lines


def draw(report: dict) -> "Figure":
    """Draw the test score of every seed of every system, and the 95 % intervals of the means. The baseline's mean is a line."""
    from matplotlib.figure import Figure

    measures = MEASURES[report["task"]]
    headline = f"test.{measures.headline}"
    rows = [row for row in report["systems"] if headline in row]
    figure = Figure(figsize=(6.8, 1.1 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        score, is_baseline = row[headline], row["system"] == report["baseline"]
        color = "C0" if is_baseline else "C7"
        seeds = [measures.unit * value for value in score["values"]]
        axes.plot(seeds, [place] * len(seeds), "o", color=color, alpha=0.35, ms=5, mec="none")
        mean, half = measures.unit * score["mean"], score["half_interval"] and measures.unit * score["half_interval"]
        axes.errorbar(mean, place, xerr=half, fmt="|", color=color, ms=14, mew=2, capsize=3)
        if is_baseline:
            axes.axvline(mean, color=color, lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [row["system"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    interval = f"its 95 % interval on these sentences (of {FEWEST_SEEDS} seeds or more)"
    axes.set_xlabel(f"{measures.title} on test: seeds, their mean,\nand {interval}")
    axes.grid(axis="x", alpha=0.25)
    return figure


FORM = StudyForm(
    kind=folder_kinds.SEEDS,
    content=SeedsReport,
    name="seeds",
    command="compare-seeds",
    labels=LABELS,
    report=COMPARISON,
    rows="systems",
    pictures=("comparison.png",),
    work=seed_work,
    read=lambda config, more: partial(read_result, MEASURES[config.task]),
    build=lambda config, records: build_report(config.task, config.grid, records),
    table=format_table,
    draw=draw,
)
