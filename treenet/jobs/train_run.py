"""A training run from configuration to averaged model, in one folder that the same command continues.

A run chooses the settings that depend on the GPU at its start and records them in its folder; later commands keep them.
"""

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from treenet.config import TrainConfig
from treenet.jobs.train_job import COMMAND, check_job, describe_corpora, describe_limits, is_the_worker, train_job
from treenet.layers.backend import best_precision_here
from treenet.loggers.feed import check_loggers, logged_training
from treenet.runs.averaging import average_checkpoints, describe_gaps
from treenet.runs.checkpoint import (
    AVERAGED,
    INITIAL,
    META,
    WEIGHTS,
    checkpoint_folders,
    describe_choices,
    frozen_sha256,
    is_complete,
    read_meta,
)
from treenet.runs.identity import check_metrics, check_weights, identity, list_changes
from treenet.runs.initial_weights import describe_start, keep_recorded_init, split_init, start_from_init
from treenet.runs.metrics_log import CURVES, best_validation, plot_curves, read_metrics
from treenet.runs.mirror import open_run
from treenet.runs.run_folder import RunFacts, read_facts
from treenet.tasks.base import build_task, describe_windows
from treenet.training.ranks import expand_segments
from treeproc.common.errors import CommandEnded, how_to_install, is_installed
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.folder_kinds import RUN, claim_folder, mark_folder
from treeproc.common.messages import format_seconds, tell, warn
from treeproc.common.provenance import recorded
from treeproc.common.settings import (
    Effect,
    UserError,
    differences,
    dump_settings,
    load_settings,
    refuse_relative_in_job,
    settings_with,
)
from treeproc.common.storage import AnyPath
from treeproc.shards.store import read_index


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
    if not is_the_worker(config):
        from treenet.jobs.ray_train import precision_of_workers  # training without Ray must not import it

        return precision_of_workers(config)
    return best_precision_here()


# Exit status of a workflow whose training was stopped and saved: 128 + SIGTERM.
STOPPED_BY_SIGTERM = 143


@dataclass(frozen=True)
class RunSummary:
    """The outcome of `run_training`. `averaged` and `curves` are None if the run was stopped before its end.

    `curves` is also None if matplotlib is not installed.
    """

    run_dir: AnyPath
    step: int
    finished: bool
    averaged: AnyPath | None
    curves: AnyPath | None
    parameters: int
    valid_nll: float | None
    loggers: tuple[str, ...] = ()  # a line each


def run_training(config: TrainConfig, out: AnyPath) -> RunSummary:
    """Train in folder `out`, or continue there. At the end, average checkpoints and draw the learning curves.

    For a finished run it returns at once. After SIGTERM, it saves a checkpoint at the next step and returns. Raises UserError if
    the run folder is of another configuration or other data, or is in use.
    """
    encoder = config.model.pretrained.folder
    others = {"init": config.init, "model.pretrained.folder": encoder, "frozen_states": config.frozen_states}
    refuse_relative_in_job({"data": config.data, **others, "--out": out})
    out = out.resolve()
    claim_folder(out, RUN)
    check_loggers(config, out)
    job = check_job(config.with_pinned_encoder(out))
    config = job.config
    mark_folder(out, RUN)
    with open_run(out) as mirror:
        run_dir = mirror.folder
        config = keep_recorded_init(choose_for_gpu(config, run_dir), run_dir)
        check_same_run(run_dir, config, job.facts, out)
        facts = job.facts | start_from_init(config, job.facts, run_dir)
        atomic_write(run_dir / "config.yaml", dump_settings(config).encode())
        atomic_write(run_dir / "run.json", json_bytes(facts, RunFacts))
        task = build_task(config)
        notes = task.notes(read_index(config.data / "encoded")), describe_windows(config, facts)
        for note in chain(*notes, describe_limits(config, facts, task.examples)):
            warn(f"note: {note}")
        if corpora := describe_corpora(facts, task.examples):
            tell("\n".join(["corpora of train:", *corpora]))
        metrics = mirror.out if config.workers else run_dir
        with (
            logged_training(config, run_dir, out, metrics, facts["data_fingerprint"]) as logged,
            recorded(run_dir, COMMAND) as record,
        ):
            record.session.started_from = facts["init"]["weights_sha256"] if "init" in facts else None
            outcome = train_job(config, run_dir, mirror, record)
            logged.state = "finished" if outcome.finished else "stopped"
        lines = read_metrics(run_dir)
        averaged = curves = None
        if outcome.finished:
            _tell_replaced_average(config, run_dir, out)
            averaged = out / average_checkpoints(run_dir, config.average, config.average_checkpoints, allow_fewer=True).name
            title = f"{config.model.name}, {out.name}"
            if is_installed("matplotlib"):
                curves = out / plot_curves({out.name: lines}, run_dir / CURVES, title, task.score).name
    nlls = [line["nll"] for line in lines if line["event"] == "valid"]
    valid_nll = nlls[-1] if nlls else None
    return RunSummary(
        out, outcome.step, outcome.finished, averaged, curves, job.facts["parameters"], valid_nll, tuple(logged.said)
    )


def _tell_replaced_average(config: TrainConfig, run_dir: Path, out: AnyPath) -> None:
    """Print which average, of another choice than that of the settings, will be replaced, and the command that makes it again."""
    before, after = describe_choices(config, read_meta(run_dir / AVERAGED))
    if before != after:
        again = f"tree-attention average-checkpoints --out {shlex.quote(str(out))} {before}"
        warn(f"note: this replaces the average of {before} by that of {after}; to have it back: {again}")


def run_to_end(config: TrainConfig, out: AnyPath) -> None:
    """Call `run_training` for a command, and print the summary. Raises CommandEnded with status 143 if the run was stopped."""
    summary = run_training(config, out)
    print(describe_run(summary))
    if not summary.finished:
        where = f"with a checkpoint in {summary.run_dir / 'checkpoints'}" if summary.step else "before the first checkpoint"
        raise CommandEnded(STOPPED_BY_SIGTERM, f"stopped {where}; the same command continues")


def describe_run(summary: RunSummary) -> str:
    """Return the summary at the end of a training."""
    run_dir, lines = summary.run_dir, read_metrics(summary.run_dir)
    train = [line for line in lines if line["event"] == "train"]
    config, facts = load_settings(TrainConfig, run_dir / "config.yaml"), read_facts(run_dir)
    task = build_task(config)
    frozen = f" ({facts['frozen']:,} of them frozen)" if "frozen" in facts else ""
    of = f" of {config.max_steps:,}" if summary.step <= config.max_steps else ""
    out = [f"run in {run_dir}: {config.model.name}, {summary.parameters:,} parameters{frozen}, {summary.step:,}{of} updates"]
    if train:
        rate = statistics.median(line["tokens_per_s"] for line in train)
        waited = sum(line["data_wait"] for line in train) / len(train)
        out[0] += f", {train[-1]['epoch'] + 1} epochs begun, in {format_seconds(lines[-1]['elapsed'])}"
        out.append(f"  speed: {rate:,.0f} {task.targets}/s (median), {waited:.1%} of the time waiting for data")
        if skipped := train[-1]["skipped"]:
            out.append(f"  skipped: {skipped:,} updates whose loss or gradient was not finite")
    if not of:
        out.append(f"  max_steps = {config.max_steps:,} changes nothing, because the run already has {summary.step:,} updates")
    if "init" in facts:
        out.append(f"  {describe_start(facts['init'])}")
    if best := best_validation(lines, task.criterion):
        last = [line for line in lines if line["event"] == "valid"][-1]
        out.append(
            f"  validation: {task.describe(last)} at update {last['step']:,}; "
            + ("the best so far" if best["step"] == last["step"] else f"best {task.describe_best(best)} at {best['step']:,}")
        )
        if summary.finished and summary.step < config.max_steps:
            out.append(f"  finished early: {config.patience} validations in a row without a better result")
    if summary.averaged:
        meta = read_json(summary.averaged / META, "run the same command again", needed=("averaged_steps",))
        steps = ", ".join(f"{step:,}" for step in meta["averaged_steps"])
        out.append(f"  model: {summary.averaged / WEIGHTS}, of the checkpoints at {steps}{describe_gaps(meta)}")
        curves = summary.curves or f"not drawn, because {how_to_install('matplotlib')}"
        board = f"; tensorboard --logdir {run_dir / 'tensorboard'}"
        if not is_installed("tensorboard"):
            board = f"; no files for TensorBoard, because {how_to_install('tensorboard')}"
        out.append(f"  curves: {curves}{board if 'tensorboard' in config.loggers else ''}")
        out.append(f"  numbers: {run_dir / 'metrics.jsonl'}")
    out += [f"  {line}" for line in summary.loggers]
    return "\n".join(out)


def _refuse_replacement(run_dir: Path, config: TrainConfig, facts: Mapping, name: AnyPath) -> None:
    """Refuse to begin where the model of another training is, or from the weights of the run itself, which would be lost.

    The same training gives the same model again, but with frozen weights: it begins by removing them.
    """
    if config.init is not None and split_init(config.init)[0].resolve() == name.resolve():
        raise UserError(f"init: {config.init} is of the run itself, which this training would replace; choose another --out")
    if is_complete(run_dir / AVERAGED):
        meta, before = read_meta(run_dir / AVERAGED), load_settings(TrainConfig, run_dir / "config.yaml")
        progress = settings_with(TrainConfig, Effect.PROGRESS)
        own, asked = (one.model_dump(mode="json", include=progress) for one in (before, config))
        own["max_steps"] = max(own["max_steps"], meta["step"])
        changed = list_changes(meta, identity(config, facts)) or differences(own, asked)
        if changed or frozen_sha256(meta):
            what = f"of other settings ({'; '.join(changed)})" if changed else "with frozen weights"
            raise UserError(
                f"{name} has a trained model {what}, without its checkpoints, and this training would replace it; choose another "
                f"--out, or remove {name / AVERAGED}"
            )


def check_same_run(run_dir: Path, config: TrainConfig, facts: Mapping, name: AnyPath) -> None:
    """Refuse to continue a run of another configuration, other data or another pretrained encoder. The message names them.

    The folder of the encoder may move: its weights are in the checkpoints.
    """
    if not checkpoint_folders(run_dir):
        _refuse_replacement(run_dir, config, facts, name)
        return  # no checkpoint yet, so the user may correct a refused setting
    recorded: Mapping = read_facts(run_dir)
    own = identity(config, facts) | {name: recorded[name] for name in (INITIAL,) if name in recorded}
    changed = list_changes(identity(load_settings(TrainConfig, run_dir / "config.yaml"), recorded), own)
    if recorded.get("states") != facts.get("states"):
        changed.append(f"encoder of frozen_states: {recorded.get('states')} -> {facts.get('states')}")
    if changed:
        raise UserError(
            f"{name} holds a run with other settings ({'; '.join(changed)}); choose another --out, or give the old settings"
        )
    check_weights(run_dir, *checkpoint_folders(run_dir), own=own, name=name)
    check_metrics(run_dir, "restore it, or remove it", name)
