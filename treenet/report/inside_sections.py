"""The sections of what is inside the models: cross-attention of the decoder, self-attention of the encoder, and linear probes."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from treenet.analysis.attention_stats import AttentionStats, Group
from treenet.analysis.encoder_attention import EncoderStats
from treenet.probing.probe_results import COLUMNS, draw_layers, table_rows, task_name
from treenet.report.compare import side_of_run
from treenet.report.figures import draw_groups, gather, group_names
from treenet.report.report_inputs import ReportRun
from treenet.report.report_model import Report
from treenet.report.tables import fact_columns, show_hash
from treenet.runs.result_provenance import describe_origin
from treenet.tasks.tables import NONE, Column, number, numbers

# Prefixes of the names of charts.
CROSS, ENCODER = "attention", "encoder_attention"
_KINDS = {"label": "phrase label", "height": "height above the leaves, which have height 0"}

Stats = AttentionStats | EncoderStats


def draw_inside(report: Report, colors: Mapping[str, str]) -> Iterator[tuple[str, Figure]]:
    """Yield charts by name: of the attention of runs that attend to nodes, then of probes."""
    for prefix, stats in ((CROSS, report.inside.attention), (ENCODER, report.inside.encoder)):
        for kind in _KINDS:
            if groups := _groups_of(stats, kind):
                yield f"{prefix}_by_{kind}", draw_groups(groups, colors, "" if kind == "label" else kind)
    for name, run in _probed(report).items():
        if figure := draw_layers(run.probes):
            yield name, figure


def _groups_of(stats: Mapping[str, Stats], kind: str) -> dict[str, list[Group]]:
    """Return groups by label or height, of the runs that attend to nodes."""
    return {name: getattr(one, f"by_{kind}") for name, one in stats.items() if one.by_label}


def _groups(stats: Mapping[str, Stats]) -> Iterator[tuple[str, str, list[Column]]]:
    """Yield each kind of position, its title and its numbers."""
    for kind, title in _KINDS.items():
        groups = _groups_of(stats, kind)
        names = group_names(list(groups.values()))
        columns = [Column(kind, names)]
        for run, of_run in groups.items():
            gathered = gather(of_run, names)
            found = [gathered.get(name) for name in names]
            columns.append(numbers(f"{run}: positions", [group.positions if group else None for group in found]))
            columns.append(numbers(f"{run}: %", [100 * group.mass.mean() if group else None for group in found], ".2f"))
            columns.append(numbers(f"{run}: even %", [100 * group.even if group else None for group in found], ".2f"))
        if groups:
            yield kind, title, columns


def _heads(shares: np.ndarray) -> list[Column]:
    """Return a table of shares [A, H], shaded by their squares."""
    style = "background: color-mix(in srgb, var(--node) {:.0f}%, transparent); padding: .1rem .35rem"
    cell = Markup(f'<span style="{style}">{{:.1f}}</span>')
    columns = [Column("layer", [str(layer + 1) for layer in range(len(shares))])]
    for head, of_head in enumerate(shares.T, 1):
        columns.append(Column(f"head {head}", [cell.format(100 * share**2, 100 * share) for share in of_head], "n"))
    return columns


def attention_section(report: Report) -> dict:
    """Return shares of cross-attention, by layer and head, and by kind of phrase, of the runs that read trees."""
    of_trees = {name: stats for name, stats in report.inside.attention.items() if stats.nodes}
    found = of_trees.values()
    facts = _hashes(report, of_trees) | {
        "Leaves / nodes of the source trees": [f"{100 * (1 - s.node_share):.1f} / {100 * s.node_share:.1f}" for s in found],
        "Target → nodes": [_share(stats.node_mass) for stats in found],
        "the same with even attention": [number(100 * sum(group.even for group in stats.by_label), ".1f") for stats in found],
        "target positions": [number(stats.target_positions) for stats in found],
    }
    heads = {name: _heads(stats.node_mass) for name, stats in of_trees.items()}
    targets = next((stats.targets for stats in found), "")
    return {"facts": fact_columns("share", of_trees, facts), "targets": targets, "heads": heads, "groups": _groups(of_trees)}


def encoder_section(report: Report) -> dict:
    """Return shares by kind of query for every run, then as `attention_section` does of the runs that attend to nodes."""
    encoders, of = report.inside.encoder, {"Leaf": "leaves", "Node": "nodes"}
    found = encoders.values()
    facts = _hashes(report, encoders)
    for kind, name in of.items():
        queries = [getattr(stats, name) for stats in found]
        # The share and the even share; none stands for queries that the model does not have.
        to_nodes = [
            (one.node_mass, one.even_node_mass) if one.queries and stats.by_label else None
            for one, stats in zip(queries, found, strict=True)
        ]
        to_itself = [(one.own_mass, one.even_own_mass) if one.queries else None for one in queries]
        for target, shares in (("nodes", to_nodes), ("itself", to_itself)):
            facts[f"{kind} → {target}"] = [_share(one[0]) if one else NONE for one in shares]
            facts[f"{kind} → {target}, with even attention"] = [number(one and 100 * one[1], ".1f") for one in shares]
    facts |= {f"queries that are {name}": [number(getattr(stats, name).queries) for stats in found] for name in of.values()}
    others = [run.name for run in report.runs if run.name in report.inside.attention and run.name not in encoders]
    of_trees = {name: stats for name, stats in encoders.items() if stats.by_label}
    heads = {name: _heads(stats.nodes.node_mass) for name, stats in of_trees.items()}
    return {"facts": fact_columns("share", encoders, facts), "others": others, "heads": heads, "groups": _groups(of_trees)}


def _hashes(report: Report, names: Collection[str]) -> dict[str, list[str]]:
    return {"weights, sha256": [show_hash(run.weights_sha256) for run in report.runs if run.name in names]}


def _share(mass: np.ndarray) -> str:
    return f"{100 * mass.mean():.1f} ± {100 * mass.std():.1f}"


def _probed(report: Report) -> dict[str, ReportRun]:
    """Return the runs with probes by the names of their figures."""
    return {f"probes_{number}": run for number, run in enumerate(report.runs, 1) if run.probes}


def probes_section(report: Report) -> dict:
    """Return accuracies at the last layer where each task was probed, and the names of the figures of all layers."""
    runs = _probed(report)
    named = {", ".join(filter(None, [run.name, run.probes_status.mark])): run for run in runs.values()}
    alone = len(runs) == 1 and not any(run.probes_status.mark for run in runs.values())
    columns, tops = {}, {}
    for name, run in named.items():
        rows = list(table_rows(run.probes))
        top: dict[str, int] = {}  # the other layers are in the figure
        for task, layer, *_ in rows:
            top |= {task: max(layer, top.get(task, 0))} if layer else {}
        tops[name] = _describe_tops(top)
        last = {(task, of): values for task, layer, of, values in rows if layer and layer == top[task]}
        for title in COLUMNS:
            columns[title if alone else f"{name}: {title}"] = {key: values.get(title) for key, values in last.items()}
    tasks = list(dict.fromkeys(key for column in columns.values() for key in column))
    table = [Column("task", [task_name(task) for task, _ in tasks]), Column("state", [of for _, of in tasks])]
    for title, column in columns.items():
        table.append(numbers(title, [None if (one := column.get(task)) is None else 100 * one for task in tasks], ".2f"))
    return {
        "columns": table,
        "tops": tops,
        "drawn": zip(runs, named, strict=True),
        "made": {name: describe_origin(run.probes) for name, run in named.items()},
        "comparable": len({side_of_run(run) for run in runs.values()} - {None}) < 2
        and all(_basis(run.probes) == _basis(next(iter(runs.values())).probes) for run in runs.values()),
    }


def _describe_tops(top: Mapping[str, int]) -> str:
    """Return the highest layer, and the tasks that were probed at lower ones alone."""
    highest = max(top.values(), default=0)
    lower = [f"{task_name(task)}: {layer}" for task, layer in top.items() if layer < highest]
    return f"{highest} ({', '.join(lower)})" if lower else str(highest)


def _basis(entry: dict) -> tuple:
    """Return the key that two runs must share to be compared. The models' trees may differ; labels are those of the parser."""
    return entry["settings"], *(entry["data"].get(name) for name in ("text_fingerprint", "parsed_fingerprint"))
