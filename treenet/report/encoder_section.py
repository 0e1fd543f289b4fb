"""The section of the encoder's self-attention over a whole split."""

from collections.abc import Iterator
from html import escape

import numpy as np

from treenet.analysis.encoder_stats import EncoderStats
from treenet.report.formats import show_hash
from treenet.report.group_section import ENCODER, show_groups, show_heads
from treenet.report.markup import TableCell, number, paragraph, text
from treenet.report.report_model import Page


def show_encoder(page: Page) -> list[str]:
    """Show shares by kind of query for every run, then charts and tables of the runs that attend to nodes."""
    report = page.report
    if not report.inside.encoder:
        return []
    said = (
        f"Self-attention of the encoder on {report.split}. A query is a leaf or a node of the source. It attends to leaves, and "
        "in tree models to nodes too. Under the subtree mask, a leaf attends only to leaves, and a node attends to its subtree."
    )
    out = [paragraph(said)]
    sha256 = {run.name: run.weights_sha256 for run in report.runs}
    head = [text("share"), *(TableCell(escape(name), "n") for name in report.inside.encoder)]
    rows = [[text("weights, sha256"), *(show_hash(sha256[name]) for name in report.inside.encoder)]]
    shares = [_shares(stats) for stats in report.inside.encoder.values()]
    for title in shares[0]:
        rows.append([text(title), *(_share(found[title][0]) for found in shares)])
        rows.append([text(f"{title}, with even attention"), *(_even(found[title]) for found in shares)])
    for title in ("leaves", "nodes"):
        counts = (getattr(stats, title).queries for stats in report.inside.encoder.values())
        rows.append([text(f"queries that are {title}"), *(number(count) for count in counts)])
    caption = (
        "Self-attention of the encoder in %; mean and standard deviation over layers and heads. Even attention is uniform over "
        "the positions that a query may attend to."
    )
    out.append(page.table(caption, head, rows))
    if others := [
        run.name for run in report.runs if run.name in report.inside.attention and run.name not in report.inside.encoder
    ]:
        out.append(paragraph(f"The table leaves out runs whose encoders have other layers: {', '.join(others)}.", class_="note"))
    of_trees = {name: stats for name, stats in report.inside.encoder.items() if stats.by_label}
    if not of_trees:
        return out
    out.append(show_heads({f"{name}: attention of nodes on nodes in %.": s.nodes.node_mass for name, s in of_trees.items()}))
    return out + show_groups(page, ENCODER, of_trees)


def _shares(stats: EncoderStats) -> dict[str, tuple[np.ndarray | None, float]]:
    """Return shares [A, H] and the even share by title. None stands for queries that the model does not have."""

    def found() -> Iterator[tuple[str, tuple[np.ndarray | None, float]]]:
        for name, queries in (("Leaf", stats.leaves), ("Node", stats.nodes)):
            there = queries.queries > 0
            yield f"{name} → nodes", (queries.node_mass if there and stats.by_label else None, queries.even_node_mass)
            yield f"{name} → itself", (queries.own_mass if there else None, queries.even_own_mass)

    return dict(found())


def _share(mass: np.ndarray | None) -> TableCell:
    return TableCell("–" if mass is None else f"{100 * mass.mean():.1f} ± {100 * mass.std():.1f}", "n")


def _even(found: tuple[np.ndarray | None, float]) -> TableCell:
    return number(None if found[0] is None else 100 * found[1], ".1f")
