"""The plain Transformer: it reads the leaves and ignores the trees."""

from treenet.batch import TreeBatch
from treenet.config import ModelConfig
from treenet.layers.attention import padding_to_attend_mask
from treenet.models.seq2seq import Memory, Seq2Seq, VocabSizes


class Transformer(Seq2Seq):
    """Post-norm encoder-decoder Transformer (Vaswani et al., 2017)."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)

    def encode(self, batch: TreeBatch) -> Memory:
        """Memory of the leaves: S = L."""
        attend_mask = padding_to_attend_mask(batch.leaf_pad_mask)
        x = self.dropout(self.embed_pieces(batch.leaf_pieces))
        for layer in self.encoder_layers:
            x = layer(x, attend_mask)
        return Memory(x, batch.leaf_pad_mask)
