"""Tiny runs on the toy data set, in one process or in several."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from treenet.config import TrainConfig
from treenet.runs.checkpoint import latest_checkpoint, take_snapshot, write_checkpoint
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import Task, build_task
from treenet.training.micro_batches import RankBatch
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import UserError, load_settings

# Processes start from one that has imported these: in a tenth of a second instead of seconds. Optimisers import Dynamo.
LIBRARIES = ["torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard", "pyarrow.compute", "numpy.ma", "pytest"]
LIBRARIES += ["transformers.models.bert.modeling_bert", "moto.moto_server.werkzeug_app", "moto.s3.responses", "moto.s3.urls"]
LIBRARIES += ["treenet.experiments.study"]
# Those of pytest-xdist need more.
LIBRARIES_OF_TESTS = ["ray.data", "ray.train.torch", "ray.serve", "stanza", "matplotlib.figure", "sacrebleu", "sacremoses"]
LIBRARIES_OF_TESTS += ["moto.server", "hypothesis", "optuna", "scipy.stats"]
multiprocessing.set_forkserver_preload(LIBRARIES)

TINY_RUN = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 10},
    "batch": {"max_tokens": 64},
    "max_steps": 20,
    "log_every": 1,
    "checkpoint_every": 5,
    "validate_every": 10,
    "workers": 0,
}


def make_config(data: Path, *overrides: str) -> TrainConfig:
    return load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(TINY_RUN)), data=data)


def make_task(data: Path, *overrides: str) -> Task:
    return build_task(make_config(data, *overrides))


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run_dir) if line["event"] == "train"]


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(latest_checkpoint(run_dir) / "model.safetensors")


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def check_stop_and_resume(config: TrainConfig, folder: Path, stop: int) -> None:
    """Train FOLDER/whole at once and FOLDER/halves with a stop after `stop` steps; losses and weights must be the same."""
    for run in ("whole", "halves"):
        (folder / run).mkdir()
    train(build_task(config), folder / "whole")
    asked = iter(range(1, 100))
    outcome = train(build_task(config), folder / "halves", should_stop=lambda: next(asked) >= stop)
    assert (outcome.step, outcome.finished) == (stop, False)
    assert train(build_task(config), folder / "halves").finished
    assert losses(folder / "halves") == losses(folder / "whole")
    assert same(final_weights(folder / "halves"), final_weights(folder / "whole"))


def _rank(
    rank: int, world_size: int, config: TrainConfig, run_dir: Path, meeting: Path, prepare: Callable[[int], None] | None
) -> None:
    torch.set_num_threads(1)
    if prepare:
        prepare(rank)
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=world_size)
    try:
        train(build_task(config), run_dir, rank=rank, world_size=world_size)
    except UserError as error:
        (run_dir / f"error-{rank}").write_text(str(error))
    dist.destroy_process_group()


def train_ranks(
    world_size: int, config: TrainConfig, run_dir: Path, prepare: Callable[[int], None] | None = None
) -> list[str | None]:
    """Train in `world_size` processes, after `prepare(rank)` in each; returns the UserError of each rank."""
    run_dir.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # a file, because another process may take a port that is free now
        arguments = (world_size, config, run_dir, Path(folder) / "meeting", prepare)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
    errors = [run_dir / f"error-{rank}" for rank in range(world_size)]
    return [path.read_text() if path.exists() else None for path in errors]


def save_for_ever(run_dir: Path, first: int) -> None:
    """Checkpoints whose weights are all equal to their step, as fast as they can be written."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, 10**6):
        torch.nn.init.constant_(model.weight, step)
        write_checkpoint(run_dir, take_snapshot(step, model, optimizer, {"step": step}, {}), keep=2)


def without_phases(errors: str) -> list[str]:
    """The lines of standard error but those that name what is under way: a busy machine has more of them."""
    return [line for line in errors.splitlines() if not line.endswith(" ...")]


def gradient_and_kept(trainer: Trainer, rank_batch: RankBatch) -> tuple[torch.Tensor, int]:
    """The gradient of a batch, and the bytes that its forward passes keep for backward."""
    kept = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.train_step.compute_gradient(rank_batch, trainer.micro_batches, 3)
    return trainer.train_step._gradients.flat.clone(), kept
