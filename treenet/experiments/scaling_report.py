"""What a data-size study says: STUDY/scaling.json, a table, and a plot like figure 5a of the paper.

A difference has two p-values, which answer two questions. One is about training with other seeds, scored on other
sentences; it needs three seeds, and a star is its alone. The other is about these very weights on these sentences.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from treenet.experiments.scaling import ScalingConfig
from treenet.experiments.study import count_not_recorded, read_fresh_scores
from treenet.inference.metrics import compare_seeds
from treenet.inference.origin import recorded_origin
from treenet.inference.results import read_system
from treenet.inference.significance import (
    ABOUT_WEIGHTS_OF_SEEDS,
    EXPLAIN_MEANS,
    EXPLAIN_SEEDS,
    EXPLAIN_WEIGHTS,
    SeedTest,
    half_interval,
    summarize,
)
from treenet.inference.translate import read_references
from treenet.training.facts import read_facts
from treenet.training.ledger import DONE, Ledger
from treeproc.files import atomic_write, json_bytes, read_json
from treeproc.settings import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

def build_report(config: ScalingConfig, ledger: Ledger, out: Path) -> dict:
    """Everything that the done cells of the ledger say, those of earlier grids included; what scaling.json holds."""
    split = config.grid.split
    done = {name: entry for name, entry in ledger.entries.items() if entry.status == DONE}
    ledger.check_labels(fraction=float, model=str, seed=int)
    cells = [_read_cell(out / "cells" / name, entry.labels, split) for name, entry in done.items()]
    references = read_references(config.data, split) if cells else []
    points = []
    for fraction in sorted({cell["fraction"] for cell in cells}):
        baseline = _of(cells, fraction, config.grid.baseline)
        for model in sorted({cell["model"] for cell in cells if cell["fraction"] == fraction}):
            here = _of(cells, fraction, model)
            point = {"fraction": fraction, "model": model, "pairs": fmean(cell["pairs"] for cell in here.values())}
            point |= {metric: summarize([cell[metric] for cell in here.values()]) for metric in ("bleu", "chrf")}
            point["seeds"] = list(here)
            if model != config.grid.baseline and (seeds := sorted(here.keys() & baseline.keys())):
                point["comparison"] = _compare(config, out, split, references, [(baseline[s], here[s]) for s in seeds])
            points.append(point)
    return {
        "split": split,
        "num_examples": len(references),
        "baseline": config.grid.baseline,
        "bootstrap_samples": config.grid.bootstrap_samples,
        "explanations": [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS],
        "bleu_signature": cells[0]["bleu_signature"] if cells else None,
        "cells": cells,
        "points": points,
    }


class _Scores(TypedDict, total=False):
    """What is read of an entry of scores.json."""

    bleu: float
    chrf: float
    bleu_signature: str


def _read_cell(folder: Path, labels: dict, split: str) -> dict:
    mend = "remove the folder and run the same command again"
    facts = read_facts(folder, mend, ("examples", "parameters"))
    scores = read_fresh_scores((split,), folder, mend, dict[str, _Scores])
    if not _Scores.__annotations__.keys() <= scores.get(split, {}).keys():
        raise UserError(
            f"{folder / 'scores.json'} has no scores of {split}; run workflows/evaluate.py --out {folder} split={split}"
        )
    kept = {name: scores[split][name] for name in _Scores.__annotations__} | recorded_origin(scores[split])
    step = read_json(folder / "averaged" / "meta.json", mend, needed=("step",))["step"]
    return {"cell": folder.name, **labels, "pairs": facts["examples"], "parameters": facts["parameters"], "step": step, **kept}


def _of(cells: Iterable[dict], fraction: float, model: str) -> dict[int, dict]:
    """The cells of one size and model by seed, in order."""
    found = {cell["seed"]: cell for cell in cells if (cell["fraction"], cell["model"]) == (fraction, model)}
    return dict(sorted(found.items()))


def _compare(config: ScalingConfig, out: Path, split: str, references: list[str], pairs: list[tuple[dict, dict]]) -> dict:
    lines = [[read_system(out / "cells" / cell["cell"], split).lines for cell in side] for side in zip(*pairs, strict=True)]
    found = compare_seeds(*lines, references, num_samples=config.grid.bootstrap_samples)
    return asdict(found.over_seeds) | {"weights": {"p_value": found.weights_p_value, "about": ABOUT_WEIGHTS_OF_SEEDS}}


def read_comparison(point: dict) -> tuple[SeedTest, float] | None:
    """The test over seeds of a point of scaling.json, and the p-value of its weights; None for a baseline.

    A file of an earlier version has the paired bootstrap alone; its interval is none over seeds, and is left out.
    """
    test = point.get("comparison")
    if test is None:
        return None
    if "weights" not in test:
        return SeedTest(test["difference"], test["seeds"], None, None, None, None), test["p_value"]
    return SeedTest(**{name: value for name, value in test.items() if name != "weights"}), test["weights"]["p_value"]


def format_table(report: dict) -> str:
    """One line a size and model, and what its numbers are about. A star marks p < 0.05 over seeds."""
    if not report["points"]:
        return "no cell is done yet"
    head = f"{'pairs':>10} {'share':>6}  {'model':<20}{'seeds':>6}{'BLEU':>8}{'± 95 %':>8}{'chrF':>8}"
    lines = [f"{head}  {'- ' + report['baseline']:>16} {'95 %':>16}{'p':>8}{'p, weights':>12}"]
    for point in report["points"]:
        half = half_interval(point["bleu"])
        line = f"{point['pairs']:>10,.0f} {point['fraction']:>6.4g}  {point['model']:<20}{len(point['seeds']):>6}"
        line += f"{point['bleu']['mean']:>8.2f}{'-' if half is None else f'{half:.2f}':>8}{point['chrf']['mean']:>8.2f}"
        if found := read_comparison(point):
            test, of_weights = found
            interval = f"[{test.interval[0]:+.2f}, {test.interval[1]:+.2f}]" if test.interval else "-"
            p_value = f"{test.p_value:.3f}{'*' if test.starred else ' '}" if test.p_value is not None else "- "
            line += f"  {test.difference:>+16.2f} {interval:>16}{p_value:>9}{of_weights:>11.3f}"
        lines.append(line)
    lines += [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS]
    lines.append(f"{report['num_examples']:,} examples of {report['split']}; {report['bleu_signature']}")
    lines += filter(None, [count_not_recorded(report["cells"])])
    return "\n".join(lines)


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


def write_report(config: ScalingConfig, ledger: Ledger, out: Path) -> str:
    """Write scaling.json, scaling.png and scaling.svg; returns the table and where the files are."""
    report = build_report(config, ledger, out)
    atomic_write(out / "scaling.json", json_bytes(report))
    pictures = plot(report, out) if report["points"] else []
    return f"{format_table(report)}\n\n" + "\n".join(map(str, [out / "scaling.json", *pictures]))
