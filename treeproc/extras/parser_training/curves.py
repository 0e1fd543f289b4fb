"""Loss and dev score of every model over its training, as one picture."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from treeproc.common.files import atomic_write
from treeproc.extras.parser_training.loop import read_fit_metrics


def write_curves(training: Path, models: Sequence[str], path: Path) -> None:
    """Write a PNG with one column per model: loss above, dev score below, over epochs. A model trained elsewhere has no curve."""
    models = [name for name in models if any("score" in record for record in read_fit_metrics(training / name))]
    if not models:
        return
    figure = Figure(figsize=(3.2 * len(models), 4.6), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for name, (upper, lower) in zip(models, axes.T, strict=True):
        records = read_fit_metrics(training / name)
        for axis, key in ((upper, "loss"), (lower, "score")):
            points = [(record["epoch"], record[key]) for record in records if isinstance(record.get(key), int | float)]
            axis.plot(*zip(*points, strict=True), marker="." if key == "score" else "", linewidth=1)
            axis.grid(alpha=0.3)
        upper.set_title(name)
        upper.set_yscale("log")
        lower.set_xlabel("epoch")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("dev score")
    FigureCanvasAgg(figure).print_png(buffer := io.BytesIO())
    atomic_write(path, buffer.getvalue())
