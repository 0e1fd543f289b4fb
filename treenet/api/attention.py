"""`TreeAttention`: attention over trees, which replaces `nn.MultiheadAttention`.

Shapes: B batch, T queries, L leaves, N nodes, S = L + N positions (leaves, then nodes in pre-order), D model, H heads.
"""

import torch
from torch import Tensor, nn

from treenet.api.checks import check_config, check_positions, check_states, check_structure, check_width, place
from treenet.config import TreeAttentionConfig
from treenet.layers.attention import CrossAttention, SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import attend_mask_of, position_pad_mask, prepare_trees
from treenet.layers.scaled_dot_product import attention_weights
from treenet.structure import TreeStructure
from treeproc.common.arguments import check_flag, check_number, check_type
from treeproc.common.errors import UserError


class TreeAttention(nn.Module):
    """Multi-head attention whose keys and values are the leaves and nodes of trees (sections 4.1 to 4.4 of the paper).

    Self-attention over the states of leaves and nodes: leaves attend to leaves, nodes to their subtrees. With `cross`, a
    decoder's queries attend to all leaves and nodes. `dropout` is that of attention weights; `tree` are the rules of the
    paper unless others are given. Called as `nn.MultiheadAttention`, but for three things: the trees come as `structure`,
    weights are returned on request alone, and `batch_first` is the default. `from_multihead_attention` takes its weights.

    Raises UserError for wrong arguments, for example if `embed_dim` is not a multiple of 2 * `num_heads`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        cross: bool = False,
        batch_first: bool = True,
        tree: TreeAttentionConfig | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_width(embed_dim, num_heads)
        check_number("dropout", dropout, 0, 1)
        check_flag("bias", bias)
        check_flag("cross", cross)
        check_flag("batch_first", batch_first)
        if tree is not None:
            check_config("tree", tree, TreeAttentionConfig)
            if tree.relative_positions:
                raise UserError(
                    "tree.relative_positions must be 0 in TreeAttention, which adds no positions (TreeEncoder does), but it is "
                    f"{tree.relative_positions}"
                )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.tree = tree or TreeAttentionConfig()
        self.attention = (CrossAttention if cross else SelfAttention)(embed_dim, num_heads, dropout, self.tree, bias)
        place(self, device, dtype)

    @classmethod
    def from_multihead_attention(
        cls, attention: nn.MultiheadAttention, *, cross: bool = False, tree: TreeAttentionConfig | None = None
    ) -> "TreeAttention":
        """Build a layer with copies of the weights of an `nn.MultiheadAttention`, on its device, in its type and its mode.

        Leaves then attend to leaves with its output; only the weights of the trees are new. Raises UserError for an attention
        that `TreeAttention` cannot compute: with `add_bias_kv` or `add_zero_attn`, or with keys or values of another width.
        """
        check_type("attention", attention, nn.MultiheadAttention)
        width, weight, bias = attention.embed_dim, attention.in_proj_weight, attention.in_proj_bias
        if weight is None:
            raise UserError(f"kdim and vdim must be embed_dim, {width}, but are {attention.kdim} and {attention.vdim}")
        if attention.bias_k is not None or attention.add_zero_attn:
            raise UserError("attention must not have add_bias_kv or add_zero_attn, which TreeAttention does not compute")
        layer = cls(
            width,
            attention.num_heads,
            attention.dropout,
            bias is not None,
            cross=cross,
            batch_first=attention.batch_first,
            tree=tree,
            device=weight.device,
            dtype=weight.dtype,
        )
        inner = layer.attention
        parts = [(inner.queries, 0, 1), (inner.keys_values, 1, 3)] if cross else [(inner.queries_keys_values, 0, 3)]
        with torch.no_grad():
            for linear, first, last in parts:
                linear.weight.copy_(weight[first * width : last * width])
                if bias is not None:
                    linear.bias.copy_(bias[first * width : last * width])
        inner.output.load_state_dict(attention.out_proj.state_dict())
        return layer.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        structure: TreeStructure | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended states, and the weights where `need_weights`, else None.

        Self-attention: query [B, S, D] -> [B, S, D]; key and value are left out or are the query. With `cross`: query
        [B, T, D] -> [B, T, D]; key and value are one memory [B, S, D]. Without `batch_first`, B and the positions change
        places. Weights are [B, T, S], the mean of the heads, or [B, H, T, S] without `average_attn_weights`: before dropout,
        each row adds up to 1. Raises UserError if the trees are missing, or the states do not fit them.
        """
        cross = isinstance(self.attention, CrossAttention)
        check_states("query", query)
        memory = query if key is None and not cross else key
        if (memory is None or (value is not None and value is not key)) or (not cross and memory is not query):
            raise UserError(
                "with cross=True, key and value must be one tensor, the states of leaves and nodes"
                if cross
                else "self-attention takes key and value from the query; leave both out, or build TreeAttention with cross=True"
            )
        check_states("key", memory)
        if not self.batch_first:
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        structure = check_structure(structure)
        check_positions(memory, structure, position_pad_mask(structure), self.embed_dim)
        if cross:
            _check_queries(query, len(memory), self.embed_dim)
        drops = self.attention.dropout_p > 0
        prepared = prepare_trees(structure, self.tree, memory, drops_weights=drops)
        attend = self._attend_memory if cross else self._attend_trees
        out, weights = attend(query, memory, prepared, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend_trees(
        self, query: Tensor, memory: Tensor, structure: TreeStructure, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        attend_mask = attend_mask_of(self.tree, position_pad_mask(structure))
        out = self.attention(query, attend_mask, structure)
        if not need_weights:
            return out, None
        queries, keys, _ = self.attention.project(query, structure)
        seen = structure.attend_mask()[:, None] if attend_mask is None else attend_mask
        return out, attention_weights(self.attention.split_heads(queries), self.attention.split_heads(keys), seen)

    def _attend_memory(
        self, query: Tensor, memory: Tensor, structure: TreeStructure, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        attend_mask = padding_to_attend_mask(position_pad_mask(structure))
        keys_values = self.attention.project_memory(memory, structure)
        out = self.attention(query, keys_values, attend_mask)
        if not need_weights:
            return out, None
        return out, attention_weights(self.attention.split_heads(self.attention.queries(query)), keys_values[0], attend_mask)


def _check_queries(query: Tensor, batch: int, width: int) -> None:
    if query.dim() != 3 or (query.shape[0], query.shape[2]) != (batch, width):
        raise UserError(f"the queries must be [{batch}, any number, {width}], but are {list(query.shape)}")
