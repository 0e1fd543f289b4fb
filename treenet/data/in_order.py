"""Results of examples in their order, computed in batches of similar size."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import torch

from treenet.data.batch import TreeBatch, collate
from treenet.data.input_kinds import InputKind
from treenet.data.windows import cut_batches

# Examples sorted by length at a time: enough for even batches, few enough for an endless input.
WINDOW = 4096

Result = TypeVar("Result")
Example = TypeVar("Example", dict, tuple[dict, ...])


def in_order(
    compute: Callable[[TreeBatch], list[Result]],
    reads: InputKind,
    examples: Iterable[dict],
    empty: Result,
    size: Callable[[dict], int],
    max_tokens: int,
    device: torch.device | str,
    window: int,
) -> Iterator[Result]:
    """Call `in_order_with_rows` for a `compute` that reads only the batch."""
    return in_order_with_rows(lambda batch, _: compute(batch), reads, examples, empty, size, max_tokens, device, window)


def in_order_with_rows(
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
