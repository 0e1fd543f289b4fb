"""The page of a report, one file that loads nothing: each section is a template and a function that computes its data."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from treenet.evaluation.significance import EXPLAINED
from treenet.experiments import scaling_report, seeds_report
from treenet.report.answer_sections import answer_section, show_comparison, show_scaling, study_section
from treenet.report.class_sections import class_examples_section
from treenet.report.example_sections import lines_section, sentences_section
from treenet.report.inside_sections import attention_section, encoder_section, probes_section
from treenet.report.language_sections import language_section
from treenet.report.report_model import Report
from treenet.report.run_sections import making_section, runs_section
from treenet.report.score_sections import ablations_section, scores_section
from treenet.tasks.scores import ABOUT_INTERVALS
from treenet.tasks.tables import number

_HERE = Path(__file__).parent
# The id, title, template and data of each section, in order. The page leaves out those that are empty.
_SECTIONS: tuple[tuple[str, str, str, Callable[[Report], dict]], ...] = (
    ("answer", "The answer", "answer", answer_section),
    ("scores", "Scores", "scores", scores_section),
    ("language", "Scores", "language", language_section),
    ("examples", "Examples", "table", class_examples_section),
    ("ablations", "Ablations", "table", ablations_section),
    ("size", "Size of the training data", "studies", partial(study_section, scaling_report.FORM, show_scaling)),
    ("seeds", "Comparisons over seeds", "studies", partial(study_section, seeds_report.FORM, show_comparison)),
    ("lines", "All sentences", "lines", lines_section),
    ("sentences", "Attention, sentence by sentence", "sentences", sentences_section),
    ("attention", "Attention to phrases and words", "attention", attention_section),
    ("encoder", "Self-attention of the encoder", "encoder", encoder_section),
    ("probes", "Probes of the encoder", "probes", probes_section),
    ("curves", "Learning curves", "curves", lambda report: {}),
    ("runs", "What was run", "runs", runs_section),
    ("making", "How each run was made", "table", making_section),
)


def render_page(report: Report, figures: Mapping[str, str]) -> str:
    """Render the whole document; `figures` are our SVG by name. Every other text is escaped."""
    loader = FileSystemLoader(_HERE / "templates")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    pages.filters |= {"number": number, "labelled": _labelled}
    pages.globals |= {"report": report, "figures": figures, "asset": _asset}
    pages.globals |= {"explained": EXPLAINED, "about_intervals": ABOUT_INTERVALS}
    pages.globals["page"] = pages.get_template("macros.html").module
    rendered = [(name, title, pages.get_template(f"{file}.html").render(show(report))) for name, title, file, show in _SECTIONS]
    sections = [(name, title, Markup(content)) for name, title, content in rendered if content.strip()]
    return pages.get_template("page.html").render(sections=sections)


def _labelled(svg: str, caption: str) -> Markup:
    """Return the pictures of a chart with a caption for screen readers."""
    return Markup(svg.replace('role="img"', f'role="img" aria-label="{escape(caption)}"'))


def _asset(name: str) -> Markup:
    """Return a style or a script of this package."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))
