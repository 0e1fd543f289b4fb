"""Model names."""

from treenet.config import ModelConfig
from treenet.models.seq2seq import Seq2Seq, VocabSizes
from treenet.models.transformer import Transformer
from treenet.models.tree_transformer import TreeTransformer
from treeproc.settings import UserError

MODELS: dict[str, type[Seq2Seq]] = {
    "transformer": Transformer,
    "tree_transformer": TreeTransformer,
}


def model_class(config: ModelConfig) -> type[Seq2Seq]:
    """The class of a model. Raises UserError for an unknown name."""
    if config.name not in MODELS:
        raise UserError(f"model.name must be one of {', '.join(sorted(MODELS))}, but is {config.name} instead")
    return MODELS[config.name]


def build_model(config: ModelConfig, vocab: VocabSizes) -> Seq2Seq:
    """A freshly initialised model. Raises UserError for an unknown name."""
    return model_class(config)(config, vocab)
