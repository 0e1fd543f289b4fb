"""The tasks by their names in a configuration."""

from treenet.config import TrainConfig
from treenet.tasks.base import Task
from treenet.tasks.causal_lm import CausalLanguageModel
from treenet.tasks.classification import Classification
from treenet.tasks.masked_lm import MaskedLanguageModel
from treenet.tasks.relatedness import Relatedness
from treenet.tasks.translation import Translation
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath

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


def workflow_of(run_dir: AnyPath) -> str:
    """Return the name of the script that trains the run in this folder, for messages."""
    try:
        return f"workflows/{TASKS[load_settings(TrainConfig, run_dir / 'config.yaml').task].workflow}"
    except UserError:
        return "the workflow of the run"


def check_task(config: TrainConfig, workflow: str) -> None:
    """Raise UserError if another script of workflows/ trains the task of the configuration."""
    if TASKS[config.task].workflow != workflow:
        names = [name for name, task in TASKS.items() if task.workflow == workflow]
        raise UserError(
            f"task must be {' or '.join(names)}, but is {config.task}; for this task, run workflows/{TASKS[config.task].workflow}"
        )
