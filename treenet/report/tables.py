"""Cells and tables that only pages have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from treenet.report.report_inputs import ReportRun
from treenet.runs.result_provenance import short
from treenet.tasks.scores import score_columns
from treenet.tasks.tables import NONE, Column, numbers


def fact_columns(title: str, names: Iterable[str], facts: Mapping[str, Iterable[str]]) -> list[Column]:
    """Return the columns of a table with a row for each fact, and a column for each name."""
    columns = zip(names, zip(*facts.values(), strict=True), strict=True)
    return [Column(title, list(facts)), *(Column(name, cells, "n") for name, cells in columns)]


def results_with(score: str, runs: Iterable[ReportRun]) -> list[tuple[ReportRun, str, dict]]:
    """Return run, name and entry of every result that has a score."""
    return [(run, result, entry) for run in runs for result, entry in run.scores.items() if score in entry]


# What a result of minimal pairs has of its good and bad sentences together.
_OF_BOTH = ("nll", "perplexity", "word_perplexity", "perplexity_given_tree", "pseudo_perplexity")


def result_columns(results: Sequence[tuple[ReportRun, str, dict]], counts: str = "examples") -> list[Column]:
    """Return the table of results with all their scores; empty without results. `counts` names the examples."""
    columns = [
        Column("run", [run.name for run, *_ in results]),
        Column("result", list(_names_of(results))),
        numbers(counts, [entry.get("num_examples") for *_, entry in results]),
    ]
    entries = [
        {name: entry[name] for name in entry if name not in _OF_BOTH} if "pairs_fingerprint" in entry else entry
        for *_, entry in results
    ]
    return columns + score_columns(entries) if results else []


def _names_of(results: Sequence[tuple[ReportRun, str, dict]]) -> Iterator[str]:
    """Yield the names of results with their marks. Data sets, and files of pairs, may differ below one name."""
    first = dict[str, tuple[str, str | None]]()
    for run, result, entry in results:
        data = entry.get("data")
        of_data = data.get("text_fingerprint") if isinstance(data, dict) and not result.startswith("surprisal") else None
        of = entry.get("pairs_fingerprint", of_data)
        one, of_one = first.setdefault(result, (run.name, of))
        yield run.statuses[result].marked(result) + (f" (of other data than that of {one})" if of != of_one else "")


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def show_hash(sha256: str | None) -> str:
    """Return the first digits of a hash, or a dash."""
    return code(short(sha256)) if sha256 else NONE
