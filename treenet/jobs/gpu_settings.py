"""Settings that depend on the GPU, chosen where a run begins and recorded in its folder: later commands keep them."""

import sys
from pathlib import Path

from treenet.config import TrainConfig
from treenet.runs.checkpoint import checkpoint_folders
from treenet.runs.precision import best_precision_here
from treenet.training.memory import expand_segments
from treeproc.common.settings import load_settings


def choose_for_gpu(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """The settings with what `auto` is: for a run that has begun as it is recorded, else as the GPU wants it.

    Says so where a run goes on in another precision than this GPU would take.
    """
    if config.precision != "auto":
        return config
    expand_segments()  # before anything asks for the GPU
    best = _best_precision(config)
    chosen = best
    if checkpoint_folders(run_dir):
        recorded = load_settings(TrainConfig, run_dir / "config.yaml").precision
        chosen = best if recorded == "auto" else recorded
    if chosen != best:
        print(f"note: this run began with precision={chosen} and keeps it; a new run would take {best} here", file=sys.stderr)
    return config.model_copy(update={"precision": chosen})


def _best_precision(config: TrainConfig) -> str:
    """The precision of the GPUs that train; `auto` where none is found, which is refused later."""
    if config.workers:
        from treenet.jobs.ray_train import precision_of_workers  # training without Ray must not import it

        return precision_of_workers(config)
    return best_precision_here()
