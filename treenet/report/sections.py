"""The sections of a page but the sentences: runs, scores, ablations, curves, studies, attention."""

import shlex
from html import escape

import numpy as np

from treenet.analysis.attention_stats import AttentionStats
from treenet.evaluation.metrics import METRIC_TITLES
from treenet.evaluation.origin import Standing, data_fingerprint, describe_decoding, describe_weights, short
from treenet.evaluation.significance import (
    ABOUT_WEIGHTS,
    EXPLAIN_MEANS,
    EXPLAIN_SEEDS,
    EXPLAIN_WEIGHTS,
    EXPLORATORY,
    SeedTest,
    half_interval,
)
from treenet.experiments.scaling_report import against_of, describe_slopes, metric_of, read_comparison
from treenet.experiments.study import count_not_recorded
from treenet.report.compare import Bucket, ScoreRow, ScoreTable, bucket_tables, speed, validation
from treenet.report.contents import Page
from treenet.report.figures import gather, group_names
from treenet.report.markup import TableCell, bullets, code, number, paragraph, table, tag, text
from treenet.report.report_runs import ReportRun
from treeproc.common.provenance import describe_software

_FINGERPRINTS = {"text_fingerprint": "text", "tree_fingerprint": "trees", "vocab_fingerprint": "vocabulary"}


def metric_name(name: str) -> str:
    """`bleu_tokenized` -> `tokenised BLEU`; metrics that are not known here by the words of their names."""
    return METRIC_TITLES.get(name, name.replace("_", " "))


def show_runs(page: Page) -> list[str]:
    report, out = page.report, []
    missing = [(run.name, one) for run in report.runs for one in run.missing]
    if missing:
        lines = [
            escape(f"{name}: {one.said}") + (f"; to add it: {code(one.command)}" if one.command else "") for name, one in missing
        ]
        out.append(tag("div", paragraph("Not everything is there:") + bullets(lines), class_="callout", role="note"))
    stale = [(run.name, one) for run in report.runs for one in run.stale]
    if stale:
        lines = [f"{escape(f'{name}: {one.said}')}; to renew: {code(one.command)}" for name, one in stale]
        message = paragraph("Stale, made with weights, data or settings that the run no longer has:")
        out.append(tag("div", message + bullets(lines), class_="callout", role="note"))
    if report.warnings:
        message = paragraph("More than the model differs:") + bullets([escape(line) for line in report.warnings])
        out.append(tag("div", message, class_="callout", role="note"))
    if not report.runs:
        return out
    rows = [[text("model"), *(TableCell(escape(str(run.config["model"].get("name", ""))), "n") for run in report.runs)]]
    facts = (("parameters", "parameters"), ("examples", "training pairs"), ("target_tokens", "target tokens an epoch"))
    for key, title in facts:
        rows.append([text(title), *(number(run.facts.get(key)) for run in report.runs)])
    rows.append([text("updates"), *(number(run.step) for run in report.runs)])
    if any(run.weights_sha256 for run in report.runs):
        rows.append([text("averaged weights, sha256"), *(_hash(run.weights_sha256) for run in report.runs)])
    best = [validation(run) for run in report.runs]
    rows.append([text("best validation NLL"), *(number(line and line["nll"], ".3f") for line in best)])
    rows.append([text("at update"), *(number(line and line["step"]) for line in best)])
    rows.append([text("target tokens a second, median"), *(number(speed(run), ",.0f") for run in report.runs)])
    rules = [len(rows)]
    if any(run.trees for run in report.runs):
        rows.append([text("trees of the data"), *(TableCell(escape(run.trees or "–"), "n") for run in report.runs)])
    same = {}
    for key, title in _FINGERPRINTS.items():
        found = [run.fingerprints.get(key) for run in report.runs]
        if len(set(found)) == 1 and found[0]:
            same[title] = found[0]
        elif any(found):
            rows.append([text(f"{title}, fingerprint"), *(TableCell(code(value) if value else "–", "n") for value in found)])
    for key, values in report.differing.items():
        if key != "model.name":
            rows.append([TableCell(code(key)), *(TableCell(escape(_value(value)), "n") for value in values)])
    head = [text(""), *(TableCell(escape(run.name), "n") for run in report.runs)]
    caption = "The runs, and every setting in which they differ." if len(report.runs) > 1 else "The run."
    out.append(page.table(caption, head, rows, rules=[rule for rule in rules if rule < len(rows)]))
    if same:
        who = "All runs are of the same data" if len(report.runs) > 1 else "The data"
        message = ", ".join(f"{escape(title)} {code(value)}" for title, value in same.items())
        out.append(tag("p", f"{who}, by fingerprint: {message}.", class_="note"))
    shared = [[TableCell(code(key)), TableCell(escape(_value(value)))] for key, value in report.shared.items()]
    count = f"{len(shared)} settings " + ("that all runs share" if len(report.runs) > 1 else "of the run")
    settings = table("Values as in config.yaml.", [text("setting"), text("value")], shared)
    out.append(tag("details", tag("summary", count) + settings))
    return out


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()  # as in YAML
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _hash(sha256: str | None) -> TableCell:
    return TableCell(code(short(sha256)) if sha256 else "–", "n")


def _result(row: ScoreRow, split: str) -> str:
    """The name of a result beside its run: `test.untrained` -> `untrained`; and its standing."""
    rest = row.result.removeprefix(split).lstrip(".").replace("_", " ").replace(".", ", ")
    notes = [rest] if rest else []
    notes += [standing_name(row.standing)] if standing_name(row.standing) else []
    return f"{row.run} ({', '.join(notes)})" if notes else row.run


def standing_name(standing: Standing) -> str:
    """A mark for a result that is not known to be of the run as it is."""
    return "stale" if standing.changed else "" if standing.recorded else "without provenance"


def show_scores(page: Page) -> list[str]:
    out = []
    for scores in page.report.tables:
        tested = [metric for metric in scores.metrics if any(metric in row.tests for row in scores.rows)]
        head = [text("")]
        for metric in scores.metrics:
            head.append(TableCell(escape(metric_name(metric)), "n"))
            head += [TableCell("difference", "n"), TableCell("p", "n")] if metric in tested else []
        rows = []
        for row in scores.rows:
            cells = [text(_result(row, scores.split))]
            for metric in scores.metrics:
                value = row.values.get(metric)
                fresh = [other for other in scores.rows if not other.standing.changed]
                best = max((other.values.get(metric, -np.inf) for other in fresh), default=None)
                cells.append(number(value, ".2f", "n best" if value == best and row in fresh and len(scores.rows) > 1 else "n"))
                if metric in tested:
                    test = row.tests.get(metric)
                    cells.append(number(test and test.difference, "+.2f") if test else TableCell("", "n"))
                    cells.append(TableCell(_p_value(test.p_value), "n") if test else TableCell("", "n"))
            rows.append(cells)
        count = max((row.record.get("num_examples", 0) for row in scores.rows), default=0)
        caption = f"Scores on {scores.split}, {count:,} sentences."
        if tested:
            caption += (
                f" Differences are to {_result(scores.baseline, scores.split)}. p (paired bootstrap over sentences) is about "
                f"{ABOUT_WEIGHTS}: it says nothing of models trained with other seeds. The highest value of a column is bold, "
                "whatever its p."
            )
        out.append(page.table(caption, head, rows))
        out += [paragraph(note, class_="note") for note in scores.notes]
        out.append(_origins(scores))
        lines = [f"{escape(metric_name(metric))}: {', '.join(map(code, found))}" for metric, found in scores.signatures().items()]
        test = next((row.tests[metric] for metric in tested[:1] for row in scores.rows if metric in row.tests), None)
        lines += [f"test: {code(test.signature)}"] if test else []
        out.append(tag("details", tag("summary", "Signatures") + bullets(lines)) if lines else "")
        out += [_buckets(page, scores, kind, buckets) for kind, buckets in bucket_tables(scores).items()]
    return out


def _origins(scores: ScoreTable) -> str:
    """The table of the origins of results."""
    head = [text(name) for name in ("", "weights", "data", "decoding", "software")]
    rows = []
    for row in scores.rows:
        made_by = row.record.get("software")
        cells = [describe_weights(row.record), short(data_fingerprint(row.record)), describe_decoding(row.record) or "–"]
        cells.append(describe_software(made_by) if isinstance(made_by, dict) else "not recorded")
        rows.append([text(_result(row, scores.split)), *map(text, cells)])
    caption = "Weights by the first digits of their sha256, data by those of their fingerprint."
    return tag("details", tag("summary", "What each result was made of") + table(caption, head, rows))


def _p_value(value: float) -> str:
    return "&lt; 0.001" if value < 0.001 else f"{value:.3f}"


def _buckets(page: Page, scores: ScoreTable, kind: str, buckets: list[Bucket]) -> str:
    """One column a result and metric."""
    metrics = list(dict.fromkeys(name for bucket in buckets for values in bucket.values.values() for name in values))
    results = [result for result in range(len(scores.rows)) if any(result in bucket.values for bucket in buckets)]
    columns = [(result, metric) for result in results for metric in metrics]
    names = [_result(scores.rows[r], scores.split) + (f", {metric_name(m)}" if len(metrics) > 1 else "") for r, m in columns]
    head = [text(kind), TableCell("sentences", "n"), *(TableCell(escape(name), "n") for name in names)]
    rows = []
    for bucket in buckets:
        values = (number(bucket.values.get(result, {}).get(metric), ".2f") for result, metric in columns)
        rows.append([text(bucket.name), number(bucket.num_examples), *values])
    what = metric_name(metrics[0]) if len(metrics) == 1 else "Scores"
    message = {"words": "by words of the source", "depth": "by depth of the source's tree"}.get(kind, f"by {kind}")
    return page.table(f"{what} on {scores.split} {message}.", head, rows)


def show_ablations(page: Page) -> str:
    """Table 3 of the paper."""
    chosen = page.report.ablations
    found = [(name, run, run.scores.get(page.report.split, {})) for name, run in chosen]
    metrics = list(dict.fromkeys(m for scores in page.report.tables for m in scores.metrics))
    metrics = [metric for metric in metrics if any(metric in record for _, _, record in found)]
    if not metrics:
        return ""
    head = [
        text("model"),
        text("run"),
        TableCell("updates", "n"),
        *(TableCell(escape(metric_name(metric)), "n") for metric in metrics),
    ]
    rows = []
    for name, run, record in found:
        cells = [text(name), text(_marked(run, page.report.split)), number(run.step)]
        rows.append([*cells, *(number(record.get(metric), ".2f") for metric in metrics)])
    caption = f"What each part of the tree attention gives (as Table 3 of the paper), on {page.report.split}."
    return page.table(caption, head, rows)


def _marked(run: ReportRun, split: str) -> str:
    message = standing_name(run.standings.get(split, Standing()))
    return f"{run.name} ({message})" if message else run.name


def show_curves(page: Page) -> str:
    if "learning_curves" not in page.report.figures:
        return ""
    return page.figure(
        "learning_curves",
        "Negative log-likelihood of training batches (thin) and of the validation split, and target tokens a second, by update.",
    )


def show_studies(page: Page) -> list[str]:
    out = []
    for index, study in enumerate(page.report.studies):
        if study.report is None:
            message = f"{escape(study.name)}: no cell of the study is done yet; the command that started it continues."
            out.append(tag("div", tag("p", message), class_="callout"))
            continue
        report = study.report
        if study.stale:
            message = f"{study.name}: stale, other weights now than those of its numbers: {', '.join(study.stale)}; to renew: "
            config = shlex.quote(f"{study.given}/config.yaml")
            command = code(f"python workflows/scaling.py --config {config} --out {shlex.quote(study.given)}")
            out.append(tag("div", tag("p", escape(message) + command), class_="callout", role="note"))
        metric = metric_of(report)
        title = METRIC_TITLES[metric]
        out.append(page.figure(scaling_name(index), f"{study.name}: {title} on {report['split']} by training pairs."))
        head = [text("model"), *(TableCell(name, "n") for name in ("pairs", "share", "seeds", title, "± 95 %", "chrF"))]
        head += [
            TableCell("difference", "n"),
            text("from"),
            *(TableCell(name, "n") for name in ("95 %", "p", "p, Holm", "p, weights")),
        ]
        rows, rules, last = [], [], None
        for point in report["points"]:
            if point["fraction"] != last and rows:
                rules.append(len(rows))
            last, found = point["fraction"], read_comparison(point)
            cells = [text(point["model"]), number(point["pairs"], ",.0f"), number(point["fraction"], ".4g")]
            cells += [number(len(point["seeds"])), number(point[metric]["mean"], ".2f")]
            cells += [number(half_interval(point[metric]), ".2f"), number(point["chrf"]["mean"], ".2f")]
            rows.append(cells + (_study_test(*found, against_of(report, point)) if found else [TableCell("", "n")] * 6))
        message = " ".join(report.get("explanations", (EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS)))
        out.append(page.table(f"{study.name}. {message}", head, rows, rules=rules))
        out += [paragraph(f"{line}.", class_="note") for line in describe_slopes(report)]
        if message := count_not_recorded(report.get("cells", ())):
            out.append(paragraph(f"{message}.", class_="note"))
    return out


def _study_test(test: SeedTest, of_weights: float, against: str) -> list[TableCell]:
    """Difference and from what, interval, p and Holm's p over seeds, p of the weights alone. A star is of the p that counts."""
    interval = "{:+.2f} to {:+.2f}".format(*test.interval).replace("-", "−") if test.interval else "–"
    p_values = [_p_value(value) if value is not None else "–" for value in (test.p_value, test.holm_p_value)]
    p_values[test.holm_p_value is not None] += "*" * test.starred
    if test.family == EXPLORATORY:
        p_values[1] = "exploratory"
    message = (interval, *p_values, _p_value(of_weights))
    return [number(test.difference, "+.2f"), text(against), *(TableCell(one, "n") for one in message)]


def scaling_name(index: int) -> str:
    """Name of the figure of a study."""
    return f"scaling_{index + 1}"


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
    head = [text(""), *(TableCell(escape(name), "n") for name in of_trees)]
    share = [TableCell(f"{100 * (1 - s.node_share):.1f} / {100 * s.node_share:.1f}", "n") for s in of_trees.values()]
    mean = [TableCell(f"{100 * s.mean:.1f} ± {100 * s.deviation:.1f}", "n") for s in of_trees.values()]
    even = [number(100 * sum(g.even for g in s.by_label), ".1f") for s in of_trees.values()]
    sha256 = {run.name: run.weights_sha256 for run in report.runs}
    rows = [
        [text("weights, sha256"), *(_hash(sha256[name]) for name in of_trees)],
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
    return table(escape(f"{name}: attention on nodes in %"), head, rows)


def _shaded(share: float) -> str:
    mix = f"background: color-mix(in srgb, var(--node) {100 * share**2:.0f}%, transparent); padding: .1rem .35rem"
    return tag("span", f"{100 * share:.1f}", style=mix)
