"""Slow oracle: Tree2Seq and its sequence baseline, a sentence, a position, a gate and a head at a time, without dropout.

Of treenet it uses the parameters alone, by their names in the model; tests run it in float64.
"""

from collections.abc import Mapping, Sequence

import torch
from reference_tree_lstm import reference_binary_tree_lstm, reference_child_sum
from strategies import Tree
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden state and cell [H]


def reference_lstm(lstm: nn.LSTM, inputs: Sequence[Tensor], start: State) -> list[State]:
    """State after every input [D]; torch's order of the gates is i, f, candidate, o."""
    hidden, cell = start
    size, states = len(hidden), []
    for x in inputs:
        gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ hidden + lstm.bias_hh_l0
        i, f, u, o = (gates[k * size : (k + 1) * size] for k in range(4))
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(u)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        states.append((hidden, cell))
    return states


def reference_bilstm(forward: Sequence[nn.LSTM], backward: Sequence[nn.LSTM], inputs: Sequence[Tensor]) -> list[State]:
    """State of both directions side by side at every input."""
    zero = (torch.zeros(forward[0].hidden_size, dtype=inputs[0].dtype),) * 2
    for ahead, back in zip(forward, backward, strict=True):
        pairs = zip(reference_lstm(ahead, inputs, zero), reference_lstm(back, inputs[::-1], zero)[::-1], strict=True)
        states = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in pairs]
        inputs = [hidden for hidden, _ in states]
    return states


def reference_states(model: nn.Module, example: Mapping, tree: Tree) -> tuple[list[State], State]:
    """States of all positions of one sentence and where the decoder starts.

    Positions are words where the model reads arcs, else leaves, and then nodes where the model has any.
    """
    size = model.encoder.embedding.weight.shape[1]
    inputs = [size**0.5 * model.encoder.embedding.weight[piece] for piece in example["leaves"]["piece"]]
    if getattr(model.encoder, "leaf", None) is not None:
        projected = [model.encoder.leaf.weight @ x + model.encoder.leaf.bias for x in inputs]
        states = [(torch.sigmoid(p[size:]) * torch.tanh(p[:size]), p[:size]) for p in projected]
    elif hasattr(model.encoder, "forward_layers"):
        states = reference_bilstm(model.encoder.forward_layers, model.encoder.backward_layers, inputs)
    if model.reads.positions == "words":
        if hasattr(model.encoder, "forward_layers"):
            inputs = [hidden for hidden, _ in states]
        governors = example["arcs"]["governor"].tolist()
        pieces = [
            [x for x, word in zip(inputs, example["leaves"]["word_index"], strict=True) if word == w]
            for w in range(len(governors))
        ]
        words = torch.stack([sum(own) / len(own) for own in pieces])
        gates = model.encoder.word
        states = reference_child_sum(words @ gates.weight.t() + gates.bias, model.encoder.states, governors)
        own = states[governors.index(-1)]
    elif model.reads.binary:
        leaves = [torch.stack(parts) for parts in zip(*states, strict=True)]
        composer = model.encoder.composer
        nodes = reference_binary_tree_lstm(*leaves, composer.weight.t(), composer.bias, tree.spans, tree.parents)
        own, states = nodes[0], states + nodes
    else:
        own = tuple(torch.cat([states[-1][part][: size // 2], states[0][part][size // 2 :]]) for part in (0, 1))
    hidden = torch.stack([h for h, _ in states])
    weights = torch.full((len(states),), 1 / len(states), dtype=hidden.dtype)
    if model.decoder.begins_with == "attention":
        pooling = model.decoder.pooling
        scores = torch.stack([pooling[2].weight[0] @ torch.tanh(pooling[0].weight @ h) for h in hidden])
        weights = scores.exp() / scores.exp().sum()
    both = [torch.stack(part) for part in zip(*states, strict=True)]
    if model.decoder.begins_with == "own":
        return states, own
    if model.decoder.begins_with == "max":
        return states, tuple(part.max(0).values for part in both)
    return states, tuple(sum(w * x for w, x in zip(weights, part, strict=True)) for part in both)


def reference_outputs(model: nn.Module, targets: Sequence[int], states: Sequence[State], start: State) -> Tensor:
    """The decoder states [T, D] that logits are computed from, after reading `targets`."""
    size = model.encoder.embedding.weight.shape[1]
    inputs = [size**0.5 * model.encoder.embedding.weight[piece] for piece in targets]
    for lstm in model.decoder.layers:
        inputs = [hidden for hidden, _ in reference_lstm(lstm, inputs, start)]
    if model.decoder.cross_attention is None:
        return torch.stack(inputs)
    return torch.stack([_attend(model, x, [hidden for hidden, _ in states]) for x in inputs])


def _attend(model: nn.Module, x: Tensor, memory: Sequence[Tensor]) -> Tensor:
    attention = model.decoder.cross_attention
    size = len(x)
    width = size // attention.num_heads
    query = attention.queries.weight @ x + attention.queries.bias
    projected = [attention.keys_values.weight @ m + attention.keys_values.bias for m in memory]
    heads = []
    for head in range(attention.num_heads):
        part = slice(head * width, (head + 1) * width)
        scores = torch.stack([query[part] @ p[:size][part] / width**0.5 for p in projected])
        weights = scores.exp() / scores.exp().sum()
        heads.append(sum(w * p[size:][part] for w, p in zip(weights, projected, strict=True)))
    attended = attention.output.weight @ torch.cat(heads) + attention.output.bias
    return torch.tanh(model.decoder.combine.weight @ torch.cat([x, attended]) + model.decoder.combine.bias)
