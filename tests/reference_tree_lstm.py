"""Slow oracles: Tree-LSTMs by recursion, a node at a time, from the equations of Tai et al. (2015), section 3.

Nothing here shares code with treenet; tests run it in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_binary_tree_lstm(
    leaf_hidden: Tensor, leaf_cell: Tensor, weight: Tensor, bias: Tensor, spans: Sequence[Sequence[int]], parents: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Hidden state and cell [H] of every node of one tree. Leaves [n, H]; `weight` [2H, 5H] gives i, f left, f right, o, u."""
    size = leaf_hidden.shape[1]
    states: list = [None] * len(spans)

    def visit(node: int) -> tuple[Tensor, Tensor]:
        start, end = spans[node][:2]
        below = {spans[child][0]: child for child, parent in enumerate(parents) if parent == node}
        children, position = [], start
        while position < end:
            if position in below:
                children.append(visit(below[position]))
                position = spans[below[position]][1]
            else:
                children.append((leaf_hidden[position], leaf_cell[position]))
                position += 1
        nothing = torch.zeros_like(leaf_hidden[0])
        (left, left_cell), (right, right_cell) = [*children, (nothing, nothing)][:2]
        gates = torch.cat([left, right]) @ weight + bias
        i, f_left, f_right, o, u = (gates[k * size : (k + 1) * size] for k in range(5))
        cell = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f_left) * left_cell + torch.sigmoid(f_right) * right_cell
        states[node] = torch.sigmoid(o) * torch.tanh(cell), cell
        return states[node]

    for node, parent in enumerate(parents):
        if parent == -1:
            visit(node)
    return states


def reference_child_sum(projected: Tensor, weight: Tensor, governors: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """State of every word; `projected` [n, 4H] and `weight` [H, 4H] are the shares of inputs and states in i, o, u, f."""
    size = weight.shape[0]
    states: list = [None] * len(governors)
    w_i, w_o, w_u, w_f = (weight[:, k * size : (k + 1) * size] for k in range(4))

    def visit(word: int) -> tuple[Tensor, Tensor]:
        children = [visit(child) for child, governor in enumerate(governors) if governor == word]
        total = sum((h for h, _ in children), start=torch.zeros(size, dtype=weight.dtype))
        x_i, x_o, x_u, x_f = (projected[word][k * size : (k + 1) * size] for k in range(4))
        cell = torch.sigmoid(x_i + total @ w_i) * torch.tanh(x_u + total @ w_u)
        for h, c in children:
            cell = cell + torch.sigmoid(x_f + h @ w_f) * c
        states[word] = torch.sigmoid(x_o + total @ w_o) * torch.tanh(cell), cell
        return states[word]

    for word, governor in enumerate(governors):
        if governor == -1:
            visit(word)
    return states
