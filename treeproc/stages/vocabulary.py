"""Pieces, labels, tags and dependency relations of the training split."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treeproc.common.files import atomic_write, file_sha256, read_text
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, fingerprint_of, read_index
from treeproc.stages.encode import TreeConfig
from treeproc.subwords import LabelVocab, SubwordConfig, WordEnds, blank_separated, mark_boundaries, train_pieces
from treeproc.trees.dependency_trees import PHRASE_LABELS, phrase_label
from treeproc.trees.flat_trees import BINARY_PREFIX, DOCUMENT_LABEL, normal_form, read_flat_trees

# Below DATA/encoded; `deprels.txt` and `pieces.tgt.model` only where they are needed.
VOCABULARY_FILES = ("vocab/pieces.model", "vocab/labels.txt", "vocab/pos_tags.txt")
OPTIONAL_VOCABULARY_FILES = ("vocab/pieces.tgt.model", "vocab/deprels.txt")


def vocabulary_files(folder: Path) -> list[str]:
    """The files of a vocabulary that are there, by their names below the encoded stage `folder`."""
    return [*VOCABULARY_FILES, *(name for name in OPTIONAL_VOCABULARY_FILES if (folder / name).exists())]


class VocabularyCounts:
    """Counts of the training split: words, labels, tags and relations, added up batch by batch."""

    def __init__(self, config: SubwordConfig, tree: TreeConfig, num_rows: int):
        self._config, self._tree, self._num_rows = config, tree, num_rows
        self.words = {side: Counter() for side in (("source",) if config.joint else ("source", "target"))}
        self.labels: set[str] = {UNANALYSED}
        if tree.tree_source == "dependencies" and tree.phrase_labels == "upos":
            self.labels.update(PHRASE_LABELS)
        self.tags: set[str] = {UNANALYSED}
        self.deprels: set[str] = set()
        self._seen = 0

    def add(self, text: dict, parsed: dict) -> None:
        words_column, trees_column = self._tree.parsed_columns
        brackets = read_flat_trees(parsed[trees_column][1])
        if self._tree.tree_source != "dependencies":
            trees = normal_form(brackets, collapse_unary=False)
            self.labels.update(trees.names[i] for i in np.unique(trees.labels))
        self.tags.update(brackets.tag_names[i] for i in np.unique(brackets.tags))
        if self._tree.arcs_column in parsed:
            self.deprels.update(pc.unique(parsed[self._tree.arcs_column][1]["deprel"]).to_pylist())
        self._count_words(text, *parsed[words_column])

    def _count_words(self, text: dict, edges: np.ndarray, words: dict) -> None:
        sides = [side for side in (self._tree.side, self._tree.other_side) if side in text]
        # Rows spread evenly over the split, the same ones however it is cut into shards.
        most = min(self._num_rows, max(1, self._config.max_training_lines // len(sides)))
        row = np.arange(self._seen, self._seen + len(edges) - 1)
        self._seen += len(row)
        chosen = (row + 1) * most // self._num_rows > row * most // self._num_rows
        kept = np.repeat(chosen, np.diff(edges))
        ends = WordEnds(np.concatenate([[0], np.cumsum(np.diff(edges)[chosen])]), words["end_char"][kept])
        lines = {side: text[side].filter(pa.array(chosen)) for side in sides}
        lines[self._tree.side] = mark_boundaries(lines[self._tree.side], ends)
        for i, side in enumerate(sides):
            counts = blank_separated(lines[side]).value_counts()
            counter = self.words["source" if self._config.joint or i == 0 else "target"]
            values, numbers = counts.field("values").to_pylist(), counts.field("counts").to_pylist()
            for word, number in zip(values, numbers, strict=True):
                counter[word] += number


def count_vocabulary(
    base: Path, text: Sequence[ShardRecord], parsed: Sequence[ShardRecord], config: SubwordConfig, tree: TreeConfig
) -> VocabularyCounts:
    """Read the training split's text and parsed shards, which are below `base`, once."""
    counts = VocabularyCounts(config, tree, sum(record.rows for record in text))
    for text_record, parsed_record in zip(text, parsed, strict=True):
        lines, trees = Shard(base / "text", text_record), Shard(base / "parsed", parsed_record)
        for views in zip(lines.columns, trees.columns, strict=True):
            counts.add(*views)
    return counts


def write_vocabulary(
    data: Path,
    text: Sequence[ShardRecord],
    parsed: Sequence[ShardRecord],
    config: SubwordConfig,
    tree: TreeConfig,
    base: Path | None = None,
) -> str:
    """Pieces, labels and tags of the training split, under `encoded/vocab`; returns the fingerprint.

    `base` holds text and parsed stage, if not `data` itself. A vocabulary that is there already and came from the same
    shards and settings is kept.
    """
    folder = data / "encoded" / "vocab"
    # The trees matter to the labels alone, and control trees share those of the parsed trees.
    form = tree.model_dump(include={"side", "binarize", "documents"})
    if tree.tree_source == "dependencies":
        form |= tree.model_dump(include={"tree_source", "phrase_labels"})
    inputs_fingerprint = fingerprint_of(
        [record.sha256 for record in parsed], [record.sha256 for record in text], config.model_dump(), form
    )
    done = folder / "fingerprint.txt"
    if done.exists() and done.read_bytes() == _vocabulary_note(folder, inputs_fingerprint):
        return inputs_fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    for name in OPTIONAL_VOCABULARY_FILES:
        (data / "encoded" / name).unlink(missing_ok=True)
    counts = count_vocabulary(base or data, text, parsed, config, tree)
    atomic_write(folder / "pieces.model", train_pieces(counts.words["source"], config))
    if counts.words.get("target"):
        atomic_write(folder / "pieces.tgt.model", train_pieces(counts.words["target"], config))
    if counts.deprels:
        atomic_write(folder / "deprels.txt", LabelVocab(counts.deprels).file_bytes())
    atomic_write(folder / "pos_tags.txt", LabelVocab(counts.tags).file_bytes())
    atomic_write(folder / "labels.txt", LabelVocab(_node_labels(counts, tree)).file_bytes())
    atomic_write(done, _vocabulary_note(folder, inputs_fingerprint))
    return inputs_fingerprint


def copy_vocabulary(data: Path, other: AnyPath) -> str:
    """The vocabulary of the data set `other`, byte for byte, under `encoded/vocab` of `data`; returns its fingerprint.

    Raises UserError when a file of it is missing or damaged, and when `data` was encoded with another one.
    """
    source, folder = other / "encoded", data / "encoded"
    index = read_index(source)
    if (folder / "index.json").exists() and read_index(folder)["vocab_fingerprint"] != index["vocab_fingerprint"]:
        raise UserError(f"{data} was encoded with another vocabulary than that of {other}; choose another --out")
    contents = {}
    for name in (*VOCABULARY_FILES, *OPTIONAL_VOCABULARY_FILES):
        if sha256 := index["files"].get(name):
            try:
                contents[name] = (source / name).read_bytes()
            except OSError:
                contents[name] = b""
            if hashlib.sha256(contents[name]).hexdigest() != sha256:
                raise UserError(f"vocab_from: {source / name} is missing or damaged; run its workflows/preprocess.py again")
    note = source / "vocab" / "fingerprint.txt"
    inputs_fingerprint = read_text(note, "run its workflows/preprocess.py again").partition("\n")[0] if note.exists() else ""
    pieces = [index["files"][name] for name in contents if name.endswith(".model")]
    if fingerprint_of(inputs_fingerprint, *pieces) != index["vocab_fingerprint"]:
        raise UserError(f"vocab_from: {note} is missing or damaged; run its workflows/preprocess.py again")
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    done = folder / "vocab" / "fingerprint.txt"
    if done.exists() and done.read_bytes() == _vocabulary_note(folder / "vocab", inputs_fingerprint):
        return inputs_fingerprint
    for name in OPTIONAL_VOCABULARY_FILES:
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        atomic_write(folder / name, content)
    atomic_write(done, _vocabulary_note(folder / "vocab", inputs_fingerprint))
    return inputs_fingerprint


def _node_labels(counts: VocabularyCounts, tree: TreeConfig) -> set[str]:
    """Labels of the trees in normal form, of split words, and of the nodes that the settings add."""
    labels = counts.labels | {SPLIT_WORD_PREFIX + tag for tag in counts.tags}
    if tree.tree_source == "dependencies" and tree.phrase_labels == "deprel":
        labels |= {phrase_label(name) for name in counts.deprels}
    if tree.documents == "dummy_root":
        labels.add(DOCUMENT_LABEL)
    return labels | {BINARY_PREFIX + label for label in labels} if tree.binarize != "none" else labels


def _vocabulary_note(folder: Path, inputs_fingerprint: str) -> bytes:
    """Content of fingerprint.txt: the fingerprint of the inputs and the hash of every file, to notice damaged ones."""
    paths = [folder.parent / name for name in (*VOCABULARY_FILES, *OPTIONAL_VOCABULARY_FILES)]
    hashes = [f"{file_sha256(path) if path.exists() else 'missing'}  {path.name}" for path in paths]
    return "\n".join([inputs_fingerprint, *hashes, ""]).encode()
