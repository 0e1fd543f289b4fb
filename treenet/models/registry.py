"""Model names: of translation models, of classifiers, and of masked language models."""

from collections.abc import Mapping
from typing import TypeVar

from treenet.config import ClassifierConfig, ModelConfig
from treenet.models.bilstm import BiLSTMClassifier
from treenet.models.classifier import Classifier
from treenet.models.constituent_transformer import ConstituentMaskedLM, ConstituentTransformer
from treenet.models.encoders import VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.seq2seq import EncoderDecoder
from treenet.models.transformer import Transformer, TransformerClassifier, TransformerMaskedLM
from treenet.models.tree_lstm import ChildSumTreeLSTMClassifier, TreeLSTMClassifier
from treenet.models.tree_transformer import TreeTransformer, TreeTransformerClassifier
from treeproc.settings import UserError

Model = TypeVar("Model")

MODELS: dict[str, type[EncoderDecoder]] = {
    "constituent_transformer": ConstituentTransformer,
    "transformer": Transformer,
    "tree_transformer": TreeTransformer,
}
CLASSIFIERS: dict[str, type[Classifier]] = {
    "bilstm": BiLSTMClassifier,
    "child_sum_tree_lstm": ChildSumTreeLSTMClassifier,
    "transformer": TransformerClassifier,
    "tree_lstm": TreeLSTMClassifier,
    "tree_transformer": TreeTransformerClassifier,
}
MASKED_LMS: dict[str, type[MaskedLM]] = {
    "constituent_transformer": ConstituentMaskedLM,
    "transformer": TransformerMaskedLM,
}


def model_class(config: ModelConfig) -> type[EncoderDecoder]:
    """The class of a translation model. Raises UserError for an unknown name."""
    return _find(MODELS, config.name)


def build_model(config: ModelConfig, vocab: VocabSizes) -> EncoderDecoder:
    """A freshly initialised translation model. Raises UserError for an unknown name."""
    return model_class(config)(config, vocab)


def classifier_class(config: ModelConfig) -> type[Classifier]:
    """The class of a classifier. Raises UserError for an unknown name."""
    return _find(CLASSIFIERS, config.name)


def build_classifier(config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int) -> Classifier:
    """A freshly initialised classifier. Raises UserError for an unknown name, and for settings that do not fit the model."""
    return classifier_class(config)(config, vocab, classifier, num_classes)


def masked_lm_class(config: ModelConfig) -> type[MaskedLM]:
    """The class of a masked language model. Raises UserError for an unknown name."""
    return _find(MASKED_LMS, config.name)


def build_masked_lm(config: ModelConfig, vocab: VocabSizes) -> MaskedLM:
    """A freshly initialised masked language model. Raises UserError for an unknown name."""
    return masked_lm_class(config)(config, vocab)


def _find(models: Mapping[str, type[Model]], name: str) -> type[Model]:
    if name not in models:
        raise UserError(f"model.name must be one of {', '.join(sorted(models))}, but is {name} instead")
    return models[name]
