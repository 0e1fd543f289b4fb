"""`TreeEncoder`: layers of tree attention over states that the caller has.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from treenet.api.checks import check_config, check_shape, check_structure, place
from treenet.config import ModelConfig
from treenet.layers.blocks import position_pad_mask, prepare_trees, run_layers
from treenet.models.encoders.transformer import build_layers
from treenet.models.encoders.tree import build_tree_attention
from treenet.structure import TreeStructure


class TreeStates(NamedTuple):
    """States of the leaves [B, L, D] and of the nodes in pre-order [B, N, D]; the first node is the root."""

    leaves: Tensor
    nodes: Tensor


class TreeEncoder(nn.Module):
    """The encoder of the Tree Transformer without its embeddings: `num_encoder_layers` of tree attention and feed-forward.

    Reads of `config`: d_model, d_ff, num_heads, num_encoder_layers, dropout, attention_dropout and tree. Raises UserError for
    wrong arguments.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        check_config("config", config, ModelConfig)
        self.config = config
        self.layers = build_layers(config, lambda _: build_tree_attention(config))
        place(self, device, dtype)

    def forward(self, leaves: Tensor, structure: TreeStructure | None = None, nodes: Tensor | None = None) -> TreeStates:
        """Return the states of leaves [B, L, D], and of nodes [B, N, D], for example embeddings of `structure.labels`.

        Without `nodes`, a node begins as the mean of its leaves. States of padding are undefined. Raises UserError if the
        trees are missing, or the states do not fit them.
        """
        structure, width = check_structure(structure), self.config.d_model
        check_shape("leaves", leaves, structure.leaf_pad_mask, width)
        nodes = structure.node_means(leaves) if nodes is None else nodes
        check_shape("nodes", nodes, structure.node_pad_mask, width)
        x = torch.cat([leaves, nodes], dim=1)
        drops_weights = bool(self.training and self.config.attention_dropout)
        prepared = prepare_trees(structure, self.config.tree, x, drops_weights=drops_weights)
        states = run_layers(self.layers, x, prepared, self.config.tree, position_pad_mask(prepared))
        return TreeStates(*states.split([structure.num_leaves, structure.num_nodes], dim=1))
