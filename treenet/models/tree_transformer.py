"""The Tree Transformer of the paper (section 4.4, figure 6)."""

from treenet.config import ClassifierConfig, ModelConfig
from treenet.models.classifier import Classifier
from treenet.models.encoders import Encoder, EncodesTrees, VocabSizes
from treenet.models.seq2seq import Seq2Seq


class TreeTransformer(EncodesTrees, Seq2Seq):
    """Encoder over leaves and nodes; tree attention in the encoder and in the decoder's cross-attention."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab, config.tree)
        self.add_nodes(config, vocab)


class TreeTransformerClassifier(EncodesTrees, Encoder, Classifier):
    """Its encoder with a class at every position (appendix 7.4); that of an example is read from the root."""

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        Encoder.__init__(self, config, vocab, config.tree)
        self.add_nodes(config, vocab)
        self.add_head(config, classifier, num_classes)
