"""The registry of architectures: models by name, made of the registered encoders.

The file of an encoder registers it, but for the plain Transformer. `import treenet.models` imports all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from treenet.config import ClassifierConfig, ModelConfig
from treenet.layers.core import build_linear
from treenet.models.composed import (
    NUM_SCORES,
    CausalLM,
    Classifier,
    MaskedLM,
    MaskedPieceEmbedding,
    PairHead,
    Seq2Seq,
    check_supervision,
)
from treenet.models.decoders.transformer import Decoder, TransformerDecoder
from treenet.models.encoders.base import Encoder, PieceEmbedding, TransformerEncoder, VocabSizes
from treenet.models.paired_weights import DRAWS, build_by_name, drawn_tensor
from treenet.models.pretrained import PretrainedLeaves
from treeproc.common.errors import check_choice
from treeproc.common.settings import UserError

_ModelT = TypeVar("_ModelT", bound=nn.Module)
Use = Literal["translation", "classification", "masked_lm", "causal_lm"]


@dataclass(frozen=True)
class Architecture:
    """An encoder, the decoder for translation, and the other uses that were tested with this encoder."""

    encoder: type[Encoder]
    decoder: Callable[[ModelConfig, PieceEmbedding], Decoder] | None = None
    uses: tuple[Use, ...] = ()

    def serves(self, use: Use) -> bool:
        """Return whether there are models of this use."""
        check_choice("use", use, Use)
        return self.decoder is not None if use == "translation" else use in self.uses


ARCHITECTURES = {"transformer": Architecture(TransformerEncoder, TransformerDecoder, uses=("classification", "masked_lm"))}


def register(name: str, architecture: Architecture) -> None:
    """Register an architecture under a value of `model.name`. Raises ValueError if the name is taken."""
    if name in ARCHITECTURES:
        raise ValueError(f"two architectures have the name {name}")
    ARCHITECTURES[name] = architecture


def names_for(use: Use) -> list[str]:
    """Return the names of the models of this use, in alphabetical order."""
    return sorted(name for name, architecture in ARCHITECTURES.items() if architecture.serves(use))


def find_architecture(config: ModelConfig, use: Use) -> Architecture:
    """Return the architecture of that name. Raises UserError for a name without models of this use."""
    names = names_for(use)
    if config.name not in names:
        raise UserError(f"model.name must be one of {', '.join(names)}, but is {config.name} instead")
    architecture = ARCHITECTURES[config.name]
    _check_layers(config, architecture, use)
    _check_pretrained(config, use)
    return architecture


def _check_layers(config: ModelConfig, architecture: Architecture, use: Use) -> None:
    """Raise UserError for settings of Transformer layers that the model would not read."""
    for name in config.layer_settings:
        if not architecture.encoder.has_transformer_layers:
            raise UserError(f"model.{name} is for models of Transformer layers, but model.name is {config.name}; leave it out")
        if name.endswith("word_dropout") and use != "translation":
            raise UserError(f"model.{name} is for translation; leave it out (classifiers have classifier.word_dropout)")
        if name.startswith("decoder") and use != "translation":
            raise UserError(f"model.{name} is for models with a decoder; leave it out")


def _check_pretrained(config: ModelConfig, use: Use) -> None:
    """Raise UserError if the model has no place for a pretrained encoder, or has none and needs one."""
    if config.pretrained.folder is None:
        if config.name == "pretrained":
            raise UserError("model.pretrained.folder must be the folder of a pretrained encoder for model.name = pretrained")
        return
    if use != "classification":
        raise UserError("model.pretrained.folder is for tasks classification and relatedness; leave it out")
    if config.name not in (names := config.pretrained.architectures):
        raise UserError(
            f"model.name must be one of {', '.join(names)} above a pretrained encoder, but is {config.name}; choose another, or "
            "leave model.pretrained.folder out"
        )


def find_encoder(config: ModelConfig, use: Use) -> type[Encoder]:
    """Return the class of the encoder. Raises UserError for a name without models of this use."""
    return find_architecture(config, use).encoder


class _NoValues(TorchFunctionMode):
    """Leaves out what PyTorch computes in Python on the meta device: the first such call would load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS or (func is Tensor.mul and isinstance(args[1], float)):
            return drawn_tensor(args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def only_shapes() -> Iterator[None]:
    """Build models without values in this context: their parameters have shapes, and need no memory."""
    with torch.device("meta"), _NoValues():
        yield


def build_model(config: ModelConfig, vocab: VocabSizes) -> Seq2Seq:
    """Build a freshly initialised translation model. Raises UserError for an unknown name."""
    architecture = find_architecture(config, "translation")

    def build() -> Seq2Seq:
        encoder = architecture.encoder(config, vocab, architecture.encoder.build_embedding(config, vocab))
        assert architecture.decoder is not None  # it serves translation
        model = Seq2Seq(encoder, architecture.decoder(config, encoder.embedding))
        encoder.add_tables(vocab)
        return model

    return _draw(config, build)


def build_classifier(
    config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig, num_classes: int, *, pairs: bool = False
) -> Classifier:
    """Build a freshly initialised classifier of examples, or of `pairs` of them.

    Raises UserError for an unknown name, and for settings that do not fit the model.
    """
    if pairs:
        return _build_for_pairs(config, vocab, options, num_classes, ordered=options.pair_features != "symmetric")
    build_encoder = _classifying_encoder(config, vocab, options)
    return _draw(config, lambda: Classifier(build_encoder(), build_linear(config.d_model, num_classes), options))


def build_relatedness(config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig) -> Classifier:
    """Build a classifier's encoder with the head for pairs, which reads one state per sentence. Raises UserError as above."""
    return _build_for_pairs(config, vocab, options, NUM_SCORES, ordered=options.pair_features == "ordered")


def _build_for_pairs(
    config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig, num_outputs: int, *, ordered: bool
) -> Classifier:
    options = options.model_copy(update={"supervision": "root"})
    build_encoder = _classifying_encoder(config, vocab, options)

    def build() -> Classifier:
        encoder = build_encoder()
        return Classifier(encoder, PairHead(config.d_model, options.pair_hidden, num_outputs, ordered=ordered), options)

    return _draw(config, build)


def build_masked_lm(config: ModelConfig, vocab: VocabSizes) -> MaskedLM:
    """Build a freshly initialised masked language model. Raises UserError for an unknown name."""
    encoder = find_encoder(config, "masked_lm")

    def build() -> MaskedLM:
        embedding = MaskedPieceEmbedding(vocab.pieces, config.d_model)
        return MaskedLM(_complete(encoder, config, vocab, embedding), embedding.mask_id)

    return _draw(config, build)


def build_causal_lm(config: ModelConfig, vocab: VocabSizes) -> CausalLM:
    """Build a freshly initialised causal language model. Raises UserError for an unknown name or settings that do not fit."""
    encoder = find_encoder(config, "causal_lm")
    return _draw(config, lambda: CausalLM(_complete(encoder, config, vocab, encoder.build_embedding(config, vocab))))


def _classifying_encoder(config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig) -> Callable[[], Encoder]:
    """Return the function that builds the encoder. Raises UserError if it cannot learn what the settings ask for."""
    encoder = find_encoder(config, "classification")
    check_supervision(config, options, encoder.reads_with(config))
    return lambda: _complete(encoder, config, vocab, encoder.build_embedding(config, vocab))


def _complete(
    build: type[Encoder], config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding | PretrainedLeaves
) -> Encoder:
    encoder = build(config, vocab, embedding)
    encoder.add_tables(vocab)
    return encoder


def _draw(config: ModelConfig, build: Callable[[], _ModelT]) -> _ModelT:
    """Return the model that `build` builds, with initial weights as the settings say."""
    return build_by_name(build) if config.paired_weights else build()
