"""A pretrained encoder alone, without a layer of ours: the baseline of all models that read trees above it."""

from torch import Tensor

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.models.encoders.base import Encoder, Memory, VocabSizes
from treenet.models.pretrained import PretrainedLeaves
from treenet.models.registry import Architecture, register
from treeproc.common.errors import UserError


class PretrainedEncoder(Encoder):
    """The states of the pretrained encoder after dropout, S = L; its own state of an example is that of [CLS]."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PretrainedLeaves):
        """Raise UserError if the model has another width than the pretrained encoder."""
        super().__init__(config, vocab, embedding)
        if embedding.width != config.d_model:
            raise UserError(
                f"model.d_model must be {embedding.width}, the width of the pretrained encoder, for model.name = pretrained, but "
                f"is {config.d_model}"
            )

    def forward(self, batch: TreeBatch) -> Memory:
        states, first = self.embedding.encode(batch)
        return Memory(self.dropout(states), batch.leaf_pad_mask, summary=first)

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """Return the state of [CLS], or the first state of tokenizers without one [B, D]."""
        assert memory.summary is not None
        return memory.summary


register("pretrained", Architecture(PretrainedEncoder, uses=("classification",)))
