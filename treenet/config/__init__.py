"""Settings of models and of training runs."""

from treenet.config.models import (
    PHRASE_LEVELS,
    ArchitectureSection,
    ConstituentConfig,
    ModelConfig,
    PhraseConfig,
    RecurrentCell,
    RelationsConfig,
    TreeAttentionConfig,
)
from treenet.config.tasks import UNRECORDED, ClassifierConfig, DecodingConfig, MaskedLMConfig, SamplingConfig
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
    "CorpusConfig",
    "DecodingConfig",
    "MaskedLMConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PhraseConfig",
    "RecurrentCell",
    "RelationsConfig",
    "SamplingConfig",
    "TrainConfig",
    "TreeAttentionConfig",
    "flatten",
]
