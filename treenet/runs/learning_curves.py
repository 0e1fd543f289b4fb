"""Pictures of training: loss by update, of one run or of several side by side."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treenet.runs.metrics_log import best_validation
from treeproc.common.files import atomic_write
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = "curves.png"
# The loss of the first updates, near ln V, would flatten the rest of the curve. So the axis ends where this share lies below.
_SHOWN = 0.98


def plot_curves(runs: Mapping[str, Sequence[dict]], path: AnyPath, title: str, score: str = "") -> AnyPath:
    """Write `draw_curves` as a PNG, with the `score` of validations if they have one, and return `path`."""
    below = (score, f"validation\n{score}") if score else ()
    write_png(draw_curves(runs, title, *below), path)
    return path


def write_png(figure: "Figure", path: AnyPath) -> None:
    """Write the figure to a file, complete or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    atomic_write(path, content.getvalue())


def draw_curves(
    runs: Mapping[str, Sequence[dict]], title: str, below: str = "lr", below_label: str = "learning rate"
) -> "Figure":
    """Draw the metric lines (`read_metrics`) of each run, by its name.

    The upper part has the negative log-likelihood by update, on training batches and on the validation split, with the best
    validation marked. The lower part has the metric `below`, for the lines that have it.
    """
    from matplotlib.figure import Figure  # here, because a command that draws nothing would spend a quarter of its imports on it

    figure = Figure(figsize=(7.5, 5.5), layout="constrained")  # no pyplot, because it would choose a window system
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    top: list[float] = []
    for number, (name, lines) in enumerate(runs.items()):
        color, label = f"C{number}", f"{name}, " if len(runs) > 1 else ""
        train = [line for line in lines if line["event"] == "train" and line["nll"] is not None]
        valid = [line for line in lines if line["event"] == "valid"]
        losses.plot(*_columns(train, "step", "nll"), color=color, alpha=0.35, lw=1, label=f"{label}training batches")
        losses.plot(*_columns(valid, "step", "nll"), color=color, marker="o", ms=3, label=f"{label}validation")
        if best := best_validation(lines):
            note = f"{label}best validation {best['nll']:.3f} at {best['step']:,}"
            losses.plot(best["step"], best["nll"], "*", color=color, ms=13, mec="white", label=note)
        rates.plot(
            *_columns([line for line in lines if below in line and line["nll"] is not None], "step", below), color=color, lw=1.5
        )
        top += [float(np.quantile([line["nll"] for line in train], _SHOWN))] if train else []
        top += [line["nll"] for line in valid if math.isfinite(line["nll"])]
    if top:
        losses.set_ylim(top=1.05 * max(top))
    losses.set(ylabel="negative log-likelihood\nnats a target", title=title)
    if losses.get_legend_handles_labels()[0]:
        losses.legend(frameon=False)
    losses.grid(alpha=0.25)
    rates.set(xlabel="updates", ylabel=below_label, ylim=(0, None))
    rates.ticklabel_format(axis="y", scilimits=(-2, 5))
    rates.xaxis.set_major_formatter("{x:,.0f}")
    rates.grid(alpha=0.25)
    return figure


def _columns(lines: Sequence[dict], *names: str) -> Iterator[list[float]]:
    return ([line[name] for line in lines] for name in names)
