"""Padded batches of examples, and where ascending costs are cut into batches; results of examples in their order.

Shapes: B batch, L leaves, N nonterminals, T target pieces with BOS or EOS.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from treenet.data.input_kinds import ALWAYS, COLUMNS, TREES, InputKind, RowLists
from treenet.data.packing import send_packed
from treenet.structure.base import Ragged, pad
from treeproc.common.errors import UserError, as_list, check_type
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_LABEL_ID


@dataclass
class TreeBatch:
    """A padded batch. Every model reads this; the plain models ignore nodes and structure."""

    example_ids: Tensor  # [B] int64
    leaf_pieces: Tensor  # [B, L] int64, PAD_ID where padded
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_labels: Tensor  # [B, N] int64, UNKNOWN_LABEL_ID where padded
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    structure: Any  # a `Structure`, as the input kind of the model builds it, shared by all layers; None for leaves
    tgt_in: Tensor  # [B, T] int64, BOS first, PAD_ID where padded
    tgt_out: Tensor  # [B, T] int64, EOS last, PAD_ID where padded
    # [B, 1 + L, H] float32, states of a pretrained encoder that were computed before (`FrozenStates`)
    leaf_states: Tensor | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return self.leaf_pieces.shape[0]

    @property
    def num_target_tokens(self) -> int:
        """Return the number of target pieces that count in the loss, EOS included."""
        return int((self.tgt_out != PAD_ID).sum())

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on `device`: from the host to an accelerator in one copy, which the host does not wait for."""
        device = torch.device(device)
        if self.leaf_pieces.device.type == "cpu" != device.type:
            return send_packed(self, device)
        moved: dict[str, Any] = {name: value if value is None else value.to(device) for name, value in vars(self).items()}
        return type(self)(**moved)

    def pad_masks(self) -> list[Tensor]:
        """Return the masks, True = padding, of all positions that a model computes."""
        return [self.source_pad_mask(), self.tgt_out == PAD_ID]

    def source_pad_mask(self) -> Tensor:
        """Return the mask [B, S], True = padding, of the encoder's positions: leaves, then the positions of every node."""
        copies = 0 if self.structure is None else self.structure.positions_of_node
        nodes = [self.node_pad_mask.repeat_interleave(copies, dim=1)] if copies else []
        return torch.cat([self.leaf_pad_mask, *nodes], dim=1)


class SourceBatch(TreeBatch):
    """A batch for models that read the source side alone."""

    def pad_masks(self) -> list[Tensor]:
        return super().pad_masks()[:-1]


def collate(examples: Sequence[dict], reads: InputKind = TREES) -> TreeBatch:
    """Return rows of an encoded shard (`Shard.row`) as one padded batch for an encoder that reads `reads`.

    Rows of a data set without a target side have empty targets, as in training. Raises UserError if there are no rows, if they
    are not such rows, or if they lack a column that the encoder reads.
    """
    check_type("reads", reads, InputKind)
    if not (examples := as_list("examples", examples, "rows of an encoded stage")):
        raise UserError("a batch must have at least one row, but has none")
    try:
        rows = RowLists(example_ids=[example["example_id"] for example in examples])
        for name in (*ALWAYS, *reads.columns):
            column, part = COLUMNS[name]
            if name == "targets" and all(column not in example for example in examples):
                rows.targets = [np.zeros(0, dtype=np.int32)] * len(examples)
                continue
            setattr(rows, name, [example[column] if part is None else example[column][part] for example in examples])
    except (KeyError, TypeError, IndexError) as error:
        lacks = f"one lacks {error}" if isinstance(error, KeyError) else "one is not a dictionary of arrays"
        raise UserError(f"examples must be rows of an encoded stage that are read as {reads}, but {lacks}") from None
    return collate_rows(rows, reads)


def collate_rows(rows: RowLists, reads: InputKind) -> TreeBatch:
    """Collate examples to one padded batch for an encoder that reads `reads`. Raises UserError for trees of another form."""
    leaf_pieces, leaf_padding = pad(rows.pieces, PAD_ID, reads.width_multiple)
    node_labels, node_padding = pad(rows.labels, UNKNOWN_LABEL_ID, reads.width_multiple)
    tgt_in, tgt_out = _target_pieces(Ragged.of(rows.targets), reads.least_target_width)
    return TreeBatch(
        example_ids=torch.from_numpy(np.array(rows.example_ids, dtype=np.int64)),
        leaf_pieces=torch.from_numpy(leaf_pieces),
        leaf_pad_mask=torch.from_numpy(leaf_padding),
        node_labels=torch.from_numpy(node_labels),
        node_pad_mask=torch.from_numpy(node_padding),
        structure=reads.build(rows),
        tgt_in=torch.from_numpy(tgt_in),
        tgt_out=torch.from_numpy(tgt_out),
    )


def _target_pieces(rows: Ragged, least_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return padded targets with BOS in front, and with EOS behind, of at least `least_width` columns."""
    lengths = rows.lengths
    before, after = np.full((2, len(rows), max(int(lengths.max(initial=0)) + 1, least_width)), PAD_ID, dtype=np.int64)
    real = np.arange(before.shape[1] - 1) < lengths[:, None]
    before[:, 0] = BOS_ID
    before[:, 1:][real] = rows.flat
    after[:, :-1][real] = rows.flat
    after[np.arange(len(rows)), lengths] = EOS_ID
    return before, after


def cut_batches(sorted_costs: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the starts of batches [num_batches + 1] over ascending costs: width * count <= max_tokens.

    An example that is longer than the budget gets a batch alone.
    """
    begins = np.flatnonzero(np.diff(sorted_costs, prepend=sorted_costs[:1] - 1)) if len(sorted_costs) else np.zeros(0, np.int64)
    return cut_runs(sorted_costs[begins], np.diff(begins, append=len(sorted_costs)), max_tokens)


def cut_runs(costs: np.ndarray, counts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Run `cut_batches` on costs [k] that ascend and occur `counts` [k] times each. The time does not grow with the counts."""
    starts, end, in_batch = [np.zeros(1, dtype=np.int64)], 0, 0  # `in_batch` rows so far are in the last batch
    for cost, count in zip(costs.tolist(), counts.tolist(), strict=True):
        most = max(1, max_tokens // max(1, cost))  # rows of a batch whose widest row has this cost
        if in_batch:
            taken = min(count, max(0, most - in_batch))
            in_batch, end, count = in_batch + taken, end + taken, count - taken
            if count:
                starts.append(np.array([end]))
        if count:
            full = (count - 1) // most  # the last batch may go on with the next cost
            starts.append(end + most * np.arange(1, full + 1))
            in_batch, end = count - full * most, end + count
    if end:
        starts.append(np.array([end]))
    return np.concatenate(starts).astype(np.int64)


# Examples sorted by length at a time: enough for even batches, few enough for an endless input.
WINDOW = 4096

Result = TypeVar("Result")
Example = TypeVar("Example", dict, tuple[dict, ...])


def in_order(
    compute: Callable[[TreeBatch, list[Example]], list[Result]],
    reads: InputKind,
    examples: Iterable[Example],
    empty: Result,
    size: Callable[[Example], int],
    max_tokens: int,
    device: torch.device | str,
    window: int,
) -> Iterator[Result]:
    """Compute the result of every example, in batches of up to `max_tokens` padded `size`, in the order of `examples`.

    `compute` gets a batch in the form that a model `reads`, and its examples. The result is `empty` for one without leaves. An
    example may be a tuple of rows, which are neighbours in the batch.
    """
    iterator, reads = iter(examples), reads.for_device(device)
    while chunk := list(islice(iterator, window)):
        found = [empty] * len(chunk)
        for rows in _batches(chunk, size, max_tokens):
            members = [chunk[row] for row in rows]
            batch = collate([row for member in members for row in rows_of(member)], reads).to(device)
            for row, result in zip(rows, compute(batch, members), strict=True):
                found[row] = result
        yield from found


def count_leaves(example: dict) -> int:
    """Count the leaves of an encoded row."""
    return len(example["leaves"]["piece"])


def longer_side(example: dict) -> int:
    """Return the number of leaves, or of target pieces with EOS if they are more."""
    return max(count_leaves(example), len(example["tgt_pieces"]) + 1)


def rows_of(example: dict | tuple[dict, ...]) -> tuple[dict, ...]:
    """Return the rows of an example."""
    return example if isinstance(example, tuple) else (example,)


def _batches(examples: list[Example], size: Callable[[Example], int], max_tokens: int) -> list[np.ndarray]:
    """Batch rows of examples that have leaves, with rows of similar size; the longest first, to run out of memory at once."""
    sizes = np.array([size(example) for example in examples])
    nodes = np.array([sum(len(row["nodes"]["label"]) for row in rows_of(example)) for example in examples])
    order = np.lexsort((nodes, sizes))
    order = order[[all(map(count_leaves, rows_of(examples[row]))) for row in order]]
    return [order[start:end] for start, end in pairwise(cut_batches(sizes[order], max_tokens).tolist())][::-1]
