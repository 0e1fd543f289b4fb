"""Models by name: `build_model(config, vocab)`."""

from treenet.models.registry import MODELS, build_model, model_class
from treenet.models.seq2seq import DecoderState, Memory, Seq2Seq, VocabSizes

__all__ = ["MODELS", "DecoderState", "Memory", "Seq2Seq", "VocabSizes", "build_model", "model_class"]
