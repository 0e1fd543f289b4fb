"""The contents of a page: the facts of a report, and sections with numbered tables and figures."""

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


@dataclass
class Report:
    """Everything that a page shows."""

    title: str
    split: str
    runs: list[ReportRun]
    studies: list[ReportStudy]
    baseline: ReportRun | None
    differing: dict[str, list]
    shared: dict[str, object]
    warnings: list[str]
    tables: list[ScoreTable]
    ablations: list[tuple[str, ReportRun]]
    attention: dict[str, AttentionStats]
    encoder: dict[str, EncoderStats]  # self-attention, of the runs whose weights can be computed
    views: dict[int, list[View]]  # by example, in the order in which they are shown
    comparisons: list[ReportStudy] = field(default_factory=list)  # over seeds
    answers: list[Answer] = field(default_factory=list)  # of the runs, then of each study
    frequencies: list[Frequencies] = field(default_factory=list)  # one a table
    lines: Lines | None = None  # all sentences of the split
    made: dict[str, list[Session]] = field(default_factory=dict)  # by run or data set, oldest first
    left_out: int = 0  # examples for which there was no room
    without_encoder: int = 0  # examples of `views` whose encoder self-attention had no room
    figures: dict[str, str] = field(default_factory=dict)  # SVG of the page by name


class Page:
    """Sections in order, with tables and figures numbered as they come."""

    def __init__(self, report: Report):
        self.report = report
        self.sections: list[tuple[str, str, str]] = []
        self.views: list[dict] = []
        self.lines: dict | None = None
        self._tables = self._figures = 0

    def table(self, caption: str, head: list[TableCell], rows: list[list[TableCell]], **more) -> str:
        """A numbered table; those inside of details have no number."""
        self._tables += 1
        return table(caption, head, rows, title=f"Table {self._tables}", **more)

    def figure(self, name: str, caption: str) -> str:
        self._figures += 1
        picture = self.report.figures[name].replace('role="img"', f'role="img" aria-label="{escape(caption)}"')
        box = tag("div", picture, class_="box", tabindex=0, role="group", aria_label=name.replace("_", " "))
        return tag("figure", box + tag("figcaption", f"<b>Figure {self._figures}.</b> {escape(caption)} {links(name)}"))

    def add(self, anchor: str, title: str, *content: str) -> None:
        if any(content):
            self.sections.append((anchor, title, "".join(content)))


def links(figure: str) -> str:
    """Links to the files of a figure."""
    place = escape(quote(f"figures/{figure}"))
    return f'<a href="{place}.svg">SVG</a>, <a href="{place}.png">PNG</a>'
