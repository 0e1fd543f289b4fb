"""A training job: a configuration that was checked against its data, and its training in this process or on Ray."""

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treenet.config import TrainConfig
from treenet.data.frozen_states import check_states
from treenet.models.pretrained import ENCODER
from treenet.models.registry import only_shapes
from treenet.runs.mirror import STOP_FILE, RunMirror, mirror_of
from treenet.tasks.base import Task, build_task, has_text_pairs
from treenet.training.batch_stream import plan_batches, weighted_files
from treenet.training.optimizer import count_frozen, frozen_names
from treenet.training.trainer import TrainOutcome, finished_outcome, train
from treeproc.common.errors import require
from treeproc.common.messages import phase
from treeproc.common.provenance import STOPPED, Recorder
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import Index, class_names, pieces_fingerprint, read_index

COMMAND = "train"  # in RUN/provenance.json, where a session says from which update to which it came


@dataclass(frozen=True)
class Job:
    """A training that can begin: settings with absolute paths, and what RUN/run.json records of data, plan and model."""

    config: TrainConfig
    facts: dict


def check_job(config: TrainConfig) -> Job:
    """Check the data against the settings, plan the batches and count the parameters. Raises UserError for what does not fit."""
    if config.workers:
        require("ray", f"workers={config.workers}", "give workers=0 to train in this process")
    config = config.with_absolute_paths()
    index, task = read_index(config.data / "encoded"), build_task(config)
    of_model = check_model(config, index, task)
    with phase("hashing the shards"):
        check_hashes(config.data / "encoded", "train", *({"valid"} & set(index["totals"])))
    with phase("reading the index, building the plan"):
        source = task.open("train", training=True)
        plan, corpora = plan_batches(config, source), weighted_files(config, source)
        used = plan.used_sizes()
        weighted = {} if corpora is None else {"corpora": corpora.describe(source.lengths["example_id"][plan.rows])}
    facts = {
        "data_fingerprint": index["fingerprint"],
        "vocab_fingerprint": index["vocab_fingerprint"],
        "pieces_fingerprint": pieces_fingerprint(index),
        "tree_settings": index.get("tree_settings", {}),
        **of_model,
        "examples": int(used.rows.sum()),
        "leaves": int((used.leaves * used.rows).sum()),
        "nodes": int(used.nodes.sum()),
        "target_tokens": source.epoch_targets(plan),
        "left_out": plan.left_out,
        **({"classes": class_names(index)} if "num_classes" in of_model else {}),
        "batches_per_epoch": plan.num_batches,
        **weighted,
    }
    return Job(config, facts)


def check_model(config: TrainConfig, index: Index, task: Task) -> dict[str, Any]:
    """Check the model, its encoder and its states against the data set, and return what RUN/run.json records of them.

    It reads no shards. Raises UserError for what does not fit.
    """
    task.check(index)
    sizes = task.sizes(index)
    states = _check_states(config, task, sizes, index)
    # A driver of Ray or of a GPU has the weights alone, and not for long.
    copies = 1 if config.workers or config.use_gpu else 4
    parameters = task.count_parameters(sizes, copies)
    check_validations(config, config.data, index["totals"])
    return {**sizes, "parameters": parameters, **_check_patterns(config, task, sizes), **states}


def check_validations(config: TrainConfig, data: AnyPath, splits: Collection[str]) -> None:
    """Raise UserError if the settings need validations, and the data set has no split for them."""
    if "valid" not in splits and (config.average == "best" or config.patience):
        what, other = ("average: best", "average=last") if config.average == "best" else ("patience", "patience=0")
        raise UserError(f"{what} needs validations, but {data} has no split valid; add one, or set {other}")


def describe_corpora(facts: Mapping, examples: str) -> list[str]:
    """Return a line for each file of train that has a weight; nothing if the run gives none. `examples` names them."""
    return [
        f"  {one['file']}: {one['examples']:,} {examples}, weight {one['weight']:g}; {one['in_epoch']:,} in an epoch"
        for one in facts.get("corpora", ())
    ]


def describe_limits(config: TrainConfig, facts: Mapping, examples: str) -> list[str]:
    """Return a line about the examples that the limits of length leave out; nothing if there are none. `examples` names them."""
    if not (count := facts["left_out"]["length"]):
        return []
    limits = f"batch.max_leaves = {config.batch.max_leaves}"
    limits += " (of a pair, twice the leaves of its longer sentence)" if has_text_pairs(config, facts) else ""
    limits += f" or batch.max_target_pieces = {config.batch.max_target_pieces}" if config.task == "translation" else ""
    return [f"training leaves out {count:,} {examples} that are empty or longer than {limits}, and uses {facts['examples']:,}"]


def _check_patterns(config: TrainConfig, task: Task, sizes: Mapping) -> dict[str, int]:
    """Check the patterns of parameter names. Returns the number of frozen values for run.json, if some are frozen."""
    if not (config.freeze or config.lr_scale):
        return {}
    with only_shapes():
        frozen = count_frozen(config, task.build_model(sizes))
    return {"frozen": frozen} if config.freeze else {}


def _check_states(config: TrainConfig, task: Task, sizes: Mapping, index: Index) -> dict[str, str]:
    """Check files of states that the run reads. Returns the sha256 of their encoder for run.json, if it reads some.

    Raises UserError if the encoder is not frozen as a whole, or if the states are not those of the data set.
    """
    if (states := config.frozen_states) is None:
        return {}
    if config.model.pretrained.folder is None:
        raise UserError("frozen_states are those of a pretrained encoder, and model.pretrained.folder is null; leave them out")
    with only_shapes():
        model = task.build_model(sizes)
    frozen = frozen_names(config, model)
    if trained := [name for name, _ in model.named_parameters() if name.startswith(ENCODER) and name not in frozen]:
        raise UserError(
            f"frozen_states: the encoder must be frozen, but {trained[0]} is trained; set freeze=[{ENCODER}*], or "
            "leave frozen_states out"
        )
    if config.classifier.word_dropout:
        raise UserError("frozen_states has the states of all words; set classifier.word_dropout=0, or leave frozen_states out")
    with phase("hashing the states"):
        return {"states": check_states(states, index, "train", *({"valid"} & set(index["totals"])))["encoder_sha256"]}


def is_the_worker(config: TrainConfig) -> bool:
    """Return whether this process trains by itself: without Ray, or as the cell of a study that has one worker."""
    if config.workers != 1:
        return not config.workers
    from treenet.jobs.ray_room import is_in_its_room  # training without Ray must not import it

    return is_in_its_room()


def train_job(
    config: TrainConfig, run_dir: Path, mirror: RunMirror | None = None, record: Recorder | None = None
) -> TrainOutcome:
    """Train in a folder that is there and held, in this process or with Ray, until the end or SIGTERM."""
    mirror, record = mirror or mirror_of(run_dir), record or Recorder(run_dir, COMMAND)
    if outcome := finished_outcome(config, run_dir):
        return outcome
    stop_file = run_dir / STOP_FILE
    stop_file.unlink(missing_ok=True)
    mirror.forget_stop()
    with stop_on_sigterm(stop_file), _updates_noted(record, run_dir):
        if not is_the_worker(config):
            from treenet.jobs.ray_train import train_with_ray  # training without Ray must not import it

            outcome = train_with_ray(config, mirror, stop_file, record.session.add_worker)
        elif config.use_gpu and not torch.cuda.is_available():
            raise UserError("use_gpu is true, but PyTorch sees no GPU; set use_gpu=false, or install PyTorch with CUDA")
        else:
            with mirror.watch(stop_file):
                device = "cuda" if config.use_gpu else "cpu"
                outcome = train(build_task(config), run_dir, device=device, should_stop=stop_file.exists)
            if config.workers:  # as train_with_ray does
                mirror.forget_stop()
        if not outcome.finished:
            record.session.outcome = STOPPED
        return outcome


@contextmanager
def _updates_noted(record: Recorder, run_dir: Path) -> Iterator[None]:
    """Note the last checkpoints before and after the training, however it ends."""
    last_step = mirror_of(run_dir).last_step
    record.note(**{"from update": last_step()})
    try:
        yield
    finally:
        record.session.did["to update"] = last_step()


@contextmanager
def stop_on_sigterm(stop_file: Path) -> Iterator[None]:
    """Let SIGTERM make `stop_file`, which rank 0 looks for at every step. Touching the file by hand does the same."""
    try:
        with on_sigterm(stop_file.touch):
            yield
    finally:
        stop_file.unlink(missing_ok=True)


@contextmanager
def on_sigterm(act: Callable[[], object]) -> Iterator[None]:
    """Let SIGTERM call `act` instead of ending this process. Only the main thread can do so; in others, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
