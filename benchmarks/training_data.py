"""Encoded data sets of random trees in the shape of captions, for benchmarks of training: no parser, no text."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from layer_trees import random_tree

from treeproc.common.files import atomic_write
from treeproc.shards.schema import ENCODED_SCHEMA, LENGTHS_SCHEMA, shard_name
from treeproc.shards.store import write_index, write_shard

NUM_LABELS = 60
MEAN_LEAVES, NODES_PER_LEAF = 15, 0.7  # of captions in subwords: n + m = 1.7 n
SPECIAL_PIECES = 4


def caption(example_id: int, num_pieces: int, flat: bool, mean_leaves: int, rng: np.random.Generator) -> dict:
    """Return one example. With `flat`, it has a leaf for each node of the other: as many positions, and one node over all."""
    leaves = int(np.clip(rng.poisson(mean_leaves), 4, mean_leaves * 8 // 3))
    nodes = max(1, round(NODES_PER_LEAF * leaves))
    target = rng.integers(SPECIAL_PIECES, num_pieces, int(np.clip(rng.poisson(leaves), 3, mean_leaves * 44 // 15)))
    spans = random_tree(leaves, nodes, rng)
    if flat:
        leaves, nodes = leaves + nodes, 1
        spans = np.array([[0, leaves, 1]])
    pieces = rng.integers(SPECIAL_PIECES, num_pieces, leaves)
    parents = [int(np.flatnonzero(spans[:i, 2] > i)[-1]) if i else -1 for i in range(nodes)]
    return {
        "example_id": example_id,
        "leaves": {"piece": pieces.tolist(), "word_index": list(range(leaves)), "pos_tag": [0] * leaves},
        "nodes": {"label": rng.integers(1, NUM_LABELS, nodes).tolist(), "parent": parents},
        "spans": {name: spans[:, i].tolist() for i, name in enumerate(("start", "end", "subtree_end"))},
        "tgt_pieces": target.tolist(),
    }


def write_captions(folder: Path, *, rows: int, num_pieces: int, flat: bool = False, mean_leaves: int = MEAN_LEAVES) -> Path:
    """Write DATA/encoded: `rows` training examples and a tenth of them for validation. Targets do not depend on `flat`."""
    encoded = folder / "encoded"
    encoded.mkdir(parents=True)
    records, lengths = [], []
    for split, count in (("train", rows), ("valid", max(1, rows // 10))):
        examples = [caption(i, num_pieces, flat, mean_leaves, np.random.default_rng([len(split), i])) for i in range(count)]
        sizes = [(len(e["leaves"]["piece"]), len(e["nodes"]["label"]), len(e["tgt_pieces"])) for e in examples]
        for row, (leaves, nodes, tgt_pieces) in enumerate(sizes):
            facts = {"example_id": row, "leaves": leaves, "nodes": nodes, "tgt_pieces": tgt_pieces}
            lengths.append({"split": split, "shard": 0, "row": row, **facts})
        counts = dict(zip(("leaves", "nodes", "tgt_pieces"), map(sum, zip(*sizes, strict=True)), strict=True))
        name, fingerprint = shard_name(split, 0, 1), f"random-{flat}"
        place = {"split": split, "index": 0, "fingerprint": fingerprint}
        records.append(write_shard(encoded, name, examples, ENCODED_SCHEMA, **place, counts=counts))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LENGTHS_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(lengths, schema=LENGTHS_SCHEMA))
    atomic_write(encoded / "lengths.arrow", sink.getvalue().to_pybytes())
    fingerprints = {f"{stage}_fingerprint": f"{stage}-{flat}" for stage in ("text", "tree", "vocab")}
    sizes = {"num_pieces": num_pieces, "num_labels": NUM_LABELS}
    write_index(encoded, records, fingerprint=f"random-{flat}", columns=ENCODED_SCHEMA.names, **sizes, **fingerprints)
    return folder
