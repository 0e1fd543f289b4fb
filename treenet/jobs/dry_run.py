"""The dry run of a training: its sizes, and its memory, disk space and hours, measured in ten updates."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from treenet.config import TrainConfig
from treenet.jobs.train_job import Job, check_job, describe_corpora, train_job
from treenet.runs.initial_weights import start_from_init
from treenet.runs.metrics_log import read_metrics
from treenet.runs.mirror import mirror_of
from treenet.tasks.base import build_task, has_text_pairs
from treeproc.common.messages import format_seconds, tell
from treeproc.common.settings import refuse_relative_in_job
from treeproc.common.storage import AnyPath

_PROBE_STEPS = 10
_NEVER = 10**9


def dry_run(config: TrainConfig, out: AnyPath | None) -> str:
    """Train for ten updates in a temporary folder, with the run's own workers and devices, and report.

    The probe begins with the batch that needs the most memory, as every run does. It ends with one validation and one checkpoint.
    Raises UserError as the run would.
    """
    refuse_relative_in_job({"data": config.data, "init": config.init, "--out": out})
    job = check_job(config.with_pinned_encoder(out))
    done = mirror_of(out).last_step() if out else 0
    # Near --out: on a cluster, all nodes see that place.
    near = next(folder for folder in out.absolute().parents if folder.is_dir()) if isinstance(out, Path) else None
    with tempfile.TemporaryDirectory(prefix=".dry-run-", dir=near) as name:
        probe = _probe(job, Path(name))
    left = max(0, job.config.max_steps - done)
    lines = ["dry run: the command writes nothing to --out", *_sizes(job)]
    if done:
        lines.append(f"  --out holds update {done:,}; {left:,} updates remain")
    return "\n".join([*lines, *_costs(job, probe, left)])


def _sizes(job: Job) -> list[str]:
    """Return sizes of data, model and update, from the plan alone."""
    config, facts = job.config, job.facts
    task = build_task(config)
    batches = facts["batches_per_epoch"]
    left_out = ", ".join(f"{count:,} by {reason}" for reason, count in facts["left_out"].items() if count) or "none"
    per_update = {name: facts[name] / batches for name in ("examples", "target_tokens", "leaves", "nodes")}
    frozen = f", {facts['frozen']:,} of them frozen" if "frozen" in facts else ""
    device = "GPU" if config.use_gpu else "CPU"
    plural = "s" if config.workers > 1 else ""
    where = f"on {config.workers} {device} worker{plural}" if config.workers else f"in this process, on a {device}"
    padded = " (of a pair, twice those of its longer sentence)" if has_text_pairs(config, facts) else ""
    return [
        f"  data: {facts['examples']:,} training {task.examples}; left out: {left_out}",
        *(f"  {line}" for line in describe_corpora(facts, task.examples)),
        f"  model: {config.model.name}, {facts['parameters']:,} parameters{frozen}",
        f"  update: {per_update['target_tokens']:,.0f} {task.targets}, {per_update['leaves']:,.0f} leaves and "
        f"{per_update['nodes']:,.0f} nodes{padded} of "
        f"{per_update['examples']:,.1f} {task.examples} (budget {config.batch.max_tokens:,}), {where}",
        f"  plan: {config.max_steps:,} updates, {config.max_steps / batches:,.1f} epochs of {batches:,}",
    ]


def _probe(job: Job, folder: Path) -> dict:
    """Measure ten updates after one that warms up; fewer if the run has fewer."""
    steps = min(1 + _PROBE_STEPS, job.config.max_steps)
    change = {"max_steps": steps, "log_every": 1, "validate_every": _NEVER, "checkpoint_every": _NEVER, "patience": 0}
    tell(f"dry run: training {steps} updates in a temporary folder, to measure speed and memory")
    start_from_init(job.config, job.facts, folder)
    train_job(job.config.model_copy(update=change), folder)
    lines = read_metrics(folder)
    train = [line for line in lines if line["event"] == "train"]
    valid = [line for line in lines if line["event"] == "valid"]
    timed = train[1:] or train
    return {
        "steps": len(timed),
        "seconds": sum(line["seconds"] for line in timed),
        "padding": sum(line["padding"] for line in timed) / len(timed),
        "data_wait": sum(line["data_wait"] for line in timed) / len(timed),
        "memory_gib": max(line["memory_gib"] for line in train),
        "validation_seconds": valid[-1]["seconds"] if valid else 0.0,
    }


def _costs(job: Job, probe: dict, left: int) -> list[str]:
    """Return speed, memory, disk space and time of the `left` updates."""
    config, facts = job.config, job.facts
    per_update = probe["seconds"] / probe["steps"]
    rate = facts["target_tokens"] / facts["batches_per_epoch"] / per_update / max(1, config.workers)
    training, validating = left * per_update, left // config.validate_every * probe["validation_seconds"]
    of_checkpoint, of_run = disk_of_run(config, facts)
    return [
        f"  probe: {probe['steps']} updates in {probe['seconds']:.1f} s, {rate:,.0f} {build_task(config).targets}/s a device, "
        f"padding {probe['padding']:.1%}, data wait {probe['data_wait']:.1%}; validation {probe['validation_seconds']:.1f} s",
        f"  memory: {show_size(probe['memory_gib'] * 2**30)} at most, "
        f"{'on the GPU' if config.use_gpu else 'in the process'} of a worker",
        f"  disk: {show_size(of_run)} at most, {show_size(of_checkpoint)} a checkpoint",
        f"  training takes about {(training + validating) / 3600:.2f} hours ({format_seconds(training + validating)}), "
        f"{format_seconds(validating)} of them validation",
    ]


def disk_of_run(config: TrainConfig, facts: Mapping) -> tuple[int, int]:
    """Return the bytes of a checkpoint, and the most bytes that the weights in a run folder take: a checkpoint replaces another.

    Weights and the two moments of Adam are float32. `facts` has the numbers of all parameters and of frozen ones.
    """
    trained = facts["parameters"] - facts.get("frozen", 0)
    initial = 4 * facts["parameters"] if config.starts_from_weights else 0
    weights = 4 * (trained if initial else facts["parameters"])  # frozen ones stand in RUN/initial
    checkpoint = (1 + bool(config.ema_decay)) * weights + 8 * trained
    kept = min(config.keep_checkpoints + (config.average == "best"), math.ceil(config.max_steps / config.checkpoint_every))
    return checkpoint, initial + (kept + 1) * checkpoint + weights


def show_size(count: float) -> str:
    """Format bytes for a person."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
