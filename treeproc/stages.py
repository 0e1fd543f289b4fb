"""The stages of a data set: text, parsed, vocabulary, encoded. One call does one shard.

Workers are plain classes; `ray_job` runs them in actors. A shard depends on its inputs and
settings alone, never on who computed it or what else ran.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from treeproc.control_trees import control_tree
from treeproc.filters import FilterConfig, drop_reason
from treeproc.parsers import Parser, ParserConfig, StanzaParser, read_trees
from treeproc.readers import read_pairs
from treeproc.schema import ENCODED_SCHEMA, LENGTHS_SCHEMA, PARSED_SCHEMA, SPLIT_WORD_PREFIX, TEXT_SCHEMA, shard_name
from treeproc.settings import Settings
from treeproc.shards import Shard, ShardRecord, atomic_write, file_sha256, fingerprint, finished_shard, write_shard
from treeproc.subwords import LabelVocab, SubwordConfig, Subwords, mark_boundaries, train_pieces
from treeproc.trees import UNANALYSED, SpanTree, join, normalise, parents_and_subtree_ends, split_words

# Below DATA/encoded.
VOCABULARY_FILES = ("vocab/pieces.model", "vocab/labels.txt", "vocab/pos_tags.txt")


class TreeConfig(Settings):
    """How the parsed trees become the trees that models read."""

    tree_source: Literal["parsed", "balanced", "left", "right", "flat", "random"] = Field(
        "parsed", description="trees of the parser, or control trees over the same words"
    )
    collapse_unary: bool = Field(True, description="a chain of nodes over the same words keeps its lowest label")
    seed: int = Field(1, description="seed of the random control trees")


def write_text(
    folder: Path,
    split: str,
    source: Sequence[Path],
    target: Sequence[Path],
    num_pairs: int,
    rows_per_shard: int,
    filters: FilterConfig,
    mark: str,
) -> Iterator[ShardRecord]:
    """Filter the pairs of one split into text shards. A shard covers a fixed range of input lines."""
    num_shards = -(-num_pairs // rows_per_shard)
    pairs = enumerate(read_pairs(source, target))
    for index in range(num_shards):
        rows, counts = [], Counter()
        for example_id, (src, tgt) in (next(pairs) for _ in range(min(rows_per_shard, num_pairs - index * rows_per_shard))):
            reason = drop_reason(src, tgt, split, filters)
            if reason:
                counts[f"dropped.{reason}"] += 1
            else:
                rows.append({"example_id": example_id, "source": src, "target": tgt})
        name = shard_name(split, index, num_shards)
        yield write_shard(folder, name, rows, TEXT_SCHEMA, split=split, index=index, fingerprint=mark, counts=counts)


class ParseShard:
    """Text shard to parsed shard. Holds the parser, so it is built once per actor."""

    def __init__(self, data: Path, config: ParserConfig):
        self._text, self._parsed = data / "text", data / "parsed"
        self._parser: Parser = StanzaParser(config)

    def __call__(self, text: ShardRecord, mark: str) -> ShardRecord:
        examples = list(Shard(self._text, text).rows())
        rows, counts, longest = [], Counter(), 0
        for example, parsed in zip(examples, self._parser.parse([e["source"] for e in examples]), strict=True):
            row = {"example_id": example["example_id"], **vars(parsed)}
            rows.append(row)
            counts[f"status.{parsed.parse_status}"] += 1
            counts["words"] += len(parsed.words["text"])
            longest = max(longest, len(parsed.words["text"]))
            for tags, tree in read_trees(row):
                counts.update(f"tag.{tag}" for tag in tags)
                counts.update(f"label.{label}" for label in normalise(tree, collapse_unary=False).labels)
        return write_shard(
            self._parsed, text.name, rows, PARSED_SCHEMA,
            split=text.split, index=text.index, fingerprint=mark, counts=counts, longest={"words": longest},
        )  # fmt: skip


def _training_lines(data: Path, text: Sequence[ShardRecord], parsed: Sequence[ShardRecord]) -> Iterator[str]:
    for text_record, parsed_record in zip(text, parsed, strict=True):
        for example, row in zip(
            Shard(data / "text", text_record).rows(), Shard(data / "parsed", parsed_record).rows(), strict=True
        ):
            yield mark_boundaries(example["source"], row["words"]["start_char"], row["words"]["end_char"])
            yield example["target"]


def write_vocabulary(data: Path, text: Sequence[ShardRecord], parsed: Sequence[ShardRecord], config: SubwordConfig) -> str:
    """Pieces, labels and tags of the training split, under `encoded/vocab`; returns the fingerprint.

    A vocabulary that is there already and came from the same shards and settings is kept.
    """
    folder = data / "encoded" / "vocab"
    mark = fingerprint([record.sha256 for record in parsed], [record.sha256 for record in text], config.model_dump())
    done = folder / "fingerprint.txt"
    if done.exists() and done.read_bytes() == _vocabulary_note(folder, mark):
        return mark
    folder.mkdir(parents=True, exist_ok=True)
    names = {name for record in parsed for name in record.counts}
    # Fallback and control trees may come later, so their label and tag are always there.
    tags = [UNANALYSED, *(name.removeprefix("tag.") for name in names if name.startswith("tag."))]
    labels = [UNANALYSED, *(name.removeprefix("label.") for name in names if name.startswith("label."))]
    atomic_write(folder / "pieces.model", train_pieces(_training_lines(data, text, parsed), config))
    atomic_write(folder / "pos_tags.txt", LabelVocab(tags).file_bytes())
    atomic_write(folder / "labels.txt", LabelVocab(labels + [SPLIT_WORD_PREFIX + tag for tag in tags]).file_bytes())
    atomic_write(done, _vocabulary_note(folder, mark))
    return mark


def _vocabulary_note(folder: Path, mark: str) -> bytes:
    """What fingerprint.txt holds: the mark, and the hash of every file, so that a damaged one is made again."""
    paths = [folder.parent / name for name in VOCABULARY_FILES]
    hashes = [f"{file_sha256(path) if path.exists() else 'missing'}  {path.name}" for path in paths]
    return "\n".join([mark, *hashes, ""]).encode()


class Encoder:
    """Parsed rows to encoded rows: pieces within words, words' subtrees, ids instead of names."""

    def __init__(self, vocab: Path, tree: TreeConfig):
        self.subwords = Subwords(vocab / "pieces.model")
        self.labels = LabelVocab.load(vocab / "labels.txt")
        self.tags = LabelVocab.load(vocab / "pos_tags.txt")
        self._config = tree

    def word_tree(self, parsed: dict) -> tuple[list[str], SpanTree]:
        """Tags and the tree over the words of one parsed row, in the normal form of the settings."""
        trees = read_trees(parsed)
        tags = list(chain.from_iterable(tags for tags, _ in trees))
        if self._config.tree_source == "parsed":
            normal = [normalise(tree, collapse_unary=self._config.collapse_unary) for _, tree in trees]
            return tags, join(normal, [len(t) for t, _ in trees])
        seed = self._config.seed * 1_000_003 + parsed["example_id"]
        return tags, control_tree(self._config.tree_source, len(tags), seed)

    def encode(self, sources: Sequence[str], parsed: Sequence[dict], targets: Sequence[str]) -> list[dict]:
        """Rows of `schema.ENCODED_SCHEMA`."""
        words = self.subwords.encode_words(sources, [row["words"] for row in parsed])
        tgt_pieces = self.subwords.encode_lines(targets)
        return [self._row(row, pieces, target) for row, pieces, target in zip(parsed, words, tgt_pieces, strict=True)]

    def empty_row(self, example_id: int) -> dict:
        """The row of a line without words: no leaves, no nodes, no target."""
        return {
            "example_id": example_id,
            "leaves": {"piece": [], "word_index": [], "pos_tag": []},
            "nodes": {"label": [], "parent": []},
            "spans": {"start": [], "end": [], "subtree_end": []},
            "tgt_pieces": [],
        }

    def _row(self, parsed: dict, word_pieces: list[list[int]], tgt_pieces: list[int]) -> dict:
        tags, tree = self.word_tree(parsed)
        counts = [len(pieces) for pieces in word_pieces]
        tree = split_words(tree, tags, counts)
        parents, subtree_ends = parents_and_subtree_ends(tree)
        tag_ids = [self.tags[tag] for tag in tags]
        return {
            "example_id": parsed["example_id"],
            "leaves": {
                "piece": list(chain.from_iterable(word_pieces)),
                "word_index": np.repeat(np.arange(len(counts)), counts).tolist(),
                "pos_tag": np.repeat(tag_ids, counts).tolist(),
            },
            "nodes": {"label": [self.labels[label] for label in tree.labels], "parent": parents},
            "spans": {"start": tree.starts, "end": tree.ends, "subtree_end": subtree_ends},
            "tgt_pieces": tgt_pieces,
        }


class EncodeShard:
    """Text and parsed shard to encoded shard."""

    def __init__(self, data: Path, tree: TreeConfig):
        self._data = data
        self._encoder = Encoder(data / "encoded" / "vocab", tree)

    def __call__(self, text: ShardRecord, parsed: ShardRecord, mark: str) -> ShardRecord:
        examples = list(Shard(self._data / "text", text).rows())
        trees = list(Shard(self._data / "parsed", parsed).rows())
        rows = self._encoder.encode([e["source"] for e in examples], trees, [e["target"] for e in examples])
        sizes = {
            "leaves": [len(row["leaves"]["piece"]) for row in rows],
            "nodes": [len(row["nodes"]["label"]) for row in rows],
            "tgt_pieces": [len(row["tgt_pieces"]) for row in rows],
        }
        return write_shard(
            self._data / "encoded", text.name, rows, ENCODED_SCHEMA,
            split=text.split, index=text.index, fingerprint=mark,
            counts=Counter({name: sum(values) for name, values in sizes.items()}),
            longest={name: max(values, default=0) for name, values in sizes.items()},
        )  # fmt: skip


def write_lengths(folder: Path, records: Sequence[ShardRecord]) -> None:
    """`lengths.arrow`: the size of every encoded row, so that planning batches opens no shard."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LENGTHS_SCHEMA) as writer:
        splits = list(dict.fromkeys(record.split for record in records))
        for record in records:
            shard = Shard(folder, record)
            columns: dict[str, list] = {name: [] for name in ("example_id", "leaves", "nodes", "tgt_pieces")}
            for views in shard.columns:
                columns["example_id"].append(views["example_id"])
                for name in ("leaves", "nodes", "tgt_pieces"):
                    columns[name].append(np.diff(views[name][0]))
            flat = {name: np.concatenate(parts) if parts else np.zeros(0, int) for name, parts in columns.items()}
            flat |= {"shard": np.full(len(shard), record.index), "row": np.arange(len(shard))}
            split = pa.DictionaryArray.from_arrays(
                pa.array(np.full(len(shard), splits.index(record.split)), pa.int8()), pa.array(splits, pa.string())
            )
            arrays = [split if f.name == "split" else pa.array(flat[f.name], f.type) for f in LENGTHS_SCHEMA]
            writer.write_batch(pa.record_batch(arrays, schema=LENGTHS_SCHEMA))
    atomic_write(folder / "lengths.arrow", sink.getvalue().to_pybytes())


def split_finished(folder: Path, names: Sequence[str], marks: Sequence[str]) -> list[ShardRecord | None]:
    """For every shard its record where it is whole and up to date, else None."""
    return [finished_shard(folder, name, mark) for name, mark in zip(names, marks, strict=True)]
