"""Words of a batch: their tags, and the paths between them in their dependency trees.

Shapes: B batch, L leaves, W words. Roots depend on one ROOT, which is not a word, but counts on a path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import Structure, pad_alike
from treeproc.common.errors import UserError
from treeproc.shards.schema import UNKNOWN_LABEL_ID


@dataclass
class Dependencies(Structure):
    """Dependency trees. The shortest path from word i to word j goes `up` arcs, then `down` arcs."""

    deprel: Tensor  # [B, W] int64, UNKNOWN_LABEL_ID where padded
    depth: Tensor  # [B, W] int64, arcs below the root, which has 0
    up: Tensor  # [B, W, W] int16
    down: Tensor  # [B, W, W] int16
    side: Tensor  # [B, W, W] int8; -1 or 1 if the path goes over a sibling of word i on its left or right, that is up = 1

    @classmethod
    def build(cls, governors: Sequence[np.ndarray], deprels: Sequence[np.ndarray]) -> "Dependencies":
        """Build from `governors[b]` and `deprels[b]`, both [W_b]; governors are counted from 0, with -1 for a root.

        Raises UserError for a cycle of arcs, and ValueError for rows of other lengths.
        """
        governor, deprel, padding = pad_alike(governors, -1, deprels, UNKNOWN_LABEL_ID)
        ancestors = _ancestors(governor, ~padding)
        depth = (ancestors < governor.shape[1]).sum(0) - 1
        common = _count_common(ancestors)
        up, down = (depth[:, :, None] + 1 - common, depth[:, None, :] + 1 - common)
        side = np.zeros(up.shape, dtype=np.int8)
        tree, word, other = np.nonzero((up == 1) & (down > 0))
        sibling = ancestors[down[tree, word, other] - 1, tree, other]  # where the path to `other` turns down
        side[tree, word, other] = np.sign(sibling - word)
        return cls(
            deprel=torch.from_numpy(deprel),
            depth=torch.from_numpy(np.maximum(depth, 0).astype(np.int64)),
            up=torch.from_numpy(up.astype(np.int16)),
            down=torch.from_numpy(down.astype(np.int16)),
            side=torch.from_numpy(side),
        )


@dataclass
class Words(Structure):
    """Words of a batch. A piece has the tag and the relations of its word."""

    word: Tensor  # [B, L] int64, word of every leaf, 0 for padding
    pos_tag: Tensor  # [B, L] int64, UNKNOWN_LABEL_ID for padding
    arcs: Dependencies | None = None  # if they were asked for

    @classmethod
    def build(
        cls, word_of_leaf: Sequence[np.ndarray], pos_tags: Sequence[np.ndarray], arcs: Dependencies | None = None
    ) -> "Words":
        """Build from `word_of_leaf[b]` and `pos_tags[b]`, both [L_b]. Raises ValueError for rows of other lengths."""
        word, pos_tag, _ = pad_alike(word_of_leaf, 0, pos_tags, UNKNOWN_LABEL_ID)
        return cls(torch.from_numpy(word), torch.from_numpy(pos_tag), arcs)

    def of_leaves(self, of_words: Tensor) -> Tensor:
        """Return values of words [B, W] as values of their leaves [B, L]."""
        return of_words.gather(1, self.word)

    def of_leaf_pairs(self, of_word_pairs: Tensor) -> Tensor:
        """Return values of pairs of words [B, W, W] as values of pairs of their leaves [B, L, L]."""
        batch, width = of_word_pairs.shape[:2]
        rows = self.word + torch.arange(batch, device=self.word.device)[:, None] * width
        return of_word_pairs.flatten().take(rows[:, :, None] * width + self.word[:, None, :])


def _ancestors(governor: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return [depth, B, W]: every word, its governor, the governor's governor, and so on.

    W is above roots, and padding is itself.
    """
    batch, width = governor.shape
    above = np.concatenate([np.where(governor < 0, width, governor), np.full((batch, 1), width)], axis=1)
    found = [np.where(real, np.arange(width), width)]
    while (found[-1] < width).any():
        if len(found) > width:
            raise UserError("arcs must form trees, but form a cycle; parse the data again")
        found.append(np.take_along_axis(above, found[-1], axis=1))
    return np.stack(found[:-1] or found)


def _count_common(ancestors: np.ndarray) -> np.ndarray:
    """Count the words that are above both words of a pair, or are one of them: [B, W, W]."""
    _, batch, width = ancestors.shape
    is_above = np.zeros((batch, width, width + 1), dtype=np.float32)
    for row in ancestors:
        np.put_along_axis(is_above, row[:, :, None], 1, axis=2)
    is_above = is_above[:, :, :width]
    return (is_above @ is_above.transpose(0, 2, 1)).astype(np.int64)


def list_paths(longest: int) -> list[str]:
    """List all paths of a tree of at most `longest` steps: U*D* up and down, LD* and RD* over a left or right sibling.

    UD... does not occur, because the codes of siblings replace it. There are (m + 1)(m + 2) / 2 - (m - 1) + 2 m paths.
    """
    straight = ["U" * up + "D" * down for up in range(longest + 1) for down in range(longest + 1 - up) if up != 1 or not down]
    return straight + [side + "D" * down for side in "LR" for down in range(longest)]


def build_path_ids(longest: int) -> Tensor:
    """Return [longest + 2, longest + 2, 3] int64: the place of a path in `list_paths` by `up`, `down` and `side` + 1.

    All longer paths share the next number.
    """
    paths = list_paths(longest)
    ids = torch.full((longest + 2, longest + 2, 3), len(paths))
    for place, path in enumerate(paths):
        if path.startswith(("L", "R")):
            ids[1, len(path), 2 * (path[0] == "R")] = place
        else:
            ids[path.count("U"), path.count("D"), 1] = place
    return ids
