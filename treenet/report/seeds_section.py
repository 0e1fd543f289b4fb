"""The section of comparisons over seeds: classifiers, and models of relatedness."""

from treenet.experiments.seeds_measures import MEASURES
from treenet.experiments.seeds_report import explain, headline_test, shown_columns
from treenet.report.markup import TableCell, number, paragraph, text
from treenet.report.report_model import Page
from treenet.report.study_section import show_p_values, tell_no_cell, tell_stale


def show_comparisons(page: Page) -> list[str]:
    """Return picture, table and notes of every comparison."""
    out = []
    for index, study in enumerate(page.report.comparisons):
        if study.report is None:
            out.append(tell_no_cell(study))
            continue
        out += tell_stale(study, "compare_seeds.py")
        report, measures = study.report, MEASURES[study.report["task"]]
        shown = shown_columns(report)
        out.append(page.figure(seeds_name(index), f"{study.name}: {measures.axis}, every seed of every system."))
        titles = ["seeds", *shown.values(), f"− {report['baseline']}", "95 %", "p", "p, Holm", "parameters", "minutes"]
        head = [text("system"), *(TableCell(title, "n") for title in titles)]
        rows = []
        for row in report["systems"]:
            cells = [text(row["system"]), number(len(row["seeds"]))]
            cells += [TableCell(measures.show_mean(row[key]) if key in row else "", "n") for key in shown]
            if test := headline_test(row, measures):
                signed = (measures.show(test.difference, "+"), measures.show_interval(test))
                cells += [TableCell(value.replace("-", "−"), "n") for value in signed]
                cells += [TableCell(value, "n") for value in show_p_values(test)]
            else:
                cells += [TableCell("", "n")] * 4
            rows.append([*cells, number(row["parameters"]), number(row["seconds"] / 60, ".1f")])
        first, *notes = explain(report)
        out.append(page.table(f"{study.name}. {first}.", head, rows))
        out += [paragraph(f"{note.removesuffix('.')}.", class_="note") for note in notes]
    return out


def seeds_name(index: int) -> str:
    """Return the name of the figure of a comparison."""
    return f"seeds_{index + 1}"
