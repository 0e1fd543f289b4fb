"""ON-LSTM, the LSTM with ordered neurons (Shen et al., 2019).

Two master gates are cumulative softmaxes over chunks of C neurons. They control how far up a state is forgotten and how far down
it is written. So neurons of high rank keep information over many steps. With the sums f~ (ascending) and i~ (descending) of a
chunk and w = f~ * i~, the gates of its neurons are f * w + (f~ - w) and i * w + (i~ - w).

Autograd over single steps would cost more than the products. So this function writes states, gates and gradients in place, and
computes everything without recursion for all steps at once.

Shapes: T steps, B batch, D input, H hidden width, C chunk size, N = H / C chunks, G = 2N + 4H gates.
The order of the gates is f~, i~ (N each), then o, i, f and the candidate g (H each).
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treeproc.common.errors import UserError


class OnLSTM(nn.Module):
    """One layer in one direction, from states of zero."""

    def __init__(self, d_input: int, d_hidden: int, chunk_size: int):
        """Raise UserError if the chunks do not fill the states."""
        super().__init__()
        if d_hidden % chunk_size or d_hidden == chunk_size:
            # The master gates of a single chunk are 1 and 0 for any input, so all states are 0.
            raise UserError(
                "chunk_size of an ON-LSTM (model.hybrid, model.phrases) must divide its width "
                f"{d_hidden}, and be smaller, but is {chunk_size}"
            )
        num_gates = 2 * (d_hidden // chunk_size) + 4 * d_hidden
        self.input = nn.Linear(d_input, num_gates)
        self.recurrent = nn.Parameter(nn.Linear(d_hidden, num_gates, bias=False).weight.detach().t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] -> [B, T, H]. A step reads only earlier steps, so padding at the end changes no real state."""
        projected = self.input(x.transpose(0, 1))
        with torch.autocast(x.device.type, enabled=False):
            hidden = on_lstm(projected.to(self.recurrent.dtype), self.recurrent)
        return hidden.transpose(0, 1)


@torch.compiler.disable  # tracing would unroll the loop, separately for every length
def on_lstm(projected: Tensor, weight: Tensor) -> Tensor:
    """Compute hidden states [T, B, H]. Both inputs are float32 or float64, and so are softmaxes and sums.

    `projected` [T, B, G] is the part of the gates from the inputs, with biases. `weight` [H, G] gives the part from the hidden
    states.
    """
    return _OnLSTM.apply(projected, weight)


class _OnLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, projected, weight):
        steps, batch, num_gates = projected.shape
        size = len(weight)
        masters = num_gates - 4 * size
        by_chunk = batch, masters // 2, -1
        hidden, cell = projected.new_zeros(2, steps + 1, batch, size)  # with the states before the first step
        gates, shares = torch.empty_like(projected), projected.new_empty(steps, batch, 2, masters // 2)
        for t in range(steps):
            now = gates[t]
            torch.addmm(projected[t], hidden[t], weight, out=now)
            out, enter, forget, candidate = now[:, masters:].view(batch, 4, *by_chunk[1:]).unbind(1)
            now[:, masters : masters + 3 * size].sigmoid_()
            candidate.tanh_()
            master = torch.softmax(now[:, :masters].view(batch, 2, -1), -1, out=shares[t]).cumsum(-1)
            keep, write = master[:, 0, :, None], 1 - master[:, 1, :, None]
            both = keep * write
            next_cell = cell[t + 1].view(by_chunk)
            torch.addcmul(keep - both, forget, both, out=next_cell).mul_(cell[t].view(by_chunk))
            next_cell.addcmul_(torch.addcmul(write - both, enter, both), candidate)
            torch.mul(next_cell.tanh(), out, out=hidden[t + 1].view(by_chunk))
        ctx.save_for_backward(hidden, cell, gates, shares, weight)
        return hidden[1:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, cell, gates, shares, weight = ctx.saved_tensors
        steps, batch, num_gates = gates.shape
        size = len(weight)
        masters = num_gates - 4 * size
        num_chunks = masters // 2
        by_chunk = steps, batch, num_chunks, -1
        out, enter, forget, candidate = gates[..., masters:].view(steps, batch, 4, num_chunks, -1).unbind(2)
        before, tanh = cell[:-1].view(by_chunk), cell[1:].view(by_chunk).tanh()
        # All factors of the gradients in the recursion, for all steps at once.
        master = shares.cumsum(-1)
        keep, write = master[:, :, 0, :, None], 1 - master[:, :, 1, :, None]
        both = keep * write
        to_cell = torch.addcmul(out, out * tanh, tanh, value=-1).view(steps, batch, size)
        to_out = (tanh * out * (1 - out)).view(steps, batch, size)
        to_enter = candidate * both * enter * (1 - enter)
        to_forget = before * both * forget * (1 - forget)
        to_candidate = torch.addcmul(write - both, enter, both) * (1 - candidate * candidate)
        to_gates = torch.stack([to_enter, to_forget, to_candidate], dim=2).view(steps, batch, 3, size)
        to_both = before * (forget - 1) + candidate * (enter - 1)
        to_masters = torch.stack([before, -candidate, to_both], dim=2)  # [T, B, 3, N, C]
        of_both = torch.stack([write, -keep], dim=2)[..., 0]  # [T, B, 2, N]
        kept = torch.addcmul(keep - both, forget, both).view(steps, batch, size)
        later = grad.new_ones(num_chunks, num_chunks).tril()  # sums from a chunk to the last
        grad_hidden, grad_cell = grad.clone(), torch.zeros_like(cell[0])
        grad_gates = torch.empty_like(gates)
        transposed = weight.t()
        for t in range(steps - 1, -1, -1):
            of_hidden, now = grad_hidden[t], grad_gates[t]
            grad_cell.addcmul_(of_hidden, to_cell[t])
            torch.mul(of_hidden, to_out[t], out=now[:, masters : masters + size])
            torch.mul(to_gates[t], grad_cell[:, None], out=now[:, masters + size :].view(batch, 3, size))
            sums = (to_masters[t] * grad_cell.view(batch, 1, num_chunks, -1)).sum(-1)
            share = shares[t]
            of_share = (torch.addcmul(sums[:, :2], of_both[t], sums[:, 2:]) @ later).mul_(share)
            torch.addcmul(of_share, share, of_share.sum(-1, keepdim=True), value=-1, out=now[:, :masters].view(batch, 2, -1))
            if t:
                grad_cell.mul_(kept[t])
                grad_hidden[t - 1].addmm_(now, transposed)
        of_weight = hidden[:-1].flatten(0, 1).t() @ grad_gates.flatten(0, 1)
        return grad_gates, of_weight
