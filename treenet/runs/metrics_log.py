"""RUN/metrics.jsonl and RUN/tensorboard: one JSON object per line, the same numbers in both.

If the package tensorboard is not installed, or the setting `loggers` leaves it out, there is no RUN/tensorboard.
"""

import json
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType

from treeproc.common.extras import is_installed
from treeproc.common.files import atomic_write, is_plausible
from treeproc.common.storage import AnyPath


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


def _is_metrics(values: object) -> bool:
    """Return whether `MetricLog` could have written this line: an event at a step, and numbers."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str) or type(values.get("step")) is not int:
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
        path = run_dir / "metrics.jsonl"
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
        for name, value in values.items():
            if value is not None and self._board is not None:
                self._board.add_scalar(f"{event}/{name}", value, step)
