"""Pieces, labels, tags and dependency relations of the training split."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treeproc.common.files import atomic_write, file_sha256, remove_leftovers
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.rows import WordEnds
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED
from treeproc.shards.shard import Shard
from treeproc.shards.store import (
    OPTIONAL_VOCABULARY_FILES,
    PIECES_FILES,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
    ShardRecord,
    fingerprint_of,
)
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.run_jobs import Run, grouped, previous_index, run_here
from treeproc.subwords import LabelVocab, SubwordConfig, blank_separated, describe_characters, mark_boundaries, train_pieces
from treeproc.trees.arcs import plain_relation
from treeproc.trees.dependency_trees import PHRASE_LABELS
from treeproc.trees.flat_trees import BINARY_PREFIX, DOCUMENT_LABEL, normal_form, read_flat_trees
from treeproc.trees.spans import EMPTY_TAG

_NOTE = "vocab/fingerprint.txt"


class TrainSplit(NamedTuple):
    """The training split, and how a vocabulary is learned from it."""

    base: AnyPath  # holds the text and the parsed stage
    text: Sequence[ShardRecord]
    parsed: Sequence[ShardRecord]
    config: SubwordConfig
    tree: TreeConfig
    run: Run = run_here  # of the jobs that count words
    line_tags: Sequence[str] = ()  # in front of lines (`parser.tags`), each of them one piece


@dataclass
class VocabularyCounts:
    """Counts of the training split: words of the lines that are learned from, by side; labels, tags and relations of all trees.

    At most the words of `max_training_lines` lines are held.
    """

    words: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    labels: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=lambda: {UNANALYSED})
    deprels: set[str] = field(default_factory=set)

    def add_names(self, labels: Iterable[str], tags: Iterable[str], deprels: Iterable[str]) -> None:
        """Take up the names that stand in some trees."""
        self.labels.update(labels)
        self.tags.update(tags)
        self.deprels.update(deprels)


Row = TypeVar("Row", int, np.ndarray)


def _chosen_before(row: Row, num_rows: int, most: int) -> Row:
    """Count rows among the first `row` that words are learned from: `most` of all, spread evenly, however shards are cut."""
    return row * most // num_rows


class CountShards:
    """Counts text and parsed shards of the training split, which has `num_rows` rows."""

    def __init__(self, base: AnyPath, config: SubwordConfig, tree: TreeConfig, num_rows: int, most: int):
        self._base, self._joint, self._tree, self._num_rows, self._most = base, config.joint, tree, num_rows, most

    def __call__(self, shards: Sequence[dict]) -> dict:
        """Count all of them: `words` by side, of the rows that are learned from; `labels`, `tags`, `deprels` of the trees.

        A shard is given by its records, `text` and `parsed`, by the number of its first row, and by whether its trees are read.
        """
        counts = VocabularyCounts()
        for shard in shards:
            self._count(counts, **shard)
        names = {"labels": counts.labels, "tags": counts.tags, "deprels": counts.deprels}
        return {"words": counts.words} | {kind: sorted(found) for kind, found in names.items()}

    def _count(self, counts: VocabularyCounts, text: ShardRecord, parsed: ShardRecord, *, first: int, names: bool) -> None:
        lines, trees = Shard(self._base / "text", text), Shard(self._base / "parsed", parsed)
        for line_views, tree_views in zip(lines.columns, trees.columns, strict=True):
            edges, of_trees = tree_views[self._tree.parsed_columns[0]]
            self._count_words(counts.words, line_views, edges, of_trees, first)
            first += len(line_views["example_id"])
            if names:
                self._find_names(counts, tree_views)

    def _find_names(self, counts: VocabularyCounts, parsed: dict) -> None:
        brackets = read_flat_trees(parsed[self._tree.parsed_columns[1]][1])
        trees = normal_form(brackets, collapse_unary=False)
        counts.labels.update(trees.names[i] for i in np.unique(trees.labels))
        counts.tags.update(brackets.tag_names[i] for i in np.unique(brackets.tags))
        if self._tree.arcs_column in parsed:
            counts.deprels.update(pc.unique(parsed[self._tree.arcs_column][1]["deprel"]).to_pylist())

    def _count_words(self, counters: defaultdict[str, Counter], text: dict, edges: np.ndarray, words: dict, first: int) -> None:
        sides = [side for side in (self._tree.side, self._tree.other_side) if side in text]
        before = _chosen_before(np.arange(first, first + len(edges)), self._num_rows, self._most)
        chosen = np.diff(before) > 0
        if not chosen.any():
            return
        kept = np.repeat(chosen, np.diff(edges))
        ends = WordEnds(np.concatenate([[0], np.cumsum(np.diff(edges)[chosen])]), words["end_char"][kept])
        lines = {side: text[side].filter(pa.array(chosen)) for side in sides}
        lines[self._tree.side] = mark_boundaries(lines[self._tree.side], ends)
        for i, side in enumerate(sides):
            counts = blank_separated(lines[side]).value_counts()
            counter = counters["source" if self._joint or i == 0 else "target"]
            values, numbers = counts.field("values").to_pylist(), counts.field("counts").to_pylist()
            for word, number in zip(values, numbers, strict=True):
                counter[word] += number


def _names_of(record: ShardRecord, tree: TreeConfig, has_arcs: bool) -> tuple[list[str], list[str], list[str]] | None:
    """Return the labels, tags and relations that the sidecar of a parsed shard counts; None if the shard itself must be read.

    It is None if the leaves are of the target side, whose trees no sidecar counts.
    """
    found: dict[str, list[str]] = {"label": [], "tag": [], "deprel": []}
    for key in record.counts:
        kind, _, name = key.partition(".")
        if kind in found:
            found[kind].append(name)
    has_words = record.counts.get("words", 1) > 0
    complete = found["label"] and found["tag"] and (found["deprel"] or not has_arcs)
    # Trees with empty elements are counted before these go.
    if tree.side == "target" or EMPTY_TAG in found["tag"] or (has_words and not complete):
        return None
    return found["label"], found["tag"], found["deprel"]


def _bare(record: ShardRecord) -> ShardRecord:
    return replace(record, counts={}, longest={})


def sampled_rows(text: Sequence[ShardRecord], config: SubwordConfig, has_both_sides: bool) -> int:
    """Return the number of rows of the training split that words are learned from; 0 if a tokenizer has its pieces."""
    most = 0 if config.tokenizer else max(1, config.max_training_lines // (1 + has_both_sides))
    return min(sum(record.rows for record in text), most)


def count_vocabulary(split: TrainSplit) -> VocabularyCounts:
    """Return the counts of the training split.

    Only shards are read that have rows of the sample, or whose sidecar does not name labels, tags and relations.
    """
    base, text, parsed, config, tree, run, _ = split
    counts = VocabularyCounts()
    columns = [Shard(base / stage, records[0]).schema.names for stage, records in (("text", text), ("parsed", parsed)) if records]
    num_rows = sum(record.rows for record in text)
    if not num_rows:
        return counts
    most = sampled_rows(text, config, {"source", "target"} <= set(columns[0]))
    shards, first = [], 0
    for lines, trees in zip(text, parsed, strict=True):
        names = _names_of(trees, tree, tree.arcs_column in columns[1])
        if names is not None:
            counts.add_names(*names)
        last = first + lines.rows
        if names is None or _chosen_before(first, num_rows, most) < _chosen_before(last, num_rows, most):
            shard = {"text": _bare(lines), "parsed": _bare(trees), "first": first, "names": names is None}
            shards.append((lines.rows, shard))
        first = last

    arguments = {"base": base, "config": config, "tree": tree, "num_rows": num_rows, "most": most}
    for _, found in run(CountShards, arguments, [{"shards": group} for group in grouped(shards)]):
        for side, words in found["words"].items():
            counts.words[side].update(words)
        counts.add_names(found["labels"], found["tags"], found["deprels"])
    return counts


def fingerprint_of_inputs(split: TrainSplit) -> str:
    """Return the fingerprint of all that a vocabulary follows from but the tags of lines: training split and settings."""
    # The trees matter to the labels alone, and control trees share those of the parsed trees.
    form = split.tree.model_dump(include={"side", "binarize", "documents"})
    if split.tree.tree_source == "dependencies":
        form |= split.tree.model_dump(include={"tree_source", "phrase_labels"})
    hashes = ([record.sha256 for record in stage] for stage in (split.parsed, split.text))
    return fingerprint_of(*hashes, split.config.facts(), form)


def write_vocabulary(data: AnyPath, split: TrainSplit) -> str:
    """Write the pieces, labels and tags of the training split, under `encoded/vocab`; returns the fingerprint.

    A vocabulary that is there already and came from the same shards and settings is kept.
    """
    folder, config = data / "encoded", split.config
    inputs_fingerprint = fingerprint_of_inputs(split)
    if split.line_tags:
        inputs_fingerprint = fingerprint_of(inputs_fingerprint, split.line_tags)
    if is_done(folder, inputs_fingerprint):
        return inputs_fingerprint
    contents = {TOKENIZER_FILE: _read_tokenizer(data, config)} if config.tokenizer else {}
    counts = count_vocabulary(split)
    if not config.tokenizer:
        contents["vocab/pieces.model"] = _train_pieces(counts.words["source"], config, split.line_tags)
    if counts.words.get("target"):
        contents["vocab/pieces.tgt.model"] = _train_pieces(counts.words["target"], config, split.line_tags)
    contents |= {name: LabelVocab(names).file_bytes() for name, names in names_by_file(counts, split.tree).items() if names}
    write_files(folder, contents, inputs_fingerprint)
    return inputs_fingerprint


def _train_pieces(counts: Mapping[str, int], config: SubwordConfig, line_tags: Sequence[str]) -> bytes:
    model = train_pieces(counts, config, line_tags)
    if note := describe_characters(model):
        warn(f"note: {note}")
    return model


def _read_tokenizer(data: AnyPath, config: SubwordConfig) -> bytes:
    """Read the file of the tokenizer. Raises UserError if the data set is finished and has the pieces of another one."""
    content = config.tokenizer_file().read_bytes()
    index = previous_index(data / "encoded", "files")
    if index is not None and index["files"].get(TOKENIZER_FILE) != hashlib.sha256(content).hexdigest():
        raise UserError(f"{data} has other pieces than {config.tokenizer}; choose another --out")
    return content


def names_by_file(counts: VocabularyCounts, tree: TreeConfig) -> dict[str, set[str]]:
    """Return the labels, tags and relations, by the name of their file."""
    return {
        "vocab/labels.txt": _node_labels(counts, tree),
        "vocab/pos_tags.txt": counts.tags,
        "vocab/deprels.txt": counts.deprels,
    }


def _node_labels(counts: VocabularyCounts, tree: TreeConfig) -> set[str]:
    """Return the labels of the trees in normal form, of split words, and of the nodes that the settings add."""
    names: Iterable[str] = counts.labels
    if tree.tree_source == "dependencies":
        names = PHRASE_LABELS if tree.phrase_labels == "upos" else map(plain_relation, counts.deprels)
    labels = {UNANALYSED, *names, *(SPLIT_WORD_PREFIX + tag for tag in counts.tags)}
    if tree.documents == "dummy_root":
        labels.add(DOCUMENT_LABEL)
    return labels | {BINARY_PREFIX + label for label in labels} if tree.binarize != "none" else labels


def is_done(folder: AnyPath, inputs_fingerprint: str) -> bool:
    """Return whether a vocabulary from these inputs is there, and undamaged."""
    done = folder / _NOTE
    return done.exists() and done.read_bytes() == _note(folder, inputs_fingerprint)


def write_files(folder: AnyPath, contents: Mapping[str, bytes], inputs_fingerprint: str) -> None:
    """Write the files of a vocabulary, and last the note that says that they are complete."""
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / "vocab")
    for name in {*PIECES_FILES, *OPTIONAL_VOCABULARY_FILES} - contents.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        atomic_write(folder / name, content)
    atomic_write(folder / _NOTE, _note(folder, inputs_fingerprint))


def _note(folder: AnyPath, inputs_fingerprint: str) -> bytes:
    """Return the content of fingerprint.txt: the fingerprint of the inputs and the hash of every file, to notice damaged ones."""
    own = [TOKENIZER_FILE, *VOCABULARY_FILES[1:]] if (folder / TOKENIZER_FILE).exists() else VOCABULARY_FILES
    paths = [folder / name for name in (*own, *OPTIONAL_VOCABULARY_FILES)]
    hashes = [f"{file_sha256(path) if path.exists() else 'missing'}  {path.name}" for path in paths]
    return "\n".join([inputs_fingerprint, *hashes, ""]).encode()
