"""The encoder with multi-granularity self-attention (Hao et al., 2019, arXiv 1909.02222). Shapes: B batch, L leaves, D model."""

import torch
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import PHRASES
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.phrase_attention import PhraseAttention
from treenet.models.architectures import Architecture, register
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.models.encoders.base import DataFacts, Memory, PieceEmbedding, VocabSizes
from treenet.models.encoders.transformer import TransformerEncoder, build_self_attention
from treenet.structure import Partition
from treeproc.common.errors import UserError


class MultiGranularityEncoder(TransformerEncoder):
    """Transformer layers. The lower ones have a head for every size of n-grams and every level of the trees.

    The weighted loss of phrase tags is added to the loss of the task in training.
    """

    reads = PHRASES
    auxiliary_loss = "tag_loss"

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        """Raise UserError if there are too few heads or layers."""
        phrases, num_layers = config.phrases, config.num_encoder_layers
        granularities = len(phrases.ngrams) + len(phrases.levels)
        if not 0 < granularities < config.num_heads:
            raise UserError(
                f"model.phrases.ngrams and model.phrases.levels must name 1 to {config.num_heads - 1} granularities together, "
                f"but name {granularities}: each takes a head, and one of model.num_heads = {config.num_heads} is for the words"
            )
        num_phrase_layers = phrases.num_layers or (num_layers + 1) // 2
        if num_phrase_layers > num_layers:
            raise UserError(
                f"model.phrases.num_layers must be at most model.num_encoder_layers = {num_layers}, but is {num_phrase_layers}"
            )
        super().__init__(
            config,
            vocab,
            embedding,
            lambda number: PhraseAttention(config, vocab.labels) if number < num_phrase_layers else build_self_attention(config),
        )
        self.phrases, self.num_phrase_layers = phrases, num_phrase_layers

    @classmethod
    def check_data(cls, config: ModelConfig, data: DataFacts) -> None:
        if config.phrases.tag_loss and not data.distinguishes("labels"):
            raise UserError(
                f"{data.folder} has one label for all phrases, so model.phrases.tag_loss has nothing to learn; set it to 0, or "
                "preprocess again with parser.name=stanza, or of given trees with parser.given_labels=parsed"
            )

    def forward(self, batch: TreeBatch) -> Memory:
        """Return the leaves of a batch as memory: S = L."""
        return self._encode(batch, with_tags=False)[0]

    def encode_to_train(self, batch: TreeBatch) -> tuple[Memory, Tensor]:
        return self._encode(batch, with_tags=True)

    def _encode(self, batch: TreeBatch, with_tags: bool) -> tuple[Memory, Tensor]:
        """Return memory, and the weighted tag loss; 0 without tags."""
        partitions = [Partition.ngrams(batch.leaf_pad_mask, n) for n in self.phrases.ngrams]
        partitions += [Partition.level(batch.structure, level, with_tags) for level in self.phrases.levels]
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_leaves(batch))
        tag_losses: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x, attend_mask, *((partitions, tag_losses) if number < self.num_phrase_layers else ()))
        total = sum(tag_losses, start=x.new_zeros((), dtype=torch.float32))
        return Memory(x, batch.leaf_pad_mask), self.phrases.tag_loss * total


register("multi_granularity", Architecture(MultiGranularityEncoder, TransformerDecoder))
