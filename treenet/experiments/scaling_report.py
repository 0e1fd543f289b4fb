"""The report of a data-size study: STUDY/scaling.json, a table, and a plot like figure 5a of the paper.

The main model of a study is its first model that is not the baseline. There are two primary comparisons: its difference from the
baseline at the largest share, and the slope of that difference over log2 of the size. All other models are compared with the main
model, and form a second family at the largest share. The p-values of both families are corrected. All else is exploratory.

A difference has two p-values, for two questions. The first is about other seeds of training, scored on other sentences. It needs
three seeds, and only it gives a star. The second is about the present weights on the present sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.data.splits import read_references
from treenet.evaluation.bootstrap import BLEU_STATISTICS, bleu_statistics, compare_seeds, compare_slopes, sample_bleu
from treenet.evaluation.evaluate import more_fingerprint, tokenizer_of
from treenet.evaluation.evaluate_settings import EvaluateSettings, References
from treenet.evaluation.metrics import METRIC_TITLES
from treenet.evaluation.origin import recorded_origin
from treenet.evaluation.run_results import read_system
from treenet.evaluation.significance import (
    ABOUT_WEIGHTS_OF_SEEDS,
    EXPLAIN_MEANS,
    EXPLAIN_SEEDS,
    EXPLAIN_WEIGHTS,
    EXPLORATORY,
    PRIMARY,
    SYSTEMS,
    SeedTest,
    correct_family,
    half_interval,
    summarize,
)
from treenet.experiments.records import Record, Recording, numbers, show_numbers
from treenet.experiments.scaling import GridConfig, ScalingConfig, describe_other_references, study_cells, study_work
from treenet.experiments.study import Study, count_not_recorded, read_fresh_scores, show_p_values
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.settings import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTHS = {"bleu": 8, "bleu_tokenized": 16}  # of columns
LABELS = {"model": str, "fraction": float, "seed": int}
# For people, below a table.
EXPLAIN_FAMILIES = (
    "p, Holm: corrected over the two primary comparisons, {primary} - {baseline} at the largest share and its slope, and over "
    "the other models, each - {primary}, at that share. Everything else is exploratory, not corrected and without a star."
)


class _Scores(TypedDict, total=False):
    """The fields of an entry of scores.json that the report reads."""

    bleu: float
    bleu_tokenized: float
    chrf: float
    bleu_signature: str
    bleu_tokenized_signature: str
    more_references_fingerprint: str


def make_study(config: ScalingConfig, out: Path, records: Path | None, more: References = ()) -> Study:
    """Make the study in the folder `out`, with the records of its cells in another folder, if they are kept.

    `more` has the lines of the files `grid.more_references`.
    """
    return Study(
        config,
        out,
        study_cells(config, out),
        study_work(config, more),
        Recording(LABELS, partial(read_result, config, more=more), records),
        config.grid.parallel,
        lambda found: format_table(build_report(config, found)),
        lambda found: write_report(config, found, out),
    )


def read_result(config: ScalingConfig, folder: Path, more: References = ()) -> tuple[dict[str, dict], dict[str, str]]:
    """Read the recorded results of a cell's translations: their scores, and the statistics of BLEU for each sentence."""
    split, metric = config.grid.split, config.grid.metric
    scores = read_fresh_scores((split,), folder, "remove the folder and run the same command again", dict[str, _Scores])
    if not _needed(metric) <= scores.get(split, {}).keys():
        raise UserError(
            f"{folder / 'scores.json'} has no scores of {split}; run workflows/evaluate.py --out {folder} split={split}"
        )
    if changed := describe_other_references(scores[split], more_fingerprint(more)):
        raise UserError(f"{folder}: the scores of {split} are stale ({changed}); run the same command again without --dry-run")
    tokenizer = tokenizer_of(config.data, EvaluateSettings()) if metric == "bleu_tokenized" else None
    statistics = bleu_statistics(read_system(folder, split).lines, read_references(config.data, split), tokenizer, more)
    return {split: scores[split]}, dict(zip(_statistics(metric), map(show_numbers, statistics.T), strict=True))


def _needed(metric: str) -> set[str]:
    return {metric, f"{metric}_signature", "bleu", "chrf"}


def _statistics(metric: str) -> list[str]:
    """Return the names of the numbers of each sentence in a record."""
    return [f"{metric}.{name}" for name in BLEU_STATISTICS]


def build_report(config: ScalingConfig, records: Sequence[Record]) -> dict:
    """Build the content of scaling.json from the records."""
    grid = config.grid
    cells = [_read_cell(record, grid) for record in records]
    models = list(dict.fromkeys([*grid.models, *(cell["model"] for cell in cells)]))
    primary = next((model for model in models if model != grid.baseline), grid.baseline)
    against = {model: grid.baseline if model == primary else primary for model in models if model != grid.baseline}
    largest = max([*grid.fractions, *(cell["fraction"] for cell in cells)])
    sentences = _read_sentences(records, grid)
    num_examples = len(next(iter(sentences.values()))) if sentences else 0
    bleu = {cell: sample_bleu(statistics, grid.bootstrap_samples) for cell, statistics in sentences.items()}
    points, families = [], {PRIMARY: [], SYSTEMS: [], EXPLORATORY: []}

    def add(place: dict, test: SeedTest, family: str, **facts: object) -> None:
        place["comparison"] = asdict(test) | {"against": against[place["model"]], **facts}
        families[family].append(place["comparison"])

    for fraction in sorted({cell["fraction"] for cell in cells}):
        for model in sorted({cell["model"] for cell in cells if cell["fraction"] == fraction}):
            here, there = _of(cells, fraction, model), _of(cells, fraction, against.get(model))
            point = {"fraction": fraction, "model": model, "pairs": fmean(cell["pairs"] for cell in here.values())}
            point |= {metric: summarize([cell[metric] for cell in here.values()]) for metric in (grid.metric, "bleu", "chrf")}
            point["seeds"] = list(here)
            if seeds := sorted(here.keys() & there.keys()):
                found = compare_seeds(*([bleu[side[seed]["cell"]] for seed in seeds] for side in (there, here)), num_examples)
                family = EXPLORATORY if fraction < largest else PRIMARY if model == primary else SYSTEMS
                weights = {"p_value": found.weights_p_value, "about": ABOUT_WEIGHTS_OF_SEEDS}
                add(point, found.over_seeds, family, weights=weights)
            points.append(point)
    slopes = []
    for model in against:
        if found := _slope(cells, bleu, model, against[model], num_examples):
            slopes.append({"model": model, **found[0]})
            add(slopes[-1], found[1], PRIMARY if model == primary else EXPLORATORY)
    for family, comparisons in families.items():
        tests = [_read_test(one) for one in comparisons]
        corrected = correct_family(tests, family) if family != EXPLORATORY else [replace(one, family=family) for one in tests]
        for one, test in zip(comparisons, corrected, strict=True):
            one |= asdict(test)
    families_said = EXPLAIN_FAMILIES.format(primary=primary, baseline=grid.baseline)
    return {
        "split": grid.split,
        "metric": grid.metric,
        "num_examples": num_examples,
        "baseline": grid.baseline,
        "bootstrap_samples": grid.bootstrap_samples,
        "explanations": [EXPLAIN_MEANS, EXPLAIN_SEEDS, *([families_said] if against else []), EXPLAIN_WEIGHTS],
        f"{grid.metric}_signature": cells[0][f"{grid.metric}_signature"] if cells else None,
        "cells": cells,
        "points": points,
        "slopes": slopes,
    }


def _read_cell(record: Record, grid: GridConfig) -> dict:
    where, split, metric = f"the record of {record['cell']}", grid.split, grid.metric
    scores, facts = record["scores"].get(split, {}), record["facts"]
    if missing := [*(_needed(metric) - scores.keys()), *({"examples", "parameters"} - facts.keys())]:
        raise UserError(f"{where} has no {', '.join(sorted(missing))} of {split}; give the split of the records as grid.split")
    count = f"nrefs:{1 + len(grid.more_references)}"
    if not scores[f"{metric}_signature"].startswith((count, "nrefs:var")):
        raise UserError(f"{where} has scores of another number of references than {count} of grid.more_references; remove it")
    kept = {name: scores[name] for name in sorted(_needed(metric))} | recorded_origin(scores)
    step = record["training"]["averaged_steps"][-1]
    places = {"pairs": facts["examples"], "parameters": facts["parameters"], "step": step}
    return {"cell": record["cell"], **record["labels"], **places, **kept}


def _read_sentences(records: Sequence[Record], grid: GridConfig) -> dict[str, np.ndarray]:
    """Read `bleu_statistics` of every cell. Raises UserError if two were scored against different references."""
    found, first = {}, None
    for record in records:
        columns = [numbers(record, name) for name in _statistics(grid.metric)]
        # With several references, the length is that of the closest one, which differs from cell to cell.
        used = record["scores"][grid.split].get("more_references_fingerprint") or columns[-1]
        first = (record["cell"], used) if first is None else first
        if not all(len(column) == len(columns[-1]) for column in columns):
            raise UserError(f"the record of {record['cell']} is damaged: its lists of sentences differ in length; restore it")
        if not np.array_equal(used, first[1]):
            raise UserError(
                f"{record['cell']} and {first[0]} have scores against different references; keep the records of one split"
            )
        found[record["cell"]] = np.stack(columns, axis=1)
    return found


def _of(cells: Iterable[dict], fraction: float, model: str) -> dict[int, dict]:
    """Return the cells of one size and model by seed, in order."""
    found = {cell["seed"]: cell for cell in cells if (cell["fraction"], cell["model"]) == (fraction, model)}
    return dict(sorted(found.items()))


def _slope(
    cells: Sequence[dict], bleu: Mapping[str, np.ndarray], model: str, against: str, num_examples: int
) -> tuple[dict, SeedTest] | None:
    """Return the slope of a model's difference, over the seeds that have all its sizes; None with one size or no such seed."""
    fractions = sorted({cell["fraction"] for cell in cells if cell["model"] == model})
    by_size = [[_of(cells, fraction, name) for fraction in fractions] for name in (against, model)]
    seeds = sorted(set.intersection(*(set(here) for side in by_size for here in side))) if fractions else []
    if len(fractions) < 2 or not seeds:
        return None
    sides = [np.array([[bleu[here[seed]["cell"]] for here in side] for seed in seeds]) for side in by_size]
    pairs = np.array([[here[seed]["pairs"] for here in by_size[1]] for seed in seeds])
    return {"fractions": fractions, "seeds": seeds}, compare_slopes(*sides, pairs, num_examples)


def _read_test(comparison: Mapping) -> SeedTest:
    return SeedTest(**{field.name: comparison[field.name] for field in fields(SeedTest) if field.name in comparison})


def read_comparison(point: dict) -> tuple[SeedTest, float] | None:
    """Return the test over seeds of a point of scaling.json, and the p-value of its weights; None for a baseline.

    A file of an earlier version has only the paired bootstrap. Its interval is not over seeds, so it is not returned.
    """
    test = point.get("comparison")
    if test is None:
        return None
    if "weights" not in test:
        return SeedTest(test["difference"], test["seeds"], None, None, None, None), test["p_value"]
    return _read_test(test), test["weights"]["p_value"]


def metric_of(report: dict) -> str:
    """Return the metric that a study compares. Files of earlier versions do not name it."""
    return report.get("metric", "bleu")


def against_of(report: dict, point: dict) -> str:
    """Return the system that a point or a slope was compared with. In files of earlier versions it is always the baseline."""
    return point["comparison"].get("against", report["baseline"])


def format_table(report: dict) -> str:
    """Return one line per size and model, the slopes, and notes about the numbers. A star marks p < 0.05 over seeds."""
    if not report["points"]:
        return "no cell is done yet"
    metric = metric_of(report)
    others = [name for name in ("bleu", "chrf") if name != metric]
    head = f"{'pairs':>10} {'share':>6}  {'model':<20}{'seeds':>6}{METRIC_TITLES[metric]:>{_WIDTHS[metric]}}{'± 95 %':>8}"
    head += "".join(f"{METRIC_TITLES[name]:>8}" for name in others)
    lines = [f"{head}  {'difference':>10} {'from':<18}{'95 %':>16}{'p':>8}{'p, Holm':>10}{'p, weights':>12}"]
    for point in report["points"]:
        half = half_interval(point[metric])
        line = f"{point['pairs']:>10,.0f} {point['fraction']:>6.4g}  {point['model']:<20}{len(point['seeds']):>6}"
        line += f"{point[metric]['mean']:>{_WIDTHS[metric]}.2f}{'-' if half is None else f'{half:.2f}':>8}"
        line += "".join(f"{point[name]['mean']:>8.2f}" for name in others)
        if found := read_comparison(point):
            test, of_weights = found
            p_value, holm = show_p_values(test)
            line += f"  {test.difference:>+10.2f} {against_of(report, point):<18}{_show_interval(test):>16}{p_value:>9}{holm:>10}"
            line += f"{of_weights:>11.3f}"
        lines.append(line)
    lines += describe_slopes(report)
    lines += report.get("explanations", [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS])
    lines.append(f"{report['num_examples']:,} examples of {report['split']}; {report[f'{metric}_signature']}")
    lines += filter(None, [count_not_recorded(report["cells"])])
    return "\n".join(lines)


def describe_slopes(report: dict) -> list[str]:
    """Return one line about the slope of every model; nothing for files of earlier versions."""
    lines = []
    for slope in report.get("slopes", ()):
        test = _read_test(slope["comparison"])
        p_value, holm = (value.strip() for value in show_p_values(test))
        what = f"{slope['model']} - {against_of(report, slope)}, {test.seeds} seeds, {len(slope['fractions'])} sizes"
        values = f"{test.difference:+.2f} BLEU a doubling, 95 % {_show_interval(test)}, p {p_value}, p, Holm {holm}"
        lines.append(f"slope of {what}: {values}")
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
    """Draw mean BLEU by number of pairs for each model, and below it the differences that the study tests.

    Bars are 95 % intervals, and crosses are single seeds.
    """
    from matplotlib.figure import Figure

    metric = metric_of(report)
    compared = any(map(read_comparison, report["points"]))
    figure = Figure(figsize=(6.4, 6.4 if compared else 4.4), layout="constrained")
    panels = figure.subplots(2 if compared else 1, sharex=True, squeeze=False)[:, 0]
    models = sorted({point["model"] for point in report["points"]})
    for index, model in enumerate(models):
        points = [point for point in report["points"] if point["model"] == model]
        aside, color = 1.02 ** (index - (len(models) - 1) / 2), f"C{index}"  # so that bars of two models do not hide each other
        scores = [point[metric] for point in points]
        means, halves, seeds = zip(*((one["mean"], half_interval(one), one["values"]) for one in scores), strict=True)
        _draw_line(panels[0], [point["pairs"] * aside for point in points], means, halves, seeds, color, model)
        if tested := [(point, found[0]) for point in points if (found := read_comparison(point))]:
            against = against_of(report, tested[0][0])
            _draw_line(
                panels[1],
                [point["pairs"] * aside for point, _ in tested],
                [test.difference for _, test in tested],
                [test.interval and test.interval[1] - test.difference for _, test in tested],
                [_single_differences(report, point, against) for point, _ in tested],
                color,
                f"{model} - {against}",
            )
    panels[0].set_ylabel(f"{METRIC_TITLES[metric]} on {report['split']}")
    if compared:
        panels[1].set_ylabel("difference")
        panels[1].axhline(0, color="C7", linewidth=0.8)
    sizes = sorted({round(point["pairs"]) for point in report["points"]})
    panels[-1].set(xscale="log", xlabel="training pairs")
    panels[-1].set_xticks(sizes, [_short(size) for size in sizes])
    panels[-1].minorticks_off()
    for axes in panels:
        axes.margins(x=0.1 if len(sizes) > 1 else 0.6, y=0.15)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _draw_line(
    axes: "Axes",
    pairs: Sequence[float],
    means: Sequence[float],
    halves: Sequence[float | None],
    seeds: Sequence[Sequence[float]],
    color: str,
    label: str,
) -> None:
    """Draw the means of a model by number of pairs, half their intervals where there are any, and the values of single seeds."""
    bars = [half or 0.0 for half in halves]
    axes.errorbar(pairs, means, yerr=bars, marker="o", markersize=5, capsize=3, linewidth=1.5, color=color, label=label)
    for at, values in zip(pairs, seeds, strict=True):
        axes.plot([at] * len(values), values, "x", markersize=4, color=color)


def _single_differences(report: dict, point: dict, against: str) -> list[float]:
    """Return the difference of each seed that both models have at the size of a point."""
    metric = metric_of(report)
    there = next(other for other in report["points"] if (other["model"], other["fraction"]) == (against, point["fraction"]))
    ours, theirs = (dict(zip(one["seeds"], one[metric]["values"], strict=True)) for one in (point, there))
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _short(count: int) -> str:
    """Shorten `1020` to `1.0k`, `4500000` to `4.5M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)


def write_report(config: ScalingConfig, records: Sequence[Record], out: Path) -> str:
    """Write scaling.json, scaling.png and scaling.svg. Returns the table and the paths."""
    report = build_report(config, records)
    atomic_write(out / "scaling.json", json_bytes(report))
    pictures = plot(report, out) if report["points"] else []
    return f"{format_table(report)}\n\n" + "\n".join(map(str, [out / "scaling.json", *pictures]))
