"""The tasks by their names in a configuration."""

from treenet.config import TrainConfig
from treenet.tasks.base import Task
from treenet.tasks.causal_lm import CausalLanguageModel
from treenet.tasks.classification import Classification
from treenet.tasks.masked_lm import MaskedLanguageModel
from treenet.tasks.relatedness import Relatedness
from treenet.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {
    "translation": Translation,
    "classification": Classification,
    "relatedness": Relatedness,
    "masked_lm": MaskedLanguageModel,
    "causal_lm": CausalLanguageModel,
}


def build_task(config: TrainConfig) -> Task:
    """Build the task of a configuration."""
    return TASKS[config.task](config)
