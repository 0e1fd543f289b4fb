"""The node of a batch that covers a leaf at a given depth."""

import numpy as np

from treenet.structure.span_table import SpanTable


class NodeLookup:
    """Finds the node of a leaf. Nodes of one depth of a tree follow each other and do not overlap."""

    def __init__(self, tree: np.ndarray, depth: np.ndarray, start: np.ndarray, num_leaves: int):
        """Prepare for the flat nodes [N]: their tree, depth and first leaf. No leaf number is above `num_leaves`."""
        self._width, self._depths = num_leaves, 1 + int(depth.max(initial=0))
        keys = self._key(tree, depth, start)
        self._order = np.append(np.argsort(keys), -1)
        self._keys = keys[self._order[:-1]]

    def __call__(self, tree: np.ndarray, depth: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        """Return the last node of that depth that starts at `leaf` or before it; -1 for depth -1."""
        place = np.searchsorted(self._keys, self._key(tree, depth, leaf), side="right") - 1
        return np.where(depth < 0, -1, self._order[place])

    def _key(self, tree: np.ndarray, depth: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        return (tree * self._depths + depth) * self._width + leaf


def find_parents(table: SpanTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the parents of all real nodes and of all real leaves, as numbers of flat nodes; -1 for no parent."""
    tree, node = np.nonzero(~table.node_pad_mask)
    start, depth = table.start[tree, node], table.depth()[tree, node]
    find = NodeLookup(tree, depth, start, table.num_leaves)
    leaf_tree, leaf = np.nonzero(~table.leaf_pad_mask)
    return find(tree, depth - 1, start), find(leaf_tree, table.leaf_depth()[leaf_tree, leaf] - 1, leaf)
