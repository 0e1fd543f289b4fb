"""Transformer Grammars (Sartran et al., 2022): a language model over trees as sequences of actions.

This is the memory-free form: a sentence is one sequence, and nothing is kept from earlier sentences.

Shapes: B batch, A actions, D model.
"""

from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import ACTIONS
from treenet.layers.depth_attention import FARTHEST, NEAREST, DepthAttention, depth_differences
from treenet.layers.positions import compute_sinusoids
from treenet.models.architectures import Architecture, register
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import build_layers
from treenet.structure.actions import PADDING


class GrammarEncoder(Encoder):
    """Transformer layers over actions. Positions attend to the stack, or compose a constituent (see `Actions`)."""

    reads = ACTIONS

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, embedding)
        sizes = config.d_model, config.num_heads, config.attention_dropout
        self.layers: nn.ModuleList = build_layers(config, lambda _: DepthAttention(*sizes))
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
        actions = batch.structure
        attend_mask, difference = actions.attend_mask(), depth_differences(actions.depth)
        x = self.dropout(self.embedding(batch.tgt_in))
        for layer in self.layers:
            x = layer(x, attend_mask, difference, self.sinusoids)
        return Memory(x, actions.kind == PADDING)


register("transformer_grammar", Architecture(GrammarEncoder, uses=("causal_lm",)))
