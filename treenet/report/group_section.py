"""Parts of the sections of cross-attention and of self-attention: charts and tables by kind of position, and heads."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from matplotlib.figure import Figure

from treenet.analysis.attention_stats import AttentionStats, Group
from treenet.analysis.encoder_stats import EncoderStats
from treenet.report.figures import draw_groups, gather, group_names
from treenet.report.markup import TableCell, number, table, tag, text
from treenet.report.report_model import Page, Report

# Prefixes of the names of charts.
CROSS, ENCODER = "attention", "encoder_attention"
_KINDS = {"label": "phrase label", "height": "height above the leaves, which have height 0"}

Stats = AttentionStats | EncoderStats


def draw_attention(report: Report, colors: Mapping[str, str]) -> Iterator[tuple[str, Figure]]:
    """Yield charts by name, of the runs that attend to nodes."""
    for prefix, stats in ((CROSS, report.inside.attention), (ENCODER, report.inside.encoder)):
        for kind in _KINDS:
            if groups := groups_of(stats, kind):
                yield f"{prefix}_by_{kind}", draw_groups(groups, colors, "" if kind == "label" else kind)


def groups_of(stats: Mapping[str, Stats], kind: str) -> dict[str, list[Group]]:
    """Return groups by label or height, of the runs that attend to nodes."""
    return {name: getattr(one, f"by_{kind}") for name, one in stats.items() if one.by_label}


def show_groups(page: Page, prefix: str, stats: Mapping[str, Stats]) -> list[str]:
    """Show a chart for each kind of position, and its numbers below."""
    out = []
    for kind, title in _KINDS.items():
        groups = groups_of(stats, kind)
        if not groups:
            continue
        out.append(page.figure(f"{prefix}_by_{kind}", f"Share of all attention by {title}."))
        names = group_names(list(groups.values()))
        head = [
            text(kind),
            *(TableCell(escape(f"{name}: {what}"), "n") for name in groups for what in ("positions", "%", "even %")),
        ]
        found = [gather(one, names) for one in groups.values()]
        rows = []
        for name in names:
            cells = [text(name)]
            for one in found:
                group = one.get(name)
                cells += [number(group and group.positions), number(group and 100 * group.mass.mean(), ".2f")]
                cells.append(number(group and 100 * group.even, ".2f"))
            rows.append(cells)
        numbers = table("Even: the share if attention were equal at all positions of a tree.", head, rows)
        out.append(tag("details", tag("summary", f"The same as a table, by {kind}") + numbers))
    return out


def show_heads(shares: Mapping[str, np.ndarray]) -> str:
    """Return a small table of shares [A, H] for each caption."""
    tables = "".join(_heads(caption, found) for caption, found in shares.items())
    return tag("details", tag("summary", "By layer and head") + tag("div", tables, class_="pair"))


def _heads(caption: str, found: np.ndarray) -> str:
    head = [text("layer"), *(TableCell(f"head {i + 1}", "n") for i in range(found.shape[1]))]
    rows: list[Sequence[TableCell]] = []
    for layer, shares in enumerate(found):
        rows.append([text(layer + 1), *(TableCell(_shaded(share), "n") for share in shares)])
    return table(caption, head, rows)


def _shaded(share: float) -> str:
    mix = f"background: color-mix(in srgb, var(--node) {100 * share**2:.0f}%, transparent); padding: .1rem .35rem"
    return tag("span", f"{100 * share:.1f}", style=mix)
