"""The report of a comparison over seeds: OUT/comparison.json, a table and a picture.

Means and deviations are over seeds. A difference from the baseline is over the seeds that both systems ran with, which share
the batch order, and its test is about training with other seeds and scoring on other sentences. It needs three seeds.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from treenet.evaluation.origin import recorded_origin
from treenet.evaluation.significance import (
    EXPLAIN_SEEDS,
    SYSTEMS,
    SeedTest,
    compare_examples,
    correct_family,
    half_interval,
    summarize,
)
from treenet.experiments.records import Record, Recording, numbers, show_numbers
from treenet.experiments.seeds import SCORED, SeedsConfig, seed_cells, seed_work
from treenet.experiments.study import Study, count_not_recorded, read_fresh_scores, show_p_values
from treenet.runs.learning_curves import write_png
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.settings import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The reported scores: (entry of scores.json, score), and the column title.
MEASURES = {
    ("valid", "accuracy"): "valid",
    ("test", "accuracy"): "test",
    ("test.last", "accuracy"): "last",
    ("test", "binary_accuracy"): "two",
    ("test.last", "binary_accuracy"): "two, last",
    ("test.peak", "accuracy"): "peak on test!",
}
# The tested differences from the baseline: measure, and the result whose predictions it is of.
TESTED = {"test.accuracy": "test", "test.last.accuracy": "test.last"}
EXPLAIN_FAMILY = "p, Holm: corrected over all systems that are compared with the baseline."
LABELS = {"system": str, "seed": int}


def make_study(config: SeedsConfig, out: Path, records: Path | None) -> Study:
    """The comparison in the folder `out`, with the records of its cells in another, if they are kept."""
    return Study(
        config,
        out,
        seed_cells(config, out),
        seed_work(config),
        Recording(LABELS, read_result, records),
        config.grid.parallel,
        lambda found: format_table(build_report(config, found)),
        lambda found: write_report(config, found, out),
    )


def read_result(folder: Path) -> tuple[dict[str, dict], dict[str, str]]:
    """The recorded results of a cell's predictions: their scores, and whether each example is right."""
    scores = read_fresh_scores(SCORED, folder, "remove the folder and run the same command again", dict[str, _Scores])
    files = {result: folder / f"predictions.{result}.tsv" for result in TESTED.values() if result in scores}
    return scores, {result: show_numbers(map(int, _read_right(path))) for result, path in files.items()}


def build_report(config: SeedsConfig, records: Sequence[Record]) -> dict:
    """Everything that the records say; what comparison.json holds."""
    cells = [_read_cell(record) for record in records]
    right = {record["cell"]: {name: numbers(record, name) for name in record["sentences"]} for record in records}
    systems = list(dict.fromkeys([*config.grid.systems, *(cell["system"] for cell in cells)]))
    rows = [_summarize_system(system, cells, config.grid.baseline, right) for system in systems]
    for measure in TESTED:
        tested = [row for row in rows if measure in row.get("tests", {})]
        for row, test in zip(tested, correct_family([row["tests"][measure] for row in tested], SYSTEMS), strict=True):
            row["tests"][measure] = asdict(test)
    return {
        "baseline": config.grid.baseline,
        "tests": f"{EXPLAIN_SEEDS} {EXPLAIN_FAMILY}",
        "cells": cells,
        "systems": [row for row in rows if row["seeds"]],
    }


class _Scores(TypedDict, total=False):
    """The fields of an entry of scores.json that are read."""

    accuracy: float
    binary_accuracy: float
    steps: Annotated[list[int], MinLen(1)]


def _read_cell(record: Record) -> dict:
    scores, training = record["scores"], record["training"]
    measures = {f"{entry}.{name}": scores[entry][name] for entry, name in MEASURES if name in scores.get(entry, {})}
    return {
        "cell": record["cell"],
        **record["labels"],
        "parameters": record["facts"]["parameters"],
        "best_step": scores["test"]["steps"][-1] if "steps" in scores.get("test", {}) else None,
        "last_step": training["updates"],
        **recorded_origin(scores.get("test", {})),
        "seconds": training["seconds"],
        **measures,
    }


def _summarize_system(system: str, cells: Sequence[dict], baseline: str, right: Mapping[str, Mapping[str, np.ndarray]]) -> dict:
    """A row of the table, with tests that are not corrected yet."""
    own, base = ({c["seed"]: c for c in cells if c["system"] == name} for name in (system, baseline))
    row: dict = {"system": system, "seeds": sorted(own)}
    for entry, name in MEASURES:
        values = [own[seed][f"{entry}.{name}"] for seed in sorted(own) if f"{entry}.{name}" in own[seed]]
        if values:
            row[f"{entry}.{name}"] = summarize(values) | {"deviation": stdev(values) if len(values) > 1 else None}
    if own:
        row["parameters"] = next(iter(own.values()))["parameters"]
        row["seconds"] = fmean(cell["seconds"] for cell in own.values())
    shared = sorted(own.keys() & base.keys())
    if system != baseline and shared and "test.accuracy" in row:
        pairs = [(base[seed]["cell"], own[seed]["cell"]) for seed in shared]
        row["tests"] = {measure: _compare(pairs, right, result) for measure, result in TESTED.items()}
    return row


def _compare(pairs: Sequence[tuple[str, str]], right: Mapping[str, Mapping[str, np.ndarray]], result: str) -> SeedTest:
    """The test of accuracy over pairs of baseline and system, one pair a seed."""
    names = list(chain(*pairs))
    for name in names:
        if result not in right[name] or len(right[name][result]) != len(right[names[0]][result]):
            raise UserError(f"{name} and {names[0]} have predictions of different examples of {result}; run one of them again")
    sides = np.array([[right[name][result] for name in pair] for pair in pairs])
    return compare_examples((sides[:, 1] - sides[:, 0]).astype(float))


def _read_right(path: Path) -> list[bool]:
    """Whether each prediction is right, in the order of the examples."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [row["predicted"] == row["label"] for row in csv.DictReader(file, delimiter="\t")]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove its folder and run the same command again") from None


def format_table(report: dict) -> str:
    """One line a system: mean and deviation over seeds in per cent, the difference from the baseline, and what it is about."""
    rows = report["systems"]
    if not rows:
        return "no cell is done yet"
    measures = [f"{entry}.{name}" for entry, name in MEASURES]
    shown = [(key, head) for key, head in zip(measures, MEASURES.values(), strict=True) if any(key in row for row in rows)]
    width = max(len("system"), *(len(row["system"]) for row in rows))
    lines = [
        f"{'system':{width}} {'seeds':>5}"
        + "".join(f"{head:>15}" for _, head in shown)
        + f"{'- ' + report['baseline']:>20}{'95 %':>18}{'p':>9}{'p, Holm':>10}{'minutes':>9}"
    ]
    for row in rows:
        line = f"{row['system']:{width}} {len(row['seeds']):5d}"
        for key, _ in shown:
            line += f"{_mean_and_deviation(row[key]) if key in row else '':>15}"
        if test := row.get("tests", {}).get("test.accuracy"):
            line += _show_test(SeedTest(**test))
        else:
            line += " " * 57
        lines.append(line + f"{row['seconds'] / 60:9.1f}")
    lines.append(
        "valid, test: the trained model (as `average` says; chosen on valid); last: the last checkpoint, on test; two: read as "
        "two classes. Mean ± deviation over seeds"
    )
    if any("test.peak.accuracy" in row for row in rows):
        lines.append(
            "peak on test!: the best kept checkpoint, chosen on test itself; it is no result, it shows what such a choice adds"
        )
    lines.append(report["tests"])
    lines += filter(None, [count_not_recorded(report["cells"])])
    return "\n".join(lines)


def _mean_and_deviation(summary: dict) -> str:
    deviation = f"{100 * summary['deviation']:.2f}" if summary["deviation"] is not None else "-"
    return f"{100 * summary['mean']:.2f} ± {deviation}"


def _show_test(test: SeedTest) -> str:
    """Difference and interval in points, p, and Holm's p."""
    interval = "[{:+.2f}, {:+.2f}]".format(*(100 * end for end in test.interval)) if test.interval else "-"
    p_value, holm = show_p_values(test)
    return f"{100 * test.difference:>+20.2f}{interval:>18}{p_value:>10}{holm:>10}"


def draw(report: dict) -> "Figure":
    """Test accuracy of every seed of every system, and the 95 % intervals of the means; the baseline's mean as a line."""
    from matplotlib.figure import Figure

    rows = [row for row in report["systems"] if "test.accuracy" in row]
    figure = Figure(figsize=(6.8, 0.9 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        accuracy, is_baseline = row["test.accuracy"], row["system"] == report["baseline"]
        color = "C0" if is_baseline else "C7"
        seeds = [100 * value for value in accuracy["values"]]
        axes.plot(seeds, [place] * len(seeds), "o", color=color, alpha=0.35, ms=5, mec="none")
        half = 100 * (half_interval(accuracy) or 0.0)
        axes.errorbar(100 * accuracy["mean"], place, xerr=half, fmt="|", color=color, ms=14, mew=2, capsize=3)
        if is_baseline:
            axes.axvline(100 * accuracy["mean"], color=color, lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [row["system"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    axes.set_xlabel("test accuracy, %: seeds, their mean and its 95 % interval on these sentences")
    axes.grid(axis="x", alpha=0.25)
    return figure


def write_report(config: SeedsConfig, records: Sequence[Record], out: Path) -> str:
    """Write comparison.json and comparison.png; returns the table and where the files are."""
    report = build_report(config, records)
    atomic_write(out / "comparison.json", json_bytes(report))
    if not report["systems"]:
        return format_table(report)
    write_png(draw(report), out / "comparison.png")
    return f"{format_table(report)}\n\n{out / 'comparison.json'}\n{out / 'comparison.png'}"
