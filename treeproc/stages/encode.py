"""Parsed shards to encoded shards, and the lengths of all rows."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from treeproc.control_trees import control_tree
from treeproc.files import atomic_write
from treeproc.parsers import read_trees
from treeproc.schema import ENCODED_SCHEMA, LENGTHS_SCHEMA
from treeproc.settings import Settings
from treeproc.shards import Shard, ShardRecord, write_shard
from treeproc.subwords import LabelVocab, Subwords
from treeproc.trees import SpanTree, join, normalise, parents_and_subtree_ends, split_words


class TreeConfig(Settings):
    """How the parsed trees become the trees that models read."""

    tree_source: Literal["parsed", "balanced", "left", "right", "flat", "random"] = Field(
        "parsed", description="trees of the parser, or control trees over the same words"
    )
    collapse_unary: bool = Field(True, description="a chain of nodes over the same words keeps its lowest label")
    seed: int = Field(1, description="seed of the random control trees")


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
