"""Results of probes in a run folder, as a table and as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from treenet.runs.result_entries import PROBES, read_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("majority", "embeddings", "untrained", "trained", "±", "control")
_MARKERS = {"root": "s", "mean": "o", "first": "o"}


def read_probes(folder: Path) -> dict[str, dict]:
    """Read the entries of probes.json; empty if there is no such file yet."""
    return read_entries(folder / PROBES)


def figure_name(name: str) -> str:
    """Return the file name of the figure of an entry."""
    return f"probes.{name}.png"


def task_name(name: str) -> str:
    """Return the name of a task in tables."""
    return name.replace("_", " ")


def table_rows(entry: dict) -> Iterator[tuple[str, int | None, str, dict[str, float]]]:
    """Return (task, layer, state, accuracies by column) for each layer and state of the trained model that was probed."""
    for name, facts in entry["tasks"].items():
        found = {(one["states"], one["layer"], one["of"]): one for one in facts["results"]}
        embeddings = {of: one["test"] for (states, _, of), one in found.items() if states == "embeddings"}
        for (states, layer, of), one in found.items():
            if states != "trained":
                continue
            values = {"majority": facts["majority"], "trained": one["test"]}
            if (half := one.get("half_interval")) is not None:
                values["±"] = half
            own = of if of in embeddings else "mean"  # pieces have no root
            if own in embeddings:
                values["embeddings"] = embeddings[own]
            values |= {name: found[name, layer, of]["test"] for name in ("untrained", "control") if (name, layer, of) in found}
            yield name, layer, of, values
        if not found:
            yield name, None, "", {"majority": facts["majority"]}


def format_probes(name: str, entry: dict) -> str:
    """Return a table of accuracies on test in per cent."""
    lines = [
        f"{name}: accuracy on test in %; baselines are the most frequent class, the embeddings of pieces, the untrained model; "
        "±: half of the 95 % interval of trained, over sentences; control: each word has a random label",
        f"{'task':18}{'state':>7}{'layer':>7}{'classes':>9}{'examples':>10}" + "".join(f"{title:>12}" for title in COLUMNS),
    ]
    for task, layer, of, values in table_rows(entry):
        facts = entry["tasks"][task]
        shown = "last" if layer and entry.get("layers") == 1 else layer or ""  # of a pretrained encoder, for example
        start = f"{task_name(task):18}{of:>7}{shown:>7}{len(facts['classes']):9d}{facts['examples']['test']:10,d}"
        cells = "".join(f"{100 * values[title]:12.2f}" if title in values else f"{'':12}" for title in COLUMNS)
        lines.append(start + cells + ("" if layer else "  nothing to predict: one class, or a split without examples").rstrip())
    return "\n".join(lines)


def _is_of(states: str, probed: str) -> bool:
    """Return whether probed states are of a curve. The embeddings are trained, so the curve of untrained states lacks them."""
    return probed == states or (states == "trained" and probed == "embeddings")


def draw_layers(entry: dict) -> "Figure | None":
    """Draw accuracy on test by layer, one panel per task. Layer 0 is the embeddings.

    Returns None if only one layer was probed.
    """
    tasks = {name: facts for name, facts in entry["tasks"].items() if len({one["layer"] for one in facts["results"]}) > 2}
    if not tasks:
        return None
    from matplotlib.figure import Figure  # here, because a command that draws nothing would spend a quarter of its imports on it

    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.4 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (name, facts), panel in zip(tasks.items(), panels, strict=False):
        for number, states in enumerate(("trained", "untrained")):
            for of in dict.fromkeys(one["of"] for one in facts["results"]):
                line = [one for one in facts["results"] if one["of"] == of and _is_of(states, one["states"])]
                line.sort(key=lambda one: one["layer"])
                x, y = [one["layer"] for one in line], [100 * one["test"] for one in line]
                dashes = "--" if of == "root" else "-"
                panel.plot(x, y, dashes, color=f"C{number}", marker=_MARKERS[of], ms=3, lw=1.3, label=f"{states}, {of}")
        panel.axhline(100 * facts["majority"], color="0.5", lw=1, ls=":", label="majority")
        panel.set_title(task_name(name), fontsize=9)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.25)
    for panel in list(panels):
        panel.set_axis_off()
    figure.supxlabel("encoder layer (0: embeddings of pieces)", fontsize=9)
    figure.supylabel("accuracy on test, %", fontsize=9)
    legend: dict = {}  # one for all panels
    for panel in figure.axes:
        lines, labels = panel.get_legend_handles_labels()
        legend |= dict(zip(labels, lines, strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8)
    return figure
