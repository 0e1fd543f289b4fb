"""The file of benchmarks/gpu.py: a Markdown page that is complete after every row, and a plot at the end."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from treeproc.common.files import atomic_write
from treeproc.common.provenance import describe_software, software

Row = Mapping[str, object]


@dataclass
class Report:
    """Rows by section, in the order of measurement. Every new row rewrites `out`."""

    out: Path
    command: str
    device: torch.device
    sections: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    finished: bool = False

    def add(self, section: str, **row: object) -> None:
        """Add one row to a section, and print it as a JSON line."""
        self.sections.setdefault(section, []).append(row)
        print(json.dumps({"benchmark": "gpu", "section": section, **row}), flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Record what was left out, with the reason."""
        self.notes.append(text)
        print(f"note: {text}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        atomic_write(self.out, self.page().encode())

    def page(self) -> str:
        state = "" if self.finished else "\nThis run has not ended: rows are missing at the end.\n"
        parts = [
            f"# Measured on {describe_device(self.device)}\n\n    {self.command}\n\n{describe_software(software())}, "
            f"torch {torch.__version__}.\n{state}"
        ]
        parts += [f"## {name}\n\n{table(rows)}\n" for name, rows in self.sections.items()]
        if self.notes:
            parts.append("## Left out\n\n" + "\n".join(f"- {note}" for note in self.notes) + "\n")
        return "\n".join(parts)

    def finish(self) -> None:
        """Mark the report as complete, and draw the rates."""
        self.finished = True
        self.write()
        try:
            draw(self.sections, self.out.with_suffix(".png"))
        except ImportError:
            self.note("the plot: matplotlib is not installed")


def describe_device(device: torch.device) -> str:
    """Return name and memory of the device."""
    if device.type != "cuda":
        return "a CPU, one thread"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a column for every key of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([format_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def draw(sections: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw bars of the rates: tokens per second of training, pieces per second of search."""
    from matplotlib.figure import Figure

    panels = [(name, unit) for name, unit in (("Training", "tokens/s"), ("Search", "pieces/s")) if sections.get(name)]
    if not panels:
        return
    figure = Figure(figsize=(6 * len(panels), 4))
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (name, unit) in zip(axes[0], panels, strict=True):
        rows = [row for row in sections[name] if isinstance(row.get(unit), int | float)]
        labels = [" ".join(str(row[key]) for key in ("size", "model", "by") if key in row) for row in rows]
        axis.barh(labels[::-1], [row[unit] for row in rows][::-1])
        axis.set_xlabel(unit)
        axis.set_title(name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
