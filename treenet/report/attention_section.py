"""The section of attention over a whole split."""

from html import escape

from treenet.analysis.attention_stats import AttentionStats
from treenet.report.contents import Page
from treenet.report.figures import gather, group_names
from treenet.report.markup import TableCell, number, paragraph, table, tag, text
from treenet.report.naming import show_hash


def show_attention(page: Page) -> list[str]:
    report = page.report
    of_trees = {name: stats for name, stats in report.attention.items() if stats.nodes}
    if not of_trees:
        return []
    any_stats = next(iter(of_trees.values()))
    what = "references" if any_stats.targets == "reference" else "model's own translations"
    out = [
        paragraph(
            f"Cross-attention of the decoder on {report.split}, with the {what} given to it; every predicted piece is a target "
            "position, the end of the sentence included. Models without trees attend to leaves alone and are not listed."
        )
    ]
    head = [text("share"), *(TableCell(escape(name), "n") for name in of_trees)]
    share = [TableCell(f"{100 * (1 - s.node_share):.1f} / {100 * s.node_share:.1f}", "n") for s in of_trees.values()]
    mean = [TableCell(f"{100 * s.mean:.1f} ± {100 * s.deviation:.1f}", "n") for s in of_trees.values()]
    even = [number(100 * sum(g.even for g in s.by_label), ".1f") for s in of_trees.values()]
    sha256 = {run.name: run.weights_sha256 for run in report.runs}
    rows = [
        [text("weights, sha256"), *(show_hash(sha256[name]) for name in of_trees)],
        [text("Leaves / nodes of the source trees"), *share],
        [text("Target → nodes"), *mean],
        [text("the same, were attention even"), *even],
        [text("target positions"), *(number(s.target_positions) for s in of_trees.values())],
    ]
    caption = "Attention to phrases in % (as Table 4 of the paper); mean and standard deviation over layers and heads."
    out.append(page.table(caption, head, rows))
    heads = "".join(_heads(name, stats) for name, stats in of_trees.items())
    out.append(tag("details", tag("summary", "By layer and head") + tag("div", heads, class_="pair")))
    for kind, title in (("label", "phrase label"), ("height", "height above the leaves; 0 are the leaves themselves")):
        if f"attention_by_{kind}" in report.figures:
            out.append(page.figure(f"attention_by_{kind}", f"Share of all attention by {title}."))
        groups = {name: getattr(stats, f"by_{kind}") for name, stats in of_trees.items()}
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
        numbers = table("Even is what attention spread evenly over the positions of each tree would give.", head, rows)
        out.append(tag("details", tag("summary", f"The same as a table, by {kind}") + numbers))
    return out


def _heads(name: str, stats: AttentionStats) -> str:
    """A small table of shares by layer and head."""
    head = [text("layer"), *(TableCell(f"head {i + 1}", "n") for i in range(stats.node_mass.shape[1]))]
    rows = []
    for layer, shares in enumerate(stats.node_mass):
        rows.append([text(layer + 1), *(TableCell(_shaded(share), "n") for share in shares)])
    return table(f"{name}: attention on nodes in %.", head, rows)


def _shaded(share: float) -> str:
    mix = f"background: color-mix(in srgb, var(--node) {100 * share**2:.0f}%, transparent); padding: .1rem .35rem"
    return tag("span", f"{100 * share:.1f}", style=mix)
