"""Self-attention that is biased by relations between two positions (Shaw et al., 2018): learned vectors r on keys and values,

    e_ij = q_i (k_j + r_ij)^T / sqrt(K),    z_i = sum_j softmax(e)_ij (v_j + s_ij)

Here r_ij is the sum of the rows of the relations of i and j in a table, with one row per relation, shared by the heads. No tensor
has a vector for every pair. Instead, q_i r^T is computed for all rows r of the table, and gathered. Weights of one relation are
added up before they are multiplied with its row.

Shapes: B batch, L leaves, T queries, S keys, A actions, D model, H heads, K = D / H, R rows or relative positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.attention import CausalSelfAttention, KeysValues, Past, SelfAttention, padding_to_attend_mask
from treenet.layers.core import build_linear
from treenet.layers.scaled_dot_product import attend, attend_subtrees, merge_heads, widen
from treenet.structure import TreeStructure
from treenet.structure.words import Dependencies, Words, build_path_ids, list_paths
from treeproc.common.errors import UserError

if TYPE_CHECKING:
    from treenet.config import RelationsConfig, TreeAttentionConfig


@dataclass
class Related:
    """The relations that self-attention reads in addition to the states. All layers share them."""

    ids: list[Tensor]  # [B or 1, L, L] int64 for every kind of relation: the row of the table for leaf i and leaf j
    labels: Tensor | None = None  # [B, L, D] embeddings that give one head its queries and keys


class Relations(nn.Module):
    """Rows of the table for every pair of leaves. The kinds follow each other; those that also apply to values come first.

    The keys' table has `num_keys` rows. The first `num_values` of them, of `num_value_kinds` kinds, are also rows of the values'
    table.
    """

    def __init__(self, config: RelationsConfig):
        super().__init__()
        kinds = config.kinds
        self.clips = {name: kind.clip for name, kind in kinds.items()}
        rows = {
            "sequence": lambda clip: 2 * clip + 1,
            "structural": lambda clip: 2 * clip + 1,
            "tree_distance": lambda clip: clip + 2,
            "tree_traversal": lambda clip: len(list_paths(clip)) + 1,
        }
        self.rows = {name: rows[name](clip) for name, clip in self.clips.items()}
        self.num_value_kinds = sum(kind.values for kind in kinds.values())
        self.num_keys = sum(self.rows.values())
        self.num_values = sum(list(self.rows.values())[: self.num_value_kinds])
        self.same = config.structural.same
        self.path_ids: Tensor
        self.register_buffer("path_ids", build_path_ids(config.tree_traversal.clip), persistent=False)

    def forward(self, num_leaves: int, words: Words | None, device: torch.device) -> list[Tensor]:
        """Return [B or 1, L, L] for every kind. All kinds except `sequence` need `words`, and their arcs."""
        out, first = [], 0
        for name, clip in self.clips.items():
            if name == "sequence":
                ids = relative_positions(num_leaves, num_leaves, clip, device)[None]
            else:
                assert words is not None and words.arcs is not None  # these kinds read them
                ids = words.of_leaf_pairs(self._of_words(name, clip, words.arcs))
            out.append(ids + first)
            first += self.rows[name]
        return out

    def of_places(self, place: Tensor) -> list[Tensor]:
        """Return [B, S, S] for the relative positions of inputs at these places [B, S]; nothing without relative positions."""
        clip = self.clips.get("sequence", 0)
        return [(place[:, None, :] - place[:, :, None]).clamp(-clip, clip) + clip] if clip else []

    def _of_words(self, name: str, clip: int, arcs: Dependencies) -> Tensor:
        """Return the rows of pairs of words, [B, W, W] int64 from 0."""
        up, down = arcs.up.long(), arcs.down.long()
        if name == "tree_distance":
            return (up + down).clamp(max=clip + 1)
        if name == "tree_traversal":
            return self.path_ids[up.clamp(max=clip + 1), down.clamp(max=clip + 1), arcs.side.long() + 1]
        if name != "structural":
            raise UserError(f"a relation of words must be tree_distance, tree_traversal or structural, but is {name}")
        same = up + down <= 1 if self.same == "edge" else (up == 0) | (down == 0)
        place = torch.arange(up.shape[1], device=up.device)
        order = torch.sign(place[None, :] - place[:, None])
        depths = arcs.depth[:, :, None] + arcs.depth[:, None, :]
        return torch.where(same, up - down, order * depths).clamp(-clip, clip) + clip


def relative_positions(num_queries: int, num_keys: int, clip: int, device: torch.device) -> Tensor:
    """Return [T, S] int64: places of keys relative to queries, within -clip..clip, from 0. The last query is at the last key."""
    keys = torch.arange(num_keys, device=device)
    return (keys - keys[num_keys - num_queries :, None]).clamp(-clip, clip) + clip


def attend_related(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attend_mask: Tensor | None,
    ids: Sequence[Tensor],
    key_table: Tensor,
    value_table: Tensor | None,
    num_value_kinds: int,
    dropout_p: float,
) -> Tensor:
    """Attend with queries [B, H, T, K] over keys, values [B, H, S, K] -> [B, H, T, K], by the equations above.

    `ids` [B or 1, T, S] of every kind of relation are rows of `key_table` [R, K]. Those of the first `num_value_kinds` kinds are
    also rows of `value_table`. On CPUs it runs at least in float32, with or without autocast, as `attend` does.
    """
    given, on_cpu = queries.dtype, queries.device.type == "cpu"
    batch, heads, length, width = queries.shape
    ids = [each[:, None].expand(batch, heads, -1, -1) for each in ids]
    if on_cpu:
        queries, keys, values, key_table = map(widen, (queries, keys, values, key_table))
        value_table = None if value_table is None else widen(value_table)
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        scaled = queries * width**-0.5
        of_rows = widen(scaled @ key_table.t())  # gradients are added up in float32
        bias = reduce(torch.add, (of_rows.gather(3, each) for each in ids))
        if attend_mask is not None:
            bias = bias.masked_fill(~attend_mask, float("-inf"))
        if value_table is None:
            return attend(queries, keys, values, bias, dropout_p).to(given)
        # PyTorch's fused kernels do not return the weights, which are needed here.
        weights = F.dropout((scaled @ keys.transpose(2, 3) + bias).softmax(dim=3), dropout_p)
        on_rows = weights.new_zeros(batch, heads, length, len(value_table))
        for each in ids[:num_value_kinds]:
            on_rows = on_rows.scatter_add(3, each, weights)
        return (weights.to(values.dtype) @ values + on_rows.to(values.dtype) @ value_table).to(given)


def build_relation_table(rows: int, width: int) -> nn.Parameter:
    """Build a table [rows, width], N(0, 1 / width). So products with queries are as large as those with keys."""
    return nn.Parameter(torch.empty(rows, width).normal_() * width**-0.5)


class RelatedSelfAttention(SelfAttention):
    """Encoder self-attention over relations.

    With `label_head`, the first head has queries and keys from labels, through its parts of W^Q and W^K. Chosen here: the place
    of the head, and embeddings as wide as the model, with the dropout of pieces, plus sinusoids of the place.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float, relations: Relations, label_head: bool = False):
        super().__init__(d_model, num_heads, dropout)
        width = d_model // num_heads
        self.label_head, self.num_value_kinds = label_head, relations.num_value_kinds
        self.key_relations = build_relation_table(relations.num_keys, width) if relations.num_keys else None
        self.value_relations = build_relation_table(relations.num_values, width) if relations.num_values else None

    def forward(  # type: ignore[override]  # relations instead of trees
        self, x: Tensor, attend_mask: Tensor | None, structure: Related
    ) -> Tensor:
        """Map x [B, S, D] -> [B, S, D]."""
        queries, keys, values = map(self.split_heads, self.queries_keys_values(x).chunk(3, dim=2))
        if self.label_head:
            assert structure.labels is not None  # the encoder embeds them
            of_labels = self._project_labels(structure.labels)
            queries, keys = (torch.cat([own, of[:, 1:]], dim=1) for own, of in zip(of_labels, (queries, keys), strict=True))
        if self.key_relations is None:
            return self.attend(queries, keys, values, attend_mask)
        tables = self.key_relations, self.value_relations, self.num_value_kinds
        attended = attend_related(queries, keys, values, attend_mask, structure.ids, *tables, self.dropout_p)
        return self.output(merge_heads(attended))

    def _project_labels(self, labels: Tensor) -> Iterator[Tensor]:
        """Map labels [B, L, D] to queries and keys [B, 1, L, K] of the first head."""
        d_model = labels.shape[2]
        width = d_model // self.num_heads
        linear = self.queries_keys_values
        for first in (0, d_model):
            rows = slice(first, first + width)
            yield F.linear(labels, linear.weight[rows], linear.bias[rows])[:, None]


class RelativeTreeSelfAttention(SelfAttention):
    """Tree attention (equations 12 to 18) with relative positions of pairs of leaves. Pairs with a node have no relation."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, tree: TreeAttentionConfig):
        super().__init__(d_model, num_heads, dropout, tree)
        self.clip, width = tree.relative_positions, d_model // num_heads
        self.key_relations = build_relation_table(2 * self.clip + 1, width)
        self.value_relations = build_relation_table(2 * self.clip + 1, width)

    def forward(  # type: ignore[override]  # trees always
        self, x: Tensor, attend_mask: Tensor | None, structure: TreeStructure
    ) -> Tensor:
        """Map x [B, S, D], leaves, then nodes, -> [B, S, D]. Without an `attend_mask`, positions attend by the trees."""
        projected, leaves = self.project(x, structure), structure.num_leaves
        ids = relative_positions(leaves, leaves, self.clip, x.device)
        if attend_mask is not None:
            nodes = x.shape[1] - leaves
            ids = F.pad(ids, (0, nodes, 0, nodes), value=2 * self.clip + 1)
            key_table, value_table = (F.pad(table, (0, 0, 0, 1)) for table in (self.key_relations, self.value_relations))
            return self.output(self._relate(projected, attend_mask, ids, key_table, value_table))
        # Leaves attend to leaves alone, and the kernels of subtree attention know no relations.
        of_leaves, mask = (part[:, :leaves] for part in projected), padding_to_attend_mask(structure.leaf_pad_mask)
        on_leaves = self._relate(of_leaves, mask, ids, self.key_relations, self.value_relations)
        return self.output(attend_subtrees(*projected, structure, self.num_heads, self.dropout_p, on_leaves=on_leaves))

    def _relate(
        self, projected: Iterable[Tensor], attend_mask: Tensor, ids: Tensor, key_table: Tensor, value_table: Tensor
    ) -> Tensor:
        """Attend with relations `ids` [S, S]: queries, keys and values [B, S, D] -> [B, S, D]."""
        queries, keys, values = map(self.split_heads, projected)
        return merge_heads(
            attend_related(queries, keys, values, attend_mask, [ids[None]], key_table, value_table, 1, self.dropout_p)
        )


class RelativeCausalSelfAttention(CausalSelfAttention):
    """Decoder self-attention with relative positions within -clip..0, and a key/value cache for decoding."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, clip: int, values: bool):
        super().__init__(d_model, num_heads, dropout)
        self.clip = clip
        self.key_relations = build_relation_table(clip + 1, d_model // num_heads)
        self.value_relations = build_relation_table(clip + 1, d_model // num_heads) if values else None

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, KeysValues]:
        """See `CausalSelfAttention.forward`."""
        queries, keys, values = map(self.split_heads, self.queries_keys_values(x).chunk(3, dim=2))
        if past is not None:
            keys, values = past.write(keys, values)
            related = self._relate(keys, values, past.distances().clamp(-self.clip, 0) + self.clip)
            return self.attend(queries, *related, past.attend_bias), (keys, values)
        length = keys.shape[2]
        ids = relative_positions(length, length, self.clip, x.device).clamp(max=self.clip)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        tables = self.key_relations, self.value_relations, 0 if self.value_relations is None else 1
        attended = attend_related(queries, keys, values, causal, [ids[None]], *tables, self.dropout_p)
        return self.output(merge_heads(attended)), (keys, values)

    def _relate(self, keys: Tensor, values: Tensor, ids: Tensor) -> KeysValues:
        """Add their relations `ids` [S] to keys and values [B, H, S, K]. Every one of them has one relation to the only query."""
        related_keys = keys + self.key_relations[ids].to(keys.dtype)
        return related_keys, values if self.value_relations is None else values + self.value_relations[ids].to(values.dtype)


NEAREST, FARTHEST = -1, 62


def depth_differences(depth: Tensor) -> Tensor:
    """Return the row of the relative position of every pair [B, A, A], from 0, for depths [B, A]."""
    return (depth[:, :, None] - depth[:, None, :]).clamp(NEAREST, FARTHEST) - NEAREST


@dataclass
class StackPast:
    """The past of one layer in a search: positions of many partial trees, which share what they begin with."""

    keys: Tensor  # [P, H, K]
    values: Tensor  # [P, H, K]
    rows: Tensor  # [B, S] which of them each tree reads, with its A next positions as the last

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of next positions [B, H, A, K] as the last B * A. Returns those of `rows` [B, H, S, K]."""
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
        self.keys, self.values = (torch.cat(pair) for pair in zip((self.keys, self.values), flat, strict=True))
        return self.keys[self.rows].transpose(1, 2), self.values[self.rows].transpose(1, 2)


class DepthAttention(SelfAttention):
    """Self-attention within a mask, by differences of depth in a tree (Sartran et al., 2022; Dai et al., 2019).

        e_ij = ((q_i + u) k_j + (q_i + v) W R_d) / sqrt(K),    d = depth of i - depth of j

    R_d is the sinusoid of position d; u, v and W are learned in every layer. As in the authors' code, d is cut to
    NEAREST..FARTHEST.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float):
        super().__init__(d_model, num_heads, dropout)
        self.positions = build_linear(d_model, d_model, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(num_heads, 1, d_model // num_heads)) for _ in range(2))

    def forward(  # type: ignore[override]  # depths instead of trees
        self, x: Tensor, attend_mask: Tensor, difference: Tensor, sinusoids: Tensor, past: StackPast | None = None
    ) -> Tensor:
        """Map x [B, A, D] -> [B, A, D], with `attend_mask` and `difference` [B, A, S], and the sinusoids [R, D] of its rows.

        Without a `past`, S = A.
        """
        queries, keys, values = map(self.split_heads, self.project(x))
        if past is not None:
            keys, values = past.write(keys, values)
        relative = self.split_heads(self.positions(sinusoids)[None])  # [1, H, R, K]
        if past is None:
            by_row = (queries + self.position_bias) @ relative.transpose(2, 3)
        else:  # one product: with many trees, the other way copies the table for each, and takes eight times as long
            by_row = torch.einsum("bhak,hrk->bhar", queries + self.position_bias, relative[0])
        bias = (by_row / math.sqrt(queries.shape[3])).gather(3, difference[:, None].expand(-1, self.num_heads, -1, -1))
        return self.attend(queries + self.content_bias, keys, values, bias.masked_fill(~attend_mask[:, None], -torch.inf))
