"""Tree attention for other models: `TreeAttention` replaces `nn.MultiheadAttention`, `TreeEncoder` is layers of it.

Shapes: B batch, T queries, L leaves, N nodes, S = L + N positions (leaves, then nodes in pre-order), D model, H heads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.layers.attention import CrossAttention, SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import attend_mask_of, position_pad_mask, prepare_trees, run_layers
from treenet.models.composed import compute_self_weights, compute_weights
from treenet.models.encoders.base import build_layers
from treenet.models.encoders.tree import build_tree_attention
from treenet.structure import TreeStructure
from treenet.structure.base import refusing_device
from treeproc.common.errors import UserError, as_integer, check_flag, check_number, check_type, from_python, quoted
from treeproc.common.settings import Settings, build_settings


def _check_width(width: int, num_heads: int) -> None:
    """Raise UserError if heads cannot share a width: half of each head's is embeddings of heights, half of ranks."""
    as_integer("num_heads", num_heads, least=1)
    if as_integer("embed_dim", width, 1, 2**31 - 1) % (2 * num_heads):
        raise UserError(f"the width must be a multiple of 2 * num_heads = {2 * num_heads}, but is {width}")


def _check_config(name: str, config: Settings, wanted: type[Settings]) -> None:
    """Raise UserError unless `config` has checked values: a copy of pydantic's `model_copy` may have any."""
    check_type(name, config, wanted)
    with from_python():
        build_settings(wanted, config.model_dump(), name)


def _check_nodes(layer: str, name: str, tree: TreeAttentionConfig) -> None:
    """Raise UserError for an initial state of nodes that a layer without embeddings does not make."""
    if tree.nodes != "labels":
        raise UserError(f"{name}.nodes must be 'labels' in {layer}, whose caller gives states of nodes, but is {tree.nodes!r}")


def _place(module: nn.Module, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Move a new module to `device` and `dtype`, where given. Raises UserError for one that it cannot have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"dtype must be a floating-point type of PyTorch, such as torch.bfloat16, but is {quoted(dtype)}")
    if device is not None:
        with refusing_device(device):
            module.to(device)
    module.to(dtype)


def _check_states(name: str, states: Tensor) -> None:
    """Raise UserError unless states are a floating-point tensor of three dimensions."""
    if not isinstance(states, Tensor):
        raise UserError(f"{name} must be a tensor, but is a {type(states).__name__}")
    if states.dim() != 3 or not states.is_floating_point():
        raise UserError(f"{name} must be floating-point numbers in three dimensions, but are {states.dtype} {list(states.shape)}")


def _check_structure(structure: TreeStructure | None) -> TreeStructure:
    """Return the structure. Raises UserError if there is none."""
    if structure is None:
        raise UserError("the trees are missing: give structure=..., for example TreeStructure.from_brackets([...])")
    if not isinstance(structure, TreeStructure):
        raise UserError(f"structure must be a TreeStructure, but is a {type(structure).__name__}")
    return structure


def _check_shape(name: str, states: Tensor, pad_mask: Tensor, width: int) -> None:
    """Raise UserError unless states are [B, positions of the mask, width], on the device of the mask."""
    _check_states(f"the states of the {name}", states)
    wanted, found = [*pad_mask.shape, width], list(states.shape)
    if found != wanted:
        raise UserError(f"the states of the {name} must be {wanted}, but are {found}")
    if states.device != pad_mask.device:
        raise UserError(f"the {name} are on {states.device}, but the trees on {pad_mask.device}; call structure.to(...)")


def _check_positions(states: Tensor, structure: TreeStructure, pad_mask: Tensor, width: int) -> None:
    """Check leaves and nodes in one tensor, as `_check_shape` does. Tell if the nodes are missing."""
    leaves, nodes = structure.num_leaves, structure.num_nodes
    if list(states.shape) == [len(pad_mask), leaves, width]:
        raise UserError(
            f"the states {list(states.shape)} have no nodes: {leaves} leaves come first, then {nodes} nodes, for example "
            "torch.cat([leaves, structure.node_means(leaves)], 1)"
        )
    _check_shape(f"{leaves} leaves and {nodes} nodes", states, pad_mask, width)


class TreeAttention(nn.Module):
    """Multi-head attention whose keys and values are the leaves and nodes of trees (sections 4.1 to 4.4 of the paper).

    Self-attention over the states of leaves and nodes: leaves attend to leaves, nodes to their subtrees. With `cross`, a
    decoder's queries attend to all leaves and nodes. `dropout` is that of attention weights; `tree` are the rules of the
    paper unless others are given. `from_multihead_attention` takes the weights of an `nn.MultiheadAttention`.

    It is called as that, but for four things. The trees come as `structure`. They have the padding, so there are no masks.
    Weights are returned on request alone, and `batch_first` is the default.

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
        _check_width(embed_dim, num_heads)
        check_number("dropout", dropout, 0, 1)
        check_flag("bias", bias)
        check_flag("cross", cross)
        check_flag("batch_first", batch_first)
        if tree is not None:
            _check_config("tree", tree, TreeAttentionConfig)
            _check_nodes("TreeAttention", "tree", tree)
            if tree.relative_positions:
                raise UserError(
                    "tree.relative_positions must be 0 in TreeAttention, which adds no positions (TreeEncoder does), but it is "
                    f"{tree.relative_positions}"
                )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.tree = tree or TreeAttentionConfig()
        self.attention: Any = (CrossAttention if cross else SelfAttention)(embed_dim, num_heads, dropout, self.tree, bias)
        _place(self, device, dtype)

    @classmethod
    def from_multihead_attention(
        cls, attention: nn.MultiheadAttention, *, cross: bool = False, tree: TreeAttentionConfig | None = None
    ) -> "TreeAttention":
        """Build a layer with copies of the weights of an `nn.MultiheadAttention`, on its device, in its type and its mode.

        What is frozen stays so. Leaves then attend to leaves with its output; only the weights of the trees are new. Raises
        UserError for an attention that `TreeAttention` cannot compute: with `add_bias_kv` or `add_zero_attn`, or with keys or
        values of another width.
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
                linear.weight.requires_grad_(weight.requires_grad)
                if bias is not None:
                    linear.bias.copy_(bias[first * width : last * width])
                    linear.bias.requires_grad_(bias.requires_grad)
        inner.output.load_state_dict(attention.out_proj.state_dict())
        for own, given in zip(inner.output.parameters(), attention.out_proj.parameters(), strict=True):
            own.requires_grad_(given.requires_grad)
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
        _check_states("query", query)
        memory = query if key is None and not cross else key
        if (memory is None or (value is not None and value is not key)) or (not cross and memory is not query):
            raise UserError(
                "with cross=True, key and value must be one tensor, the states of leaves and nodes"
                if cross
                else "self-attention takes key and value from the query; leave both out, or build TreeAttention with cross=True"
            )
        _check_states("key", memory)
        if not self.batch_first:
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        structure = _check_structure(structure)
        pad_mask = position_pad_mask(structure)
        _check_positions(memory, structure, pad_mask, self.embed_dim)
        if cross:
            _check_queries(query, len(memory), self.embed_dim)
        prepared = prepare_trees(structure, self.tree, memory, drops_weights=self.attention.dropout_p > 0)
        weights: Tensor | None = None
        if cross:
            keys_values, real = self.attention.project_memory(memory, prepared), padding_to_attend_mask(pad_mask)
            out = self.attention(query, keys_values, real, structure=prepared)
            if need_weights:
                weights = compute_weights(self.attention, query, keys_values, real)
        else:
            attend_mask = attend_mask_of(self.tree, pad_mask)
            out = self.attention(query, attend_mask, prepared)
            if need_weights:
                weights = compute_self_weights(self.attention, query, attend_mask, prepared)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return out if self.batch_first else out.transpose(0, 1), weights


def _check_queries(query: Tensor, batch: int, width: int) -> None:
    if query.dim() != 3 or (query.shape[0], query.shape[2]) != (batch, width):
        raise UserError(f"the queries must be [{batch}, any number, {width}], but are {list(query.shape)}")


class TreeStates(NamedTuple):
    """States of the leaves [B, L, D] and of the nodes in pre-order [B, N, D]; the first node is the root."""

    leaves: Tensor
    nodes: Tensor


class TreeEncoder(nn.Module):
    """The encoder of the Tree Transformer without its embeddings: `num_encoder_layers` of tree attention and feed-forward.

    Reads of `config`: d_model, d_ff, num_heads, num_encoder_layers, dropout, attention_dropout, activation_dropout,
    encoder_layer_drop, norm and tree. Raises UserError for wrong arguments.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        _check_config("config", config, ModelConfig)
        if config.name != "tree_transformer":
            raise UserError(
                f"config.name must be 'tree_transformer' in TreeEncoder, but is {config.name!r}; for a baseline without trees, "
                "take torch.nn.TransformerEncoder"
            )
        _check_nodes("TreeEncoder", "config.tree", config.tree)
        self.config = config
        self.layers = build_layers(config, lambda _: build_tree_attention(config))
        _place(self, device, dtype)

    def forward(self, leaves: Tensor, structure: TreeStructure | None = None, nodes: Tensor | None = None) -> TreeStates:
        """Return the states of leaves [B, L, D], and of nodes [B, N, D], for example embeddings of `structure.labels`.

        Without `nodes`, a node begins as the mean of its leaves. States of padding are undefined. Raises UserError if the
        trees are missing, or the states do not fit them.
        """
        structure, width = _check_structure(structure), self.config.d_model
        _check_shape("leaves", leaves, structure.leaf_pad_mask, width)
        nodes = structure.node_means(leaves) if nodes is None else nodes
        _check_shape("nodes", nodes, structure.node_pad_mask, width)
        x = torch.cat([leaves, nodes], dim=1)
        drops_weights = bool(self.training and self.config.attention_dropout)
        prepared = prepare_trees(structure, self.config.tree, x, drops_weights=drops_weights)
        states = run_layers(self.layers, x, prepared, self.config.tree, position_pad_mask(prepared))
        return TreeStates(*states.split([structure.num_leaves, structure.num_nodes], dim=1))
