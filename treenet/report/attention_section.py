"""The section of cross-attention over a whole split."""

from html import escape

from treenet.report.formats import show_hash
from treenet.report.group_section import CROSS, show_groups, show_heads
from treenet.report.markup import TableCell, number, paragraph, text
from treenet.report.report_model import Page


def show_attention(page: Page) -> list[str]:
    report = page.report
    of_trees = {name: stats for name, stats in report.inside.attention.items() if stats.nodes}
    if not of_trees:
        return []
    any_stats = next(iter(of_trees.values()))
    what = "references" if any_stats.targets == "reference" else "model's own translations"
    out = [
        paragraph(
            f"Cross-attention of the decoder on {report.split}. The decoder reads the {what}. Every predicted piece is a target "
            "position, and so is the end of the sentence. The table leaves out models without trees, which attend only to leaves."
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
        [text("the same with even attention"), *even],
        [text("target positions"), *(number(s.target_positions) for s in of_trees.values())],
    ]
    caption = "Attention to phrases in % (as Table 4 of the paper); mean and standard deviation over layers and heads."
    out.append(page.table(caption, head, rows))
    out.append(show_heads({f"{name}: attention on nodes in %.": stats.node_mass for name, stats in of_trees.items()}))
    return out + show_groups(page, CROSS, of_trees)
