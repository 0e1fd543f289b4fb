"""Model names: of translation models, of classifiers, and of masked language models."""

from collections.abc import Mapping
from typing import TypeVar

from treenet.config import ClassifierConfig, ModelConfig
from treenet.layers.pair_head import NUM_SCORES, PairHead
from treenet.models.bilstm import BiLSTMClassifier, BiLSTMSeq2Seq
from treenet.models.classifier import Classifier
from treenet.models.constituent_transformer import ConstituentMaskedLM, ConstituentTransformer
from treenet.models.convolution import DynamicConv, LightConv
from treenet.models.convs2s import ConvS2S
from treenet.models.encoders import VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.multi_granularity import MultiGranularityTransformer
from treenet.models.on_lstm_hybrid import OnLSTMHybrid
from treenet.models.relation_transformer import RelationTransformer, RelationTransformerClassifier
from treenet.models.seq2seq import EncoderDecoder
from treenet.models.transformer import Transformer, TransformerClassifier, TransformerMaskedLM
from treenet.models.tree_lstm import ChildSumTree2Seq, ChildSumTreeLSTMClassifier, Tree2Seq, TreeLSTMClassifier
from treenet.models.tree_transformer import TreeTransformer, TreeTransformerClassifier
from treeproc.common.settings import UserError

Model = TypeVar("Model")

MODELS: dict[str, type[EncoderDecoder]] = {
    "bilstm": BiLSTMSeq2Seq,
    "child_sum_tree2seq": ChildSumTree2Seq,
    "constituent_transformer": ConstituentTransformer,
    "convs2s": ConvS2S,
    "dynamicconv": DynamicConv,
    "lightconv": LightConv,
    "multi_granularity": MultiGranularityTransformer,
    "on_lstm_hybrid": OnLSTMHybrid,
    "relation_transformer": RelationTransformer,
    "transformer": Transformer,
    "tree2seq": Tree2Seq,
    "tree_transformer": TreeTransformer,
}
CLASSIFIERS: dict[str, type[Classifier]] = {
    "bilstm": BiLSTMClassifier,
    "child_sum_tree_lstm": ChildSumTreeLSTMClassifier,
    "relation_transformer": RelationTransformerClassifier,
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


def build_relatedness(config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig) -> Classifier:
    """A classifier's encoder, read from as whole examples are, below the head of two sentences. Raises UserError as above."""
    model = build_classifier(config, vocab, classifier.model_copy(update={"supervision": "root"}), NUM_SCORES)
    model.head = PairHead(config.d_model, classifier.pair_hidden)
    return model


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
