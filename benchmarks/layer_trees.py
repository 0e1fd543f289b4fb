"""Trees of a batch for benchmarks: random ones with the shape of parses, or real ones of an encoded data set."""

from pathlib import Path

import numpy as np

from treenet.structure import TreeStructure

SENTENCE_LEAVES = (8, 48)  # of the sentences of a random document


def random_tree(num_leaves: int, num_nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw spans [num_nodes, 3] in pre-order of a random n-ary tree over `num_leaves` > num_nodes leaves.

    It starts from a binary tree. Half of its splits cut off a short constituent on the left, as in English. Random nodes except
    the root are then dissolved into their parents. The depth is about that of parses.
    """
    spans, stack = [], [(0, num_leaves)]
    while stack:
        start, end = stack.pop()
        length = end - start
        if length < 2:
            continue
        spans.append((start, end))
        cut = min(length - 1, int(rng.geometric(0.4))) if rng.random() < 0.5 else int(rng.integers(1, length))
        stack += [(start + cut, end), (start, start + cut)]
    kept = np.sort(np.concatenate([[0], 1 + rng.permutation(len(spans) - 1)[: num_nodes - 1]]))
    return add_subtree_ends(np.array(spans)[kept])


def add_subtree_ends(spans: np.ndarray) -> np.ndarray:
    """Add the end of each subtree: spans [N, 2] of nodes in pre-order, without unary chains -> [N, 3]."""
    ends = [int(np.argmax(np.append(spans[i + 1 :, 0] >= end, True))) + i + 1 for i, (_, end) in enumerate(spans)]
    return np.column_stack([spans, ends])


def random_document(num_leaves: int, num_nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Return sentences of 8 to 48 leaves under a dummy root."""
    lengths = []
    while (left := num_leaves - sum(lengths)) > SENTENCE_LEAVES[1] + SENTENCE_LEAVES[0]:
        lengths.append(int(rng.integers(SENTENCE_LEAVES[0], SENTENCE_LEAVES[1] + 1)))
    lengths += [left // 2, left - left // 2] if left > SENTENCE_LEAVES[1] else [left]
    share = np.floor(np.array(lengths) * (num_nodes - 1) / num_leaves).astype(int)
    for index in rng.permutation(len(lengths))[: num_nodes - 1 - share.sum()]:
        share[index] += 1
    rows, leaf = [np.array([[0, num_leaves, num_nodes]])], 0
    for length, nodes in zip(lengths, np.minimum(share, np.array(lengths) - 1), strict=True):
        rows.append(random_tree(length, int(nodes), rng) + np.array([leaf, leaf, sum(map(len, rows))]))
        leaf += length
    spans = np.concatenate(rows)
    spans[0, 2] = len(spans)
    return spans


def random_structure(batch: int, num_leaves: int, num_nodes: int, document: bool = False, seed: int = 0) -> TreeStructure:
    """Build `batch` random trees of the same size, single sentences or documents of several."""
    rng = np.random.default_rng(seed)
    make = random_document if document else random_tree
    return TreeStructure.build([num_leaves] * batch, [make(num_leaves, num_nodes, rng) for _ in range(batch)])


def encoded_structure(folder: Path, split: str, batch: int, num_leaves: int) -> TreeStructure:
    """Build the `batch` examples of DATA/encoded with lengths close to `num_leaves`, padded: a batch as in the plan."""
    from treenet.data.examples import ExampleSource  # needs pyarrow and pydantic; random trees do not

    source = ExampleSource(folder / "encoded", split)
    distance = np.abs(np.asarray(source.lengths["leaves"]).astype(int) - num_leaves)
    return source.batch(np.argsort(distance, kind="stable")[:batch]).structure
