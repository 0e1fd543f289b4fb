"""F1 of words by how often they stand in the training text, for every result of a table of scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from treenet.evaluation.buckets import FrequencyBucket, count_occurrences, score_by_frequency
from treenet.evaluation.evaluate import EvaluateSettings, tokenizer_of
from treenet.report.compare import ScoreTable, references_of
from treenet.report.report_runs import ReportRun
from treenet.tasks.translation_metrics import build_tokenizer
from treeproc.common.cache import prefetch
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import AT_ONCE
from treeproc.shards.records import ShardRecord
from treeproc.shards.shard import Shard
from treeproc.shards.store import read_index, stage_folder


@dataclass(frozen=True)
class Frequencies:
    """Scores by frequency on one table, or why there are none in `missing`. `rows` are places in the table."""

    missing: str = ""
    rows: tuple[int, ...] = ()
    buckets: tuple[FrequencyBucket, ...] = ()
    training_lines: int = 0
    tokenizer: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict:
        return asdict(self)


def score_frequencies(table: ScoreTable, runs: Sequence[ReportRun], say: Callable[[str], None]) -> Frequencies:
    """Score words by frequency. The counts are of all lines of the train split, on the side that models write."""
    there = references_of(table, runs)
    if there is None:
        return Frequencies(f"no data set of a run has the references of {table.split}")
    anchor, references = there
    data = anchor.data
    try:
        folder = stage_folder(data, "text")
        records = read_index(folder).records("train")
        size, total = sum(record.bytes for record in records), sum(record.rows for record in records)
    except UserError as error:  # the training text is of no other use to a report
        return Frequencies(str(error))
    if not records:
        return Frequencies("its data set has no training text")
    named, found = {run.name: run for run in runs}, []
    for place, row in enumerate(table.rows):
        lines = named[row.run].translations.get(row.result, ())
        if len(lines) == len(references) and not row.status.changed:
            found.append((place, lines))
    if not found:
        return Frequencies("the translations are missing, or have changed since they were scored")
    encoded = read_index(data / "encoded")
    lowercase = encoded.get("subword_settings", {}).get("lowercase", False)
    side = "source" if encoded.get("tree_settings", {}).get("side") == "target" else "target"
    tokenizer = tokenizer_of(data, EvaluateSettings())
    split = build_tokenizer(tokenizer)

    def words(line: str) -> list[str]:
        return split(line.lower() if lowercase else line).split()

    systems, expected = [[words(line) for line in lines] for _, lines in found], [words(line) for line in references]
    wanted = {word for lines in (*systems, expected) for line in lines for word in line}
    loaded = "" if isinstance(folder, Path) else f": {size / 1e6:,.1f} MB are read from {folder}"
    say(f"counting the words of {table.split} in the training text{loaded}")
    try:
        counts = count_occurrences(map(words, _training_lines(folder, records, side)), wanted)
    except UserError as error:
        return Frequencies(str(error))
    buckets = tuple(score_by_frequency(systems, expected, counts))
    return Frequencies("", tuple(place for place, _ in found), buckets, total, tokenizer, tuple(_shares(table, named)))


def _training_lines(folder: AnyPath, records: Sequence[ShardRecord], side: str) -> Iterator[str]:
    """Yield the lines of the training text. One shard is open at a time: there may be more than a process may map.

    Objects are read through the cache of local copies, which has a limit. Copies of the next ones are under way meanwhile.
    """
    for place, record in enumerate(records):
        if place % AT_ONCE == 0:
            prefetch((folder / one.name, one.sha256) for one in records[place : place + 2 * AT_ONCE])
        yield from (row[side] for row in Shard(folder, record).rows())


def _shares(table: ScoreTable, runs: dict[str, ReportRun]) -> Iterator[str]:
    for name in dict.fromkeys(row.run for row in table.rows):
        share = (runs[name].config.get("batch") or {}).get("fraction", 1.0)
        if share < 1:
            yield f"{name} was trained on a share of {share:g} of these lines."
