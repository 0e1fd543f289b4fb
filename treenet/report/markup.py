"""HTML by small functions, and names and numbers as every section writes them.

Every text goes through `text` or `number`; all else is markup of this package.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from treenet.report.compare import ScoreRow
from treenet.runs.result_provenance import ResultStatus, short
from treenet.tasks.translation_metrics import METRIC_TITLES

# A first column of longer texts than this keeps some width on a phone.
_SHORT = 12


@dataclass(frozen=True)
class TableCell:
    """A table cell of escaped content; `n` among its classes aligns it right."""

    content: str
    classes: str = ""


def text(value: object) -> TableCell:
    return TableCell(escape(str(value)))


def number(value: float | int | None, form: str = ",", classes: str = "n") -> TableCell:
    """Return a number with a true minus sign; a dash where there is none."""
    return TableCell("–" if value is None else escape(format(value, form).replace("-", "−")), classes)


def tag(name: str, content: str, /, **attributes: object) -> str:
    """Return an element; `content` is markup, attributes are escaped, a trailing underscore is left out (`class_`)."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{written}>{content}</{name}>"


def paragraph(content: str, **attributes: object) -> str:
    return tag("p", escape(content), **attributes)


def bullets(lines: Sequence[str]) -> str:
    return tag("ul", "".join(tag("li", line) for line in lines))


def code(content: str) -> str:
    return tag("code", escape(content))


def table(
    caption: str, head: Sequence[TableCell], rows: Sequence[Sequence[TableCell]], rules: Sequence[int] = (), title: str = ""
) -> str:
    """Return a table that scrolls in its own box, which the keyboard reaches. There is a rule above each of the rows `rules`.

    The caption is not the table's, so that it may be wider; its first sentence names the table for screen readers.
    """

    def cells(row: Sequence[TableCell], in_head: bool) -> str:
        out = []
        for place, cell in enumerate(row):
            scope = {"scope": "col"} if in_head else {"scope": "row"} if place == 0 else {}
            kind = {"class_": cell.classes} if cell.classes else {}
            out.append(tag("th" if scope else "td", cell.content, **scope, **kind))
        return "".join(out)

    ruled = [{"class_": "rule"} if place in rules else {} for place in range(len(rows))]
    body = "".join(tag("tr", cells(row, in_head=False), **rule) for row, rule in zip(rows, ruled, strict=True))
    content = tag("thead", tag("tr", cells(head, in_head=True))) + tag("tbody", body)
    kind = {"class_": "named"} if any(len(row[0].content) > _SHORT for row in rows if row) else {}
    inner = tag("table", content, aria_label=caption.partition(". ")[0].removesuffix("."), **kind)
    box = tag("div", inner, class_="box", tabindex=0, role="group", aria_label=f"{title or 'Table'}, which may scroll")
    said = f"<b>{title}.</b> {escape(caption)}" if title else escape(caption)
    return tag("figure", tag("figcaption", said) + box, class_="table")


def metric_name(name: str) -> str:
    """Return `tokenised BLEU` for `bleu_tokenized`. Metrics that are not known here keep the words of their names."""
    return METRIC_TITLES.get(name, name.replace("_", " "))


def result_name(row: ScoreRow, split: str) -> str:
    """Return the name of a result beside its run: `test.untrained` -> `untrained`; and its status."""
    rest = row.result.removeprefix(split).lstrip(".").replace("_", " ").replace(".", ", ")
    notes = [rest] if rest else []
    notes += [status_name(row.status)] if status_name(row.status) else []
    return f"{row.run} ({', '.join(notes)})" if notes else row.run


def status_name(status: ResultStatus) -> str:
    """Return a mark for a result that is not known to be of the run as it is."""
    return "stale" if status.changed else "" if status.recorded else "without provenance"


def show_status(status: ResultStatus) -> str:
    """Return the mark of a result behind its name; empty if it is known to be of the run as it is."""
    return f" ({name})" if (name := status_name(status)) else ""


def show_p_value(value: float) -> str:
    """Return markup of a p-value."""
    return "&lt; 0.001" if value < 0.001 else f"{value:.3f}"


def show_hash(sha256: str | None) -> TableCell:
    """Return the first digits of a hash, or a dash."""
    return TableCell(code(short(sha256)) if sha256 else "–", "n")
