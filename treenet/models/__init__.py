"""Models by name: `build_model(config, vocab)`, `build_classifier(config, vocab, options, num_classes)`,
`build_relatedness(config, vocab, options)`, `build_masked_lm(config, vocab)`,
`build_causal_lm(config, vocab)`."""

from treenet.models.architectures import ARCHITECTURES
from treenet.models.causal_lm import CausalLM
from treenet.models.classifier import Classifier, ClassLogits
from treenet.models.decoders.base import DecoderState
from treenet.models.encoders.base import DataFacts, Encoder, Memory, VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.registry import (
    build_causal_lm,
    build_classifier,
    build_masked_lm,
    build_model,
    build_relatedness,
    find_encoder,
    names_for,
)
from treenet.models.seq2seq import Seq2Seq

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "ClassLogits",
    "Classifier",
    "DataFacts",
    "DecoderState",
    "Encoder",
    "MaskedLM",
    "Memory",
    "Seq2Seq",
    "VocabSizes",
    "build_causal_lm",
    "build_classifier",
    "build_masked_lm",
    "build_model",
    "build_relatedness",
    "find_encoder",
    "names_for",
]
