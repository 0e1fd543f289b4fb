"""The section of language models: their loss on text, and their choices in minimal pairs by groups of pairs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

from treenet.evaluation.minimal_pairs import SHOWN, pair_columns
from treenet.report.figures import FAINT, begin_rows
from treenet.report.report_model import Report
from treenet.report.tables import result_columns, results_with
from treenet.tasks.tables import Column


@dataclass(frozen=True)
class PairGroups:
    """Groups of the pairs of a result: the name of their chart, and titles and groups of the runs with these pairs."""

    chart: str
    result: str
    kind: str
    titles: dict[str, str] = field(default_factory=dict)  # of the runs, by name
    rows: dict[str, Mapping[str, Mapping]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(next(iter(self.rows.values())))

    @property
    def columns(self) -> list[Column]:
        runs = {self.titles[run]: [groups[name] for name in self.names] for run, groups in self.rows.items()}
        return pair_columns(self.kind, self.names, runs)


def pair_groups(report: Report) -> list[PairGroups]:
    """Return the groups of every result of pairs, by its columns. Runs with other pairs of one name stand apart."""
    found: dict[tuple, PairGroups] = {}
    for run, result, entry in results_with("nll", report.runs):
        for kind, groups in entry.get("groups", {}).items():
            key = result, kind, entry.get("pairs_fingerprint"), *groups
            one = found.setdefault(key, PairGroups(f"pairs_{len(found) + 1}", result, kind))
            one.titles[run.name], one.rows[run.name] = run.statuses[result].marked(run.name), groups
    return [*found.values()]


def draw_pairs(report: Report, colors: Mapping[str, str]) -> Iterator[tuple[str, Figure]]:
    """Yield a chart by name for each column with few groups: accuracies, 95 % intervals, and a line where chance is."""
    for one in pair_groups(report):
        if len(one.names) <= SHOWN:
            yield one.chart, _draw(one, colors)


def _draw(shown: PairGroups, colors: Mapping[str, str]) -> Figure:
    figure, axes, places = begin_rows(shown.names, len(shown.rows), shown.kind, "right, %")
    for at, (run, groups) in zip(places, shown.rows.items(), strict=True):
        right = 100 * np.array([groups[name]["pair_accuracy"] for name in shown.names])
        low, high = 100 * np.array([groups[name]["interval"] for name in shown.names]).T
        axes.hlines(at, low, high, color=colors[run], lw=1)
        axes.plot(right, at, "o", color=colors[run], ms=4, label=shown.titles[run])
    axes.axvline(50, color=FAINT, lw=0.8, ls=":")
    axes.legend(loc="best")
    return figure


def language_section(report: Report) -> dict:
    """Return the scores of language models, and their minimal pairs by group."""
    results = results_with("nll", report.runs) if report.of_language else []
    kinds = {run.name: entry.get("kind") for run, result, entry in results if "pairs_fingerprint" not in entry}
    joint = [name for name, kind in kinds.items() if kind in ("joint", "beam")]
    note = f" The nll of {', '.join(joint)} is an upper bound: of sentence and tree, or of the trees of a beam."
    return {
        "columns": result_columns(results, "sentences"),
        "groups": pair_groups(report),
        "note": note if 0 < len(joint) < len(kinds) else "",
    }
