"""A small data set with parsed shards, written without a parser: words of one or two pieces, random trees and arcs over them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from toydata import random_spans
from toylabels import write_labelled

from treeproc.shards.schema import FULL_PARSED_SCHEMA, select, shard_name
from treeproc.shards.store import content_fingerprint, write_index, write_shard
from treeproc.trees.spans import SpanTree, write_brackets

NUM_WORDS, SUFFIX, SHARDS = 12, 20, 2
LABELS, TAGS, RELATIONS = ("S", "NP", "VP"), ("A", "B", "C"), ("obj", "subj")
PROBE_COLUMNS = ("leaves", "nodes", "spans", "tgt_pieces", "label", "node_labels", "leaf_labels", "arcs")


def pieces_of(word: int) -> list[int]:
    """One piece, or two of which the second is the same for all."""
    return [4 + word, SUFFIX] if word % 4 == 0 else [4 + word]


def make_example(example_id: int, random: np.random.Generator) -> tuple[dict, dict]:
    """A parsed and an encoded row. The tag of a word follows from the word, and so does its relation."""
    words = random.integers(NUM_WORDS, size=int(random.integers(2, 8))).tolist()
    spans, parents = random_spans(len(words), random)
    labels = random.integers(len(LABELS), size=len(spans))
    tree = SpanTree([LABELS[i] for i in labels], [start for start, _, _ in spans], [end for _, end, _ in spans])
    texts, tags = [f"w{word}" for word in words], [TAGS[word % len(TAGS)] for word in words]
    order = random.permutation(len(words))
    governor = np.full(len(words), -1)
    for place in range(1, len(words)):
        governor[order[place]] = order[random.integers(place)]
    parsed = {
        "example_id": example_id,
        "words": {"text": texts, "start_char": [0] * len(words), "end_char": [0] * len(words), "pos_tag": tags},
        "trees": [write_brackets(tree, texts, tags)],
        "parse_status": "parsed",
        "arcs": {"governor": governor.tolist(), "deprel": [RELATIONS[word % len(RELATIONS)] for word in words]},
    }
    pieces = [pieces_of(word) for word in words]
    edges = np.cumsum([0, *map(len, pieces)])
    leaves = [piece for one in pieces for piece in one]
    encoded = {
        "example_id": example_id,
        "leaves": {
            "piece": leaves,
            "word_index": np.repeat(np.arange(len(words)), np.diff(edges)).tolist(),
            "pos_tag": [0] * len(leaves),
        },
        "nodes": {"label": (labels + 1).tolist(), "parent": parents},
        "spans": {
            "start": edges[[start for start, _, _ in spans]].tolist(),
            "end": edges[[end for _, end, _ in spans]].tolist(),
            "subtree_end": [subtree_end for _, _, subtree_end in spans],
        },
        "tgt_pieces": leaves[::-1],
        "label": words[0] % 2,
        "node_labels": [-1] * len(spans),
        "leaf_labels": [-1] * len(leaves),
        "arcs": {"governor": governor.tolist(), "deprel": [0] * len(words)},
    }
    return parsed, encoded


def write_probe_data(
    folder: Path,
    *,
    train: int = 120,
    valid: int = 30,
    test: int = 30,
    columns: Sequence[str] = PROBE_COLUMNS,
    alike: bool = False,
    **facts: object,
) -> Path:
    """Write parsed/ and encoded/ into `folder` and return it. In each split, example 0 has a flat tree and 1 two trees.

    If `alike`, all splits begin with the same sentences.
    """
    parsed, encoded = {}, {}
    for seed, (split, count) in enumerate((("train", train), ("valid", valid), ("test", test))):
        random = np.random.default_rng(0 if alike else seed)
        parsed[split], encoded[split] = zip(*(make_example(number, random) for number in range(count)), strict=True)
        parsed[split][0]["parse_status"] = "flat_too_long"
        parsed[split][1]["trees"] *= 2
    fingerprint = write_parsed(folder, parsed, arcs="arcs" in columns)
    write_labelled(folder, encoded, columns=columns, shards=SHARDS, **{"parsed_fingerprint": fingerprint, **facts})
    return folder


def write_parsed(folder: Path, splits: dict[str, Sequence[dict]], *, arcs: bool) -> str:
    """Write parsed/ into `folder`, and return its fingerprint."""
    (folder / "parsed").mkdir(parents=True)
    schema = select(FULL_PARSED_SCHEMA, ("words", "trees", "parse_status", *(("arcs",) if arcs else ())))
    records = []
    for split, rows in splits.items():
        for index, chosen in enumerate(np.array_split(np.arange(len(rows)), SHARDS)):
            name, part = shard_name(split, index, SHARDS), [{key: rows[i][key] for key in schema.names} for i in chosen]
            records.append(write_shard(folder / "parsed", name, part, schema, split=split, index=index, fingerprint="toy"))
    write_index(folder / "parsed", records)
    return content_fingerprint(records)
