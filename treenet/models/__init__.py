"""Models by name: `build_model(config, vocab)`, `build_classifier(config, vocab, classifier, num_classes)`."""

from treenet.models.classifier import Classifier, ClassLogits
from treenet.models.encoders import Memory, VocabSizes
from treenet.models.registry import (
    CLASSIFIERS,
    MODELS,
    build_classifier,
    build_model,
    build_relatedness,
    classifier_class,
    model_class,
)
from treenet.models.seq2seq import DecoderState, EncoderDecoder

__all__ = [
    "CLASSIFIERS",
    "MODELS",
    "ClassLogits",
    "Classifier",
    "DecoderState",
    "EncoderDecoder",
    "Memory",
    "VocabSizes",
    "build_classifier",
    "build_model",
    "build_relatedness",
    "classifier_class",
    "model_class",
]
