"""Settings of models and of training runs."""

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
)
from treenet.config.training import (
    OPERATIONAL,
    BatchConfig,
    ClassifierConfig,
    DecodingConfig,
    MaskedLMConfig,
    OptimizerConfig,
    TrainConfig,
    flatten,
)

__all__ = [
    "OPERATIONAL",
    "PHRASE_LEVELS",
    "ArchitectureSection",
    "BatchConfig",
    "ClassifierConfig",
    "ConstituentConfig",
    "ConvS2SConfig",
    "ConvolutionConfig",
    "DecodingConfig",
    "HybridConfig",
    "MaskedLMConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PhraseConfig",
    "RecurrentCell",
    "RecurrentConfig",
    "RelationsConfig",
    "TrainConfig",
    "TreeAttentionConfig",
    "flatten",
]
