"""Models by name: `build_model(config, vocab)`, `build_classifier(config, vocab, options, num_classes)`,
`build_relatedness(config, vocab, options)`, `build_masked_lm(config, vocab)`,
`build_causal_lm(config, vocab)`."""

import pkgutil
from importlib import import_module

from treenet.models import encoders
from treenet.models.composed import CausalLM, Classifier, ClassLogits, MaskedLM, Seq2Seq
from treenet.models.decoders.transformer import DecoderState
from treenet.models.encoders.base import DataFacts, Encoder, Memory, VocabSizes
from treenet.models.registry import (
    ARCHITECTURES,
    build_causal_lm,
    build_classifier,
    build_masked_lm,
    build_model,
    build_relatedness,
    find_encoder,
    names_for,
)

for _module in pkgutil.iter_modules(encoders.__path__, f"{encoders.__name__}."):
    import_module(_module.name)  # importing the files of encoders registers them

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
