"""Scores of the transitions of gold derivations. It uses the modules of Stanza's parser for whole batches.

Shapes: S states of a batch, W words with two bookends per sentence, N nodes, H hidden size, A transitions.
"""

import numpy as np
import torch
from stanza.models.constituency.lstm_model import LSTMModel
from torch import Tensor, nn

from treeproc.extras.parser_training.derivations import DerivationBatch
from treeproc.extras.parser_training.level_lstm import level_lstm
from treeproc.extras.parser_training.lstm import dropout, one_way
from treeproc.shards.ragged import edges_of, ranges


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
    for children, node, count in batch.nodes:
        values = table.index_select(0, torch.from_numpy(children))
        node = torch.from_numpy(node)[:, None].expand_as(values)
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
