"""The Transformer with multi-granularity self-attention (Hao et al., 2019, arXiv 1909.02222).

Shapes: B batch, L leaves, T target positions, D model.
"""

import torch
from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.phrase_attention import PhraseEncoderLayer
from treenet.models.encoders import Memory, VocabSizes
from treenet.models.seq2seq import Seq2Seq
from treenet.structure import Partition
from treeproc.common.errors import UserError


class MultiGranularityTransformer(Seq2Seq):
    """The lower encoder layers have a head for every size of n-grams and every level of the trees.

    Trained with the loss of phrase tags, weighted, beside that of the translation.
    """

    reads = "phrases"
    auxiliary_loss = "tag_loss"

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        """Raises UserError when heads or layers do not suffice."""
        super().__init__(config, vocab)
        self.phrases = config.phrases
        granularities = len(self.phrases.ngrams) + len(self.phrases.levels)
        if not 0 < granularities < config.num_heads:
            raise UserError(
                f"model.phrases.ngrams and model.phrases.levels must name 1 to {config.num_heads - 1} granularities in all, "
                f"a head for each: one of model.num_heads = {config.num_heads} is for the words; but they name {granularities}"
            )
        self.num_phrase_layers = self.phrases.num_layers or (config.num_encoder_layers + 1) // 2
        if self.num_phrase_layers > config.num_encoder_layers:
            raise UserError(
                f"model.phrases.num_layers must be at most model.num_encoder_layers = {config.num_encoder_layers}, but is "
                f"{self.num_phrase_layers}"
            )
        for index in range(self.num_phrase_layers):
            self.encoder_layers[index] = PhraseEncoderLayer(config, vocab.labels)

    def encode(self, batch: TreeBatch) -> Memory:
        """The leaves of a batch as memory: S = L."""
        return self._encode(batch, with_tags=False)[0]

    def decode_to_train(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        memory, tag_loss = self._encode(batch, with_tags=True)
        return self.decode_memory(batch, memory), tag_loss

    def _encode(self, batch: TreeBatch, with_tags: bool) -> tuple[Memory, Tensor]:
        """Memory, and the weighted tag loss; 0 without tags."""
        partitions = [Partition.ngrams(batch.leaf_pad_mask, n) for n in self.phrases.ngrams]
        partitions += [Partition.level(batch.structure, level, with_tags) for level in self.phrases.levels]
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_pieces(batch.leaf_pieces))
        total = x.new_zeros((), dtype=torch.float32)
        for index, layer in enumerate(self.encoder_layers):
            if index < self.num_phrase_layers:
                x, tag_loss = layer(x, attend_mask, partitions)
                total = total + tag_loss
            else:
                x = layer(x, attend_mask)
        return Memory(x, batch.leaf_pad_mask), self.phrases.tag_loss * total
