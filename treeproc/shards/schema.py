"""The shard format: columns, special ids and file names that every other module relies on.

A data set is a folder with three stages, each a folder of Arrow IPC files and an `index.json`:

    text/     canonical lines: what was read, after filters
    parsed/   words, part-of-speech tags and bracketed trees, still strings
    encoded/  the paper's T(X) = (L, N, R) as integers, ready for training

One row is one example. An encoded row has the three tables of section 4.1 of the paper:

- `leaves`: L, the ordered terminals.
- `nodes`: N, the nonterminals.
- `spans`: R, the subtree of every nonterminal as half-open intervals.
"""

import re
from collections.abc import Collection, Iterable

import pyarrow as pa

SCHEMA_VERSION = 1

# The three that every data set may have; further test splits have names of their own.
SPLITS = ("train", "valid", "test")
SPLIT_NAME = re.compile("[a-z0-9_]{1,50}")
MOST_SPLITS = 128  # their numbers in `lengths.arrow` are int8

# Characters that some program takes for the end of a line.
_LINE_END = re.compile("[\n-\r\x1c-\x1e\x85\u2028\u2029]")

# Ids of the special sentencepiece pieces, the same in every vocabulary.
PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3
# Piece k of a pretrained tokenizer is piece k + FIRST_PIECE.
FIRST_PIECE = 4

# Id 0 of a label vocabulary stands for every label that training data did not hold.
UNKNOWN_LABEL_ID = 0
UNKNOWN_LABEL = "<unk>"

# The root of a word that subwords split carries the word's tag (paper, section 7.4 and figure 7).
SPLIT_WORD_PREFIX = "POS="
# Label and tag of whatever no parser has analysed; X is the Penn Treebank's "unknown, uncertain".
UNANALYSED = "X"

# The score of a parse, a mean log-probability, has so many decimal places. A line without a complete parse is below every score.
SCORE_PLACES = 3
UNSCORED = float("-inf")

# Rows of one record batch. Fixed, so that the bytes of a shard depend on its rows alone.
ROWS_PER_RECORD_BATCH = 1024


def _list_of(**fields: pa.DataType) -> pa.DataType:
    """Return a non-nullable list of non-nullable structs."""
    struct = pa.struct([pa.field(name, type_, nullable=False) for name, type_ in fields.items()])
    return pa.list_(pa.field("item", struct, nullable=False))


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in columns.items()])


def select(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """Return `example_id` and the named columns of a full schema, in its order: the schema of one data set."""
    return pa.schema([field for field in schema if field.name == "example_id" or field.name in names])


# `example_id` is the 0-based number of the example over the concatenated inputs of a split. All columns
# after `source` are there or not there for a whole data set. `words` of an input that came tokenised
# hold character offsets into `source`; `trees` are PTB brackets over them, `node_labels` their
# nonterminals in pre-order, `leaf_labels` and `arcs` one per word (governor 0-based, -1 for a root). `score` is that of
# a pair of sentences: examples 2k and 2k + 1 are the sentences of pair k, and have its score both. `document` is the number of
# the document of a sentence, from 0 over the inputs of a split.
FULL_TEXT_SCHEMA = _schema(
    example_id=pa.int64(),
    source=pa.string(),
    target=pa.string(),
    label=pa.int32(),
    score=pa.float64(),
    words=_list_of(text=pa.string(), start_char=pa.int32(), end_char=pa.int32()),
    trees=pa.list_(pa.field("item", pa.string(), nullable=False)),
    node_labels=pa.list_(pa.field("item", pa.int8(), nullable=False)),
    leaf_labels=pa.list_(pa.field("item", pa.int8(), nullable=False)),
    arcs=_list_of(governor=pa.int32(), deprel=pa.string()),
    document=pa.int64(),
)

# The text of translation pairs.
TEXT_SCHEMA = select(FULL_TEXT_SCHEMA, ("source", "target"))

# `words` hold character offsets into the source line; `trees` are PTB brackets, one per tree of
# the example; `parse_status` is "parsed" or the name of the fallback that was used instead.
# `arcs` (one per word, governor 0-based, -1 a root) are there where the parser gives dependencies, `parse_score` where its
# scores are asked for, the target columns where the target side has a parser too.
_PARSED_WORDS = _list_of(text=pa.string(), start_char=pa.int32(), end_char=pa.int32(), pos_tag=pa.string())
_TREES = pa.list_(pa.field("item", pa.string(), nullable=False))
FULL_PARSED_SCHEMA = _schema(
    example_id=pa.int64(),
    words=_PARSED_WORDS,
    trees=_TREES,
    parse_status=pa.string(),
    parse_score=pa.float64(),
    arcs=_list_of(governor=pa.int32(), deprel=pa.string()),
    target_words=_PARSED_WORDS,
    target_trees=_TREES,
    target_parse_status=pa.string(),
    target_parse_score=pa.float64(),
    target_arcs=_list_of(governor=pa.int32(), deprel=pa.string()),
)
PARSED_SCHEMA = select(FULL_PARSED_SCHEMA, ("words", "trees", "parse_status"))

# `nodes` are in pre-order over all trees of the example, `parent` is row-local, -1 for a root.
# Node i's subtree is nodes [i, subtree_end) and leaves [start, end).
# Columns that not every data set has: `tgt_pieces` of pairs; `label` of an example, `node_labels`, one per node, and
# `leaf_labels`, one per leaf, for classification, -1 where there is none; `score` of a sentence's pair; `arcs`, one per
# word, governor -1 for the root.
FULL_ENCODED_SCHEMA = _schema(
    example_id=pa.int64(),
    leaves=_list_of(piece=pa.int32(), word_index=pa.int32(), pos_tag=pa.int16()),
    nodes=_list_of(label=pa.int16(), parent=pa.int32()),
    spans=_list_of(start=pa.int32(), end=pa.int32(), subtree_end=pa.int32()),
    tgt_pieces=pa.list_(pa.field("item", pa.int32(), nullable=False)),
    label=pa.int32(),
    score=pa.float64(),
    node_labels=pa.list_(pa.field("item", pa.int8(), nullable=False)),
    leaf_labels=pa.list_(pa.field("item", pa.int8(), nullable=False)),
    arcs=_list_of(governor=pa.int32(), deprel=pa.int16()),
)


# Columns of parallel text.
ENCODED_SCHEMA = select(FULL_ENCODED_SCHEMA, ("leaves", "nodes", "spans", "tgt_pieces"))

# One row per example of the data set, ordered by split, shard and row: enough to plan batches.
LENGTHS_SCHEMA = _schema(
    split=pa.dictionary(pa.int8(), pa.string()),
    shard=pa.int32(),
    row=pa.int32(),
    example_id=pa.int64(),
    leaves=pa.int32(),
    nodes=pa.int32(),
    tgt_pieces=pa.int32(),
)

# How many rows of a shard have the same two sizes, ordered by split, shard, leaves and target pieces; `nodes` is their sum.
# Data sets of more than WINDOW_ROWS rows have this file, from which the batches of a window are counted without its rows.
SIZE_COUNTS_SCHEMA = _schema(
    split=pa.dictionary(pa.int8(), pa.string()),
    shard=pa.int32(),
    leaves=pa.int32(),
    tgt_pieces=pa.int32(),
    rows=pa.int32(),
    nodes=pa.int64(),
)
WINDOW_ROWS = 1 << 23


# By the name of a stage's folder: what its shards may hold, and what every one of them holds.
STAGE_SCHEMAS = {"text": FULL_TEXT_SCHEMA, "parsed": FULL_PARSED_SCHEMA, "encoded": FULL_ENCODED_SCHEMA}
NEEDED_COLUMNS = {
    "text": ("example_id", "source"),
    "parsed": ("example_id", "words", "trees", "parse_status"),
    "encoded": ("example_id", "leaves", "nodes", "spans"),
}


def in_order(splits: Iterable[str]) -> list[str]:
    """Return the names of splits in the order of a data set: train, valid, test, then the others by name."""
    return sorted(splits, key=lambda split: (SPLITS.index(split) if split in SPLITS else len(SPLITS), split))


def line_end_in(names: Iterable[str]) -> str:
    """Return which of the names of labels, tags or relations holds which line end, in words; empty if none does.

    The files of a vocabulary hold one name a line.
    """
    for name in names:
        if found := _LINE_END.search(name):
            return f"{name[:40]!r} with the line end U+{ord(found[0]):04X}"
    return ""


def lower_case(text: str) -> str:
    """Return the text as lower-cased pieces have it: Greek Σ is σ at the end of a word too, where Python writes ς."""
    return text.replace("Σ", "σ").lower()


def without_tag(line: str, tags: Collection[str]) -> str:
    """Return what follows the tag of a line, also if that is nothing."""
    if not tags:  # as in most jobs, which call this for every line
        return line
    first, _, text = line.partition(" ")
    return text if first in tags else line


def shard_name(split: str, index: int, count: int) -> str:
    """Return the file name of shard `index` of `count`, for example `train-00002-of-00016.arrow`."""
    return f"{split}-{index:05d}-of-{count:05d}.arrow"


# What a data set of up to 8,192,000 rows has.
SMALLEST = 2000
_SHARDS = 4096
# The largest stage is the parsed one: 500 bytes a pair of captions, and twice that for lines of WMT.
_BYTES_A_ROW = 1000
_BYTES_A_SHARD = 100_000_000
LARGEST = _BYTES_A_SHARD // _BYTES_A_ROW // ROWS_PER_RECORD_BATCH * ROWS_PER_RECORD_BATCH


def auto_rows_per_shard(rows: int) -> int:
    """Return the number of rows of a shard for a data set of `rows` input examples, all splits together.

    It grows so that there are at most 4,096 shards, in whole record batches, until a shard of the largest stage has about
    100 MB (99,328 rows). It depends on the number of rows alone. It does not use the cluster, nor the bytes of the input, which
    a compressed file hides. So data sets of the same text have the same shards.
    """
    if rows <= SMALLEST * _SHARDS:
        return SMALLEST
    batches = -(-rows // (_SHARDS * ROWS_PER_RECORD_BATCH))
    return min(LARGEST, batches * ROWS_PER_RECORD_BATCH)
