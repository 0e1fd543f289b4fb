"""The page of a report: one HTML file that loads nothing."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

from treenet.report.answer_section import show_answer
from treenet.report.attention_section import show_attention
from treenet.report.encoder_section import show_encoder
from treenet.report.line_section import show_lines
from treenet.report.live import Live, show_live
from treenet.report.markup import code, paragraph, tag
from treenet.report.pictures import show_sentences
from treenet.report.probes import show_probes
from treenet.report.provenance_section import show_making
from treenet.report.report_model import Page, Report
from treenet.report.run_section import show_curves, show_runs
from treenet.report.score_section import show_ablations, show_scores
from treenet.report.seeds_section import show_comparisons
from treenet.report.study_section import show_studies
from treeproc.common.command_names import as_called

_HERE = Path(__file__).parent
# Nothing is loaded, and nothing but this page's own script runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render_page(report: Report, figures: Mapping[str, str], live: Live | None = None) -> str:
    """Render the whole document; with `live`, one that reloads itself."""
    page = Page(report, figures)
    if live is not None:
        page.add("live", "Under way", *show_live(page, live))
        page.add("live-curves", "Learning curves", show_curves(page))
    page.add("answer", "The answer", *show_answer(page))
    page.add("scores", "Scores", *show_scores(page))
    page.add("ablations", "Ablations", show_ablations(page))
    page.add("size", "Size of the training data", *show_studies(page))
    page.add("seeds", "Comparisons over seeds", *show_comparisons(page))
    page.add("lines", "All sentences", *show_lines(page))
    page.add("sentences", "Attention, sentence by sentence", *show_sentences(page))
    page.add("attention", "Attention to phrases and words", *show_attention(page))
    page.add("encoder", "Self-attention of the encoder", *show_encoder(page))
    page.add("probes", "Probes of the encoder", *show_probes(page))
    if live is None:
        page.add("curves", "Learning curves", show_curves(page))
    page.add("runs", "What was run", *show_runs(page))
    page.add("making", "How each run was made", show_making(page))

    links = "".join(tag("li", tag("a", escape(title), href=f"#{anchor}")) for anchor, title, _ in page.sections)
    names = ", ".join(one.name for one in [*report.runs, *report.studies, *report.comparisons])
    body = tag("header", tag("h1", escape(report.title)) + paragraph(names, class_="lead"))
    body += tag("nav", tag("ol", links), aria_label="Contents")
    body += tag("main", "".join(tag("section", tag("h2", escape(title)) + content, id=a) for a, title, content in page.sections))
    body += tag(
        "footer", f"Made by {code(as_called('workflows/report.py'))}; the numbers are in {code('report.json')} beside this page."
    )
    if page.views:
        body += _data("views", page.views) + f"<script>{_read('page.js')}</script>"
    if page.lines is not None:
        body += _data("lines-data", page.lines) + f"<script>{_read('lines.js')}</script>"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    if live is not None and live.refresh_s:
        head += f'<meta http-equiv="refresh" content="{live.refresh_s}">'
    head += f'<title>{escape(report.title)}</title><link rel="icon" href="data:,"><style>{_read("page.css")}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _data(name: str, value: object) -> str:
    """Return JSON in which nothing is markup, for a script of the page."""
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    content = content.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{content}</script>'


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
