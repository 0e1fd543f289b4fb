"""Examples to padded tensors.

Shapes: B batch, L leaves, N nonterminals, T target pieces with BOS or EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure import TreeStructure
from treeproc.schema import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_LABEL_ID


@dataclass
class TreeBatch:
    """A padded batch. Every model reads this; the plain models ignore nodes and structure."""

    example_ids: Tensor  # [B] int64
    leaf_pieces: Tensor  # [B, L] int64, PAD_ID where padded
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_labels: Tensor  # [B, N] int64, UNKNOWN_LABEL_ID where padded
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    structure: TreeStructure  # maps shared by all layers, heads and the cross-attention
    tgt_in: Tensor  # [B, T] int64, BOS first, PAD_ID where padded
    tgt_out: Tensor  # [B, T] int64, EOS last, PAD_ID where padded

    def __len__(self) -> int:
        return self.leaf_pieces.shape[0]

    @property
    def num_target_tokens(self) -> int:
        """Target pieces that count in the loss, EOS included."""
        return int((self.tgt_out != PAD_ID).sum())

    def to(self, device: torch.device | str) -> "TreeBatch":
        return TreeBatch(**{name: value.to(device) for name, value in vars(self).items()})


def pad(rows: Sequence[np.ndarray], value: int) -> np.ndarray:
    """Stack 1-d rows into [B, longest] filled up with `value`; at least one column."""
    width = max(1, max(len(row) for row in rows))
    out = np.full((len(rows), width), value, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def collate(examples: Sequence[dict]) -> TreeBatch:
    """Rows of an encoded shard (`Shard.row`) to one padded batch."""
    leaves = [example["leaves"]["piece"] for example in examples]
    labels = [example["nodes"]["label"] for example in examples]
    targets = [example["tgt_pieces"] for example in examples]
    leaf_pieces, node_labels = pad(leaves, PAD_ID), pad(labels, UNKNOWN_LABEL_ID)
    num_leaves = np.array([len(row) for row in leaves])
    num_nodes = np.array([len(row) for row in labels])
    return TreeBatch(
        example_ids=torch.tensor([example["example_id"] for example in examples]),
        leaf_pieces=torch.from_numpy(leaf_pieces),
        leaf_pad_mask=torch.from_numpy(np.arange(leaf_pieces.shape[1]) >= num_leaves[:, None]),
        node_labels=torch.from_numpy(node_labels),
        node_pad_mask=torch.from_numpy(np.arange(node_labels.shape[1]) >= num_nodes[:, None]),
        structure=TreeStructure.build(
            num_leaves=num_leaves.tolist(),
            spans=[np.stack([e["spans"]["start"], e["spans"]["end"], e["spans"]["subtree_end"]], axis=1) for e in examples],
        ),
        tgt_in=torch.from_numpy(pad([np.concatenate([[BOS_ID], row]) for row in targets], PAD_ID)),
        tgt_out=torch.from_numpy(pad([np.concatenate([row, [EOS_ID]]) for row in targets], PAD_ID)),
    )
