"""The unpaired tests of a study: at every size, all models against the baseline, with one variance over seeds for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

import numpy as np

from treenet.evaluation.significance import DUNNETT, LEVEL, POWER, compare_with_baseline
from treenet.tasks.translation_metrics import METRIC_TITLES

# For people, below a table.
EXPLAIN_POOLED = (
    f"Unpaired: {DUNNETT}. Interval and p hold for all comparisons of a size and metric together. 'seen' is the smallest true "
    f"difference that this design finds with probability {POWER:g}: a smaller one may be there without being found."
)
_HEAD = ("pairs", "unpaired", "metric", "difference", "95 %", "p", "seen")
Table = tuple[Sequence[str], Sequence[Sequence[str]], str]  # its head, its rows, and their meaning
_TITLES = {**METRIC_TITLES, "nll": "nll a token"}


def compare_sizes(
    cells: Sequence[Mapping], baseline: str, samples: Mapping[str, Mapping[str, np.ndarray]], level: float = LEVEL
) -> Iterator[dict]:
    """Yield the tests of scaling.json, by size, metric and model.

    `samples` has of each metric and cell the score of all sentences, and then of each sample of one bootstrap, [1 + samples].
    """
    for fraction in sorted({cell["fraction"] for cell in cells}):
        here = [cell for cell in cells if cell["fraction"] == fraction]
        pairs = fmean(cell["pairs"] for cell in here)
        for metric, of_cells in samples.items():
            found = {
                model: np.stack([of_cells[cell["cell"]] for cell in here if cell["model"] == model])  # [seeds, 1 + samples]
                for model in dict.fromkeys(cell["model"] for cell in here)
            }
            if baseline not in found:
                continue
            means = {model: scores[:, 1:].mean(0) for model, scores in found.items()}
            variances = {model: float((mean - means[baseline]).var()) for model, mean in means.items()}
            values = {model: scores[:, 0].tolist() for model, scores in found.items()}
            for model, test in compare_with_baseline(values, baseline, variances, level).items():
                yield {
                    "fraction": fraction,
                    "pairs": pairs,
                    "metric": metric,
                    "model": model,
                    "against": baseline,
                    **asdict(test),
                }


def list_pooled(report: Mapping) -> Table:
    """Return the table: pairs, difference, metric, its value, interval, p, and what the design sees."""
    rows: list[tuple[str, ...]] = []
    for test in report.get("pooled", ()):  # files of earlier versions have none
        digits = 3 if test["metric"] == "nll" else 2
        low, high = test["interval"]
        numbers = f"{test['difference']:+.{digits}f}", f"[{low:+.{digits}f}, {high:+.{digits}f}]", f"{test['p_value']:.3f}"
        name = f"{test['model']} - {test['against']}"
        rows.append((f"{test['pairs']:,.0f}", name, _TITLES[test["metric"]], *numbers, f"{test['seen']:.{digits}f}"))
    return _HEAD, rows, EXPLAIN_POOLED


def align(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
