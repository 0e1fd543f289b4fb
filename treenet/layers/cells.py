"""Tree-LSTM cells (Tai et al., 2015). They compute one level of all trees of a batch at a time.

Autograd over single levels would copy the states of all other levels at every level. So these functions write states, gates and
gradients in place. They compute the gradients of the weights in one product at the end.

Shapes: M nodes in the order of levels, A arcs, H width of states.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from treenet.layers.backend import first_derivative


def binary_tree_lstm(
    hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor, children: Tensor, edges: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute hidden and cell states [1 + leaves + M, H]: row of zeros, given leaves, then nodes (N-ary cell, N = 2).

    `hidden` and `cell` [leaves, H] are those of the leaves. `weight` [2H, 5H] and `bias` [5H] map the children's hidden states to
    the gates: i, f of the left child, f of the right child, o and the candidate u. `children` [M, 2] are rows of the result, from
    earlier levels or leaves. All is computed in the type of `weight`, with or without autocast.
    """
    with torch.autocast(weight.device.type, enabled=False):
        return _BinaryTreeLSTM.apply(hidden.to(weight.dtype), cell.to(weight.dtype), weight, bias, children, edges)


class _BinaryTreeLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, leaf_hidden: Tensor, leaf_cell: Tensor, weight: Tensor, bias: Tensor, children: Tensor, edges: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        size, first = leaf_hidden.shape[1], 1 + len(leaf_hidden)
        hidden, cell = (leaf_hidden.new_empty(first + len(children), size) for _ in range(2))
        hidden[0], cell[0] = 0, 0
        hidden[1:first], cell[1:first] = leaf_hidden, leaf_cell
        gates = leaf_hidden.new_empty(len(children), 5 * size)
        for start, end in pairwise(edges):
            below = children[start:end].flatten()
            level = gates[start:end]
            torch.addmm(bias, hidden.index_select(0, below).view(-1, 2 * size), weight, out=level)
            level[:, : 4 * size].sigmoid_()
            enter, candidate = level[:, :size], level[:, 4 * size :].tanh_()
            kept = cell.index_select(0, below).view(-1, 2 * size).mul_(level[:, size : 3 * size])
            now = cell[first + start : first + end]
            torch.add(kept[:, :size], kept[:, size:], out=now)
            now.addcmul_(enter, candidate)
            torch.mul(now.tanh(), level[:, 3 * size : 4 * size], out=hidden[first + start : first + end])
        ctx.save_for_backward(hidden, cell, gates, weight, children)
        ctx.edges = edges
        return hidden, cell

    @staticmethod
    @first_derivative
    def backward(ctx: Any, of_hidden: Tensor, of_cells: Tensor) -> Any:
        hidden, cell, gates, weight, children = ctx.saved_tensors
        size, first = hidden.shape[1], len(hidden) - len(children)
        enter, left, right, out, candidate = gates.chunk(5, 1)
        below = children.flatten()
        tanh = cell[first:].tanh()
        # All factors of the gradients in the recursion, for all nodes at once.
        to_cell = torch.addcmul(out, out * tanh, tanh, value=-1)
        to_out = tanh * out * (1 - out)
        of_cell = cell.index_select(0, below).view(-1, 2 * size)
        to_gates = torch.cat(
            [
                candidate * enter * (1 - enter),
                of_cell[:, :size] * left * (1 - left),
                of_cell[:, size:] * right * (1 - right),
                enter * (1 - candidate * candidate),
            ],
            dim=1,
        ).view(-1, 4, size)
        grad_hidden, grad_cell = of_hidden.clone(), of_cells.clone()
        grad_gates = torch.empty_like(gates)
        transposed = weight.t()
        for start, end in reversed(list(pairwise(ctx.edges))):
            level, here = grad_gates[start:end].view(-1, 5, size), slice(first + start, first + end)
            now = grad_cell[here].addcmul_(grad_hidden[here], to_cell[start:end])
            torch.mul(to_gates[start:end, :3], now[:, None], out=level[:, :3])
            torch.mul(to_out[start:end], grad_hidden[here], out=level[:, 3])
            torch.mul(to_gates[start:end, 3], now, out=level[:, 4])
            rows = below[2 * start : 2 * end]
            grad_hidden.index_add_(0, rows, (grad_gates[start:end] @ transposed).view(-1, size))
            forget = gates[start:end, size : 3 * size].reshape(-1, 2, size)
            grad_cell.index_add_(0, rows, (forget * now[:, None]).view(-1, size))
        inputs = hidden.index_select(0, below).view(-1, 2 * size)
        return grad_hidden[1:first], grad_cell[1:first], inputs.t() @ grad_gates, grad_gates.sum(0), None, None


def child_sum_tree_lstm(
    projected: Tensor, weight: Tensor, child: Tensor, governor: Tensor, edges: Sequence[int], arc_edges: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute hidden and cell states [M, H] of the child-sum cell, over any number of children.

    `projected` [M, 4H] is the part of the gates i, o, u and f from the inputs, with biases. `weight` [H, 4H] gives the part from
    hidden states: of the sum of the children for i, o and u, of the single child for its f. Arc a goes from node `governor[a]`
    down to node `child[a]`, which is in an earlier level. `arc_edges` are the first arcs of every level. All is computed in the
    type of `weight`, with or without autocast.
    """
    with torch.autocast(weight.device.type, enabled=False):
        return _ChildSumTreeLSTM.apply(projected.to(weight.dtype), weight, child, governor, edges, arc_edges)


class _ChildSumTreeLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, child: Tensor, governor: Tensor,
        edges: Sequence[int], arc_edges: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        size = weight.shape[0]
        hidden, cell = projected.new_zeros(2, len(projected), size)
        gates = projected[:, : 3 * size].clone()  # i, o, u
        forget = projected[:, 3 * size :].index_select(0, governor)  # [A, H]
        sums = projected.new_zeros(len(projected), size)
        to_gates, to_forget = weight[:, : 3 * size], weight[:, 3 * size :]
        for (start, end), (first, last) in zip(pairwise(edges), pairwise(arc_edges), strict=True):
            level, now = gates[start:end], cell[start:end]
            if last > first:
                below, above = child[first:last], governor[first:last]
                states = hidden.index_select(0, below)
                level.addmm_(sums.index_add_(0, above, states)[start:end], to_gates)
                gate = forget[first:last].addmm_(states, to_forget).sigmoid_()
                cell.index_add_(0, above, cell.index_select(0, below).mul_(gate))
            level[:, : 2 * size].sigmoid_()
            candidate = level[:, 2 * size :].tanh_()
            now.addcmul_(level[:, :size], candidate)
            torch.mul(now.tanh(), level[:, size : 2 * size], out=hidden[start:end])
        ctx.save_for_backward(hidden, cell, gates, forget, sums, weight, child, governor)
        ctx.edges, ctx.arc_edges = edges, arc_edges
        return hidden, cell

    @staticmethod
    @first_derivative
    def backward(ctx: Any, of_hidden: Tensor, of_cells: Tensor) -> Any:
        hidden, cell, gates, forget, sums, weight, child, governor = ctx.saved_tensors
        size = weight.shape[0]
        enter, out, candidate = gates.chunk(3, 1)
        tanh = cell.tanh()
        # All factors of the gradients in the recursion, for all nodes and arcs at once.
        to_cell = torch.addcmul(out, out * tanh, tanh, value=-1)
        to_enter, to_out = candidate * enter * (1 - enter), tanh * out * (1 - out)
        to_candidate = enter * (1 - candidate * candidate)
        to_forget = cell.index_select(0, child) * forget * (1 - forget)
        grad_hidden, grad_cell = of_hidden.clone(), of_cells.clone()
        grad_gates, grad_forget = torch.empty_like(gates), torch.empty_like(forget)
        from_gates, from_forget = weight[:, : 3 * size].t(), weight[:, 3 * size :].t()
        for (start, end), (first, last) in reversed(list(zip(pairwise(ctx.edges), pairwise(ctx.arc_edges), strict=True))):
            level, here = grad_gates[start:end], grad_hidden[start:end]
            now = grad_cell[start:end].addcmul_(here, to_cell[start:end])
            torch.mul(now, to_enter[start:end], out=level[:, :size])
            torch.mul(here, to_out[start:end], out=level[:, size : 2 * size])
            torch.mul(now, to_candidate[start:end], out=level[:, 2 * size :])
            if last > first:
                below, above = child[first:last], governor[first:last] - start
                of_cell = now.index_select(0, above)
                of_forget = torch.mul(of_cell, to_forget[first:last], out=grad_forget[first:last])
                of_states = torch.addmm((level @ from_gates).index_select(0, above), of_forget, from_forget)
                grad_hidden.index_add_(0, below, of_states)
                grad_cell.index_add_(0, below, of_cell.mul_(forget[first:last]))
        of_inputs = torch.zeros_like(hidden).index_add_(0, governor, grad_forget)
        of_weight = torch.cat([sums.t() @ grad_gates, hidden.index_select(0, child).t() @ grad_forget], dim=1)
        return torch.cat([grad_gates, of_inputs], dim=1), of_weight, None, None, None, None
