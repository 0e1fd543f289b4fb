"""Examples to padded tensors.

Shapes: B batch, L leaves, N nonterminals, T target pieces with BOS or EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from treenet.structure import ArcLevels, Dependencies, PhraseLevels, SpanTable, TreeLevels, TreeStructure, Words
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_LABEL_ID

# What a model reads of an example: its leaves; also its trees, as tree attention or as a binary Tree-LSTM reads them, or the
# phrases at their levels; the arcs between its words, as a child-sum Tree-LSTM reads them; its words with their tags, or these
# with the arcs and the ways between.
Reads = Literal["leaves", "trees", "binary_trees", "phrases", "arcs", "words", "dependencies"]
READS_WORDS: tuple[Reads, ...] = ("phrases", "arcs", "words", "dependencies")  # those that need `RowLists.words`
READS_ARCS: tuple[Reads, ...] = ("arcs", "dependencies")  # those that need the arcs between words


@dataclass
class TreeBatch:
    """A padded batch. Every model reads this; the plain models ignore nodes and structure."""

    example_ids: Tensor  # [B] int64
    leaf_pieces: Tensor  # [B, L] int64, PAD_ID where padded
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_labels: Tensor  # [B, N] int64, UNKNOWN_LABEL_ID where padded
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    structure: Any  # what the model reads beside pieces, as `build_structure` makes it, shared by all layers; None for leaves
    tgt_in: Tensor  # [B, T] int64, BOS first, PAD_ID where padded
    tgt_out: Tensor  # [B, T] int64, EOS last, PAD_ID where padded

    def __len__(self) -> int:
        return self.leaf_pieces.shape[0]

    @property
    def num_target_tokens(self) -> int:
        """Target pieces that count in the loss, EOS included."""
        return int((self.tgt_out != PAD_ID).sum())

    def to(self, device: torch.device | str) -> "TreeBatch":
        moved: dict[str, Any] = {name: value if value is None else value.to(device) for name, value in vars(self).items()}
        return type(self)(**moved)

    def pad_masks(self) -> list[Tensor]:
        """Masks, True = padding, of all positions that a model computes."""
        nodes = [self.node_pad_mask] if isinstance(self.structure, TreeStructure) else []
        return [self.leaf_pad_mask, *nodes, self.tgt_out == PAD_ID]


class SourceBatch(TreeBatch):
    """A batch of which models read the source side alone."""

    def pad_masks(self) -> list[Tensor]:
        return super().pad_masks()[:-1]


@dataclass
class RowLists:
    """The columns of a batch's examples that models read, one array per example; words and arcs for models that need them."""

    example_ids: list[int] = field(default_factory=list)
    pieces: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    subtree_ends: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)  # of each leaf
    pos_tags: list[np.ndarray] = field(default_factory=list)  # of each leaf
    governors: list[np.ndarray] = field(default_factory=list)  # of each word, -1 is the root
    relations: list[np.ndarray] = field(default_factory=list)  # of each word to its governor

    def __len__(self) -> int:
        return len(self.example_ids)


def pad(flat: np.ndarray, lengths: np.ndarray, value: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `lengths` that stand one after the other in `flat`, as [B, longest] filled up with `value`, and where they
    are padding; at least one column."""
    padding = np.arange(max(1, lengths.max(initial=0))) >= lengths[:, None]
    out = np.full(padding.shape, value, dtype=np.int64)
    out[~padding] = flat
    return out, padding


def collate(examples: Sequence[dict], reads: Reads = "trees") -> TreeBatch:
    """Rows of an encoded shard (`Shard.row`) to one padded batch for a model that reads `reads`."""
    rows = RowLists()
    for example in examples:
        rows.example_ids.append(example["example_id"])
        rows.pieces.append(example["leaves"]["piece"])
        rows.labels.append(example["nodes"]["label"])
        rows.starts.append(example["spans"]["start"])
        rows.ends.append(example["spans"]["end"])
        rows.subtree_ends.append(example["spans"]["subtree_end"])
        rows.targets.append(example["tgt_pieces"])
        if reads in READS_WORDS:
            rows.words.append(example["leaves"]["word_index"])
            rows.pos_tags.append(example["leaves"]["pos_tag"])
        if reads in READS_ARCS:
            rows.governors.append(example["arcs"]["governor"])
            rows.relations.append(example["arcs"]["deprel"])
    return collate_rows(rows, reads)


def collate_rows(rows: RowLists, reads: Reads = "trees") -> TreeBatch:
    """Examples to one padded batch for a model that reads `reads`."""
    num_leaves, num_nodes, num_targets = (_lengths(lists) for lists in (rows.pieces, rows.labels, rows.targets))
    leaf_pieces, leaf_padding = pad(np.concatenate(rows.pieces), num_leaves, PAD_ID)
    node_labels, node_padding = pad(np.concatenate(rows.labels), num_nodes, UNKNOWN_LABEL_ID)
    tgt_in, tgt_out = _target_pieces(np.concatenate(rows.targets), num_targets)
    return TreeBatch(
        example_ids=torch.tensor(rows.example_ids),
        leaf_pieces=torch.from_numpy(leaf_pieces),
        leaf_pad_mask=torch.from_numpy(leaf_padding),
        node_labels=torch.from_numpy(node_labels),
        node_pad_mask=torch.from_numpy(node_padding),
        structure=build_structure(rows, reads),
        tgt_in=torch.from_numpy(tgt_in),
        tgt_out=torch.from_numpy(tgt_out),
    )


def build_structure(rows: RowLists, reads: Reads) -> Any:
    """What a model reads beside pieces. Raises UserError for trees that are not of that form."""
    if reads == "leaves":
        return None
    if reads == "arcs":
        return ArcLevels.build(rows.words, rows.governors)
    if reads in ("words", "dependencies"):
        arcs = Dependencies.build(rows.governors, rows.relations) if reads == "dependencies" else None
        return Words.build(rows.words, rows.pos_tags, arcs)
    num_leaves, num_nodes = [len(pieces) for pieces in rows.pieces], [len(labels) for labels in rows.labels]
    flat = np.stack([np.concatenate(lists) for lists in (rows.starts, rows.ends, rows.subtree_ends)], axis=1)
    spans = np.split(flat, np.cumsum(num_nodes)[:-1])
    if reads == "phrases":
        return PhraseLevels.build(SpanTable.build(num_leaves, spans), rows.labels, rows.words)
    if reads == "binary_trees":
        return TreeLevels.build(SpanTable.build(num_leaves, spans))
    return TreeStructure.build(num_leaves, spans)


def _target_pieces(flat: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Padded targets with BOS in front, and with EOS behind."""
    before, after = np.full((2, len(lengths), lengths.max(initial=0) + 1), PAD_ID, dtype=np.int64)
    real = np.arange(before.shape[1] - 1) < lengths[:, None]
    before[:, 0] = BOS_ID
    before[:, 1:][real] = flat
    after[:, :-1][real] = flat
    after[np.arange(len(lengths)), lengths] = EOS_ID
    return before, after


def _lengths(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
