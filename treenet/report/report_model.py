"""The contents of a page: the facts of a report, and sections with numbered tables and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from treenet.analysis.attention_stats import AttentionStats
from treenet.analysis.encoder_stats import EncoderStats
from treenet.report.answer import Answer
from treenet.report.compare import ScoreTable
from treenet.report.frequencies import Frequencies
from treenet.report.lines import Lines
from treenet.report.markup import TableCell, table, tag
from treenet.report.report_runs import ReportRun, ReportStudy
from treenet.report.sentence_views import View
from treeproc.common.provenance import Session


@dataclass(frozen=True)
class Inside:
    """Attention of the models of the runs on the split."""

    attention: dict[str, AttentionStats] = field(default_factory=dict)
    encoder: dict[str, EncoderStats] = field(default_factory=dict)  # self-attention, of the runs whose weights can be computed
    views: dict[int, list[View]] = field(default_factory=dict)  # by example, in the order in which they are shown
    left_out: int = 0  # examples for which there was no room
    without_encoder: int = 0  # examples of `views` whose encoder self-attention had no room


@dataclass(frozen=True)
class Scored:
    """The scores of the runs, with their tests."""

    tables: list[ScoreTable] = field(default_factory=list)
    answer: Answer | None = None
    frequencies: list[Frequencies] = field(default_factory=list)  # one a table
    lines: Lines | None = None  # all sentences of the split


@dataclass(frozen=True)
class Report:
    """Everything that a page shows, except its figures."""

    title: str
    split: str
    runs: list[ReportRun]
    studies: list[ReportStudy]
    comparisons: list[ReportStudy]  # over seeds
    baseline: ReportRun | None
    differing: dict[str, list]
    shared: dict[str, object]
    warnings: list[str]
    ablations: list[tuple[str, ReportRun]]
    made: dict[str, list[Session]]  # by run or data set, oldest first
    answers: list[Answer]  # of the runs, then of each study
    inside: Inside
    scored: Scored


class Page:
    """Sections in order, with tables and figures numbered as they come. `figures` are SVG by name."""

    def __init__(self, report: Report, figures: Mapping[str, str]):
        self.report, self.figures = report, figures
        self.sections: list[tuple[str, str, str]] = []
        self.views: list[dict] = []
        self.lines: dict | None = None
        self._tables = self._figures = 0

    def table(self, caption: str, head: list[TableCell], rows: list[list[TableCell]], **more) -> str:
        """Return a numbered table; those inside of details have no number."""
        self._tables += 1
        return table(caption, head, rows, title=f"Table {self._tables}", **more)

    def figure(self, name: str, caption: str) -> str:
        self._figures += 1
        picture = self.figures[name].replace('role="img"', f'role="img" aria-label="{escape(caption)}"')
        box = tag("div", picture, class_="box", tabindex=0, role="group", aria_label=name.replace("_", " "))
        return tag("figure", box + tag("figcaption", f"<b>Figure {self._figures}.</b> {escape(caption)} {links(name)}"))

    def add(self, anchor: str, title: str, *content: str) -> None:
        if any(content):
            self.sections.append((anchor, title, "".join(content)))


def links(figure: str) -> str:
    """Return links to the files of a figure."""
    place = escape(quote(f"figures/{figure}"))
    return f'<a href="{place}.svg">SVG</a>, <a href="{place}.png">PNG</a>'
