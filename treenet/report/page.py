"""The page of a report: one HTML file that loads nothing."""

import base64
import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from treenet.experiments.scaling_report import SIGNIFICANT
from treenet.inference.attention_stats import AttentionStats
from treenet.report.compare import (
    ScoreRow,
    ScoreTable,
    bucket_tables,
    reads_trees,
    speed,
    validation,
)
from treenet.report.examples import END, WORD_START, View
from treenet.report.figures import gather, group_names, shade
from treenet.report.markup import Cell, bullets, code, number, paragraph, table, tag, text
from treenet.report.runs import ReportRun, Study
from treenet.report.tree_layout import draw_svg, lay_out, node_text, piece_text

_HERE = Path(__file__).parent
# Nothing is loaded, and nothing but this page's own script runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_WORDS = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "nll": "NLL"}
_MARKS = {"text_fingerprint": "text", "tree_fingerprint": "trees", "vocab_fingerprint": "vocabulary"}


@dataclass
class Report:
    """Everything that a page shows."""

    title: str
    split: str
    runs: list[ReportRun]
    studies: list[Study]
    baseline: ReportRun | None
    differing: dict[str, list]
    shared: dict[str, object]
    warnings: list[str]
    tables: list[ScoreTable]
    ablations: list[tuple[str, ReportRun]]
    attention: dict[str, AttentionStats]
    views: dict[int, list[View]]  # by example, in the order in which they are shown
    left_out: int = 0  # examples for which there was no room
    figures: dict[str, str] = field(default_factory=dict)  # SVG of the page by name


class _Page:
    """Sections in order, with tables and figures numbered as they come."""

    def __init__(self, report: Report):
        self.report = report
        self.sections: list[tuple[str, str, str]] = []
        self.views: list[dict] = []
        self._tables = self._figures = 0

    def table(self, caption: str, head: list[Cell], rows: list[list[Cell]], **more) -> str:
        """A numbered table; those inside of details have no number."""
        self._tables += 1
        return table(f"<b>Table {self._tables}.</b> {escape(caption)}", head, rows, **more)

    def figure(self, name: str, caption: str) -> str:
        self._figures += 1
        box = tag("div", self.report.figures[name], class_="box", tabindex=0, role="group", aria_label=caption)
        files = f'<a href="figures/{escape(name)}.svg">SVG</a>, <a href="figures/{escape(name)}.png">PNG</a>'
        return tag("figure", box + tag("figcaption", f"<b>Figure {self._figures}.</b> {escape(caption)} {files}"))

    def add(self, anchor: str, title: str, *content: str) -> None:
        if any(content):
            self.sections.append((anchor, title, "".join(content)))


def render_page(report: Report) -> str:
    """The whole document."""
    page = _Page(report)
    page.add("runs", "What was run", *_runs(page))
    page.add("scores", "Scores", *_scores(page))
    page.add("ablations", "Ablations", _ablations(page))
    page.add("curves", "Learning curves", _curves(page))
    page.add("size", "Size of the training data", *_studies(page))
    page.add("attention", "Attention to phrases and words", *_attention(page))
    page.add("sentences", "Sentences", *_sentences(page))

    links = "".join(tag("li", tag("a", escape(title), href=f"#{anchor}")) for anchor, title, _ in page.sections)
    names = ", ".join(one.name for one in [*report.runs, *report.studies])
    body = tag("h1", escape(report.title)) + paragraph(names, class_="lead")
    body += tag("nav", tag("ol", links), aria_label="Contents")
    body += tag("main", "".join(tag("section", tag("h2", escape(title)) + content, id=a) for a, title, content in page.sections))
    body += tag("footer", "Made by <code>workflows/report.py</code>. The numbers are in <code>report.json</code> beside this page.")
    views = json.dumps(page.views, ensure_ascii=False).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    if page.views:
        body += f'<script type="application/json" id="views">{views}</script><script>{_read("page.js")}</script>'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f'<title>{escape(report.title)}</title><link rel="icon" href="data:,"><style>{_read("page.css")}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def metric_name(name: str) -> str:
    """`bleu_tokenized` -> `BLEU tokenized`."""
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def _runs(page: _Page) -> list[str]:
    report, out = page.report, []
    if missing := [line for run in report.runs for line in run.missing]:
        lines = []
        for run in report.runs:
            for line in run.missing:
                said, colon, command = line.partition(": python ")
                lines.append(f"{escape(run.name)}: {escape(said)}" + (f". To add it: {code('python ' + command)}" if colon else ""))
        out.append(tag("div", paragraph("Not everything is there:") + bullets(lines), class_="callout"))
        assert len(lines) == len(missing)
    if report.warnings:
        said = paragraph("More than the model differs:") + bullets([escape(line) for line in report.warnings])
        out.append(tag("div", said, class_="callout", role="note"))
    if not report.runs:
        return out
    rows = [[text("model"), *(Cell(escape(str(run.config["model"].get("name", ""))), "n") for run in report.runs)]]
    facts = (("parameters", "parameters"), ("examples", "training pairs"), ("target_tokens", "target tokens an epoch"))
    for key, title in facts:
        rows.append([text(title), *(number(run.facts.get(key)) for run in report.runs)])
    rows.append([text("updates"), *(number(run.step) for run in report.runs)])
    best = [validation(run) for run in report.runs]
    rows.append([text("best validation NLL"), *(number(line and line["nll"], ".3f") for line in best)])
    rows.append([text("at update"), *(number(line and line["step"]) for line in best)])
    rows.append([text("target tokens a second, median"), *(number(speed(run), ",.0f") for run in report.runs)])
    rules = [len(rows)]
    same = {}
    for mark, title in _MARKS.items():
        found = [run.marks.get(mark) for run in report.runs]
        if len(set(found)) == 1 and found[0]:
            same[title] = found[0]
        elif any(found):
            rows.append([text(f"{title}, fingerprint"), *(Cell(code(value) if value else "–", "n") for value in found)])
    for key, values in report.differing.items():
        if key != "model.name":
            rows.append([Cell(code(key)), *(Cell(escape(_value(value)), "n") for value in values)])
    head = [text(""), *(Cell(escape(run.name), "n") for run in report.runs)]
    caption = "The runs, and every setting in which they differ." if len(report.runs) > 1 else "The run."
    out.append(page.table(caption, head, rows, rules=[rule for rule in rules if rule < len(rows)]))
    if same:
        who = "All runs are" if len(report.runs) > 1 else "The run is"
        said = ", ".join(f"{escape(title)} {code(value)}" for title, value in same.items())
        out.append(tag("p", f"{who} of the same data, by fingerprint: {said}.", class_="note"))
    shared = [[Cell(code(key)), Cell(escape(_value(value)))] for key, value in report.shared.items()]
    settings = table("Settings that all runs share." if len(report.runs) > 1 else "Settings of the run.", [text("setting"), text("value")], shared)
    count = f"{len(shared)} settings " + ("that all runs share" if len(report.runs) > 1 else "of the run")
    out.append(tag("details", tag("summary", count) + settings))
    return out


def _value(value: object) -> str:
    if value is None:
        return "–"
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _result(row: ScoreRow, split: str) -> str:
    """What tells a result from the run's own: `test.untrained` -> `untrained`."""
    rest = row.result.removeprefix(split).lstrip(".").replace("_", " ").replace(".", ", ")
    return f"{row.run} ({rest})" if rest else row.run


def _scores(page: _Page) -> list[str]:
    out = []
    for scores in page.report.tables:
        tested = [metric for metric in scores.metrics if any(metric in row.tests for row in scores.rows)]
        head = [text("")]
        for metric in scores.metrics:
            head.append(Cell(escape(metric_name(metric)), "n"))
            head += [Cell("difference", "n"), Cell("p", "n")] if metric in tested else []
        rows = []
        for row in scores.rows:
            cells = [text(_result(row, scores.split))]
            for metric in scores.metrics:
                value = row.values.get(metric)
                best = max((other.values.get(metric, -np.inf) for other in scores.rows), default=None)
                cells.append(number(value, ".2f", "n best" if value == best and len(scores.rows) > 1 else "n"))
                if metric in tested:
                    test = row.tests.get(metric)
                    cells.append(number(test and test.difference, "+.2f") if test else Cell("", "n"))
                    cells.append(Cell(_p_value(test.p_value), "n") if test else Cell("", "n"))
            rows.append(cells)
        count = max((row.record.get("num_examples", 0) for row in scores.rows), default=0)
        caption = f"Scores on {scores.split}, {count:,} sentences."
        if tested:
            caption += (
                f" Differences are to {_result(scores.baseline, scores.split)}; p by paired bootstrap over sentences, * below "
                f"{SIGNIFICANT}. The highest value of a column is bold, significant or not."
            )
        out.append(page.table(caption, head, rows))
        out += [paragraph(note, class_="note") for note in scores.notes]
        lines = [
            f"{escape(metric_name(metric))}: {', '.join(map(code, found))}" for metric, found in scores.signatures().items()
        ]
        test = next((row.tests[metric] for metric in tested[:1] for row in scores.rows if metric in row.tests), None)
        lines += [f"test: {code(test.signature)}"] if test else []
        out.append(tag("details", tag("summary", "Signatures") + bullets(lines)) if lines else "")
        out += [_buckets(page, scores, kind, buckets) for kind, buckets in bucket_tables(scores).items()]
    return out


def _p_value(value: float) -> str:
    said = "&lt; 0.001" if value < 0.001 else f"{value:.3f}"
    return said + ("*" if value < SIGNIFICANT else "")


def _buckets(page: _Page, scores: ScoreTable, kind: str, buckets: list[dict]) -> str:
    """One column a result and metric."""
    metrics = list(dict.fromkeys(m for bucket in buckets for values in bucket["rows"].values() for m in values))
    chosen = [(number_, metric) for number_ in range(len(scores.rows)) for metric in metrics]
    chosen = [(n, m) for n, m in chosen if any(m in bucket["rows"].get(n, {}) for bucket in buckets)]
    names = [_result(scores.rows[n], scores.split) + (f", {metric_name(m)}" if len(metrics) > 1 else "") for n, m in chosen]
    head = [text(kind), Cell("sentences", "n"), *(Cell(escape(name), "n") for name in names)]
    rows = [
        [
            text(bucket["bucket"]),
            number(bucket["num_examples"]),
            *(number(bucket["rows"].get(n, {}).get(m), ".2f") for n, m in chosen),
        ]
        for bucket in buckets
    ]
    what = metric_name(metrics[0]) if len(metrics) == 1 else "Scores"
    said = {"words": "by words of the source", "depth": "by depth of the source's tree"}.get(kind, f"by {kind}")
    return page.table(f"{what} on {scores.split} {said}.", head, rows)


def _ablations(page: _Page) -> str:
    """Table 3 of the paper."""
    chosen = page.report.ablations
    found = [(name, run, run.scores.get(page.report.split, {})) for name, run in chosen]
    metrics = list(dict.fromkeys(m for scores in page.report.tables for m in scores.metrics))
    metrics = [metric for metric in metrics if any(metric in record for _, _, record in found)]
    if not metrics:
        return ""
    head = [text("model"), text("run"), *(Cell(escape(metric_name(metric)), "n") for metric in metrics)]
    rows = [[text(name), text(run.name), *(number(record.get(m), ".2f") for m in metrics)] for name, run, record in found]
    caption = f"What each part of the tree attention gives (as Table 3 of the paper), on {page.report.split}."
    return page.table(caption, head, rows)


def _curves(page: _Page) -> str:
    if "learning_curves" not in page.report.figures:
        return ""
    return page.figure(
        "learning_curves",
        "Negative log-likelihood of training batches (thin) and of the validation split, and target tokens a second, by update.",
    )


def _studies(page: _Page) -> list[str]:
    out = []
    for index, study in enumerate(page.report.studies):
        if study.report is None:
            said = f"{escape(study.name)}: no cell of the study is done yet; the command that started it continues."
            out.append(tag("div", tag("p", said), class_="callout"))
            continue
        report = study.report
        out.append(page.figure(scaling_name(index), f"{study.name}: BLEU on {report['split']} by training pairs."))
        head = [text("model"), *(Cell(name, "n") for name in ("pairs", "share", "seeds", "BLEU", "± 95 %", "chrF"))]
        head += [Cell(name, "n") for name in ("difference", "95 %", "p")]
        rows, rules, last = [], [], None
        for point in report["points"]:
            if point["fraction"] != last and rows:
                rules.append(len(rows))
            last, test = point["fraction"], point.get("comparison")
            cells = [text(point["model"]), number(point["pairs"], ",.0f"), number(point["fraction"], ".4g")]
            cells += [number(len(point["seeds"])), number(point["bleu"]["mean"], ".2f")]
            cells += [number(point["bleu"]["half_interval"], ".2f"), number(point["chrf"]["mean"], ".2f")]
            interval = f"{test['interval'][0]:+.2f} to {test['interval'][1]:+.2f}".replace("-", "−") if test else ""
            cells += [number(test["difference"], "+.2f") if test else Cell("", "n"), Cell(interval, "n")]
            rows.append([*cells, Cell(_p_value(test["p_value"]) if test else "", "n")])
        caption = (
            f"{study.name}: ± is the interval of the mean over seeds ({report['interval']}), differences are to "
            f"{report['baseline']} ({report['test']})."
        )
        out.append(page.table(caption, head, rows, rules=rules))
    return out


def scaling_name(index: int) -> str:
    """Name of the figure of a study."""
    return f"scaling_{index + 1}"


def _attention(page: _Page) -> list[str]:
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
    head = [text(""), *(Cell(escape(name), "n") for name in of_trees)]
    share = [Cell(f"{100 * (1 - s.node_share):.1f} / {100 * s.node_share:.1f}", "n") for s in of_trees.values()]
    mean = [Cell(f"{100 * s.mean:.1f} ± {100 * s.deviation:.1f}", "n") for s in of_trees.values()]
    even = [number(100 * sum(g.even for g in s.by_label), ".1f") for s in of_trees.values()]
    rows = [
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
        head = [text(kind), *(Cell(escape(f"{name}: {what}"), "n") for name in groups for what in ("positions", "%", "even %"))]
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
    head = [text("layer"), *(Cell(f"head {i + 1}", "n") for i in range(stats.node_mass.shape[1]))]
    rows = []
    for layer, shares in enumerate(stats.node_mass):
        rows.append([text(layer + 1), *(Cell(_shaded(share), "n") for share in shares)])
    return table(escape(f"{name}: attention on nodes in %"), head, rows)


def _shaded(share: float) -> str:
    mix = f"background: color-mix(in srgb, var(--node) {100 * share**2:.0f}%, transparent); padding: .1rem .35rem"
    return tag("span", f"{100 * share:.1f}", style=mix)


def _sentences(page: _Page) -> list[str]:
    report = page.report
    if not report.views:
        return []
    out = [
        paragraph(
            "Choose a target token by pointing, tapping or with the arrow keys: leaves and phrases are shaded by the attention "
            "that they get from it, with the number in % below. Translations are the models' own, and the weights are those of "
            "predicting the token."
        ),
        tag("div", "".join(_swatch(share) for share in (0.01, 0.05, 0.2, 0.5, 1)), class_="swatches", aria_hidden="true"),
    ]
    if report.left_out:
        out.append(paragraph(f"{report.left_out} more sentences were asked for; they are left out to keep this page small."))
    for example, views in report.views.items():
        first = views[0]
        pairs = [("source", first.source), ("reference", first.reference)]
        content = "".join(tag("dt", title) + tag("dd", escape(said)) for title, said in pairs)
        out.append(tag("h3", f"Example {example} of {escape(report.split)}", id=f"example-{example}") + tag("dl", content, class_="text"))
        out += [_view(page, view) for view in views]
    return out


def _swatch(share: float) -> str:
    fills = (
        f'<i style="background: color-mix(in srgb, var(--{kind}) {100 * shade(share):.0f}%, var(--page))"></i>'
        for kind in ("leaf", "node")
    )
    return tag("span", "".join(fills) + f"{100 * share:.0f} %")


def _view(page: _Page, view: View) -> str:
    layers, heads, targets, positions = view.weights.shape
    number_ = len(page.views)
    tokens = [piece_text(piece) for piece in view.tokens[:-1]] + ["end of sentence"]
    leaves = [piece_text(piece) for piece in view.leaves]
    layout = lay_out(view)
    names = leaves + [f"{box.text}\t{box.phrase}" for box in layout.boxes[len(leaves) :]]
    page.views.append(
        {
            "layers": layers,
            "heads": heads,
            "positions": positions,
            "leaves": len(leaves),
            "tokens": tokens,
            "names": names,
            "weights": pack(view.weights),
        }
    )
    words: list[list[str]] = []  # buttons of a word stay on one line
    for place, piece in enumerate(view.tokens[:-1]):
        if not place or piece.startswith(WORD_START):
            words.append([])
        words[-1].append(_token(place, tokens[place]))
    words = [[_token(-1, "all tokens", "aside")], *words, [_token(targets - 1, END, "aside")]]
    buttons = [tag("span", "".join(word), class_="word") for word in words]
    label = f"{view.run}, example {view.example_id}"
    selects = _select("layer", layers, label) + _select("head", heads, label)
    title = f"{escape(view.run)} <span class=\"p\">chrF of this sentence {view.chrf:.1f}</span>"
    what = "Parse tree of the source" if view.labels else "Leaves of the source"
    tree = tag("div", draw_svg(layout, f"{what}: {view.source}"), class_="box", tabindex=0, role="group", aria_label=what)
    tokens_ = tag("div", " ".join(buttons), class_="tokens", role="radiogroup", aria_label=f"Target tokens of {label}")
    beside = tag("div", tokens_ + tag("div", "", class_="readout", aria_live="polite"), class_="beside")
    content = tag("header", tag("h4", title) + tag("div", selects, class_="controls"))
    content += tag("div", tree + beside, class_="picture")
    return tag("figure", content, class_="attention", data_view=number_, data_example=view.example_id, aria_label=label)


def _token(place: int, said: str, classes: str = "") -> str:
    more = {"class_": classes} if classes else {}
    checked = str(place == -1).lower()
    return tag("button", escape(said), type="button", role="radio", aria_checked=checked, data_t=place, **more)


def _select(what: str, count: int, label: str) -> str:
    options = tag("option", "mean", value=-1) + "".join(tag("option", str(i + 1), value=i) for i in range(count))
    return tag("label", what + tag("select", options, aria_label=f"{what} of {label}"))


def pack(weights: np.ndarray) -> str:
    """Weights between 0 and 1 as base64 of little-endian 16-bit numbers; page.js reads them."""
    return base64.b64encode(np.rint(weights * 65535).astype("<u2").tobytes()).decode()
