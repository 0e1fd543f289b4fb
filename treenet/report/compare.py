"""Comparison of runs: their differences, whether they are comparable, and their scores."""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treenet.config import OPERATIONAL, ArchitectureSection, ModelConfig, TreeAttentionConfig, flatten
from treenet.data.input_kinds import TREES
from treenet.data.splits import read_references
from treenet.evaluation.bootstrap import Comparison, compare_systems
from treenet.models import ARCHITECTURES
from treenet.report.report_inputs import ReportRun, own_index
from treenet.runs.result_provenance import ResultStatus
from treenet.tasks.learning import say_unlearned, why_unlearned
from treenet.tasks.translation_metrics import METRIC_TITLES, needed_tokenizer
from treeproc.common.messages import tell
from treeproc.common.settings import differences, is_below
from treeproc.shards.store import fingerprint_of, side_of

# The values of sections that a run does not record: its architecture does not read them.
_DEFAULTS = {
    f"model.{name}.{key}": value
    for name, section in ModelConfig()
    if isinstance(section, ArchitectureSection)
    for key, value in flatten(section.model_dump(mode="json")).items()
}
# The model, the search (in the notes of a table), the updates, and what changes no result.
_NAMED_ELSEWHERE = ("data", "model", "decoding", "max_steps", *OPERATIONAL)
_DROPOUT = re.compile(r"model\.\w*drop\w*")  # of all architectures
_NO_METRIC = ("num_examples", "seed")


def settings_of(runs: Sequence[ReportRun]) -> tuple[dict[str, list], dict[str, object]]:
    """Return (settings that differ, one value a run; settings that all runs share). A setting that a run lacks is None."""
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key != "data"]
    values = {key: [one.get(key, _DEFAULTS.get(key)) for one in flat] for key in keys}
    differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    return differing, {key: values[key][0] for key in keys if key not in differing}


def choose_baseline(runs: Sequence[ReportRun], name: str | None) -> ReportRun | None:
    """Return the run of that name; without one, the first Transformer, else the first."""
    named = [run for run in runs if run.name == name]
    plain = [run for run in runs if run.config["model"].get("name") == "transformer"]
    return next(iter((*named, *plain, *runs)), None)


def reads_trees(run: ReportRun) -> bool:
    found = ARCHITECTURES.get(run.config["model"].get("name"))
    return found is not None and found.encoder.reads is TREES


def side_of_run(run: ReportRun) -> str | None:
    """Return the side of the text that the run reads; None if its data set is not there."""
    index = own_index(run)
    return None if index is None else side_of(index)


def warnings(runs: Sequence[ReportRun], baseline: ReportRun) -> list[str]:
    """Return differences that make runs hard to compare with the baseline, one sentence each; none if only the model differs."""
    out = []
    for run in runs:
        if run is baseline:
            continue
        # Other trees may have other labels, and so another vocabulary with the same pieces.
        known = "pieces_fingerprint" in run.fingerprints and "pieces_fingerprint" in baseline.fingerprints
        pieces = ("pieces_fingerprint", "other pieces") if known else ("vocab_fingerprint", "another vocabulary")
        for key, what, so in (
            ("text_fingerprint", "other text", ", so do not compare the two"),
            (*pieces, ", so losses and batches differ too"),
            ("tree_fingerprint", "other trees over its text", ""),
        ):
            if key in run.fingerprints and key in baseline.fingerprints and run.fingerprints[key] != baseline.fingerprints[key]:
                out.append(f"{run.name} was trained on {what} than {baseline.name}{so}.")
        sides = [side_of_run(one) for one in (run, baseline)]
        if None not in sides and sides[0] != sides[1]:
            out.append(
                f"{run.name} reads the {sides[0]} side of its text, {baseline.name} the {sides[1]}, so do not compare the two."
            )
        own, other = flatten(run.config), flatten(baseline.config)
        differing = (key for key in own | other if own.get(key) != other.get(key))
        changed = [key for key in differing if _DROPOUT.fullmatch(key) or not is_below(key, _NAMED_ELSEWHERE)]
        batches = [key for key in changed if key == "seed" or key.startswith("batch.")]
        settings = [key for key in changed if key not in batches]
        for what, keys in (("saw other batches", batches), ("has other settings", settings)):
            if keys:
                listed = ", ".join(f"{key} is {own.get(key, 'the default')}, not {other.get(key, 'the default')}" for key in keys)
                out.append(f"{run.name} {what} than {baseline.name}: {listed}.")
        if run.step != baseline.step:
            out.append(f"{run.name} was trained for {run.step:,} updates, {baseline.name} for {baseline.step:,}.")
    return out


def speed(run: ReportRun) -> float | None:
    """Return the median of target tokens a second."""
    rates = [line["tokens_per_s"] for line in run.metrics if line["event"] == "train" and line.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


@dataclass
class ScoreRow:
    """One result of a run on a split, and its test against the baseline of the table."""

    run: str
    result: str
    record: dict
    values: dict[str, float]
    status: ResultStatus = field(default_factory=ResultStatus)
    tests: dict[str, Comparison] = field(default_factory=dict)

    def name(self, split: str) -> str:
        """Return the name of the result beside its run: `test.untrained` -> `untrained`; and its status."""
        rest = self.result.removeprefix(split).lstrip(".").replace("_", " ").replace(".", ", ")
        notes = ", ".join(filter(None, (rest, self.status.mark)))
        return f"{self.run} ({notes})" if notes else self.run

    @property
    def unlearned(self) -> str:
        """Why the model learned nothing; empty if it learned something."""
        return why_unlearned(self.record)

    @property
    def more_references(self) -> str | None:
        """The fingerprint of the references beside those of the data set; None if there are none."""
        return self.record.get("more_references_fingerprint")


@dataclass
class ScoreTable:
    """Results on one split of one text. `notes` are reasons why rows have no test, and differences beside the model.

    `references` is the fingerprint of their references; empty if it is not known.
    """

    split: str
    text: str
    metrics: list[str]
    rows: list[ScoreRow]
    baseline: ScoreRow | None = None
    notes: list[str] = field(default_factory=list)
    references: str = ""

    def signatures(self) -> dict[str, list[str]]:
        """Return the different signatures of each metric."""
        found = {
            metric: dict.fromkeys(row.record[name] for row in self.rows if (name := f"{metric}_signature") in row.record)
            for metric in self.metrics
        }
        return {metric: list(signatures) for metric, signatures in found.items() if signatures}


def metric_values(record: dict) -> dict[str, float]:
    """Return every number of a score that is a metric."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NO_METRIC
    }


def score_tables(runs: Sequence[ReportRun], baseline: ReportRun | None, num_samples: int) -> list[ScoreTable]:
    """Make tables by split, text and references, in the order of the runs.

    Every result is tested against the baseline's on that split. One text has two sides, so it can have two lists of references.
    """
    tables: dict[tuple[str, str, str], ScoreTable] = {}
    for run in runs:
        for result, record in run.scores.items():
            split, text = record.get("split", result), (record.get("data") or {}).get("text_fingerprint", "")
            references = record.get("references_fingerprint", "")
            table = tables.setdefault((split, text, references), ScoreTable(split, text, [], [], references=references))
            row = ScoreRow(run.name, result, record, metric_values(record), run.statuses[result])
            table.rows.append(row)
            table.metrics += [name for name in row.values if name not in table.metrics]
            if run is baseline and result == split:
                table.baseline = row
    for table in tables.values():
        _test(table, {run.name: run for run in runs}, num_samples)
        table.notes += _notes(table, runs)
    return list(tables.values())


def table_of(tables: Sequence[ScoreTable], split: str) -> ScoreTable | None:
    """Return the table of a split: the one with the baseline if there are several texts or references."""
    found = [table for table in tables if table.split == split]
    return next((table for table in found if table.baseline), found[0] if found else None)


def _test(table: ScoreTable, runs: dict[str, ReportRun], num_samples: int) -> None:
    if table.baseline is None or len(table.rows) < 2:
        return
    if (found := references_of(table, runs.values())) is None:
        table.notes.append(f"No tests: no data set of a run has the references of {table.split} any more.")
        return
    systems = [(row, runs[row.run].translations.get(row.result, [])) for row in table.rows]
    base = next(lines for row, lines in systems if row is table.baseline)
    if why := _why_untested(table.baseline, base, found[1]):
        table.notes.append(f"No tests: {why[1]}")
        return
    for row, lines in systems:
        if why := _why_untested(row, lines, found[1]):
            table.notes.append(f"{row.run}, {row.result}: no test, because {why[0]}.")
        elif row is not table.baseline:
            tell(f"paired bootstrap: {row.run}, {row.result}, against {table.baseline.run}")
            tokenizer = needed_tokenizer([table.baseline.record, row.record])
            row.tests = compare_systems(base, lines, found[1], num_samples, tokenizer=tokenizer)


def _why_untested(row: ScoreRow, lines: list[str], references: list[str]) -> tuple[str, str] | None:
    """Return why a result has no test, and why a table has none if the result is its baseline."""
    if row.status.changed:
        return "it is stale", f"the scores of {row.run} are stale."
    if row.more_references:
        why = f"the scores of {row.run} are of more references. evaluate --compare takes them."
        return "its scores are of more references", why
    if not lines or len(lines) != len(references):
        changed = "are missing, or have changed since they were scored"
        return f"its translations {changed}", f"the translations of {row.run} {changed}."
    return None


def references_of(table: ScoreTable, runs: Iterable[ReportRun]) -> tuple[ReportRun, list[str]] | None:
    """Return the first run whose data set exists and has the table's text and references, and these references."""
    for run in (run for run in runs if has_text(run, table)):
        lines = read_references(run.data, table.split)
        if table.references in ("", fingerprint_of(lines)):
            return run, lines
    return None


def has_text(run: ReportRun, table: ScoreTable) -> bool:
    """Return whether the run's data set is there and has the sentences of the table."""
    index = own_index(run)
    return index is not None and index.get("text_fingerprint") == table.text and table.split in index["totals"]


# The fingerprint of a data set that decides which sentences are in a bucket.
_BUCKETS_BY = {"words": "parsed_fingerprint", "depth": "fingerprint", "parse_score": "parsed_fingerprint"}


def _in_other_buckets(table: ScoreTable, kind: str) -> list[int]:
    """Return the numbers of rows whose data set puts other sentences into the buckets than that of the first row."""
    scored = [number for number, row in enumerate(table.rows) if kind in row.record.get("buckets", {})]
    data = {number: (table.rows[number].record.get("data") or {}).get(_BUCKETS_BY[kind]) for number in scored}
    known = [number for number in scored if data[number] is not None]
    return [number for number in known if data[number] != data[known[0]]]


def _notes(table: ScoreTable, runs: Sequence[ReportRun]) -> Iterator[str]:
    """Yield what makes rows hard to compare, and what was learned or scored in part."""
    yield from say_unlearned({f"{row.run}, {row.result}": row.unlearned for row in table.rows if row.unlearned})
    rows = [row for row in table.rows if isinstance(row.record.get("decoding"), dict)]
    for row in rows[1:]:
        changed = differences(rows[0].record["decoding"], row.record["decoding"])
        if changed := [line for line in changed if not line.startswith("max_tokens:")]:
            listed = "; ".join(changed).replace(" -> ", ", now ")
            yield f"{row.run}, {row.result}: decoded with other settings than {rows[0].run}, {listed}."
    for metric, signatures in table.signatures().items():
        if len(signatures) > 1:
            title = METRIC_TITLES.get(metric, metric)
            yield f"Do not compare the values of {title}: their signatures differ: {', '.join(signatures)}."
    for run in runs:
        model = ARCHITECTURES.get(run.config["model"].get("name"))
        if run.agreement and model and model.encoder.reads.constituents and any(row.run == run.name for row in table.rows):
            yield f"{run.name} has {run.trees} trees: {run.agreement}."
    for kind in _BUCKETS_BY:
        for row in (table.rows[number] for number in _in_other_buckets(table, kind)):
            yield f"{row.run}, {row.result}: no scores by {kind}; its data set has other sentences in a bucket."


def ablations(runs: Sequence[ReportRun]) -> list[tuple[str, ReportRun]]:
    """List Table 3: (name of the variant, run) of runs that differ in `model.tree` alone; nothing if there are fewer than two."""
    groups: dict[str, dict[str, ReportRun]] = {}
    for run in filter(reads_trees, runs):
        flat = flatten(run.config)
        own = {key: value for key, value in flat.items() if not key.startswith("model.tree.") and key not in OPERATIONAL}
        rest = {key: value for key, value in own.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
        groups.setdefault(repr((sorted(rest.items(), key=str), run.fingerprints)), {}).setdefault(variant(run), run)
    largest = max(groups.values(), key=len, default={})
    return sorted(largest.items(), key=lambda item: (len(item[0].split(" – ")), item[0])) if len(largest) > 1 else []


def variant(run: ReportRun) -> str:
    """Name a tree model as in Table 3, by what its settings take from the defaults."""
    defaults, names = TreeAttentionConfig().model_dump(), ["Tree Transformer"]
    for key, value in run.config["model"].get("tree", {}).items():
        if value != defaults.get(key):
            short = {"hierarchical_embeddings": "HierEmb", "subtree_mask": "SubMask"}.get(key)
            names.append(short if short and value is False else f"{key} = {value}")
    return " – ".join(names)


def comparable_buckets(table: ScoreTable) -> dict[str, dict[int, list[dict]]]:
    """Return the scores by kind of bucket, such as `words`, and by number of row, of rows with the same sentences in it."""
    found = {}
    for kind in _BUCKETS_BY:
        others = _in_other_buckets(table, kind)
        of_rows = {number: row.record.get("buckets", {}).get(kind, []) for number, row in enumerate(table.rows)}
        found[kind] = {number: entries for number, entries in of_rows.items() if entries and number not in others}
    return {kind: of_rows for kind, of_rows in found.items() if of_rows}
