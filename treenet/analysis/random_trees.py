"""A control for translation: the model reads every sentence with a wrong tree.

If its translations stay the same, the model does not use its trees.
"""

import numpy as np

from treeproc.trees.flat_trees import FlatTrees

ATTEMPTS = 20


def random_spans(num_leaves: int, num_nodes: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """Draw nested or disjoint spans [start, end) of a random tree in pre-order. The first span covers all leaves.

    They are drawn from the `2 * num_leaves - 1` subtrees of a random binary tree, with its leaves. No span repeats while there
    are enough. Repeated spans are unary chains.
    """
    binary, unsplit = [], [(0, num_leaves)]
    while unsplit:
        start, end = unsplit.pop()
        binary.append((start, end))
        if end - start > 1:
            cut = int(random.integers(start + 1, end))
            unsplit += [(start, cut), (cut, end)]
    rounds = [random.permutation(len(binary)) for _ in range(num_nodes // len(binary))]
    others = np.concatenate([1 + random.permutation(len(binary) - 1), *rounds])
    chosen = [0, *others[: num_nodes - 1]]
    return sorted((binary[i] for i in chosen), key=lambda span: (span[0], -span[1]))


def with_random_tree(example: dict, seed: int) -> dict:
    """Return the example of an encoded shard with a random tree of another shape over its own leaves.

    Its nonterminals are the same, in random order. The tree is a function of `seed` and `example_id`. A sentence that is too
    short for a second shape keeps its tree.
    """
    num_leaves, num_nodes = len(example["leaves"]["piece"]), len(example["nodes"]["label"])
    if not num_leaves or not num_nodes:
        return example
    random = np.random.default_rng([seed, example["example_id"]])
    own = sorted(zip(example["spans"]["start"].tolist(), example["spans"]["end"].tolist(), strict=True))
    for _ in range(ATTEMPTS):
        spans = random_spans(num_leaves, num_nodes, random)
        if sorted(spans) != own:
            break
    start, end = np.array(spans, dtype=np.int32).T
    labels = np.asarray(example["nodes"]["label"])[random.permutation(num_nodes)]
    tree = FlatTrees(labels, start, end, names=[])
    return {
        **example,
        "nodes": {"label": labels, "parent": tree.parents().astype(np.int32)},
        "spans": {"start": start, "end": end, "subtree_end": tree.subtree_ends().astype(np.int32)},
    }
