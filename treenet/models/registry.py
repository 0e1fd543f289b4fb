"""Models by name: one registry of encoders, and the models that are made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from treenet.config import ClassifierConfig, ModelConfig
from treenet.layers.linear import build_linear
from treenet.layers.pair_head import PairHead
from treenet.models.classifier import Classifier, check_supervision
from treenet.models.decoders.base import Decoder
from treenet.models.decoders.convs2s import ConvS2SDecoder
from treenet.models.decoders.recurrent import RecurrentDecoder
from treenet.models.decoders.transformer import (
    TransformerDecoder,
    build_dynamicconv_decoder,
    build_lightconv_decoder,
    build_relative_decoder,
    build_tree_decoder,
)
from treenet.models.encoders.base import Encoder, PieceEmbedding, VocabSizes
from treenet.models.encoders.constituents import ConstituentEncoder
from treenet.models.encoders.convolution import DynamicConvEncoder, LightConvEncoder
from treenet.models.encoders.convs2s import ConvS2SEncoder
from treenet.models.encoders.lstm import BiLSTMEncoder
from treenet.models.encoders.multi_granularity import MultiGranularityEncoder
from treenet.models.encoders.on_lstm_hybrid import OnLSTMHybridEncoder
from treenet.models.encoders.relations import RelationEncoder
from treenet.models.encoders.transformer import TransformerEncoder
from treenet.models.encoders.tree import TreeEncoder
from treenet.models.encoders.tree_lstm import ChildSumEncoder, ChildSumTree2SeqEncoder, Tree2SeqEncoder, TreeLSTMEncoder
from treenet.models.masked_lm import MaskedLM, MaskedPieceEmbedding
from treenet.models.seq2seq import Seq2Seq
from treeproc.common.settings import UserError

Use = Literal["translation", "classification", "masked_lm"]


@dataclass(frozen=True)
class Architecture:
    """An encoder, the decoder that it translates with, and the other uses that it has been tried in."""

    encoder: type[Encoder]
    decoder: Callable[[ModelConfig, PieceEmbedding], Decoder] | None = None
    uses: tuple[Use, ...] = ()

    def serves(self, use: Use) -> bool:
        """Whether there are models of this use."""
        return self.decoder is not None if use == "translation" else use in self.uses


ARCHITECTURES: dict[str, Architecture] = {
    "bilstm": Architecture(BiLSTMEncoder, RecurrentDecoder, ("classification",)),
    "child_sum_tree2seq": Architecture(ChildSumTree2SeqEncoder, RecurrentDecoder),
    "child_sum_tree_lstm": Architecture(ChildSumEncoder, uses=("classification",)),
    "constituent_transformer": Architecture(ConstituentEncoder, TransformerDecoder, ("masked_lm",)),
    "convs2s": Architecture(ConvS2SEncoder, ConvS2SDecoder),
    "dynamicconv": Architecture(DynamicConvEncoder, build_dynamicconv_decoder),
    "lightconv": Architecture(LightConvEncoder, build_lightconv_decoder),
    "multi_granularity": Architecture(MultiGranularityEncoder, TransformerDecoder),
    "on_lstm_hybrid": Architecture(OnLSTMHybridEncoder, TransformerDecoder),
    "relation_transformer": Architecture(RelationEncoder, build_relative_decoder, ("classification",)),
    "transformer": Architecture(TransformerEncoder, TransformerDecoder, ("classification", "masked_lm")),
    "tree2seq": Architecture(Tree2SeqEncoder, RecurrentDecoder),
    "tree_lstm": Architecture(TreeLSTMEncoder, uses=("classification",)),
    "tree_transformer": Architecture(TreeEncoder, build_tree_decoder, ("classification",)),
}


def names_for(use: Use) -> list[str]:
    """Names of the models of this use, in alphabetical order."""
    return sorted(name for name, architecture in ARCHITECTURES.items() if architecture.serves(use))


def find_architecture(config: ModelConfig, use: Use) -> Architecture:
    """The architecture of that name. Raises UserError for a name without models of this use."""
    names = names_for(use)
    if config.name not in names:
        raise UserError(f"model.name must be one of {', '.join(names)}, but is {config.name} instead")
    return ARCHITECTURES[config.name]


def find_encoder(config: ModelConfig, use: Use) -> type[Encoder]:
    """The class of the encoder. Raises UserError for a name without models of this use."""
    return find_architecture(config, use).encoder


def build_model(config: ModelConfig, vocab: VocabSizes) -> Seq2Seq:
    """A freshly initialised translation model. Raises UserError for an unknown name."""
    architecture = find_architecture(config, "translation")
    embedding = architecture.encoder.build_embedding(config, vocab)
    encoder = architecture.encoder(config, vocab, embedding)
    model = Seq2Seq(encoder, architecture.decoder(config, embedding))
    encoder.add_tables(vocab)
    return model


def build_classifier(config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig, num_classes: int) -> Classifier:
    """A freshly initialised classifier. Raises UserError for an unknown name, and for settings that do not fit the model."""
    encoder = _build_classifying_encoder(config, vocab, options)
    return Classifier(encoder, build_linear(config.d_model, num_classes), options)


def build_relatedness(config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig) -> Classifier:
    """A classifier's encoder, read from as whole examples are, below the head of two sentences. Raises UserError as above."""
    options = options.model_copy(update={"supervision": "root"})
    encoder = _build_classifying_encoder(config, vocab, options)
    return Classifier(encoder, PairHead(config.d_model, options.pair_hidden), options)


def build_masked_lm(config: ModelConfig, vocab: VocabSizes) -> MaskedLM:
    """A freshly initialised masked language model. Raises UserError for an unknown name."""
    embedding = MaskedPieceEmbedding(vocab.pieces, config.d_model)
    encoder = find_encoder(config, "masked_lm")(config, vocab, embedding)
    return MaskedLM(_complete(encoder, vocab), embedding.mask_id)


def _build_classifying_encoder(config: ModelConfig, vocab: VocabSizes, options: ClassifierConfig) -> Encoder:
    encoder = find_encoder(config, "classification")
    check_supervision(config, options, encoder.reads_with(config))
    return _complete(encoder(config, vocab, encoder.build_embedding(config, vocab)), vocab)


def _complete(encoder: Encoder, vocab: VocabSizes) -> Encoder:
    encoder.add_tables(vocab)
    return encoder
