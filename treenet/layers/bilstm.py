"""LSTMs over padded sequences, forward or in both directions.

Shapes: B batch, L positions, D width of all directions together, H = D / 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.dropout import Dropout

Layers = nn.ModuleList


def build_bilstm(width: int, num_layers: int) -> tuple[Layers, Layers]:
    """Build layers of both directions, each half as wide."""
    forward, backward = (build_lstm(width, width // 2, num_layers) for _ in range(2))
    return forward, backward


def build_lstm(width: int, size: int, num_layers: int) -> Layers:
    """Build layers of one direction, from inputs [..., D] to states of `size`."""
    return nn.ModuleList([nn.LSTM(width, size, batch_first=True) for _ in range(num_layers)])


def run_lstm(x: Tensor, layers: Layers, dropout: Dropout, *, with_cells: bool = False) -> tuple[Tensor, Tensor | None]:
    """Run the forward direction, as `run_bilstm` does. Padding comes last, so no real position reads it."""
    for layer in layers:
        before = x if layer is layers[0] else dropout(x)
        x = layer(before)[0]
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
        ahead, back = ahead_layer(x)[0], back_layer(back_x)[0]
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
    gates = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0) + F.linear(before, lstm.weight_hh_l0, lstm.bias_hh_l0)
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
