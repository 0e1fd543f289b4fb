"""A small data set without a parser: random trees over a toy language whose target reverses the source."""

import io
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import sentencepiece

from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.parsers.config import ParserName
from treeproc.shards.schema import (
    BOS_ID,
    ENCODED_SCHEMA,
    EOS_ID,
    FULL_ENCODED_SCHEMA,
    LENGTHS_SCHEMA,
    PAD_ID,
    TEXT_SCHEMA,
    UNK_ID,
    UNKNOWN_LABEL,
    select,
    shard_name,
)
from treeproc.shards.store import content_fingerprint, fingerprint_of, write_index, write_shard
from treeproc.stages.inputs import TreeConfig

WORDS = ["ba", "be", "bi", "bo", "bu", "da", "de", "di", "do", "du", "ga", "ge", "gi", "go", "gu", "ka", "ke", "ki", "ko", "ku"]
LABELS = [UNKNOWN_LABEL, "S", "NP", "VP", "PP"]


def random_spans(num_leaves: int, random: np.random.Generator) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Spans (start, end, subtree_end) in pre-order and parents of a random tree over the leaves."""
    spans: list[list[int]] = []
    parents: list[int] = []

    def grow(start: int, end: int, parent: int) -> None:
        node = len(spans)
        spans.append([start, end, 0])
        parents.append(parent)
        if end - start > 1:
            middle = int(random.integers(start + 1, end))
            for left, right in ((start, middle), (middle, end)):
                if right - left > 1:
                    grow(left, right, node)
        spans[node][2] = len(spans)

    grow(0, num_leaves, -1)
    return [tuple(span) for span in spans], parents


def encode_row(example_id: int, leaves: list[int], target: list[int], random: np.random.Generator) -> dict:
    spans, parents = random_spans(len(leaves), random)
    return {
        "example_id": example_id,
        "leaves": {"piece": leaves, "word_index": list(range(len(leaves))), "pos_tag": [0] * len(leaves)},
        "nodes": {"label": random.integers(1, len(LABELS), len(spans)).tolist(), "parent": parents},
        "spans": {name: [span[i] for span in spans] for i, name in enumerate(("start", "end", "subtree_end"))},
        "tgt_pieces": target,
    }


def write_toy_data(
    folder: Path, *, train: int = 60, valid: int = 12, test: int = 8, shards: int = 2, longest: int = 9, seed: int = 0,
    arcs: bool = False, every: int = 1,
) -> Path:  # fmt: skip
    """Write text/, encoded/ with vocab/ and lengths.arrow of a toy data set into `folder` and return it.

    With `arcs`, a word is governed by the one before it, and its relation is that of its piece. The examples are lines 1,
    `every` + 1, ... of their splits; the others were dropped.
    """
    random = np.random.default_rng(seed)
    splits = {}
    for split, count in (("train", train), ("valid", valid), ("test", test)):
        lines = [[str(word) for word in random.choice(WORDS, random.integers(2, longest + 1))] for _ in range(count)]
        splits[split] = [(" ".join(words), " ".join(reversed(words))) for words in lines]
    text, encoded = folder / "text", folder / "encoded"
    for stage in (text, encoded / "vocab"):
        stage.mkdir(parents=True)
    lines = [line for pairs in splits.values() for pair in pairs for line in pair]
    (encoded / "vocab" / "pieces.model").write_bytes(_train_pieces(*lines))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(encoded / "vocab" / "pieces.model"))
    (encoded / "vocab" / "labels.txt").write_text("".join(label + "\n" for label in LABELS))
    (encoded / "vocab" / "pos_tags.txt").write_text(UNKNOWN_LABEL + "\n")
    schema = select(FULL_ENCODED_SCHEMA, [*ENCODED_SCHEMA.names, *(["arcs"] if arcs else [])])
    if arcs:
        (encoded / "vocab" / "deprels.txt").write_text("".join(name + "\n" for name in (UNKNOWN_LABEL, "a", "b")))
    fingerprints = {name: fingerprint_of(name, splits, longest, seed) for name in ("text", "tree", "vocab", "encoded")}
    records: dict[Path, list] = {text: [], encoded: []}
    lengths = []
    for split, pairs in splits.items():
        ids = np.array_split(np.arange(len(pairs)), shards)
        for index, chosen in enumerate(ids):
            name = shard_name(split, index, shards)
            rows = [{"example_id": int(i) * every, "source": pairs[i][0], "target": pairs[i][1]} for i in chosen]
            trees = [
                encode_row(row["example_id"], pieces.encode(row["source"]), pieces.encode(row["target"]), random) for row in rows
            ]
            for row in trees if arcs else ():
                leaves = row["leaves"]["piece"]
                row["arcs"] = {"governor": list(range(-1, len(leaves) - 1)), "deprel": [piece % 3 for piece in leaves]}
            sizes = [(len(t["leaves"]["piece"]), len(t["nodes"]["label"]), len(t["tgt_pieces"])) for t in trees]
            for offset, (row, (leaves, nodes, tgt_pieces)) in enumerate(zip(rows, sizes, strict=True)):
                facts = {"example_id": row["example_id"], "leaves": leaves, "nodes": nodes, "tgt_pieces": tgt_pieces}
                lengths.append({"split": split, "shard": index, "row": offset, **facts})
            counts = dict(zip(("leaves", "nodes", "tgt_pieces"), map(sum, zip(*sizes, strict=True)), strict=True))
            place = {"split": split, "index": index}
            records[text].append(write_shard(text, name, rows, TEXT_SCHEMA, **place, fingerprint=fingerprints["text"]))
            records[encoded].append(
                write_shard(encoded, name, trees, schema, **place, fingerprint=fingerprints["encoded"], counts=counts)
            )
    table = pa.Table.from_pylist(lengths, schema=LENGTHS_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LENGTHS_SCHEMA) as writer:
        writer.write_table(table)
    atomic_write(encoded / "lengths.arrow", sink.getvalue().to_pybytes())
    write_index(text, records[text], fingerprint=fingerprints["text"], text_fingerprint=fingerprints["text"])
    write_index(
        encoded, records[encoded], fingerprint=fingerprints["encoded"], text_fingerprint=content_fingerprint(records[text]),
        tree_fingerprint=fingerprints["tree"], vocab_fingerprint=fingerprints["vocab"], columns=schema.names,
        tree_source="random", num_pieces=pieces.get_piece_size(), num_labels=len(LABELS),
    )  # fmt: skip
    return folder


@cache
def _train_pieces(*lines: str) -> bytes:
    """A small BPE model with the project's special ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=48, hard_vocab_limit=False,
        pad_id=PAD_ID, unk_id=UNK_ID, bos_id=BOS_ID, eos_id=EOS_ID, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def with_given_trees(data: Path, parser_name: ParserName = "given") -> Path:
    """Record the parser and the settings of trees, so that commands encode treebanks and lines for the data set."""
    index = data / "encoded" / "index.json"
    parser = {"parser": describe_parser(ParserConfig(name=parser_name)), "parser_settings": {"name": parser_name}}
    atomic_write(index, json_bytes(read_json(index) | parser | {"tree_settings": TreeConfig().model_dump()}))
    return data
