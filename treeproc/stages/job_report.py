"""The report of a preprocessing job: notices, lists of dropped and unparsed lines, and the sizes of the data set."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import numpy as np

from treeproc.common.cache import find_changed
from treeproc.common.files import atomic_output, file_sha256
from treeproc.common.storage import AnyPath
from treeproc.parsers.config import NO_PARSER, ParserConfig, is_fallback
from treeproc.parsers.given import TAG
from treeproc.readers import Format
from treeproc.shards.schema import UNANALYSED, UNKNOWN_LABEL
from treeproc.shards.shard import Shard
from treeproc.shards.store import (
    Index,
    ShardRecord,
    class_names,
    describe_agreement,
    describe_trees,
    kept_shapes,
    read_index,
    stage_folder,
)
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.text_warnings import is_noticed
from treeproc.subwords import LabelVocab
from treeproc.trees.dependency_trees import unread_names

logger = logging.getLogger(__name__)

DROPPED = "dropped.tsv"
FALLBACKS = "fallbacks.tsv"
_STATUS_COLUMNS = {"source": "parse_status", "target": "target_parse_status"}
_STATUS_COUNTS = ("status.", "target_status.")


def tab_separated(rows: Iterable[tuple]) -> bytes:
    """Return one line a row."""
    return "".join("\t".join(map(str, row)) + "\n" for row in rows).encode()


@contextmanager
def line_list(path: AnyPath, *columns: str) -> Iterator[IO[bytes]]:
    """Open a list with a header, complete or not at all. Its rows are `tab_separated`. Raises UserError when the disk refuses."""
    with atomic_output(path) as file:
        file.write(tab_separated([columns]))
        yield file


def has_files(folder: AnyPath, index: dict) -> bool:
    """Return whether the lists that an index names are there and complete."""
    return all((path := folder / name).exists() and file_sha256(path) == sha256 for name, sha256 in index["files"].items())


def write_fallbacks(folder: AnyPath, records: Sequence[ShardRecord]) -> dict[str, str]:
    """List the lines of a parsed stage that no parser could analyse, with side and `parse_status`; returns name and hash.

    Numbers of lines are those that `inspect --line` takes. Lines for which no parser was asked are not listed. Only shards that
    have something to list are read, one at a time.
    """
    with line_list(folder / FALLBACKS, "split", "line", "side", "parse_status") as lines:
        for record in records:
            if any(is_fallback(name.partition("status.")[2]) for name in record.counts if name.startswith(_STATUS_COUNTS)):
                lines.write(tab_separated((record.split, number + 1, *rest) for number, *rest in _fallbacks(folder, record)))
    return {FALLBACKS: file_sha256(folder / FALLBACKS)}


def _fallbacks(folder: AnyPath, record: ShardRecord) -> Iterator[tuple[int, str, str]]:
    """Yield (example_id, side, parse_status) of every line of a shard that has a fallback."""
    for views in Shard(folder, record).columns:
        sides = {side: views[name].to_pylist() for side, name in _STATUS_COLUMNS.items() if name in views}
        for row, number in enumerate(views["example_id"].tolist()):
            for side, statuses in sides.items():
                if is_fallback(statuses[row]):
                    yield number, side, statuses[row]


def write_dropped(
    folder: AnyPath, parsed: AnyPath, records: Sequence[ShardRecord], whole: Sequence[ShardRecord], index: Index | None
) -> dict[str, str]:
    """List the examples that the encoded stage `folder` drops for the scores of their parses; returns name and hash.

    Numbers of lines are as in `write_fallbacks`. The shards `whole` of the parsed stage have all examples. A list that the
    finished `index` names stays.
    """
    known = index.get("files", {}).get(DROPPED) if index is not None and records == index.records() else None
    if known is None or find_changed(folder, {DROPPED: known}):
        with line_list(folder / DROPPED, "split", "line", "reason") as lines:
            for record, every in zip(records, whole, strict=True):
                if record.counts.get("dropped.parse_score"):
                    gone = np.setdiff1d(Shard(parsed, every).ids, Shard(folder, record).ids)
                    lines.write(tab_separated((record.split, number + 1, "parse_score") for number in gone.tolist()))
    return {DROPPED: file_sha256(folder / DROPPED)}


_LISTED = 4
_CLASSES = 10


def dropped(records: Iterable[ShardRecord]) -> dict[str, dict[str, int]]:
    """Count dropped rows by split and reason."""
    out: dict[str, dict[str, int]] = {}
    for record in records:
        counts = out.setdefault(record.split, {})
        for name, count in record.counts.items():
            if name.startswith("dropped."):
                reason = name.removeprefix("dropped.")
                counts[reason] = counts.get(reason, 0) + count
    return out


def parse_statuses(parsed: AnyPath, split: str, side: str) -> dict[str, int]:
    """Count examples by parse_status of a side; empty if the parsed stage is not there: training does not need it."""
    if not (parsed / "index.json").exists():
        return {}
    totals = read_index(parsed)["totals"].get(split, {})
    prefix = "status." if side == "source" else "target_status."
    return {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}


def fallbacks(counts: dict[str, int]) -> int:
    """Count the examples that got a flat tree because the parser could not analyse them."""
    return sum(n for name, n in counts.items() if name.startswith("status.") and is_fallback(name.removeprefix("status.")))


def reasons(counts: dict[str, int]) -> str:
    """Return counts by name, as a person reads them."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"


def tree_notes(total: dict[str, int]) -> list[str]:
    """Describe counts from making the trees of a split: lifted crossing arcs, what control trees share with the lines' own."""
    notes = []
    if "lifted_arcs" in total:
        notes.append(f"crossing arcs: {total['lifted_arcs']:,} lifted, in {total['lifted_sentences']:,} sentences")
    if "tokenizer_pieces" in total:
        share = total["crossing_pieces"] / max(1, total["tokenizer_pieces"])
        notes.append(
            f"tokenizer: {total['crossing_pieces']:,} of {total['tokenizer_pieces']:,} pieces ({share:.2%}) cross a border of "
            f"words, in {total['lines_with_crossing']:,} lines, and their words are cut by themselves; "
            f"unknown pieces: {total['unknown_pieces']:,}, of them for words without a piece: {total['words_without_piece']:,}"
        )
    if "lines_without_partner" in total:
        notes.append(
            "shuffled trees: lines that keep their own tree, because no other line has as many words: "
            f"{total['lines_without_partner']:,}"
        )
    if "lines_with_surplus" in total:
        notes.append(
            f"other shapes: lines that keep their own shape: {total.get('kept_shapes', 0):,} ({kept_shapes(total):.1%}); lines "
            f"whose shape lost nodes, because no other shape has as many words and nodes: {total['lines_with_surplus']:,}"
        )
    if total.get("inner_nodes"):
        kept = total["kept_labels"] / total["inner_nodes"]
        notes.append(f"permuted labels: {kept:.1%} of the nodes below a root have their own label by chance")
    if agreement := describe_agreement({"totals": {"": total}}):
        notes.append(f"control trees: {agreement}")
    return notes


def class_notes(text: AnyPath, split: str, index: Mapping) -> list[str]:
    """Describe how many examples, or pairs, of a split each class has.

    `text` is the folder of the text stage, which may be elsewhere, and `index` that of the encoded stage.
    """
    if "num_classes" not in index or not (text / "index.json").exists():
        return []
    total, names, rows_each = index["totals"][split], class_names(index), 2 if index.get("pairs") else 1
    if not any(name.startswith("class.") for name in total):  # the encode stage drops no example
        total = read_index(text)["totals"].get(split, {})
    counts = {name: total.get(f"class.{number}", 0) // rows_each for number, name in enumerate(names)}
    rows, missing = sum(counts.values()), [name for name, count in counts.items() if not count]
    shown = sorted(counts, key=lambda name: -counts[name])[:_CLASSES]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    notes = [f"classes: {', '.join(f'{name} {counts[name]:,} ({counts[name] / max(1, rows):.1%})' for name in shown)}{more}"]
    if missing and split == "train":
        notes.append(f"no example of {', '.join(missing[:_CLASSES])}{', ...' if len(missing) > _CLASSES else ''}")
    return notes


def say_unlearned_classes(records: Iterable[ShardRecord], names: Sequence[str]) -> None:
    """Warn of classes that other splits have, but not train: `hold_out` may have taken the only example."""
    splits: dict[str, set[str]] = {}
    for record in records:
        splits.setdefault(record.split, set()).update(name for name in record.counts if name.startswith("class."))
    learned = splits.pop("train", None)
    if learned is None:
        return
    for split, found in splits.items():
        if missing := [name for number, name in enumerate(names) if f"class.{number}" in found - learned]:
            logger.warning(
                "warning: train has no example of %s, but %s has; give train examples of all classes, or leave these out",
                _first(missing), split,
            )  # fmt: skip


def summary(index: dict, out: AnyPath) -> str:
    """Return the summary at the end of the job."""
    lines = [f"data set in {out}: {index['num_pieces']:,} pieces, {index['num_labels']} labels, trees: {describe_trees(index)}"]
    for split, total in index["totals"].items():
        pairs = "tgt_pieces" in index["columns"]
        rows = "pairs" if pairs else "sentences of pairs" if index.get("pairs") else "examples"
        names = {"rows": rows, "leaves": "leaves", "nodes": "nodes"}
        names |= {"tgt_pieces": "target pieces"} if pairs else {}
        sizes = [f"{total[key]:,} {name}" for key, name in names.items()]
        lines.append(f"  {split}: {', '.join(sizes)}; dropped: {reasons(index['dropped'].get(split, {}))}")
        if statuses := parse_statuses(stage_folder(out, "parsed"), split, index["tree_settings"]["side"]):
            lines.append(
                f"    parse_status: {reasons(statuses)}{', because parser.name is words' if NO_PARSER in statuses else ''}"
            )
        notes = class_notes(stage_folder(out, "text"), split, index)
        lines += [f"    {note}" for note in [*notes, *tree_notes(total)]]
    for stage, name, what in (
        ("text", DROPPED, "dropped"),
        ("parsed", FALLBACKS, "parsed in part, or not parsed"),
        ("encoded", DROPPED, "dropped by tree.min_parse_score"),
    ):
        if (path := stage_folder(out, stage) / name).exists() and _has_rows(path):
            lines.append(f"  lines that were {what}: {path}")
    return "\n".join(lines)


def _has_rows(path: AnyPath) -> bool:
    """Return whether a list has more than its header."""
    with path.open("rb") as file:
        file.readline()
        return bool(file.readline())


# Names of what no parser has analysed or read, and CoreNLP's relation of a root.
_NO_NAMES = {UNKNOWN_LABEL, UNANALYSED, TAG, "tag", "ROOT"}


def say_unread_names(config: TreeConfig, vocab: AnyPath) -> None:
    """Warn about relations and tags of the training split that the phrases of its arcs do not know."""
    relations, tags = (
        set(LabelVocab.load(path).names) - _NO_NAMES if (path := vocab / name).exists() else set()
        for name in ("deprels.txt", "pos_tags.txt")
    )
    of_arcs, of_words = unread_names(relations, tags, config.phrases, config.phrase_labels)
    if of_arcs:
        logger.warning(
            "warning: tree.phrases=layered reads the relations of Universal Dependencies, but the arcs have others (%s); set "
            "tree.phrases=flat", _first(of_arcs)
        )  # fmt: skip
    reads_tags = config.phrases == "layered" or config.phrase_labels == "upos"
    if of_words or (reads_tags and not tags):
        logger.warning(
            "warning: phrases follow from universal tags or those of the Penn Treebank, but the words have %s; set "
            "tree.phrases=flat tree.phrase_labels=deprel", f"others ({_first(of_words)})" if of_words else "none"
        )  # fmt: skip


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _CLASSES} more" if len(names) > _CLASSES else ""
    return f"{', '.join(names[:_CLASSES])}{more}"


# Kinds of notices that need no more than a line: what stands in the text, and what to do.
_TOLD = {
    "escapes": ("a parser reads escapes such as &amp; as words", "write the characters themselves into the files"),
    "attached": (
        "does not look tokenised, but tokenized is moses: final marks without a blank before them", "set tokenized: none"
    ),
    "subwords": ("looks cut into subwords, whose marks (▁ or ##) are read as text", "join them to words in the files"),
    "quoted": ("quoted as in CSV, with quotation marks that are read as text", "undo the quoting in the files"),
    "decomposed": (
        "letters and their marks as separate characters, such as e + U+0301, which parsers and pieces do not take for one letter",
        "normalization: nfc joins them",
    ),
    "miscoded": ("UTF-8 that was read as cp1252, such as Ã¼ for ü", "convert the files again, from their first form"),
    "entities": ("HTML entities, such as &uuml;", "write the characters themselves into the files"),
    "markup": ("HTML tags, which are read as text", "remove them from the files"),
    "codes": (r"escapes such as \u00fc, which are read as text", "write the characters themselves into the files"),
    "percent": ("escapes of URLs, such as %20 or %C3%BC", "write the characters themselves into the files"),
    "base64": ("text in base64", "decode the files"),
    "columns": ("looks like columns (||| or tabs), which are read as text", "give files with the text alone"),
    "lost": ("question marks in the place of letters, such as M?nchen", "convert the files again, from their first form"),
    "scripts": ("words of Latin and Cyrillic letters, which look alike", "write each word in one script"),
    "control": (
        "control characters: translate and classify leave such lines empty, and evaluate does not", "remove them from the files"
    ),
    "wrapped": (
        "sentences go on in the next line, but the job reads each part as a sentence", "join the lines of each paragraph"
    ),
    "equal": ("the target is the source", "check the files, unless copies are meant"),
    "constant": ("one line again and again", "check the files, unless this is meant"),
    "unrelated": (
        "source and target seem not to belong together: the targets of other lines share as much with a source as its own does",
        "check the order of the lines in both files",
    ),
}  # fmt: skip
_KINDS = (*_TOLD, "tokens", "language", "sentences", "placeholders", "leaks", "shifted")
_OF_SETTINGS = ("attached", "decomposed", "sentences")  # kinds whose hint is a setting


def say_notices(notices: dict, parsers: Mapping[str, ParserConfig | None], form: Format, lender: AnyPath | None = None) -> None:
    """Log the lines of `notice_lines`."""
    for line in notice_lines(notices, parsers, form, lender):
        logger.warning("warning: %s", line)


def notice_lines(
    notices: dict, parsers: Mapping[str, ParserConfig | None], form: Format, lender: AnyPath | None = None
) -> list[str]:
    """Return the notices about a text, one line a kind: place and count, an example, a hint.

    `notices` are those of the index of the text stage, `parsers` those of the sides. The settings are those of the data set
    `lender`, if there is one, and no hint names them.
    """
    as_there = f"write the lines as those of {lender}" if lender else ""
    sides = [(split, side, facts) for split, by_side in notices.items() for side, facts in by_side.items()]
    found = {kind: [(split, side, facts) for split, side, facts in sides if is_noticed(kind, facts)] for kind in _KINDS}
    split_already = {side for side, parser in parsers.items() if parser and parser.split_sentences}
    found["sentences"] = [one for one in found["sentences"] if one[1] not in split_already]
    lines = []

    def add(kind: str, what: str, do: str = "") -> None:
        do = as_there if as_there and kind in _OF_SETTINGS else do
        if found[kind]:
            lines.append("; ".join([f"{what}: {_where(kind, found[kind])}", _example(kind, found, form), *([do] if do else [])]))

    if found["tokens"]:
        escapes = f"; escapes such as &apos; or @-@: {_where('escapes', found['escapes'], 2)}" if found["escapes"] else ""
        do = (as_there or "set tokenized: moses") if not form.columns else "undo the tokens in the files"
        lines.append(
            "looks tokenised, but tokenized is none: blanks before punctuation: "
            f"{_where('tokens', found['tokens'], 2)}{escapes}; {_example('escapes' if escapes else 'tokens', found, form)}; {do}"
        )
    else:
        add("escapes", *_TOLD["escapes"])
    for kind, told in _TOLD.items():
        if kind != "escapes":
            add(kind, *told)
    for by in dict.fromkeys(facts["shifted"]["by"] for *_, facts in found["shifted"]):
        ones = [one for one in found["shifted"] if one[2]["shifted"]["by"] == by]
        lines.append(
            f"source and target seem shifted: the target of a source stands {abs(by)} {'line' if abs(by) == 1 else 'lines'} "
            f"{'before' if by < 0 else 'after'} it: {_where('shifted', ones)}; {_example('shifted', {'shifted': ones}, form)}; "
            "look for a line that one file lacks"
        )
    for code in dict.fromkeys(facts["language"]["seems"] for *_, facts in found["language"]):
        ones = [one for one in found["language"] if one[2]["language"]["seems"] == code]
        language = (parser := parsers[ones[0][1]]) and parser.language
        lines.append(
            f"seems to be in another language ({code}) than the parser's ({language}): {_where('language', ones)}, of the lines "
            f"that were checked; {_example('language', {'language': ones}, form)}; remove such lines"
            f"{'' if lender else ', or choose a parser of their language'}"
        )
    names = {"source": "parser", "target": "target_parser"}
    settings = " and ".join(f"{names[side]}.split_sentences" for side in dict.fromkeys(one[1] for one in found["sentences"]))
    do = f"{settings}: true gives each sentence its own tree"
    add("sentences", "several sentences on a line, each line parsed as one", do)
    add("placeholders", "placeholders or subword marks, which a parser reads as words")
    what = "sources that are in valid or test too, except for case, punctuation and blanks"
    add("leaks", what, "" if form.has_pairs else "filters.drop_leaks: true drops them")
    return lines


def _where(kind: str, found: Sequence[tuple[str, str, dict]], most: int = _LISTED) -> str:
    """Return counts and shares by split and side, at most so many."""
    parts = []
    for split, side, facts in found[:most]:
        count, total = facts[kind]["count"], facts[kind].get("looked_at", facts["lines"])
        parts.append(f"{count:,} of {total:,} {'names' if side == 'class' else 'lines'} of {split} {side} ({count / total:.1%})")
    return ", ".join([*parts, *([f"and of {len(found) - most} more"] if len(found) > most else [])])


def _example(kind: str, found: Mapping[str, Sequence[tuple[str, str, dict]]], form: Format) -> str:
    """Return the first three lines of the first side. In few formats, each line is an example."""
    split, side, facts = found[kind][0]
    are_lines = form.ranges is not None and form.ranges.ends == "lines"
    unit = "name" if side == "class" else "line" if are_lines else "sentence" if form.has_pairs else "example"
    lines = [(facts[kind]["line"], facts[kind]["text"]), *facts[kind].get("more", ())]
    return f"for example {split} {side} {unit} {', '.join(f'{line:,}: {text!r}' for line, text in lines)}"


def noticed(notices: dict, split: str) -> str:
    """Return the notices about the lines of a split, in words."""
    parts = []
    for side, facts in notices.get(split, {}).items():
        counts = [f"{facts[kind]['count']:,} {kind}" for kind in facts if kind != "lines" and is_noticed(kind, facts)]
        parts += [f"{side}: {', '.join(counts)}"] if counts else []
    return "; ".join(parts) or "nothing"


def count_lines(records: Sequence[ShardRecord]) -> list[str]:
    """Count examples that stay, and those dropped by reason, one line a split."""
    rows: dict[str, int] = {}
    for record in records:
        rows[record.split] = rows.get(record.split, 0) + record.rows
    by_split = dropped(records)
    return [f"  {split}: {count:,} examples; dropped: {reasons(by_split[split])}" for split, count in rows.items()]
