"""What a comparison over seeds says: OUT/comparison.json, a table and a picture.

Means and deviations are over seeds. Differences from the baseline are tested by Student's t over seeds: paired where
both systems ran with the same seeds, which share the batch order, and by Welch's t without that assumption. p-values are
of single comparisons, not corrected for their number.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import TYPE_CHECKING

import numpy as np

from treenet.experiments.scaling_report import summarize
from treenet.experiments.seeds import SeedsConfig
from treenet.training.curves import write_png
from treenet.training.ledger import DONE, Ledger
from treenet.training.logs import read_metrics
from treeproc.files import atomic_write, json_bytes, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is reported: (entry of scores.json, score), and its head in the table.
MEASURES = {
    ("valid", "accuracy"): "valid",
    ("test", "accuracy"): "test",
    ("test.last", "accuracy"): "last",
    ("test", "binary_accuracy"): "two",
    ("test.last", "binary_accuracy"): "two, last",
}


def t_probability(t: float, freedom: float) -> float:
    """Two-sided p of Student's t with any positive degrees of freedom: t = sqrt(freedom) tan(a), density cos(a)^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    inside = float(np.interp(math.atan(abs(t) / math.sqrt(freedom)), angles, mass / mass[-1]))
    return 1.0 - inside


def welch_test(first: Sequence[float], second: Sequence[float]) -> dict | None:
    """Welch's t-test of unequal variances; None with less than two values a side, or where nothing varies."""
    if min(len(first), len(second)) < 2:
        return None
    parts = [variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return None
    t = (fmean(second) - fmean(first)) / math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    return {"t": t, "freedom": freedom, "p_value": t_probability(t, freedom)}


def paired_test(first: Sequence[float], second: Sequence[float]) -> dict | None:
    """The paired t-test; None with less than two pairs, or where differences do not vary."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    if len(differences) < 2 or not stdev(differences):
        return None
    t = fmean(differences) / (stdev(differences) / math.sqrt(len(differences)))
    return {"t": t, "freedom": len(differences) - 1, "p_value": t_probability(t, len(differences) - 1)}


def build_report(config: SeedsConfig, ledger: Ledger, out: Path) -> dict:
    """Everything that the done cells of the ledger say, those of earlier grids included; what comparison.json holds."""
    done = {name: entry for name, entry in ledger.entries.items() if entry.status == DONE}
    cells = [_read_cell(out / "cells" / name, entry.labels) for name, entry in done.items()]
    systems = list(dict.fromkeys([*config.grid.systems, *(cell["system"] for cell in cells)]))
    rows = [_summarize_system(system, cells, config.grid.baseline) for system in systems]
    return {
        "baseline": config.grid.baseline,
        "tests": "of test accuracy against the baseline, over seeds: paired t (seeds of both) and Welch's t",
        "cells": cells,
        "systems": [row for row in rows if row["seeds"]],
    }


def _read_cell(folder: Path, labels: dict) -> dict:
    mend = "remove the folder and run the same command again"
    scores, facts = read_json(folder / "scores.json", mend), read_json(folder / "run.json", mend)
    lines = read_metrics(folder)
    measures = {f"{entry}.{name}": scores[entry][name] for entry, name in MEASURES if name in scores.get(entry, {})}
    return {
        "cell": folder.name,
        **labels,
        "parameters": facts["parameters"],
        "best_step": scores["test"]["steps"][-1] if "test" in scores else None,
        "last_step": lines[-1]["step"],
        "seconds": lines[-1]["elapsed"],
        **measures,
    }


def _summarize_system(system: str, cells: Sequence[dict], baseline: str) -> dict:
    own, base = ({c["seed"]: c for c in cells if c["system"] == name} for name in (system, baseline))
    row: dict = {"system": system, "seeds": sorted(own)}
    for entry, name in MEASURES:
        values = [own[seed][f"{entry}.{name}"] for seed in sorted(own) if f"{entry}.{name}" in own[seed]]
        if values:
            row[f"{entry}.{name}"] = summarize(values) | {"deviation": stdev(values) if len(values) > 1 else None}
    if own:
        row["parameters"] = next(iter(own.values()))["parameters"]
        row["seconds"] = fmean(cell["seconds"] for cell in own.values())
    if system != baseline and own and base and "test.accuracy" in row:
        row["tests"] = {}
        for measure in ("test.accuracy", "test.last.accuracy"):
            shared = sorted(own.keys() & base.keys())
            paired = [[side[seed][measure] for seed in shared] for side in (base, own)]
            whole = [[cell[measure] for cell in side.values()] for side in (base, own)]
            difference = fmean(whole[1]) - fmean(whole[0])
            row["tests"][measure] = {"difference": difference, "paired": paired_test(*paired), "welch": welch_test(*whole)}
    return row


def format_table(report: dict) -> str:
    """One line a system: mean and deviation over seeds in per cent, and the difference from the baseline; a star: p < 0.05."""
    rows = report["systems"]
    if not rows:
        return "no cell is done yet"
    measures = [f"{entry}.{name}" for entry, name in MEASURES]
    shown = [(key, head) for key, head in zip(measures, MEASURES.values(), strict=True) if any(key in row for row in rows)]
    width = max(len("system"), *(len(row["system"]) for row in rows))
    lines = [
        f"{'system':{width}} {'seeds':>5}"
        + "".join(f"{head:>15}" for _, head in shown)
        + f"{'- ' + report['baseline']:>20}{'paired p':>11}{'Welch p':>10}{'minutes':>9}"
    ]
    for row in rows:
        line = f"{row['system']:{width}} {len(row['seeds']):5d}"
        for key, _ in shown:
            line += f"{_mean_and_deviation(row[key]) if key in row else '':>15}"
        if test := row.get("tests", {}).get("test.accuracy"):
            line += f"{100 * test['difference']:>+20.2f}{_p(test['paired']):>11}{_p(test['welch']):>10}"
        else:
            line += " " * 41
        lines.append(line + f"{row['seconds'] / 60:9.1f}")
    lines.append(
        "valid, test: the trained model (as `average` says; chosen on valid); last: the last checkpoint, on test; two: read as "
        "two classes. Mean ± deviation over seeds; p of the difference in test"
    )
    return "\n".join(lines)


def _mean_and_deviation(summary: dict) -> str:
    deviation = f"{100 * summary['deviation']:.2f}" if summary["deviation"] is not None else "-"
    return f"{100 * summary['mean']:.2f} ± {deviation}"


def _p(test: dict | None) -> str:
    return f"{test['p_value']:.4f}{'*' if test['p_value'] < 0.05 else ''}" if test else "-"


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
        half = 100 * (accuracy["half_interval"] or 0.0)
        axes.errorbar(100 * accuracy["mean"], place, xerr=half, fmt="|", color=color, ms=14, mew=2, capsize=3)
        if is_baseline:
            axes.axvline(100 * accuracy["mean"], color=color, lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [row["system"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    axes.set_xlabel("test accuracy, %: seeds, mean and its 95 % interval")
    axes.grid(axis="x", alpha=0.25)
    return figure


def write_report(config: SeedsConfig, ledger: Ledger, out: Path) -> str:
    """Write comparison.json and comparison.png; returns the table and where the files are."""
    report = build_report(config, ledger, out)
    atomic_write(out / "comparison.json", json_bytes(report))
    if not report["systems"]:
        return format_table(report)
    write_png(draw(report), out / "comparison.png")
    return f"{format_table(report)}\n\n{out / 'comparison.json'}\n{out / 'comparison.png'}"
