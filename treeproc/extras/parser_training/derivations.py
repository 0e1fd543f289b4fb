"""The transitions of gold trees in the in-order scheme, all index arrays of a batch of them, and their scores.

A node is opened after its first child: `(X A B)` is `A Open(X) B Close`. Every transition pushes one entry on the stack. A shift
pushes the next word. An open pushes the embedding of its label. A close removes the children and the open label, and pushes the
node. Training follows the gold transitions. So stack depths, children and heights are known before any number is computed, and
all sentences of a batch can be computed level by level.

The scores come from the modules of Stanza's parser, for whole batches. Shapes: S transitions, or states before them, W words with
two bookends per sentence, N nodes, H hidden size, A transitions to choose from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from stanza.models.constituency.lstm_model import LSTMModel
from torch import Tensor, nn

from treeproc.extras.parser_training.layers import dropout, level_lstm, one_way
from treeproc.shards.rows import edges_of, ranges
from treeproc.trees.spans import SpanTree

SHIFT, CLOSE = 0, 1  # in Stanza's order of transitions; opens follow


def transitions_of(tree: SpanTree, num_words: int, opens: Mapping[str, int]) -> list[int]:
    """Return the in-order transitions of a tree with one root over all words; `opens` has the transition of every label.

    Raises KeyError for a label without one.
    """
    out: list[int] = []
    begun: list[int] = []  # nodes whose first child is not complete
    opened: list[int] = []
    node = 0
    for word in range(num_words):
        while node < len(tree) and tree.starts[node] == word:
            begun.append(node)
            node += 1
        out.append(SHIFT)
        complete = word  # start of the latest complete constituent
        while True:
            if begun and tree.starts[begun[-1]] == complete:
                opened.append(begun.pop())
                out.append(opens[tree.labels[opened[-1]]])
            if not opened or tree.ends[opened[-1]] != word + 1:
                break
            complete = tree.starts[opened.pop()]
            out.append(CLOSE)
    return out


@dataclass
class DerivationBatch:
    """Index arrays of a batch. Its table has W rows of words, a row for every label, and N rows of nodes by height.

    A row of the stack is a push. Row 0, alone in level 0, is the empty stack. A row continues one of an earlier level.
    """

    lengths: np.ndarray  # [sentences] transitions
    targets: np.ndarray  # [S] gold transitions
    fronts: np.ndarray  # [S] table row of the next word
    tops: np.ndarray  # [S] row of the stack
    pushed: np.ndarray  # [rows - 1] table row that a row of the stack pushes
    below: np.ndarray  # [rows] the row that a row of the stack continues; 0 for row 0
    levels: list[int]  # level l of the stack is rows [levels[l], levels[l + 1])
    nodes: list[tuple[np.ndarray, np.ndarray, int]]  # by height: table rows of children, their node in the level, nodes


class Derivations:
    """The transitions of many sentences, as flat arrays of steps."""

    def __init__(self, sequences: Sequence[Sequence[int]]):
        self.edges = edges_of(np.fromiter(map(len, sequences), np.int64, len(sequences)))
        columns = [np.concatenate(column) for column in zip(*map(_trace, sequences), strict=True)]
        self.actions, self.positions, self.below, self.depths, self.parents, self.heights = columns
        self.num_words = np.add.reduceat(self.actions == SHIFT, self.edges[:-1])

    def batch(self, rows: np.ndarray, num_labels: int) -> DerivationBatch:
        """Build index arrays of the sentences `rows`, in this order. Labels have the numbers of their transitions."""
        lengths, sizes = np.diff(self.edges)[rows], self.num_words[rows] + 2
        steps = ranges(self.edges[rows], lengths)
        first = np.repeat(edges_of(lengths)[:-1], lengths)  # first step of each sentence
        here = np.arange(len(steps))
        actions, heights, depths = self.actions[steps].astype(np.int64), self.heights[steps], self.depths[steps]
        fronts = np.repeat(edges_of(sizes)[:-1] + 1, lengths) + self.positions[steps]
        # The push of the last transition is not used for any prediction.
        is_last = np.zeros(len(steps), bool)
        is_last[edges_of(lengths)[1:] - 1] = True

        closes = np.flatnonzero((actions == CLOSE) & ~is_last)
        closes = closes[np.argsort(heights[closes], kind="stable")]
        table = np.where(actions == SHIFT, fronts, sizes.sum() + actions - CLOSE - 1)
        table[closes] = sizes.sum() + num_labels + np.arange(len(closes))
        node = np.full(len(steps), -1)
        node[closes] = np.arange(len(closes))
        parents = np.where(self.parents[steps] >= 0, node[first + self.parents[steps]], -1)

        pushes = np.flatnonzero(~is_last)
        pushes = pushes[np.argsort(depths[pushes], kind="stable")]
        row = np.zeros(len(steps), np.int64)
        row[pushes] = np.arange(1, len(pushes) + 1)
        below = np.where(self.below[steps] >= 0, row[first + self.below[steps]], 0)
        return DerivationBatch(
            lengths=lengths,
            targets=actions,
            fronts=fronts,
            tops=np.where(here > first, row[here - 1], 0),
            pushed=table[pushes],
            below=np.concatenate([[0], below[pushes]]),
            levels=[0, *(1 + np.searchsorted(depths[pushes], np.arange(1, depths.max() + 2))).tolist()],
            nodes=_nodes(table, parents, heights[closes]),
        )


def _nodes(table: np.ndarray, parents: np.ndarray, heights: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Return the nodes by height: rows of the children, the node of each child, and the number of nodes.

    `parents` is the node that takes a step's push as a child (-1: none). `heights` are those of the nodes, in rising order.
    """
    children = np.flatnonzero(parents >= 0)
    children = children[np.argsort(parents[children], kind="stable")]
    parents = parents[children]
    node_edges = np.searchsorted(heights, np.arange(1, heights.max(initial=0) + 2))
    child_edges = np.searchsorted(parents, node_edges)
    return [
        (table[children[a:b]], parents[a:b] - start, int(end - start))
        for (a, b), (start, end) in zip(pairwise(child_edges), pairwise(node_edges), strict=True)
    ]


def _trace(actions: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the trace of a derivation, for every transition.

    Its columns are the transition, the words shifted before, the step below its push (-1: none), and the depth. Then follow the
    close that takes its push as a child (-1: none), and the height of its push (0: no node).
    """
    count = len(actions)
    positions, below, depths, parents, heights = [0] * count, [-1] * count, [0] * count, [-1] * count, [0] * count
    stack: list[int] = []
    opens: list[int] = []
    position = 0
    for step, action in enumerate(actions):
        positions[step] = position
        if action == SHIFT:
            position += 1
        elif action == CLOSE:
            at = opens.pop()
            children = [stack[at - 1], *stack[at + 1 :]]
            del stack[at - 1 :]
            heights[step] = 1 + max(heights[child] for child in children)
            for child in children:
                parents[child] = step
        else:
            opens.append(len(stack))
        if stack:
            below[step] = stack[-1]
        stack.append(step)
        depths[step] = len(stack)
    return tuple(np.array(column, np.int32) for column in (actions, positions, below, depths, parents, heights))


def word_states(model: LSTMModel, inputs: Tensor, lengths: np.ndarray) -> Tensor:
    """Return states [W, H] of the words with bookends, from embeddings [words, I] without them."""
    sizes = lengths + 2
    ends = np.cumsum(sizes)
    rows = np.arange(ends[-1]) + 2 - np.repeat(2 * np.arange(len(sizes)) + 1, sizes)
    rows[ends - sizes], rows[ends - 1] = 0, 1
    table = torch.cat([model.word_start_embedding[None], model.word_end_embedding[None], inputs])
    states = _dropout(model.word_dropout, table.index_select(0, torch.from_numpy(rows)))
    return model.nonlinearity(model.word_to_constituent(_run_sequences(model.word_lstm, states, sizes)))


def _run_sequences(lstm: nn.LSTM, states: Tensor, lengths: np.ndarray) -> Tensor:
    """Return outputs of an LSTM over concatenated sequences."""
    starts, longest = edges_of(lengths)[:-1, None], lengths.max()
    # Padded rows repeat their last step; its outputs are not used.
    position = np.minimum(np.arange(longest), lengths[:, None] - 1)
    directions = [starts + position, starts + lengths[:, None] - 1 - position][: 1 + lstm.bidirectional]
    used = ranges(np.arange(len(lengths)) * longest, lengths)
    first = states.new_zeros(1, len(lengths), lstm.hidden_size)
    for layer in range(lstm.num_layers):
        if layer:
            states = dropout(states, lstm.dropout if lstm.training else 0.0)
        outputs = []
        for direction, rows in enumerate(directions):
            inputs = states.index_select(0, torch.from_numpy(rows.ravel())).view(*rows.shape, -1)
            hidden = one_way(lstm.all_weights[layer * len(directions) + direction], inputs, first, first)
            back = np.empty(len(states), np.int64)
            back[rows.ravel()[used]] = used
            outputs.append(hidden.flatten(0, 1).index_select(0, torch.from_numpy(back)))
        states = torch.cat(outputs, 1)
    return states


def transition_logits(model: LSTMModel, words: Tensor, batch: DerivationBatch) -> Tensor:
    """Return scores [S, A] of the transitions in the states of the derivations, from the states of the words [W, H]."""
    table = torch.cat([words, model.dummy_embedding.weight])
    for children, parents, count in batch.nodes:
        values = table.index_select(0, torch.from_numpy(children))
        node = torch.from_numpy(parents)[:, None].expand_as(values)
        highest = values.new_full((count, values.shape[1]), -torch.inf).scatter_reduce(0, node, values, "amax")
        table = torch.cat([table, model.nonlinearity(model.reduce_linear(_dropout(model.lstm_input_dropout, highest)))])
    history, stack = _history_states(model, batch), _stack_states(model, table, batch)
    fronts, tops = (torch.from_numpy(rows) for rows in (batch.fronts, batch.tops))
    states = torch.cat([words.index_select(0, fronts), history, stack.index_select(0, tops)], 1)
    for layer in model.output_layers:
        states = layer(model.nonlinearity(_dropout(model.predict_dropout, states)))
    return states


def _history_states(model: LSTMModel, batch: DerivationBatch) -> Tensor:
    """Return the state of the earlier transitions for every state [S, transition hidden size]."""
    stack = model.transition_stack
    starts = edges_of(batch.lengths)[:-1]
    # The start comes before the first transition. It has no dropout.
    inputs = _dropout(model.lstm_input_dropout, model.transition_embedding(torch.from_numpy(batch.targets)).roll(1, 0))
    inputs = inputs.index_copy(0, torch.from_numpy(starts), stack.start_embedding.expand(len(starts), -1))
    return _run_sequences(stack.lstm, inputs, batch.lengths)


def _stack_states(model: LSTMModel, table: Tensor, batch: DerivationBatch) -> Tensor:
    """Return the stack after every push [pushes + 1, H], level by level. Row 0 is the empty stack."""
    stack = model.constituent_stack
    pushed = _dropout(model.lstm_input_dropout, table.index_select(0, torch.from_numpy(batch.pushed)))
    states = torch.cat([stack.start_embedding[None], pushed])
    below = torch.from_numpy(batch.below)
    for layer in range(stack.lstm.num_layers):
        if layer:
            states = dropout(states, stack.lstm.dropout if model.training else 0.0)
        states = level_lstm(stack.lstm, states, below, batch.levels, f"l{layer}")
    return states


def _dropout(module: nn.Dropout, states: Tensor) -> Tensor:
    return dropout(states, module.p) if module.training else states
