"""Causal language models: the plain Transformer, with tree regularisation or without, and Transformer Grammars.

Transformer Grammars (Sartran et al., 2022) read trees as sequences of actions. This is the memory-free form: a sentence is one
sequence, and nothing is kept from earlier sentences.

Shapes: B batch, L leaves, T = L + 1 positions from BOS on, A actions, D model.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import ACTIONS, LEAVES, SPLIT_POINTS, InputKind
from treenet.layers.attention import PrefixAttention
from treenet.layers.blocks import compute_sinusoids
from treenet.layers.constituents import tree_reg_losses
from treenet.layers.relations import FARTHEST, NEAREST, DepthAttention, StackPast, depth_differences
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding, TransformerEncoder, VocabSizes, build_layers
from treenet.models.registry import Architecture, register
from treenet.structure import SplitPoints
from treenet.structure.sequences import PADDING, Actions
from treeproc.common.errors import UserError
from treeproc.shards.schema import PAD_ID


class CausalTransformerEncoder(TransformerEncoder):
    """Transformer layers over BOS and the pieces, in which positions see no later one.

    With `model.tree_reg.weight`, the loss of splits is added in training. As in the authors' code, it reads the first entries of
    the output of one layer, without BOS.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        """Raise UserError if there are too few layers or heads for the loss of splits."""
        sizes = config.d_model, config.num_heads, config.attention_dropout
        super().__init__(config, vocab, embedding, lambda _: PrefixAttention(*sizes))
        options, num_layers = config.tree_reg, config.num_encoder_layers
        self.reads = self.reads_with(config)
        self.weight = options.weight
        self.layer = options.layer or math.ceil(0.75 * num_layers)
        heads = options.heads or math.ceil(0.25 * config.num_heads)
        self.width = heads * config.d_model // config.num_heads
        for name, value, most_name, most in (
            ("layer", self.layer, "num_encoder_layers", num_layers),
            ("heads", heads, "num_heads", config.num_heads),
        ):
            if value > most:
                raise UserError(f"model.tree_reg.{name} must be at most model.{most_name} = {most}, but is {value}")

    @classmethod
    def reads_with(cls, config: ModelConfig) -> InputKind:
        """Return the input kind: trees are read only for their loss."""
        return SPLIT_POINTS if config.tree_reg.weight else LEAVES

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the states of BOS and all pieces: S = T."""
        return self._encode(batch)[0]

    def encode_to_train(self, batch: TreeBatch) -> tuple[Memory, Tensor | None]:
        """Return memory and the loss of splits: for each example the mean over its spans times its number of targets."""
        memory, states = self._encode(batch)
        if not isinstance(batch.structure, SplitPoints):
            return memory, None
        losses = tree_reg_losses(states[:, 1:, : self.width], batch.structure)
        return memory, self.weight * (losses * (~memory.pad_mask).sum(1)).sum()

    def states_of_trees(self, pieces: Tensor, depth: Tensor, attend_mask: Tensor) -> Tensor:
        """Return the states [B, T, D] of trees of pieces [B, T]: sentences that share their beginnings, from BOS on.

        A position is at the place `depth` [B, T] of its sentences. It attends where `attend_mask` [B, T, T] is True.
        """
        x = self.embedding(pieces) + F.embedding(depth, self.positions.rows(int(depth.max()) + 1))
        for layer in self.layers:
            x = layer(x, attend_mask[:, None])
        return x

    def _encode(self, batch: TreeBatch) -> tuple[Memory, Tensor]:
        """Return the memory, and the output of the regularised layer."""
        x = self.dropout(self.positions(self.embedding(batch.tgt_in)))
        regularised = x
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)  # padding comes last, so the causal mask hides it
            if number == self.layer:
                regularised = x
        return Memory(x, batch.tgt_in == PAD_ID), regularised


register("causal_transformer", Architecture(CausalTransformerEncoder, uses=("causal_lm",)))


class GrammarEncoder(Encoder):
    """Transformer layers over actions. Positions attend to the stack, or compose a constituent (see `Actions`)."""

    reads = ACTIONS
    has_transformer_layers = True

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding)
        sizes = config.d_model, config.num_heads, config.attention_dropout
        self.layers = build_layers(config, lambda _: DepthAttention(*sizes))
        self.sinusoids: Tensor
        # Row r stands for the difference r + NEAREST. Another first position would be a linear map of these sinusoids, which the
        # layers' own maps absorb.
        self.register_buffer("sinusoids", compute_sinusoids(FARTHEST - NEAREST + 1, config.d_model), persistent=False)

    @classmethod
    def build_embedding(cls, config: ModelConfig, vocab: VocabSizes) -> PieceEmbedding:
        """Build a table of pieces, opening nonterminals and closing nonterminals."""
        return PieceEmbedding(vocab.pieces + 2 * vocab.labels, config.d_model)

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the states of all actions: S = A."""
        actions: Actions = batch.structure
        return Memory(self.extend(batch.tgt_in, actions, [None] * len(self.layers)), actions.kind == PADDING)

    def extend(self, ids: Tensor, actions: Actions, pasts: Sequence[StackPast | None]) -> Tensor:
        """Return the states [B, A, D] of `ids` [B, A], which are the last of `actions`. The pasts of layers have those before."""
        last = slice(-ids.shape[1], None)
        attend_mask, difference = actions.attend_mask()[:, last], depth_differences(actions.depth)[:, last]
        x = self.dropout(self.embedding(ids))
        for layer, past in zip(self.layers, pasts, strict=True):
            x = layer(x, attend_mask, difference, self.sinusoids, past)
        return x


register("transformer_grammar", Architecture(GrammarEncoder, uses=("causal_lm",)))
