"""Multi-granularity self-attention (MG-SA; Hao et al., 2019, arXiv 1909.02222): some heads attend to phrases.

A composition makes a vector for every phrase of a partition, from its leaves. It is a module with `forward(x, partition)`: states
of leaves [B, L, D] -> [B, P, `width`], zeros for padding.

Shapes: B batch, L leaves, P phrases of a partition, D model, H heads, K = D / H, G heads that attend to phrases, W width of a
composed vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import KeysValues, padding_to_attend_mask
from treenet.layers.backend import uncompiled
from treenet.layers.core import ATTENTION_GAIN, build_linear
from treenet.layers.recurrent import build_recurrence
from treenet.layers.scaled_dot_product import attend, merge_heads, split_heads
from treenet.structure import NO_TAG, Partition

if TYPE_CHECKING:
    from treenet.config import ModelConfig, PhraseConfig


def pool_max(x: Tensor, partition: Partition) -> Tensor:
    """Return the maximum over the leaves of each phrase: [B, L, W] -> [B, P, W]."""
    batch, num_phrases = partition.pad_mask.shape
    # Start from -inf: with 0, a maximum of exactly 0 would share its gradient with the start.
    pooled = x.new_full((batch, num_phrases + 1, x.shape[2]), -torch.inf)
    pooled = pooled.scatter_reduce(1, partition.phrase[..., None].expand(-1, -1, x.shape[2]), x, "amax")
    return pooled[:, :-1].masked_fill(partition.pad_mask[..., None], 0)


class Composition(nn.Module):
    """Composes the leaves of each phrase."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width


class MaxPool(Composition):
    """The maximum over a phrase; no parameters, W = D."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__(d_model)

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        return pool_max(x, partition)


class Convolution(Composition):
    """A convolution over three leaves, ReLU, and the maximum over the phrase. Beyond the ends of a phrase there are zeros."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__(d_head)
        self.taps = build_linear(d_model, d_head, num_blocks=3, bias=False)
        self.bias = nn.Parameter(torch.zeros(d_head))

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        before, here, after = self.taps(x).chunk(3, dim=2)
        together = (partition.phrase[:, 1:] == partition.phrase[:, :-1])[..., None]
        before = F.pad(before[:, :-1] * together, (0, 0, 1, 0))
        after = F.pad(after[:, 1:] * together, (0, 0, 0, 1))
        return pool_max(F.relu(before + here + after + self.bias), partition)


class Recurrence(Composition):
    """The last hidden state of an LSTM that restarts with every phrase.

    One loop over the leaves serves phrases of any length.
    """

    def __init__(self, d_model: int, d_head: int):
        super().__init__(d_head)
        self.input = build_linear(d_model, d_head, num_blocks=4)  # i, f, o and the candidate
        self.recurrent = build_linear(d_head, d_head, num_blocks=4, bias=False)

    @uncompiled  # tracing would unroll the loop, separately for every length
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


class Attention(Composition):
    """Self-attention of one head within a phrase, and the maximum over it."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__(d_head)
        self.queries_keys_values = build_linear(d_model, d_head, num_blocks=3, gain=ATTENTION_GAIN)

    def forward(self, x: Tensor, partition: Partition) -> Tensor:
        queries, keys, values = (part[:, None] for part in self.queries_keys_values(x).chunk(3, dim=2))
        together = partition.phrase[:, None, :, None] == partition.phrase[:, None, None, :]
        return pool_max(attend(queries, keys, values, together, dropout_p=0.0)[:, 0], partition)


COMPOSITIONS: dict[str, Callable[[int, int], Composition]] = {
    "max_pool": MaxPool,
    "convolution": Convolution,
    "lstm": Recurrence,
    "attention": Attention,
}


class PhraseMemory(nn.Module):
    """F_h of one head.

    It composes leaves to phrases G = COM(H), predicts their tags from G, and lets them interact: H_g = REC(G). The tag of a
    phrase is the label of its node. A word of several pieces has `POS=` and its tag, a single piece without a node has none. The
    loss of tags is a sum over the phrases of all layers and levels, divided by the number of target pieces. An n-gram consists of
    pieces, and the last one may be shorter.
    """

    def __init__(self, d_model: int, d_head: int, config: PhraseConfig, num_tags: int):
        """Build the layers; `num_tags` is 0 for phrases without tags."""
        super().__init__()
        self.composition = COMPOSITIONS[config.composition](d_model, d_head)
        width = self.composition.width
        self.tag_logits = build_linear(width, num_tags) if num_tags else None
        self.interaction = None
        if config.interaction != "none":
            self.interaction = build_recurrence(config.interaction, width, d_head, config.chunk_size)
            width = d_head
        self.keys_values = build_linear(width, d_head, num_blocks=2, gain=ATTENTION_GAIN)

    def forward(self, x: Tensor, partition: Partition) -> tuple[KeysValues, Tensor]:
        """Map x [B, L, D] to keys and values [B, 1, P, K].

        Also returns the summed -log p of the tags, 0 for a partition without tags.
        """
        phrases = self.composition(x, partition)
        tag_loss = x.new_zeros((), dtype=torch.float32)
        if self.tag_logits is not None and partition.tags is not None:
            logits = self.tag_logits(phrases).flatten(0, 1)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            tag_loss = F.cross_entropy(logits, partition.tags.flatten(), ignore_index=NO_TAG, reduction="sum")
        if self.interaction is not None:
            phrases = self.interaction(phrases)
        keys, values = self.keys_values(phrases)[:, None].chunk(2, dim=3)
        return (keys, values), tag_loss


class PhraseAttention(nn.Module):
    """Self-attention. Each of the last G heads attends to a memory of phrases, the others to leaves.

    Q^h = H W_Q^h for all heads; K^h, V^h = H_g W_K^h, H_g W_V^h for those with phrases.
    """

    def __init__(self, config: ModelConfig, num_tags: int):
        super().__init__()
        phrases, d_model, d_head = config.phrases, config.d_model, config.d_model // config.num_heads
        self.num_heads, self.dropout = config.num_heads, config.attention_dropout
        tags = [0] * len(phrases.ngrams) + [num_tags if phrases.tag_loss else 0] * len(phrases.levels)
        self.num_leaf_heads = config.num_heads - len(tags)
        self.queries = build_linear(d_model, d_model, gain=ATTENTION_GAIN)
        # The weights get the spread that they would have among the keys and values of all heads.
        gain = ATTENTION_GAIN * ((1 + self.num_leaf_heads / self.num_heads) / 2) ** 0.5
        self.keys_values = build_linear(d_model, self.num_leaf_heads * d_head, num_blocks=2, gain=gain)
        self.memories = nn.ModuleList([PhraseMemory(d_model, d_head, phrases, one) for one in tags])
        self.output = build_linear(d_model, d_model)

    def forward(self, x: Tensor, attend_mask: Tensor, partitions: Sequence[Partition], tag_losses: list[Tensor]) -> Tensor:
        """Map x [B, L, D] -> [B, L, D], with `attend_mask` [B, 1, 1, L] and one partition for each of the G heads.

        It appends the sum of -log p of all tags to `tag_losses`.
        """
        dropout_p = self.dropout if self.training else 0.0
        queries = split_heads(self.queries(x), self.num_heads)
        keys, values = (split_heads(part, self.num_leaf_heads) for part in self.keys_values(x).chunk(2, dim=2))
        attended = [attend(queries[:, : self.num_leaf_heads], keys, values, attend_mask, dropout_p)]
        tag_loss = x.new_zeros(())
        for head, (memory, partition) in enumerate(zip(self.memories, partitions, strict=True), start=self.num_leaf_heads):
            (keys, values), loss = memory(x, partition)
            attend_phrases = padding_to_attend_mask(partition.pad_mask)
            attended.append(attend(queries[:, head : head + 1], keys, values, attend_phrases, dropout_p))
            tag_loss = tag_loss + loss
        tag_losses.append(tag_loss)
        return self.output(merge_heads(torch.cat(attended, dim=1)))
