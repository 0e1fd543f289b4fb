"""The plain Transformer: it reads the leaves and ignores the trees."""

from treenet.config import ClassifierConfig, ModelConfig
from treenet.models.classifier import Classifier
from treenet.models.encoders import Encoder, VocabSizes
from treenet.models.masked_lm import MaskedLM
from treenet.models.seq2seq import Seq2Seq


class Transformer(Seq2Seq):
    """Post-norm encoder-decoder Transformer (Vaswani et al., 2017)."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)


class TransformerClassifier(Encoder, Classifier):
    """Its encoder; the class of an example is read from the mean of the leaves, or from the first."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        Encoder.__init__(self, config, vocab)
        self.add_head(config, classifier, num_classes)


class TransformerMaskedLM(MaskedLM):
    """Its encoder as a masked language model."""
