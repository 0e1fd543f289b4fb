"""Composition: a vector for every phrase of a partition, from its leaves (Hao et al., 2019, arXiv 1909.02222).

Every composition is a module with `forward(x, partition)`: states of leaves [B, L, D] -> [B, P, `width`], zeros for padding.

Shapes: B batch, L leaves, P phrases, D model, W width of a composed vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.linear import ATTENTION_GAIN, build_linear
from treenet.layers.scaled_dot_product import attend
from treenet.structure import Partition


def pool_max(x: Tensor, partition: Partition) -> Tensor:
    """Return the maximum over the leaves of each phrase: [B, L, W] -> [B, P, W]."""
    batch, num_phrases = partition.pad_mask.shape
    # Start from -inf: with 0, a maximum of exactly 0 would share its gradient with the start.
    pooled = x.new_full((batch, num_phrases + 1, x.shape[2]), -torch.inf)
    pooled = pooled.scatter_reduce(1, partition.phrase[..., None].expand(-1, -1, x.shape[2]), x, "amax")
    return pooled[:, :-1].masked_fill(partition.pad_mask[..., None], 0)


class MaxPool(nn.Module):
    """The maximum over a phrase; no parameters, W = D."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__()
        self.width = d_model

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        return pool_max(x, partition)


class Convolution(nn.Module):
    """A convolution over three leaves, ReLU, and the maximum over the phrase. Beyond the ends of a phrase there are zeros."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__()
        self.width = d_head
        self.taps = build_linear(d_model, d_head, num_blocks=3, bias=False)
        self.bias = nn.Parameter(torch.zeros(d_head))

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        before, here, after = self.taps(x).chunk(3, dim=2)
        together = (partition.phrase[:, 1:] == partition.phrase[:, :-1])[..., None]
        before = F.pad(before[:, :-1] * together, (0, 0, 1, 0))
        after = F.pad(after[:, 1:] * together, (0, 0, 0, 1))
        return pool_max(F.relu(before + here + after + self.bias), partition)


class Recurrence(nn.Module):
    """The last hidden state of an LSTM that restarts with every phrase.

    One loop over the leaves serves phrases of any length.
    """

    def __init__(self, d_model: int, d_head: int):
        super().__init__()
        self.width = d_head
        self.input = build_linear(d_model, d_head, num_blocks=4)  # i, f, o and the candidate
        self.recurrent = build_linear(d_head, d_head, num_blocks=4, bias=False)

    @torch.compiler.disable  # tracing would unroll the loop, separately for every length
    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        phrase = partition.phrase
        projected = self.input(x).unbind(1)
        goes_on = (phrase[:, 1:] == phrase[:, :-1])[..., None].to(x.dtype).unbind(1)
        hidden = cell = x.new_zeros(len(x), self.width)
        states = []
        for t, now in enumerate(projected):
            if t:
                hidden, cell = hidden * goes_on[t - 1], cell * goes_on[t - 1]
            gates, candidate = (now + self.recurrent(hidden)).split([3 * self.width, self.width], dim=1)
            enter, forget, out = gates.sigmoid().chunk(3, dim=1)
            cell = forget * cell + enter * candidate.tanh()
            hidden = out * cell.tanh()
            states.append(hidden)
        last = phrase.new_zeros(len(x), partition.pad_mask.shape[1] + 1)
        last = last.scatter_reduce(1, phrase, torch.arange(len(states), device=x.device).expand_as(phrase), "amax")[:, :-1]
        composed = torch.stack(states, dim=1).gather(1, last[..., None].expand(-1, -1, self.width))
        return composed.masked_fill(partition.pad_mask[..., None], 0)


class Attention(nn.Module):
    """Self-attention of one head within a phrase, and the maximum over it."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__()
        self.width = d_head
        self.queries_keys_values = build_linear(d_model, d_head, num_blocks=3, gain=ATTENTION_GAIN)

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        queries, keys, values = (part[:, None] for part in self.queries_keys_values(x).chunk(3, dim=2))
        together = partition.phrase[:, None, :, None] == partition.phrase[:, None, None, :]
        return pool_max(attend(queries, keys, values, together, dropout_p=0.0)[:, 0], partition)


COMPOSITIONS: dict[str, type[nn.Module]] = {
    "max_pool": MaxPool,
    "convolution": Convolution,
    "lstm": Recurrence,
    "attention": Attention,
}
