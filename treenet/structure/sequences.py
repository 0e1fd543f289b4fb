"""Trees as sequences: of words and brackets, and of actions.

Words and labelled brackets (Li et al., 2017; Currey and Heafield, 2019): a node becomes an opening bracket, its children, and a
closing bracket, both with its label. Attention does not know the order of its inputs. So the positions stay leaves, then nodes,
each node twice: first its opening bracket, then its closing one. Only `place` knows the sequence.

Actions, for Transformer Grammars (Sartran et al., 2022): a sentence becomes BOS, and then its tree in pre-order. A node becomes
an opening nonterminal, its children, and its closing nonterminal twice. The first copy composes the constituent: it attends to
the parts of the constituent, and replaces them on the stack. It predicts nothing. The second copy attends to the stack, and
predicts the next action. The stack at every position follows from one number for each position: where it leaves the stack. That
is where its constituent is composed. Words of several pieces are not constituents here: their pieces are children of the node
above the word, as in the paper.

Shapes: B batch, L leaves, N nodes, S = L + 2N positions, A actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import Ragged, SpanTable, Structure, find_parents
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID


@dataclass
class LinearizedTrees(Structure):
    """The places of all positions of a batch."""

    place: Tensor  # [B, S] int64: the place in the sequence, from 0; 0 for padding
    positions_of_node: ClassVar[int] = 2

    @classmethod
    def build(cls, table: SpanTable) -> "LinearizedTrees":
        """Build from a span table."""
        leaf, node, depth = np.arange(table.num_leaves), np.arange(table.num_nodes), table.depth
        # Before a leaf are the brackets that opened at it or before it, and those that closed.
        place_of_leaf = leaf + table.count_until(table.start)[:, :-1] + table.count_until(table.end)[:, :-1]
        opened = table.start + node + (node - depth)
        closed = table.end + table.subtree_end + (table.subtree_end - 1 - depth)
        brackets = np.where(table.node_pad_mask[..., None], 0, np.stack([opened, closed], axis=2))
        leaves = np.where(table.leaf_pad_mask, 0, place_of_leaf)
        return cls(torch.from_numpy(np.concatenate([leaves, brackets.reshape(len(leaves), -1)], axis=1)))


PADDING, PIECE, OPEN, COMPOSE, STACK = range(5)


@dataclass
class Actions(Structure):
    """The actions of a batch, padded on the right."""

    kind: Tensor  # [B, A] int64: PADDING, PIECE (also BOS), OPEN, COMPOSE or STACK, the two copies of a closing nonterminal
    symbol: Tensor  # [B, A] int64: the piece, or the label of the node
    depth: Tensor  # [B, A] int64: nodes above, and BOS; 0 for BOS
    leaves: Tensor  # [B, A] int64: position that composes it away; A for never, -1 for what is not put on the stack

    @classmethod
    def build(
        cls,
        pieces: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
        words: Sequence[np.ndarray],
        spans: Ragged,
    ) -> "Actions":
        """Build from the pieces, node labels and words of leaves of every example, and from `spans` [N_b, 3].

        Raises UserError if the spans are not trees.
        """
        leaves = Ragged.of(pieces)
        SpanTable.build(leaves.lengths, spans)  # only its check
        kept = _above_words(spans, Ragged.of(words))
        table = SpanTable.build(leaves.lengths, _select(spans, kept))
        label = Ragged.of(labels).flat[kept]
        tree, node = np.nonzero(~table.node_pad_mask)
        start, end, subtree_end, depth = (x[tree, node] for x in (table.start, table.end, table.subtree_end, table.depth))
        leaf_tree, leaf = np.nonzero(~table.leaf_pad_mask)
        # A node is opened after its earlier leaves and nodes, and after its earlier nodes but its ancestors were closed twice.
        opened = 1 + start + node + 2 * (node - depth)
        composed = 1 + end + subtree_end + 2 * (subtree_end - 1 - depth)
        before = table.count_until(table.start) + 2 * table.count_until(table.end)
        place = 1 + leaf + before[leaf_tree, leaf]
        lengths = 1 + table.leaf_counts + 3 * table.node_counts
        width = int(lengths.max())
        kind, symbol, depths, closer = np.zeros((4, len(lengths), width), dtype=np.int64)
        symbol[:], closer[:] = PAD_ID, -1
        kind[:, 0], symbol[:, 0], closer[:, 0] = PIECE, BOS_ID, width
        above, above_leaf = find_parents(table)
        composed = np.append(composed, width)  # the last entry: no parent
        kind[leaf_tree, place], symbol[leaf_tree, place] = PIECE, leaves.flat
        depths[leaf_tree, place], closer[leaf_tree, place] = 1 + table.leaf_depth()[leaf_tree, leaf], composed[above_leaf]
        for kind_here, at, leaves_at in (
            (OPEN, opened, composed[:-1]),
            (COMPOSE, composed[:-1], composed[above]),
            (STACK, composed[:-1] + 1, -1),
        ):
            kind[tree, at], symbol[tree, at], depths[tree, at], closer[tree, at] = kind_here, label, 1 + depth, leaves_at
        return cls(*map(torch.from_numpy, (kind, symbol, depths, closer)))

    def ids(self, num_pieces: int, num_labels: int) -> Tensor:
        """Return [B, A] ids of a table: pieces, then opening and then closing nonterminals of all labels; PAD_ID for padding."""
        first = torch.tensor([0, 0, num_pieces, num_pieces + num_labels, num_pieces + num_labels])
        return self.symbol + first[self.kind]

    def next_ids(self, num_pieces: int, num_labels: int) -> Tensor:
        """Return [B, A] ids that the positions predict: the next one, or EOS at the end. PAD_ID: nothing, where one composes."""
        ids = self.ids(num_pieces, num_labels)
        following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], PAD_ID)], dim=1)
        last = (self.kind != PADDING).sum(1, keepdim=True) - 1
        following.scatter_(1, last, EOS_ID)
        return following.masked_fill((self.kind == COMPOSE) | (self.kind == PADDING), PAD_ID)

    def attend_mask(self) -> Tensor:
        """Return [B, A, A], True where a position (dimension 1) attends to another. Every position attends to itself.

        A composing position attends to what leaves the stack there: the opening nonterminal and the children. All other positions
        attend to the stack: to earlier positions that have not left it.
        """
        place = torch.arange(self.kind.shape[1], device=self.kind.device)
        leaves, query = self.leaves[:, None, :], place[:, None]
        on_stack = (leaves > query) & (place < query)
        return torch.where((self.kind == COMPOSE)[:, :, None], leaves == query, on_stack) | (place == query)


def _above_words(spans: Ragged, words: Ragged) -> np.ndarray:
    """Return [sum of N_b] whether a node is more than the pieces of a word: False for the lowest node over a word, and inside it.

    A node over one word of one piece stays.
    """
    start, end, subtree_end = spans.flat.T.astype(np.int64)
    example = np.repeat(np.arange(len(spans)), spans.lengths)
    leaf_offset = np.cumsum(words.lengths) - words.lengths
    node_offset = np.cumsum(spans.lengths) - spans.lengths
    first, last = leaf_offset[example] + start, leaf_offset[example] + end - 1
    one_word = words.flat[first] == words.flat[last]
    of_example = np.repeat(np.arange(len(words)), words.lengths)
    joined = (np.diff(words.flat) == 0) & (np.diff(of_example) == 0)  # whether a leaf is of the same word as the one before
    same = np.concatenate([[False], joined, [False]])
    whole = one_word & ~same[first] & ~same[last + 1]
    following = np.arange(len(start)) + 1
    has_below = following < node_offset[example] + subtree_end
    below = np.minimum(following, max(len(start) - 1, 0))
    lowest = ~(has_below & (start[below] == start) & (end[below] == end))
    return ~one_word | (whole & (~lowest | (first == last)))


def _select(spans: Ragged, kept: np.ndarray) -> Ragged:
    """Return the spans of the nodes that are kept, with `subtree_end` counted in them."""
    example = np.repeat(np.arange(len(spans)), spans.lengths)
    before = np.concatenate([[0], kept.cumsum()])
    offset = (np.cumsum(spans.lengths) - spans.lengths)[example]
    flat = spans.flat.astype(np.int64)
    flat[:, 2] = before[offset + flat[:, 2]] - before[offset]
    return Ragged(flat[kept], np.bincount(example[kept], minlength=len(spans)))
