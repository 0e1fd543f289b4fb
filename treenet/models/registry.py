"""Model names."""

from collections.abc import Callable

from torch import nn

from treenet.config import ModelConfig
from treenet.models.seq2seq import VocabSizes
from treenet.models.transformer import Transformer
from treenet.models.tree_transformer import TreeTransformer
from treeproc.settings import UserError

MODELS: dict[str, Callable[[ModelConfig, VocabSizes], nn.Module]] = {
    "transformer": Transformer,
    "tree_transformer": TreeTransformer,
}


def build_model(config: ModelConfig, vocab: VocabSizes) -> nn.Module:
    """A freshly initialised model. Raises UserError for an unknown name."""
    if config.name not in MODELS:
        raise UserError(f"model.name must be one of {', '.join(sorted(MODELS))}, but is {config.name} instead")
    return MODELS[config.name](config, vocab)
