"""Settings of models and of training runs."""

from treenet.config.decoding import UNRECORDED, DecodingConfig
from treenet.config.models import (
    PHRASE_LEVELS,
    ArchitectureSection,
    ConstituentConfig,
    ConvolutionConfig,
    ConvS2SConfig,
    HybridConfig,
    ModelConfig,
    PhraseConfig,
    RecurrentCell,
    RecurrentConfig,
    RelationsConfig,
    TreeAttentionConfig,
    TreeRegConfig,
)
from treenet.config.tasks import ClassifierConfig, MaskedLMConfig, SamplingConfig
from treenet.config.training import (
    MAY_CHANGE,
    OPERATIONAL,
    BatchConfig,
    CorpusConfig,
    OptimizerConfig,
    TrainConfig,
    flatten,
)

__all__ = [
    "MAY_CHANGE",
    "OPERATIONAL",
    "PHRASE_LEVELS",
    "UNRECORDED",
    "ArchitectureSection",
    "BatchConfig",
    "ClassifierConfig",
    "ConstituentConfig",
    "ConvS2SConfig",
    "ConvolutionConfig",
    "CorpusConfig",
    "DecodingConfig",
    "HybridConfig",
    "MaskedLMConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PhraseConfig",
    "RecurrentCell",
    "RecurrentConfig",
    "RelationsConfig",
    "SamplingConfig",
    "TrainConfig",
    "TreeAttentionConfig",
    "TreeRegConfig",
    "flatten",
]
