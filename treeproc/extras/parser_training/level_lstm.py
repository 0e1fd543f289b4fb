"""An LSTM whose rows continue other rows: chains, stacks and trees, one level of rows at a time.

Rows are in order of their level. A row continues a row of an earlier level, or starts from zeros. Shapes: N rows, I input size, H
hidden size; gates in torch's order: in, forget, cell, out.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def level_lstm(lstm: nn.LSTM, inputs: Tensor, below: Tensor, edges: Sequence[int], layer: str) -> Tensor:
    """Compute hidden states [N, H] of one layer ("l0", "l1", "l0_reverse", ...) of `lstm` over `inputs` [N, I].

    `below` [N] is the row that each row continues. The rows of level 0, which ends at edges[1], start from zeros.
    """
    weight, recurrent, bias, recurrent_bias = (
        getattr(lstm, f"{name}_{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    return _LevelLSTM.apply(nn.functional.linear(inputs, weight, bias + recurrent_bias), recurrent, below, edges)


class _LevelLSTM(torch.autograd.Function):
    """One layer, from the part of the gates that comes from the inputs [N, 4H].

    The gradient of the weights is one product at the end.
    """

    @staticmethod
    def forward(ctx, projected: Tensor, recurrent: Tensor, below: Tensor, edges: Sequence[int]) -> Tensor:
        size = recurrent.shape[1]
        gates = projected.clone()
        hidden, cell = projected.new_empty(len(gates), size), projected.new_empty(len(gates), size)
        weight = recurrent.t()
        for start, end in pairwise(edges):
            level = gates[start:end]
            if start:
                before = below[start:end]
                level.addmm_(hidden.index_select(0, before), weight)
            enter_forget, candidate, out = level[:, : 2 * size], level[:, 2 * size : 3 * size], level[:, 3 * size :]
            enter_forget.sigmoid_()
            candidate.tanh_()
            out.sigmoid_()
            now = cell[start:end]
            torch.mul(candidate, level[:, :size], out=now)
            if start:
                now.addcmul_(cell.index_select(0, before), level[:, size : 2 * size])
            torch.mul(torch.tanh(now), out, out=hidden[start:end])
        ctx.save_for_backward(gates, hidden, cell, recurrent, below)
        ctx.edges = edges
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gates, hidden, cell, recurrent, below = ctx.saved_tensors
        size, first = recurrent.shape[1], ctx.edges[1]
        enter, forget, candidate, out = gates.chunk(4, 1)
        tanh = cell.tanh()
        # All factors of the gradients in the recurrence, for all rows at once.
        to_cell = torch.addcmul(out, out * tanh, tanh, value=-1)
        to_out = tanh * out * (1 - out)
        before = torch.cat([cell.new_zeros(first, size), cell.index_select(0, below[first:])])
        to_candidate = torch.addcmul(enter, enter * candidate, candidate, value=-1)
        to_gates = torch.cat([candidate * enter * (1 - enter), before * forget * (1 - forget), to_candidate], 1).view(-1, 3, size)
        grad_gates = torch.empty_like(gates)
        grad_hidden, grad_cell = grad.clone(), torch.zeros_like(cell)
        for start, end in reversed(list(pairwise(ctx.edges))):
            level, now = grad_gates[start:end], grad_cell[start:end]
            now.addcmul_(grad_hidden[start:end], to_cell[start:end])
            torch.mul(to_gates[start:end], now[:, None], out=level[:, : 3 * size].view(-1, 3, size))
            torch.mul(to_out[start:end], grad_hidden[start:end], out=level[:, 3 * size :])
            if start:
                grad_hidden.index_add_(0, below[start:end], level @ recurrent)
                grad_cell.index_add_(0, below[start:end], now * forget[start:end])
        return grad_gates, grad_gates[first:].t() @ hidden.index_select(0, below[first:]), None, None
