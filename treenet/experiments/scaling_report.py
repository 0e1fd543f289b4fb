"""What a data-size study says: STUDY/scaling.json, a table, and a plot like figure 5a of the paper.

The primary comparisons are those of the first model that is not the baseline: its difference at the largest share of the
grid, and the slope of its difference over log2 of the size. All others are one family, whose p-values are corrected.

A difference has two p-values, which answer two questions. One is about training with other seeds, scored on other
sentences; it needs three seeds, and a star is its alone. The other is about these very weights on these sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from treenet.experiments.records import Record, Recording, numbers, show_numbers
from treenet.experiments.scaling import ScalingConfig, study_cells, study_work
from treenet.experiments.study import Study, count_not_recorded, read_fresh_scores, show_p_values
from treenet.inference.metrics import BLEU_STATISTICS, bleu_statistics, compare_seeds, compare_slopes, sample_bleu
from treenet.inference.origin import recorded_origin
from treenet.inference.results import read_system
from treenet.inference.significance import (
    ABOUT_WEIGHTS_OF_SEEDS,
    EXPLAIN_HOLM,
    EXPLAIN_MEANS,
    EXPLAIN_SEEDS,
    EXPLAIN_WEIGHTS,
    SeedTest,
    correct_family,
    half_interval,
    summarize,
)
from treenet.inference.translate import read_references
from treeproc.files import atomic_write, json_bytes
from treeproc.settings import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"model": str, "fraction": float, "seed": int}
# For people, below a table.
EXPLAIN_PRIMARY = (
    "Primary, and not corrected: {model} - {baseline} at the largest share, and its slope, which is BLEU a doubling of the pairs."
)
OTHERS = "all other comparisons here"


class _Scores(TypedDict, total=False):
    """What is read of an entry of scores.json."""

    bleu: float
    chrf: float
    bleu_signature: str


def make_study(config: ScalingConfig, out: Path, records: Path | None) -> Study:
    """The study in the folder `out`, with the records of its cells in another, if they are kept."""
    return Study(
        config,
        out,
        study_cells(config, out),
        study_work(config),
        Recording(LABELS, partial(read_result, config), records),
        config.grid.parallel,
        lambda found: format_table(build_report(config, found)),
        lambda found: write_report(config, found, out),
    )


def read_result(config: ScalingConfig, folder: Path) -> tuple[dict[str, dict], dict[str, str]]:
    """What is recorded of the translations of a cell: their scores, and all that BLEU needs of each sentence."""
    split = config.grid.split
    scores = read_fresh_scores((split,), folder, "remove the folder and run the same command again", dict[str, _Scores])
    if not _Scores.__annotations__.keys() <= scores.get(split, {}).keys():
        raise UserError(
            f"{folder / 'scores.json'} has no scores of {split}; run workflows/evaluate.py --out {folder} split={split}"
        )
    statistics = bleu_statistics(read_system(folder, split).lines, read_references(config.data, split))
    return {split: scores[split]}, dict(zip(BLEU_STATISTICS, map(show_numbers, statistics.T), strict=True))


def build_report(config: ScalingConfig, records: Sequence[Record]) -> dict:
    """Everything that the records say; what scaling.json holds."""
    split, baseline = config.grid.split, config.grid.baseline
    cells = [_read_cell(record, split) for record in records]
    sampled = _sample(config, records)
    num_examples = len(numbers(records[0], BLEU_STATISTICS[0])) if records else 0
    points = []
    for fraction in sorted({cell["fraction"] for cell in cells}):
        base = _of(cells, fraction, baseline)
        for model in sorted({cell["model"] for cell in cells if cell["fraction"] == fraction}):
            here = _of(cells, fraction, model)
            point = {"fraction": fraction, "model": model, "pairs": fmean(cell["pairs"] for cell in here.values())}
            point |= {metric: summarize([cell[metric] for cell in here.values()]) for metric in ("bleu", "chrf")}
            point["seeds"] = list(here)
            if model != baseline and (seeds := sorted(here.keys() & base.keys())):
                sides = [[sampled[side[seed]["cell"]] for seed in seeds] for side in (base, here)]
                found = compare_seeds(*sides, num_examples)
                weights = {"p_value": found.weights_p_value, "about": ABOUT_WEIGHTS_OF_SEEDS}
                point["comparison"] = asdict(found.over_seeds) | {"weights": weights}
            points.append(point)
    slopes = [slope for model in config.grid.models if (slope := _slope(cells, sampled, model, baseline, num_examples))]
    primary = next((model for model in config.grid.models if model != baseline), None)
    _correct(points, slopes, primary, max(config.grid.fractions))
    said = [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS]
    said += [EXPLAIN_PRIMARY.format(model=primary, baseline=baseline), EXPLAIN_HOLM.format(family=OTHERS)] if primary else []
    return {
        "split": split,
        "num_examples": num_examples,
        "baseline": baseline,
        "primary": primary,
        "bootstrap_samples": config.grid.bootstrap_samples,
        "explanations": said,
        "bleu_signature": cells[0]["bleu_signature"] if cells else None,
        "cells": cells,
        "points": points,
        "slopes": slopes,
    }


def _read_cell(record: Record, split: str) -> dict:
    where = f"the record of {record['cell']}"
    scores, facts = record["scores"].get(split, {}), record["facts"]
    if missing := [*(_Scores.__annotations__.keys() - scores.keys()), *({"examples", "parameters"} - facts.keys())]:
        raise UserError(f"{where} has no {', '.join(sorted(missing))} of {split}; give the split of the records as grid.split")
    kept = {name: scores[name] for name in _Scores.__annotations__} | recorded_origin(scores)
    step = record["training"]["averaged_steps"][-1]
    places = {"pairs": facts["examples"], "parameters": facts["parameters"], "step": step}
    return {"cell": record["cell"], **record["labels"], **places, **kept}


def _sample(config: ScalingConfig, records: Sequence[Record]) -> dict[str, np.ndarray]:
    """`sample_bleu` of every cell. Raises UserError where two were scored against different references."""
    sampled, first = {}, None
    for record in records:
        statistics = np.stack([numbers(record, name) for name in BLEU_STATISTICS], axis=1)
        first = (record["cell"], statistics[:, -1]) if first is None else first
        if not np.array_equal(statistics[:, -1], first[1]):
            raise UserError(f"{record['cell']} and {first[0]} have scores of different references; keep records of one split")
        sampled[record["cell"]] = sample_bleu(statistics, config.grid.bootstrap_samples)
    return sampled


def _of(cells: Iterable[dict], fraction: float, model: str) -> dict[int, dict]:
    """The cells of one size and model by seed, in order."""
    found = {cell["seed"]: cell for cell in cells if (cell["fraction"], cell["model"]) == (fraction, model)}
    return dict(sorted(found.items()))


def _slope(cells: Sequence[dict], sampled: Mapping[str, np.ndarray], model: str, baseline: str, num_examples: int) -> dict | None:
    """The slope of a model's difference, over the seeds that have all sizes; None with one size or no such seed."""
    fractions = sorted({cell["fraction"] for cell in cells if cell["model"] == model})
    by_size = [[_of(cells, fraction, name) for fraction in fractions] for name in (baseline, model)]
    seeds = sorted(set.intersection(*(set(here) for side in by_size for here in side))) if fractions else []
    if model == baseline or len(fractions) < 2 or not seeds:
        return None
    sides = [np.array([[sampled[here[seed]["cell"]] for here in side] for seed in seeds]) for side in by_size]
    pairs = np.array([[here[seed]["pairs"] for here in by_size[1]] for seed in seeds])
    test = compare_slopes(*sides, pairs, num_examples)
    return {"model": model, "fractions": fractions, "seeds": seeds, "comparison": asdict(test)}


def _correct(points: Sequence[dict], slopes: Sequence[dict], primary: str | None, largest: float) -> None:
    """Give all comparisons but the primary ones Holm's p-values."""
    others = [point for point in points if "comparison" in point and (point["model"], point["fraction"]) != (primary, largest)]
    others += [slope for slope in slopes if slope["model"] != primary]
    tests = correct_family([_read_test(one["comparison"]) for one in others])
    for one, test in zip(others, tests, strict=True):
        one["comparison"] |= {"holm_p_value": test.holm_p_value}


def _read_test(comparison: Mapping) -> SeedTest:
    return SeedTest(**{name: value for name, value in comparison.items() if name != "weights"})


def read_comparison(point: dict) -> tuple[SeedTest, float] | None:
    """The test over seeds of a point of scaling.json, and the p-value of its weights; None for a baseline.

    A file of an earlier version has the paired bootstrap alone; its interval is none over seeds, and is left out.
    """
    test = point.get("comparison")
    if test is None:
        return None
    if "weights" not in test:
        return SeedTest(test["difference"], test["seeds"], None, None, None, None), test["p_value"]
    return _read_test(test), test["weights"]["p_value"]


def format_table(report: dict) -> str:
    """One line a size and model, the slopes, and what the numbers are about. A star marks p < 0.05 over seeds."""
    if not report["points"]:
        return "no cell is done yet"
    head = f"{'pairs':>10} {'share':>6}  {'model':<20}{'seeds':>6}{'BLEU':>8}{'± 95 %':>8}{'chrF':>8}"
    lines = [f"{head}  {'- ' + report['baseline']:>16} {'95 %':>16}{'p':>8}{'p, Holm':>10}{'p, weights':>12}"]
    for point in report["points"]:
        half = half_interval(point["bleu"])
        line = f"{point['pairs']:>10,.0f} {point['fraction']:>6.4g}  {point['model']:<20}{len(point['seeds']):>6}"
        line += f"{point['bleu']['mean']:>8.2f}{'-' if half is None else f'{half:.2f}':>8}{point['chrf']['mean']:>8.2f}"
        if found := read_comparison(point):
            test, of_weights = found
            p_value, holm = show_p_values(test)
            line += f"  {test.difference:>+16.2f} {_show_interval(test):>16}{p_value:>9}{holm:>10}{of_weights:>11.3f}"
        lines.append(line)
    lines += describe_slopes(report)
    lines += report.get("explanations", [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS])
    lines.append(f"{report['num_examples']:,} examples of {report['split']}; {report['bleu_signature']}")
    lines += filter(None, [count_not_recorded(report["cells"])])
    return "\n".join(lines)


def describe_slopes(report: dict) -> list[str]:
    """A line about the slope of every model; files of earlier versions have none."""
    lines = []
    for slope in report.get("slopes", ()):
        test = _read_test(slope["comparison"])
        p_value, holm = (said.strip() for said in show_p_values(test))
        what = f"{slope['model']} - {report['baseline']} over {len(slope['fractions'])} sizes, {len(slope['seeds'])} seeds"
        lines.append(
            f"slope of {what}: {test.difference:+.2f} BLEU a doubling, 95 % {_show_interval(test)}, p {p_value}, p, Holm {holm}"
        )
    return lines


def _show_interval(test: SeedTest) -> str:
    return f"[{test.interval[0]:+.2f}, {test.interval[1]:+.2f}]" if test.interval else "-"


def plot(report: dict, out: Path) -> list[Path]:
    """Write `draw` as scaling.png and scaling.svg."""
    import matplotlib

    paths = [out / "scaling.png", out / "scaling.svg"]
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none"}):
        figure = draw(report)
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def draw(report: dict) -> "Figure":
    """Mean BLEU by number of pairs for each model, intervals as bars, single seeds as strokes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    models = sorted({point["model"] for point in report["points"]})
    for index, model in enumerate(models):
        points = [point for point in report["points"] if point["model"] == model]
        aside = 1.02 ** (index - (len(models) - 1) / 2)  # so that bars of two models do not hide each other
        pairs, means = [point["pairs"] * aside for point in points], [point["bleu"]["mean"] for point in points]
        halves = [half_interval(point["bleu"]) or 0.0 for point in points]
        bars = axes.errorbar(pairs, means, yerr=halves, marker="o", markersize=5, capsize=3, linewidth=1.5, label=model)
        for at, point in zip(pairs, points, strict=True):
            values = point["bleu"]["values"]
            axes.plot([at] * len(values), values, "_", markersize=9, color=bars[0].get_color())
    axes.set(xscale="log", xlabel="training pairs", ylabel=f"BLEU on {report['split']}")
    sizes = sorted({round(point["pairs"]) for point in report["points"]})
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # else points of one size lie on the edge
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _short(count: int) -> str:
    """`1020` -> `1.0k`, `4500000` -> `4.5M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)


def write_report(config: ScalingConfig, records: Sequence[Record], out: Path) -> str:
    """Write scaling.json, scaling.png and scaling.svg; returns the table and where the files are."""
    report = build_report(config, records)
    atomic_write(out / "scaling.json", json_bytes(report))
    pictures = plot(report, out) if report["points"] else []
    return f"{format_table(report)}\n\n" + "\n".join(map(str, [out / "scaling.json", *pictures]))
