"""A small data set with classes, written without a parser: binary trees, arcs, and words whose pieces give their class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from toydata import random_spans

from treeproc.common.files import atomic_write
from treeproc.shards.schema import FULL_ENCODED_SCHEMA, LENGTHS_SCHEMA, select, shard_name
from treeproc.shards.store import fingerprint_of, write_index, write_shard

NUM_PIECES, NUM_LABELS, NUM_CLASSES = 24, 5, 3
LABELLED_COLUMNS = ("leaves", "nodes", "spans", "label", "node_labels", "leaf_labels", "arcs")


def labelled_row(example_id: int, random: np.random.Generator, longest: int = 9) -> dict:
    """An encoded row. The class of a phrase is the most frequent of its leaves', of which some lack a label."""
    pieces = random.integers(4, NUM_PIECES, int(random.integers(2, longest + 1)))
    spans, parents = random_spans(len(pieces), random)
    classes = pieces % NUM_CLASSES

    def most_frequent(start: int, end: int) -> int:
        return int(np.bincount(classes[start:end]).argmax())

    node_labels = [most_frequent(start, end) for start, end, _ in spans]
    leaf_labels = classes.copy()
    leaf_labels[random.random(len(pieces)) < 0.2] = -1
    order = random.permutation(len(pieces))
    governor = np.full(len(pieces), -1)
    for place in range(1, len(pieces)):
        governor[order[place]] = order[random.integers(place)]
    return {
        "example_id": example_id,
        "leaves": {"piece": pieces.tolist(), "word_index": list(range(len(pieces))), "pos_tag": [0] * len(pieces)},
        "nodes": {"label": random.integers(1, NUM_LABELS, len(spans)).tolist(), "parent": parents},
        "spans": {name: [span[i] for span in spans] for i, name in enumerate(("start", "end", "subtree_end"))},
        "label": node_labels[0],
        "node_labels": [c if random.random() < 0.8 else -1 for c in node_labels],
        "leaf_labels": leaf_labels.tolist(),
        "arcs": {"governor": governor.tolist(), "deprel": [0] * len(pieces)},
    }


def make_rows(count: int, seed: int = 0) -> list[dict]:
    random = np.random.default_rng(seed)
    return [labelled_row(i, random) for i in range(count)]


def write_labelled(
    folder: Path, splits: dict[str, list[dict]], *, columns: Sequence[str] = LABELLED_COLUMNS, shards: int = 2, **facts: object
) -> Path:
    """Write encoded/ with lengths.arrow of rows by split into `folder` and return it.

    `facts` change the index; None leaves one out.
    """
    encoded, schema = folder / "encoded", select(FULL_ENCODED_SCHEMA, columns)
    encoded.mkdir(parents=True)
    records, lengths = [], []
    for split, rows in splits.items():
        for index, chosen in enumerate(np.array_split(np.arange(len(rows)), shards)):
            part = [{name: rows[i][name] for name in schema.names} for i in chosen]
            place = {"split": split, "index": index}
            records.append(write_shard(encoded, shard_name(split, index, shards), part, schema, **place, fingerprint="toy"))
            for offset, row in enumerate(part):
                sizes = {"leaves": len(row["leaves"]["piece"]), "nodes": len(row["nodes"]["label"]), "tgt_pieces": 0}
                lengths.append({"split": split, "shard": index, "row": offset, "example_id": row["example_id"], **sizes})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LENGTHS_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(lengths, schema=LENGTHS_SCHEMA))
    atomic_write(encoded / "lengths.arrow", sink.getvalue().to_pybytes())
    index = {
        "fingerprint": fingerprint_of(splits, columns),
        "text_fingerprint": "text",
        "vocab_fingerprint": "vocab",
        "columns": schema.names,
        "tree_settings": {"binarize": "right"},
        "num_pieces": NUM_PIECES,
        "num_labels": NUM_LABELS,
        "num_classes": NUM_CLASSES,
    }
    index |= facts
    write_index(encoded, records, **{name: value for name, value in index.items() if value is not None})
    return folder


def write_toy_labels(folder: Path, train: int = 60, valid: int = 16, test: int = 12) -> Path:
    counts = {"train": train, "valid": valid, "test": test}
    return write_labelled(folder, {split: make_rows(count, seed) for seed, (split, count) in enumerate(counts.items())})
