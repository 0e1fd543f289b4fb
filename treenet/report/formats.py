"""Names and numbers as every section of a page writes them."""

from treenet.report.compare import ScoreRow
from treenet.report.markup import TableCell, code
from treenet.runs.result_provenance import ResultStatus, short
from treenet.tasks.translation_metrics import METRIC_TITLES


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


def show_p_value(value: float) -> str:
    """Return markup of a p-value."""
    return "&lt; 0.001" if value < 0.001 else f"{value:.3f}"


def show_hash(sha256: str | None) -> TableCell:
    """Return the first digits of a hash, or a dash."""
    return TableCell(code(short(sha256)) if sha256 else "–", "n")
