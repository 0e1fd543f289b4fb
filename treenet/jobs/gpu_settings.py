"""Settings that depend on the GPU. A run chooses them at its start and records them in its folder; later commands keep them."""

from pathlib import Path

from treenet.config import TrainConfig
from treenet.runs.checkpoint import checkpoint_folders
from treenet.runs.precision import best_precision_here
from treenet.training.memory import expand_segments
from treeproc.common.messages import warn
from treeproc.common.settings import load_settings


def choose_for_gpu(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """Return the settings with values for `auto`: the recorded ones if the run has begun, else the best ones for the GPU.

    It prints a note if a run continues in another precision than this GPU would choose.
    """
    if config.precision != "auto":
        return config
    expand_segments()  # before any code uses the GPU
    best = _best_precision(config)
    chosen = best
    if checkpoint_folders(run_dir):
        recorded = load_settings(TrainConfig, run_dir / "config.yaml").precision
        chosen = best if recorded == "auto" else recorded
    if chosen != best:
        warn(f"note: this run began with precision={chosen}, and keeps it; a new run would use {best} on this machine")
    return config.model_copy(update={"precision": chosen})


def _best_precision(config: TrainConfig) -> str:
    """Return the precision of the GPUs that train; `auto` if there is none, which raises an error later."""
    if config.workers:
        from treenet.jobs.ray_train import precision_of_workers  # training without Ray must not import it

        return precision_of_workers(config)
    return best_precision_here()
