"""All sentences of a split with their translations and chrF, and F1 of words by how often they stand in the training text."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from treenet.data.splits import read_split
from treenet.evaluation.buckets import FrequencyBucket, count_occurrences, measure_sources, score_by_frequency
from treenet.report.compare import ScoreTable, has_text, reads_trees, references_of, table_of
from treenet.report.report_inputs import ReportRun, own_index
from treenet.tasks.translation_metrics import build_tokenizer, needed_tokenizer, sentence_chrf, tokenizer_of
from treeproc.common.cache import CopiesAhead
from treeproc.common.messages import tell
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import AT_ONCE
from treeproc.shards.records import ShardRecord
from treeproc.shards.schema import lower_case
from treeproc.shards.shard import Shard
from treeproc.shards.store import read_index, side_of, stage_folder

Value = TypeVar("Value")
# Bytes of the sentences in a page: 3,000 of 25 words with four translations. A browser filters them in an instant.
_MOST_BYTES = 4_000_000


@dataclass(frozen=True)
class Lines:
    """Columns over sentences. Every run that is scored on the split has a column of translations and one of chrF."""

    total: int  # of the split; there may be more than the columns have
    measured: str  # the run whose data set has the trees of `depth`
    baseline: int | None  # its place in `systems`
    systems: list[str]
    line: list[int]  # number in the input of the split, from 1
    words: list[int]  # of the source
    depth: list[int]  # of its tree
    source: list[str]
    reference: list[str]
    translations: list[list[str]]  # by system, then sentence
    chrf: list[list[float]]  # of the sentence alone, rounded to two places

    def changes(self) -> np.ndarray:
        """Return the largest difference in chrF to the baseline, of any system [sentences]; zeros without a baseline."""
        scores = np.array(self.chrf)
        if self.baseline is None:
            return np.zeros(len(self.line))
        return np.abs(scores - scores[self.baseline]).max(axis=0)

    def keep(self, rows: Sequence[int]) -> "Lines":
        """Keep the sentences `rows` alone."""
        return replace(
            self,
            line=_take(self.line, rows),
            words=_take(self.words, rows),
            depth=_take(self.depth, rows),
            source=_take(self.source, rows),
            reference=_take(self.reference, rows),
            translations=[_take(column, rows) for column in self.translations],
            chrf=[_take(column, rows) for column in self.chrf],
        )


def _take(column: Sequence[Value], rows: Sequence[int]) -> list[Value]:
    return [column[row] for row in rows]


def collect_lines(tables: Sequence[ScoreTable], runs: Sequence[ReportRun], split: str) -> Lines | None:
    """Collect the sentences of `split` with the translations of all runs that were scored on the baseline's text.

    None if no data set has the text, or no run has translations. Where they would take too many bytes, those stay
    on which a system differs most from the baseline; without a baseline, the first ones.
    """
    table = table_of(tables, split)
    there = references_of(table, runs) if table else None
    if table is None or there is None:
        return None
    anchor, references = there
    named = {row.run: row for row in table.rows if row.result == split and not row.status.changed}
    kept = {run.name: run.translations[split] for run in runs if run.name in named and split in run.translations}
    translations = {name: lines for name, lines in kept.items() if len(lines) == len(references)}
    if not translations:
        return None
    tell(f"chrF of every sentence of {split}")
    measured = next((run for run in runs if run.name in named and reads_trees(run) and has_text(run, table)), anchor)
    sizes = measure_sources(read_split(measured.data, "encoded", split))
    side = side_of(read_index(anchor.data / "encoded"))
    texts = list(read_split(anchor.data, "text", split))
    systems = list(translations)
    base = table.baseline.run if table.baseline else None
    lines = Lines(
        total=len(references),
        measured=measured.name,
        baseline=systems.index(base) if base in systems and len(systems) > 1 else None,
        systems=systems,
        line=[int(row["example_id"]) + 1 for row in texts],
        words=sizes["words"].tolist(),
        depth=sizes["depth"].tolist(),
        source=[row[side] for row in texts],
        reference=references,
        translations=list(translations.values()),
        chrf=[sentence_chrf(one, references).round(2).tolist() for one in translations.values()],
    )
    return _fit(lines, _MOST_BYTES)


def _fit(lines: Lines, most: int) -> Lines:
    order = np.argsort(-lines.changes(), kind="stable").tolist()
    texts = [lines.source, lines.reference, *lines.translations]
    sizes = [sum(len(json.dumps(text[row], ensure_ascii=False).encode()) + 10 for text in texts) for row in order]
    count = int(np.searchsorted(np.cumsum(sizes), most, side="right"))
    return lines if count >= len(order) else lines.keep(sorted(order[:count]))


@dataclass(frozen=True)
class Frequencies:
    """Scores by frequency on one table, or why there are none in `missing`. `rows` are places in the table."""

    missing: str = ""
    rows: tuple[int, ...] = ()
    buckets: tuple[FrequencyBucket, ...] = ()
    training_lines: int = 0
    tokenizer: str = ""
    notes: tuple[str, ...] = ()


def score_frequencies(table: ScoreTable, runs: Sequence[ReportRun]) -> Frequencies:
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
    side = "source" if side_of(encoded) == "target" else "target"
    tokenizer = needed_tokenizer([table.rows[place].record for place, _ in found]) or tokenizer_of(data)
    split = build_tokenizer(tokenizer)

    def words(line: str) -> list[str]:
        return split(lower_case(line) if lowercase else line).split()

    systems, expected = [[words(line) for line in lines] for _, lines in found], [words(line) for line in references]
    wanted = {word for lines in (*systems, expected) for line in lines for word in line}
    loaded = "" if isinstance(folder, Path) else f": {size / 1e6:,.1f} MB are read from {folder}"
    tell(f"counting the words of {table.split} in the training text{loaded}")
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
    with closing(CopiesAhead()) as copies:
        for place, record in enumerate(records):
            if place % AT_ONCE == 0:
                copies.begin((folder / one.name, one.sha256) for one in records[place : place + 2 * AT_ONCE])
            yield from (row[side] for row in Shard(folder, record).rows())


def _shares(table: ScoreTable, runs: dict[str, ReportRun]) -> Iterator[str]:
    for name in dict.fromkeys(row.run for row in table.rows):
        share = (runs[name].config.get("batch") or {}).get("fraction", 1.0)
        if share < 1:
            yield f"{name} was trained on a share of {share:g} of these lines."
        if low := (own_index(runs[name]) or {}).get("dropped", {}).get("train", {}).get("parse_score"):
            yield f"{name} was trained without {low:,} of these lines, whose parse_score is low."
