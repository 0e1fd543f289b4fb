"""The causal Transformer, a plain language model, with tree regularisation or without.

Shapes: B batch, L leaves, T = L + 1 positions from BOS on, D model.
"""

import math

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import LEAVES, SPLIT_POINTS, InputKind
from treenet.layers.attention import PrefixAttention
from treenet.layers.tree_reg import tree_reg_losses
from treenet.models.architectures import Architecture, register
from treenet.models.encoders.base import Memory, PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import TransformerEncoder
from treenet.structure import SplitPoints
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
