"""Recurrences over sequences: LSTMs of one or two directions, the ON-LSTM, and layers with residual and layer norm around one.

ON-LSTM is the LSTM with ordered neurons (Shen et al., 2019). Two master gates are cumulative softmaxes over chunks of C neurons.
They control how far up a state is forgotten and how far down it is written. So neurons of high rank keep information over many
steps. With the sums f~ (ascending) and i~ (descending) of a chunk and w = f~ * i~, the gates of its neurons are f * w + (f~ - w)
and i * w + (i~ - w). Autograd over single steps would cost more than the products. So this function writes states, gates and
gradients in place, and computes everything without recursion for all steps at once.

Shapes: B batch, L positions, D width of all directions together or model, H = D / 2. Of the ON-LSTM: T steps, D input, H hidden
width, C chunk size, N = H / C chunks, G = 2N + 4H gates. The order of the gates is f~, i~ (N each), then o, i, f and the
candidate g (H each).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.backend import first_derivative, uncompiled
from treenet.layers.core import Dropout, Modules
from treeproc.common.errors import UserError, check_choice

if TYPE_CHECKING:
    from treenet.config import RecurrentCell

    Layers = Modules[nn.LSTM]


def build_bilstm(width: int, num_layers: int) -> tuple[Layers, Layers]:
    """Build layers of both directions, each half as wide."""
    forward, backward = (build_lstm(width, width // 2, num_layers) for _ in range(2))
    return forward, backward


def build_lstm(width: int, size: int, num_layers: int) -> Layers:
    """Build layers of one direction, from inputs [..., D] to states of `size`."""
    return Modules([nn.LSTM(width, size, batch_first=True) for _ in range(num_layers)])


def run_layer(layer: nn.LSTM, *inputs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return `layer(*inputs)`. oneDNN has no LSTM in bf16 for processors without AVX-512; PyTorch then computes it itself."""
    lacking = torch.is_autocast_enabled("cpu") and torch.backends.cpu.get_cpu_capability() != "AVX512"
    with torch.backends.mkldnn.flags(enabled=False) if lacking else nullcontext():
        return layer(*inputs)


def run_lstm(x: Tensor, layers: Layers, dropout: Dropout, *, with_cells: bool = False) -> tuple[Tensor, Tensor | None]:
    """Run the forward direction, as `run_bilstm` does. Padding comes last, so no real position reads it."""
    for layer in layers:
        before = x if layer is layers[0] else dropout(x)
        x = run_layer(layer, before)[0]
    return x, lstm_cells(layer, before, x) if with_cells else None


def run_bilstm(
    x: Tensor, pad_mask: Tensor, forward: Layers, backward: Layers, dropout: Dropout, *, with_cells: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run both directions: hidden states [B, L, D] of the last layer side by side, and its cells. Dropout is between layers.

    Inputs: x [B, L, D]; pad_mask [B, L], True = padding, which comes last.
    """
    # Padding comes last in both directions, so no real position reads it.
    turned = _reversed_order(pad_mask)
    for ahead_layer, back_layer in zip(forward, backward, strict=True):
        if ahead_layer is not forward[0]:
            x = dropout(x)
        back_x = _turn(x, turned)
        ahead, back = run_layer(ahead_layer, x)[0], run_layer(back_layer, back_x)[0]
        if with_cells and ahead_layer is forward[-1]:
            cells = lstm_cells(ahead_layer, x, ahead), _turn(lstm_cells(back_layer, back_x, back), turned)
        x = torch.cat([ahead, _turn(back, turned)], dim=2)
    return x, torch.cat(cells, dim=2) if with_cells else None


def last_states(x: Tensor, pad_mask: Tensor) -> Tensor:
    """Return the last state of each direction, [B, L, D] -> [B, D]: forward at the last position, backward at the first."""
    ahead, back = x.chunk(2, dim=2)
    return torch.cat([last_state(ahead, pad_mask), back[:, 0]], dim=1)


def last_state(x: Tensor, pad_mask: Tensor) -> Tensor:
    """Return the state at the last real position, [B, L, D] -> [B, D]."""
    last = (~pad_mask).sum(1) - 1
    return x[torch.arange(len(last), device=last.device), last]


def lstm_cells(lstm: nn.LSTM, x: Tensor, hidden: Tensor) -> Tensor:
    """Compute cells [B, L, H] of one layer that began at zeros, from its inputs x [B, L, D] and hidden states [B, L, H].

    `nn.LSTM` returns all hidden states, but only the last cell. With known hidden states, all gates are two products. Then only c
    = f * c_before + i * u must run in order.
    """
    before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    weight_x, weight_h, bias_x, bias_h = lstm.all_weights[0]
    gates = F.linear(x, weight_x, bias_x) + F.linear(before, weight_h, bias_h)
    enter, keep, candidate, _ = gates.to(torch.promote_types(gates.dtype, torch.float32)).chunk(4, dim=2)
    entering, kept = (enter.sigmoid() * candidate.tanh()).unbind(1), keep.sigmoid().unbind(1)
    cells = [entering[0]]
    for new, share in zip(entering[1:], kept[1:], strict=True):
        cells.append(torch.addcmul(new, share, cells[-1]))
    return torch.stack(cells, dim=1)


def _reversed_order(pad_mask: Tensor) -> Tensor:
    """Return the order [B, L]: real positions from last to first, padding where it is."""
    positions = torch.arange(pad_mask.shape[1], device=pad_mask.device).expand(pad_mask.shape)
    lengths = (~pad_mask).sum(1, keepdim=True)
    return torch.where(pad_mask, positions, lengths - 1 - positions)


def _turn(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the positions of x [B, L, D] by [B, L]."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


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


@uncompiled  # tracing would unroll the loop, separately for every length
def on_lstm(projected: Tensor, weight: Tensor) -> Tensor:
    """Compute hidden states [T, B, H]. Both inputs are float32 or float64, and so are softmaxes and sums.

    `projected` [T, B, G] is the part of the gates from the inputs, with biases. `weight` [H, G] gives the part from the hidden
    states.
    """
    return _OnLSTM.apply(projected, weight)


class _OnLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, weight: Tensor) -> Tensor:
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
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Any:
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


class LSTM(nn.LSTM):
    """One layer of PyTorch's LSTM. It computes at least in float32, as the ON-LSTM does."""

    def __init__(self, d_input: int, d_hidden: int):
        super().__init__(d_input, d_hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without states
        """Map x [B, T, D] to hidden states [B, T, D]."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.all_weights[0][1].dtype))[0]


def build_recurrence(cell: RecurrentCell, d_input: int, d_hidden: int, chunk_size: int) -> LSTM | OnLSTM:
    """Build a map [B, T, d_input] -> [B, T, d_hidden]. Raises UserError if the chunks of an ON-LSTM do not fill its states."""
    check_choice("cell", cell, ("on_lstm", "lstm"))
    return LSTM(d_input, d_hidden) if cell == "lstm" else OnLSTM(d_input, d_hidden, chunk_size)


class RecurrentLayer(nn.Module):
    """A recurrence with dropout, residual and layer norm around it, like the other sub-layers (post-norm)."""

    def __init__(self, cell: RecurrentCell, d_model: int, chunk_size: int, dropout: float):
        super().__init__()
        self.recurrence = build_recurrence(cell, d_model, d_model, chunk_size)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] -> [B, T, D]."""
        return self.norm(x + self.dropout(self.recurrence(x)))
