"""Models by name: `build_model(config, vocab)`, `build_classifier(config, vocab, classifier, num_classes)`,
`build_masked_lm(config, vocab)`."""

from treenet.models.classifier import Classifier, ClassLogits
from treenet.models.encoders import Memory, VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.registry import (
    CLASSIFIERS,
    MASKED_LMS,
    MODELS,
    build_classifier,
    build_masked_lm,
    build_model,
    build_relatedness,
    classifier_class,
    masked_lm_class,
    model_class,
)
from treenet.models.seq2seq import DecoderState, EncoderDecoder

__all__ = [
    "CLASSIFIERS",
    "MASKED_LMS",
    "MODELS",
    "ClassLogits",
    "Classifier",
    "DecoderState",
    "EncoderDecoder",
    "MaskedLM",
    "Memory",
    "VocabSizes",
    "build_classifier",
    "build_masked_lm",
    "build_model",
    "build_relatedness",
    "classifier_class",
    "masked_lm_class",
    "model_class",
]
