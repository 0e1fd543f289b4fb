"""LSTMs on padded rows. On a CPU, training is several times faster than with PyTorch's packed sequences, with equal results.

Shapes: B rows, L steps of the longest, D inputs, H states.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

_SPELLING_CHUNKS = 4
# This function is undocumented. A step of few rows takes a fifth longer without it.
_lstm = getattr(torch, "lstm", None)


def one_way(weights: Sequence[Tensor], x: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """Return states of one direction of one layer, [B, L, H], from x [B, L, D] and the first states [1, B, H]."""
    if _lstm is None:
        module = nn.LSTM(x.shape[2], h.shape[2], batch_first=True, device="meta")
        names = (name for name, _ in module.named_parameters())
        return functional_call(module, dict(zip(names, weights, strict=True)), (x, (h, c)))[0]
    return _lstm(x, (h, c), list(weights), True, 1, 0.0, torch.is_grad_enabled(), False, True)[0]


def both_ways(lstm: nn.LSTM, x: Tensor, sizes: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """Return states of a bidirectional LSTM of one layer, [B, L, 2H]. Values after the `sizes` of the rows are meaningless.

    First states are [2, B, H], by default zero.
    """
    if h is None or c is None:
        h = c = x.new_zeros(2, len(x), lstm.hidden_size)
    steps = torch.arange(x.shape[1])
    # The backward direction reads every row from its own end, so its padding also comes last.
    back = torch.where(steps < sizes[:, None], sizes[:, None] - 1 - steps, steps)
    rows = torch.arange(len(x))[:, None]
    ahead, behind = lstm.all_weights
    forward, backward = one_way(ahead, x, h[:1], c[:1]), one_way(behind, x[rows, back], h[1:], c[1:])[rows, back]
    # To turn `back` twice is the identity.
    return torch.cat([forward, backward], 2)


def highway(module: nn.Module, x: Tensor, sizes: Tensor, h: Tensor, c: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute Stanza's `HighwayLSTM`: [B, L, D] to [B, L, 2H], with first states [2 layers, 1, H] and dropout between layers."""
    h, c = (first.expand(-1, len(x), -1).contiguous() for first in (h, c))
    for layer, packed in enumerate(module.lstm):
        if layer:
            x = drop(x)
        states = both_ways(packed.lstm, x, sizes, h[2 * layer : 2 * layer + 2], c[2 * layer : 2 * layer + 2])
        x = states + torch.sigmoid(module.gate[layer](x)) * module.highway_func(module.highway[layer](x))
    return x


def spell(module: nn.Module, characters: Tensor, sizes: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute word representations of Stanza's `CharacterModel`: [words, H] from padded characters [words, L] and counts."""
    order = sizes.argsort(stable=True)
    out = []
    for part in order.chunk(_SPELLING_CHUNKS):
        longest = int(sizes[part].max())
        x = drop(module.char_emb(characters[part, :longest]))
        first = [p.expand(-1, len(part), -1).contiguous() for p in (module.charlstm_h_init, module.charlstm_c_init)]
        states = one_way(module.charlstm.lstm.all_weights[0], x, *first)
        weights = torch.sigmoid(module.char_attn(drop(states)))
        there = torch.arange(longest) < sizes[part, None]
        out.append((states * weights * there[..., None]).sum(1))
    return torch.cat(out)[order.argsort()]


def dropout(x: Tensor, share: float) -> Tensor:
    """Apply dropout from random bytes: PyTorch's own takes a fifth of a step on a CPU. The share is rounded to 256ths."""
    dropped = round(256 * share)
    if not dropped:
        return x
    kept = np.frombuffer(np.random.bytes(x.numel()), np.uint8) >= dropped
    return x * torch.from_numpy(kept).view(x.shape).to(x.dtype).mul_(256 / (256 - dropped))


class Dropout(nn.Module):
    """`dropout` as a module."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def replace_dropout(model: nn.Module) -> None:
    """Replace all dropout modules of PyTorch by `Dropout`. Names and weights stay."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, Dropout(child.p))
