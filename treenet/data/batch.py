"""Padded batches of examples.

Shapes: B batch, L leaves, N nonterminals, T target pieces with BOS or EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treenet.data.input_kinds import TREES, InputKind
from treenet.data.row_lists import RowLists, lengths_of
from treenet.structure import Structure
from treenet.structure.span_table import round_up
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_LABEL_ID


@dataclass
class TreeBatch:
    """A padded batch. Every model reads this; the plain models ignore nodes and structure."""

    example_ids: Tensor  # [B] int64
    leaf_pieces: Tensor  # [B, L] int64, PAD_ID where padded
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_labels: Tensor  # [B, N] int64, UNKNOWN_LABEL_ID where padded
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    structure: Structure | None  # as the input kind of the model builds it, shared by all layers; None for leaves
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
        nodes = [self.node_pad_mask] if self.structure is not None and self.structure.adds_positions else []
        return [self.leaf_pad_mask, *nodes, self.tgt_out == PAD_ID]


class SourceBatch(TreeBatch):
    """A batch of which models read the source side alone."""

    def pad_masks(self) -> list[Tensor]:
        return super().pad_masks()[:-1]


def pad(flat: np.ndarray, lengths: np.ndarray, value: int, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `lengths` that stand one after the other in `flat`, as [B, longest] filled up with `value`, and where they
    are padding; a `multiple` of columns, at least one."""
    padding = np.arange(round_up(lengths.max(initial=0), multiple)) >= lengths[:, None]
    out = np.full(padding.shape, value, dtype=np.int64)
    out[~padding] = flat
    return out, padding


def collate(examples: Sequence[dict], reads: InputKind = TREES) -> TreeBatch:
    """Rows of an encoded shard (`Shard.row`) as one padded batch for an encoder that reads `reads`."""
    rows = RowLists()
    appenders = rows.appenders(reads.columns)
    for example in examples:
        rows.example_ids.append(example["example_id"])
        for name, parts in appenders:
            for part, append in parts:
                append(example[name] if part is None else example[name][part])
    return collate_rows(rows, reads)


def collate_rows(rows: RowLists, reads: InputKind = TREES) -> TreeBatch:
    """Examples as one padded batch for an encoder that reads `reads`. Raises UserError for trees that are not of that form."""
    num_leaves, num_nodes, num_targets = (lengths_of(lists) for lists in (rows.pieces, rows.labels, rows.targets))
    leaf_pieces, leaf_padding = pad(np.concatenate(rows.pieces), num_leaves, PAD_ID, reads.width_multiple)
    node_labels, node_padding = pad(np.concatenate(rows.labels), num_nodes, UNKNOWN_LABEL_ID, reads.width_multiple)
    tgt_in, tgt_out = _target_pieces(np.concatenate(rows.targets), num_targets)
    return TreeBatch(
        example_ids=torch.tensor(rows.example_ids),
        leaf_pieces=torch.from_numpy(leaf_pieces),
        leaf_pad_mask=torch.from_numpy(leaf_padding),
        node_labels=torch.from_numpy(node_labels),
        node_pad_mask=torch.from_numpy(node_padding),
        structure=reads.build(rows),
        tgt_in=torch.from_numpy(tgt_in),
        tgt_out=torch.from_numpy(tgt_out),
    )


def _target_pieces(flat: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Padded targets with BOS in front, and with EOS behind."""
    before, after = np.full((2, len(lengths), lengths.max(initial=0) + 1), PAD_ID, dtype=np.int64)
    real = np.arange(before.shape[1] - 1) < lengths[:, None]
    before[:, 0] = BOS_ID
    before[:, 1:][real] = flat
    after[:, :-1][real] = flat
    after[np.arange(len(lengths)), lengths] = EOS_ID
    return before, after
