"""RUN/metrics.jsonl and RUN/tensorboard: one JSON object per line, the same numbers in both; and pictures of the loss.

If the package tensorboard is not installed, or the setting `loggers` leaves it out, there is no RUN/tensorboard. A picture shows
the loss by update, of one run or of several side by side.
"""

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from treenet.runs.ray_metrics import show_line
from treeproc.common.errors import is_installed
from treeproc.common.files import atomic_write, is_plausible
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_metrics(run_dir: AnyPath) -> list[dict]:
    """Read the lines of RUN/metrics.jsonl up to the first incomplete or damaged one."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # a power cut leaves zeros
            break
        if not _is_metrics(values):
            break
        lines.append(values)
    return lines


def logged_step(run_dir: AnyPath) -> int:
    """Return the update of the last line of RUN/metrics.jsonl; 0 without one."""
    lines = read_metrics(run_dir)
    return lines[-1]["step"] if lines else 0


def _is_metrics(values: object) -> bool:
    """Return whether `MetricLog` could have written this line: an event at a step, and numbers."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str) or type(values.get("step")) is not int:
        return False
    if (values["event"] in ("train", "valid") and "nll" not in values) or (values["event"] == "valid" and values["nll"] is None):
        return False
    numbers = (value for name, value in values.items() if name != "event")
    return all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool) and is_plausible(value))
        for value in numbers
    )


def best_validation(lines: Iterable[dict], criterion: Callable[[dict], float] = itemgetter("nll")) -> dict | None:
    """Return the validation with the lowest criterion, the first of equal ones; None if there was no validation."""
    valid = [line for line in lines if line["event"] == "valid" and math.isfinite(criterion(line))]
    return min(valid, key=criterion) if valid else None


def describe_metrics(line: dict) -> str:
    """Return the part of a training line that a person watches."""
    parts = [
        "loss not finite" if line["loss"] is None else f"loss {line['loss']:.3f}",
        f"{line['tokens_per_s_per_device']:,.0f} tokens/s a device",
        f"padding {line['padding']:.1%}",
        f"data wait {line['data_wait']:.1%}",
    ]
    if line["skipped"]:
        parts.append(f"{line['skipped']} updates skipped")
    return ", ".join(parts)


class MetricLog:
    """Writes metrics from step `resume_step` on. It drops lines of later steps, because they run again."""

    def __init__(self, run_dir: Path, resume_step: int, board: bool = True):
        kept = [line for line in read_metrics(run_dir) if line["step"] <= resume_step]
        path, self._run = run_dir / "metrics.jsonl", run_dir.name
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a", encoding="utf-8")
        self._board = None
        if board and is_installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError) if error else nullcontext():  # a full disk, which was reported before
            self._file.close()
            if self._board is not None:
                self._board.close()

    def write(self, event: str, step: int, **values: float | int | None) -> None:
        """Write one line {"event", "step", ...}. None stands for a value that does not exist."""
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._file.flush()
        if event == "train":
            show_line(self._run, {"step": step, **values})
        for name, value in values.items():
            if value is not None and self._board is not None:
                self._board.add_scalar(f"{event}/{name}", value, step)


CURVES = "curves.png"
# The loss of the first updates, near ln V, would flatten the rest of the curve. So the axis ends where this share lies below.
_SHOWN = 0.98


def plot_curves(runs: Mapping[str, Sequence[dict]], path: AnyPath, title: str, score: str = "") -> AnyPath:
    """Write `draw_curves` as a PNG, with the `score` of validations if they have one, and return `path`."""
    below = (score, f"validation\n{score}") if score else ()
    figure = draw_curves(runs, title, *below)
    figure.set_layout_engine(None)  # to lay it out takes as long as to draw it, and longer than a small training
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.09, top=0.94, hspace=0.14)
    write_png(figure, path)
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

    The upper part has the negative log-likelihood by update, on training batches and on the validation split, with the lowest
    one marked. The lower part has the metric `below`, for the lines that have it.
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
            note = f"{label}lowest nll on validation {best['nll']:.3f} at {best['step']:,}"
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
    rates.set(xlabel="updates", ylabel=below_label)
    if not any(value < 0 for line in rates.lines for value in line.get_ydata()):  # a correlation may be negative
        rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", scilimits=(-2, 5))
    rates.xaxis.set_major_formatter("{x:,.0f}")
    rates.grid(alpha=0.25)
    return figure


def _columns(lines: Sequence[dict], *names: str) -> Iterator[list[float]]:
    return ([line[name] for line in lines] for name in names)
