"""A training run from configuration to averaged model, in one folder that the same command continues."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from treenet.config import TrainConfig
from treenet.data import ExampleSource
from treenet.models import VocabSizes, build_model
from treenet.plan import BatchPlan
from treenet.training.checkpoint import (
    average_checkpoints,
    checkpoint_folders,
    checkpoint_step,
    is_whole,
    latest_checkpoint,
    load_weights,
)
from treenet.training.logs import read_metrics
from treenet.training.loop import Outcome, train
from treeproc.files import atomic_write, json_bytes, locked, read_json
from treeproc.settings import UserError, differences, dump_settings, load_settings, refuse_relative_in_job
from treeproc.shards import check_hashes, read_index

# May change between two commands on one run folder: none of them changes what a step computes. The
# data set may move; its fingerprint may not change.
OPERATIONAL = (
    "data", "decoding", "workers", "use_gpu", "max_steps", "log_every",
    "validate_every", "checkpoint_every", "keep_checkpoints", "average_checkpoints",
)  # fmt: skip
STOP_FILE = "stop-requested"
# Exit status of a workflow whose training was stopped and saved: 128 + SIGTERM.
STOPPED_BY_SIGTERM = 143


@dataclass(frozen=True)
class RunSummary:
    """What `run_training` leaves behind. `averaged` is None when the run was stopped before its end."""

    run_dir: Path
    step: int
    finished: bool
    averaged: Path | None
    parameters: int
    valid_nll: float | None


def run_training(config: TrainConfig, out: Path) -> RunSummary:
    """Train in folder `out`, or continue there, and average the last checkpoints at the end.

    A finished run returns at once. SIGTERM saves a checkpoint at the next step and returns. Raises
    UserError for a run folder of another configuration, of other data, or in use.
    """
    refuse_relative_in_job({"data": config.data, "--out": out})
    run_dir = Path(out).resolve()
    config = config.model_copy(update={"data": config.data.resolve()})
    index = read_index(config.data / "encoded")
    if "tgt_pieces" not in index.get("columns", ["tgt_pieces"]):
        raise UserError(
            f"{config.data} has no target side (its columns: {', '.join(index['columns'])}), and a translation model needs "
            "one; choose a data set of pairs"
        )
    if not index.get("subword_settings", {}).get("joint", True):
        raise UserError(
            f"{config.data} has a vocabulary for each side, but models share one table of pieces between the sides; "
            "preprocess again with subwords.joint=true and parsed set to its folder"
        )
    check_hashes(config.data / "encoded", "train", *({"valid"} & set(index["totals"])))
    source = ExampleSource(config.data / "encoded", "train")
    plan = BatchPlan.build(source.lengths, config.batch, text_fingerprint=index["text_fingerprint"], seed=config.seed)
    model = build_model(config.model, VocabSizes(index["num_pieces"], index["num_labels"]))
    facts = {
        "data_fingerprint": index["fingerprint"],
        "vocab_fingerprint": index["vocab_fingerprint"],
        "num_pieces": index["num_pieces"],
        "num_labels": index["num_labels"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "examples": len(plan.rows),
        "left_out": plan.left_out,
        "batches_per_epoch": plan.num_batches,
    }
    del model, plan, source
    make_run_folder(run_dir)
    with locked(run_dir):
        check_same_run(run_dir, config, facts)
        atomic_write(run_dir / "config.yaml", dump_settings(config).encode())
        atomic_write(run_dir / "run.json", json_bytes(facts))
        outcome = _train(config, run_dir)
        averaged = _average(config, run_dir) if outcome.finished else None
    nlls = [line["nll"] for line in read_metrics(run_dir) if line["event"] == "valid"]
    return RunSummary(run_dir, outcome.step, outcome.finished, averaged, facts["parameters"], nlls[-1] if nlls else None)


def _train(config: TrainConfig, run_dir: Path) -> Outcome:
    if (folder := latest_checkpoint(run_dir)) and checkpoint_step(folder) >= config.max_steps:
        return Outcome(checkpoint_step(folder), finished=True)
    stop_file = run_dir / STOP_FILE
    stop_file.unlink(missing_ok=True)
    with stop_on_sigterm(stop_file):
        if config.workers:
            from treenet.training.ray_train import train_with_ray  # training without Ray must not import it

            return train_with_ray(config, run_dir, stop_file)
        if config.use_gpu and not torch.cuda.is_available():
            raise UserError("use_gpu is true, but PyTorch sees no GPU; set use_gpu=false or install a CUDA build of PyTorch")
        return train(config, run_dir, device="cuda" if config.use_gpu else "cpu", should_stop=stop_file.exists)


def _average(config: TrainConfig, run_dir: Path) -> Path:
    """Average unless RUN/averaged is already of the same checkpoints."""
    steps = [checkpoint_step(folder) for folder in checkpoint_folders(run_dir)][-config.average_checkpoints :]
    folder = run_dir / "averaged"
    if is_whole(folder) and read_json(folder / "meta.json")["averaged_steps"] == steps:
        return folder
    return average_checkpoints(run_dir, config.average_checkpoints)


def load_trained(run_dir: Path, checkpoint: Path | None = None) -> tuple[TrainConfig, torch.nn.Module]:
    """Configuration and model, in eval mode, of RUN/averaged or of the given checkpoint folder."""
    config = load_settings(TrainConfig, run_dir / "config.yaml")
    folder = checkpoint or run_dir / "averaged"
    if not folder.is_dir():
        raise UserError(
            f"{folder} is missing; run workflows/train_wmt.py to the end, or workflows/average_checkpoints.py --out {run_dir}"
        )
    meta = read_json(folder / "meta.json")
    model = build_model(config.model, VocabSizes(meta["num_pieces"], meta["num_labels"]))
    load_weights(model, folder)
    return config, model.eval()


def make_run_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {run_dir}: {error.strerror}; choose another --out") from None


def check_same_run(run_dir: Path, config: TrainConfig, facts: Mapping) -> None:
    """Refuse to continue a run of another configuration or other data, naming what differs."""
    if not checkpoint_folders(run_dir):
        return  # nothing was trained here yet: a setting that was refused may be mended
    old = load_settings(TrainConfig, run_dir / "config.yaml").model_dump(mode="json")
    new = config.model_dump(mode="json")
    changed = [line for name in new if name not in OPERATIONAL for line in differences(old[name], new[name], name)]
    before = read_json(run_dir / "run.json", "restore it, or use another --out").get("data_fingerprint")
    if before != facts["data_fingerprint"]:
        changed.append(f"data fingerprint: {before} -> {facts['data_fingerprint']}")
    if changed:
        raise UserError(
            f"{run_dir} holds a run of other settings ({'; '.join(changed)}); use another --out, or the settings of that run"
        )


@contextmanager
def stop_on_sigterm(stop_file: Path) -> Iterator[None]:
    """SIGTERM makes `stop_file`, which rank 0 looks for at every step. Touching the file by hand does the same."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: stop_file.touch())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        stop_file.unlink(missing_ok=True)
