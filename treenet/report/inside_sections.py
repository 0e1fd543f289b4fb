"""The sections of what is inside the models: cross-attention of the decoder, self-attention of the encoder, and linear probes."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from matplotlib.figure import Figure

from treenet.analysis.attention_stats import AttentionStats, Group
from treenet.analysis.encoder_attention import EncoderStats
from treenet.probing.probe_results import COLUMNS, table_rows, task_name
from treenet.report.figures import draw_groups, gather, group_names
from treenet.report.markup import TableCell, number, paragraph, show_hash, status_name, table, tag, text
from treenet.report.report_model import Page, Report
from treenet.runs.result_provenance import describe_origin

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


def probes_name(index: int) -> str:
    """Return the name of the figure of a run."""
    return f"probes_{index + 1}"


def show_probes(page: Page) -> list[str]:
    runs = [run for run in page.report.runs if run.probes]
    if not runs:
        return []
    out = [
        paragraph(
            f"Linear classifiers on frozen states of the encoder ({'tree-attention probe'}), trained on sentences of "
            "train and scored on test. Compare a trained model with its untrained version, which reads the same trees: the "
            "difference is what it has learned. ± is half of the 95 % interval of a trained model, over sentences. Selectivity "
            "is the accuracy of the trained model minus that of the control, in which each form of a word has a random label."
        )
    ]
    found = [{(task, of, layer): values for task, layer, of, values in table_rows(run.probes)} for run in runs]
    # The last layer of each; the others are in the figure.
    last = [max((layer for _, _, layer in one if layer), default=0) for one in found]
    shown = [{(t, of): v for (t, of, layer), v in one.items() if layer == top} for one, top in zip(found, last, strict=True)]
    names = [", ".join(filter(None, [run.name, status_name(run.probes_status)])) for run in runs]
    head = [text("task"), text("state")]
    alone = len(runs) == 1 and names == [runs[0].name]
    head += [TableCell(escape(name if alone else f"{run}: {name}"), "n") for run in names for name in COLUMNS]
    rows = []
    for task, of in dict.fromkeys(key for one in shown for key in one):
        values = [one.get((task, of), {}) for one in shown]
        accuracies = [value.get(name) for value in values for name in COLUMNS]
        rows.append([text(task_name(task)), text(of), *(number(one and 100 * one, ".2f") for one in accuracies)])
    layers = ", ".join(f"{name} {top}" for name, top in zip(names, last, strict=True))
    out.append(page.table(f"Accuracy of probes in %, at the highest layer that was probed ({layers}).", head, rows))
    for index, run in enumerate(page.report.runs):
        if probes_name(index) in page.figures:
            name = names[runs.index(run)]
            out.append(page.figure(probes_name(index), f"{name}: accuracy of probes by encoder layer."))
    made = "; ".join(f"{name}: {describe_origin(run.probes)}" for name, run in zip(names, runs, strict=True))
    out.append(paragraph(f"Made with: {made}.", class_="note"))
    if any(_basis(run.probes) != _basis(runs[0].probes) for run in runs):
        out.append(
            paragraph(
                "Do not compare these numbers: the probes of the runs have different settings, or other text.", class_="note"
            )
        )
    return out


def _basis(entry: dict) -> tuple:
    """Return the key that two runs must share to be compared. The models' trees may differ; labels are those of the parser."""
    return entry["settings"], *(entry["data"].get(name) for name in ("text_fingerprint", "parsed_fingerprint"))
