"""The training loop, the same with and without Ray: one call is one rank.

Every step seeds its own dropout, and its batch is a function of its number. So a resumed run repeats an uninterrupted one.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from treenet.config import TrainConfig
from treenet.data.examples import Examples
from treenet.data.plan import plan_in_order
from treenet.layers.backend import keep_freed_memory
from treenet.runs.checkpoint import (
    FIRST_UPDATE,
    FROZEN,
    INITIAL,
    checkpoint_folders,
    checkpoint_step,
    find_fault,
    is_complete,
    latest_checkpoint,
    lineage,
    read_meta,
    take_snapshot,
)
from treenet.runs.checkpoint_io import CheckpointWriter, load_checkpoint, load_weights
from treenet.runs.identity import check_weights
from treenet.runs.metrics_log import MetricLog, describe_metrics
from treenet.runs.run_folder import recorded_sha256
from treenet.tasks.base import Task
from treenet.training.batch_stream import BatchStream, TrainingData
from treenet.training.decoded_validation import DecodedValidation
from treenet.training.micro_batches import MicroBatches, RankBatch
from treenet.training.optimizer import frozen_names
from treenet.training.ranks import Ranks, begin_peak, bound_kernel_cache, deterministic_mode, expand_segments, peak_memory
from treenet.training.state import StepResult, Stopwatch, TrainState, is_finished
from treenet.training.step import TrainStep, Updates
from treeproc.common.messages import Progress, phase
from treeproc.common.provenance import now
from treeproc.common.settings import UserError
from treeproc.shards.store import read_index


@dataclass(frozen=True)
class TrainOutcome:
    """The outcome of a call of `train`: its last step, and whether the training is finished."""

    step: int
    finished: bool


def finished_outcome(config: TrainConfig, run_dir: Path) -> TrainOutcome | None:
    """Return the outcome of a finished run; None if something remains to do, which mostly needs no hashing."""
    for folder in reversed(checkpoint_folders(run_dir)):
        step = checkpoint_step(folder)
        if not is_finished(config, step, read_meta(folder).get("validations_since_best", 0)):
            return None
        if is_complete(folder):
            return TrainOutcome(step, finished=True)
    return None


def train(
    task: Task,
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[dict], None] = lambda metrics: None,
    show_progress: bool = True,
) -> TrainOutcome:
    """Train from the latest complete checkpoint in `run_dir` to `max_steps`, or until validation stops improving.

    With world_size > 1, a process group must exist. Every rank calls `should_stop` at every step. If one answers True, all save a
    checkpoint and return. Every rank calls `report` with the metrics of every log step. Raises TrainingFailed on all ranks.
    """
    torch.set_flush_denormal(True)
    keep_freed_memory()
    bound_kernel_cache()
    device = torch.device(device)
    if device.type == "cuda":
        use_gpu(device)
    begin_peak(device)
    with deterministic_mode(task.config.deterministic):
        with phase("building the plan and the model"):
            trainer = Trainer(task, Ranks(rank, world_size, device))
        with phase("looking for a checkpoint"):
            trainer.resume(run_dir)
        return trainer.train(run_dir, should_stop, report, show_progress)


def use_gpu(device: torch.device) -> None:
    """Set up the allocator, and make a numbered GPU the present one, for NCCL and compiled kernels. `cuda` is the present one."""
    expand_segments()
    if device.index is not None:
        torch.cuda.set_device(device)


class Trainer:
    """One rank of a run: data, model and state."""

    def __init__(self, task: Task, ranks: Ranks):
        self.task, self.config, self.ranks = task, task.config, ranks
        config = task.config
        self.data = TrainingData(task, ranks.rank, ranks.world_size, ranks.device)
        self.plan, self.micro_batches = self.data.plan, self.data.micro_batches
        index = read_index(config.data / "encoded")
        self.valid = self._micro_batches(task.open("valid", device=ranks.device), "valid") if "valid" in index["totals"] else None
        self.decoded = None
        if self.valid and config.valid_metric != "nll":
            self.decoded = DecodedValidation(task, self.valid.source, ranks)
        self.meta = {
            "data_fingerprint": index["fingerprint"],
            "vocab_fingerprint": index["vocab_fingerprint"],
            **task.sizes(index),
            "model": config.model.model_dump(mode="json"),
            "settings": config.lasting(),
        }
        torch.manual_seed(config.seed)
        self.train_step = TrainStep(task.build_model(self.meta), task, ranks)
        self.updates = Updates(self.train_step, self.micro_batches, TrainState())
        self.ancestors: dict[str, str] = {}  # of the next checkpoint

    @property
    def state(self) -> TrainState:
        """The counters of the run, over all updates that are counted."""
        return self.updates.state

    def _micro_batches(self, source: Examples, split: str) -> MicroBatches:
        config, ranks = self.config, self.ranks
        return MicroBatches(source, config.batch, ranks.rank, ranks.world_size, in_step=config.shard_weights, split=split)

    def resume(self, run_dir: Path) -> None:
        """Continue from the latest complete checkpoint, if there is one. All ranks take the one that the leader finds.

        Without a checkpoint, a run with `init` or a pretrained encoder starts from the weights in RUN/initial. Its checkpoints
        leave out the frozen ones of these. The next ones of a continued run have what the first one has.
        """
        check_weights(run_dir, *checkpoint_folders(run_dir), own=self.meta)
        if folder := self.ranks.from_leader(latest_checkpoint(run_dir) if self.ranks.leads else None):
            average = self.train_step.average.weights if self.train_step.average else None
            state = load_checkpoint(folder, self.train_step.model, self.train_step.optimizer, average=average)
            self.updates.state = TrainState(**state)
            kept = (FROZEN, INITIAL, FIRST_UPDATE)
            self.meta |= {name: value for name, value in read_meta(folder).items() if name in kept}
            self.ancestors = lineage(folder)
            if self.train_step.loss_scale and self.state.loss_scale:
                self.train_step.loss_scale.load(self.state.loss_scale)
        elif self.config.starts_from_weights:
            self._start_from(run_dir)

    def _start_from(self, run_dir: Path) -> None:
        """Load the initial weights of a run with `init`, which the job has written. Raises UserError if they are damaged."""
        folder = run_dir / INITIAL
        if fault := find_fault(folder):
            raise UserError(f"{folder} is damaged ({fault}); run the training command again, which writes it")
        check_weights(run_dir, folder, own=self.meta)
        load_weights(self.train_step.model, folder)
        self.meta[INITIAL] = recorded_sha256(folder)
        if frozen := frozen_names(self.config, self.train_step.model):
            self.meta[FROZEN] = {"names": sorted(frozen), "sha256": recorded_sha256(folder)}
        if self.train_step.average:
            self.train_step.average.restart()

    def check_memory(self) -> None:
        """Compute the batch that needs the most memory, forward and backward, without an update.

        The optimiser's state is already in memory. So a lack of memory shows now, and not after hours. A compiled model also
        computes a rank's batch of one example. That batch has a different graph, so both graphs compile now. Raises
        TrainingFailed on all ranks.
        """
        failure, hardest = None, self.plan.hardest_batch()
        tried = [hardest, hardest[: self.ranks.world_size]] if self.config.compile else [hardest]
        try:
            self.train_step.allocate_state()
            for rows in tried:
                self.train_step.compute_gradient(self.micro_batches.rank_batch(rows), self.micro_batches, 0)
        except UserError as error:
            failure = str(error)
        except torch.OutOfMemoryError:
            if self.train_step.is_sharded:  # the other ranks wait for this one, not for its message
                raise
            failure = (
                "the model with its gradients and optimiser does not fit into the memory of a worker; choose a smaller model"
            )
        self.ranks.fail_together(failure)

    def rank_batches(self) -> Iterator[RankBatch]:
        """Return this rank's batch of every update, from the present step on."""
        return self.data.rank_batches(self._updates())

    def _updates(self) -> range:
        return range(self.state.step, self.config.max_steps)

    def step(
        self, rank_batch: RankBatch, *, waited: float = 0.0, wants_stop: bool = False, failure: str | None = None
    ) -> StepResult | None:
        """Make one update. Returns the result of the update that was last counted in `state`; on a CPU, that is this one."""
        return self.updates.start(rank_batch, waited=waited, wants_stop=wants_stop, failure=failure)

    def settle(self) -> StepResult | None:
        """Wait until all updates are counted. Returns the result of the last one."""
        return self.updates.settle()

    def train(
        self, run_dir: Path, should_stop: Callable[[], bool], report: Callable[[dict], None], show_progress: bool
    ) -> TrainOutcome:
        """See the function `train`."""
        if is_finished(self.config, self.state.step, self.state.validations_since_best):
            return TrainOutcome(self.state.step, finished=True)
        with BatchStream(self.task, self.ranks, self.data, self._updates()) as stream:  # starts while the largest batch is tried
            with phase("compiling, trying the largest batch" if self.config.compile else "trying the largest batch"):
                self.check_memory()
            return self._train_on(stream, run_dir, should_stop, report, show_progress)

    def _train_on(
        self,
        stream: BatchStream,
        run_dir: Path,
        should_stop: Callable[[], bool],
        report: Callable[[dict], None],
        show_progress: bool,
    ) -> TrainOutcome:
        """Run `train` on the batches from the present step on."""
        config, state, leads = self.config, self.state, self.ranks.leads
        if state.step == 0:
            self.meta[FIRST_UPDATE] = now()
        log = MetricLog(run_dir, state.step, board="tensorboard" in config.loggers) if leads else None
        keep, best = config.keep_checkpoints, config.average == "best"
        writer = CheckpointWriter(run_dir, keep=keep, best=best, ancestors=self.ancestors) if leads else None
        progress = Progress("train", config.max_steps, unit="steps", initial=state.step) if leads and show_progress else None
        with log or nullcontext(), writer or nullcontext(), progress or nullcontext():
            watch, waited = Stopwatch(), 0.0
            for rank_batch in stream:
                result = self.step(
                    rank_batch,
                    waited=stream.waited - waited,
                    wants_stop=should_stop(),
                    failure=writer.failure if writer else None,
                )
                if self.updates.wants_stop or self._is_due(state.step):
                    result = self.settle()
                waited = stream.waited
                state.count_seconds(watch.lap())
                if progress:
                    progress.update()
                if result and state.step % config.log_every == 0:
                    line = self._metrics(result)
                    if progress:
                        progress.update(0, postfix=describe_metrics(line))
                    if log:
                        log.write("train", state.step, **line)
                    report({"step": state.step, **line})
                metrics = None
                if self.valid and (state.step % config.validate_every == 0 or state.step == config.max_steps):
                    with phase("validating"):
                        metrics = self.validate()
                    if self.task.is_judged(metrics):
                        state.count_validation(self.task.criterion(metrics))
                    if log:
                        log.write("valid", state.step, **metrics)
                finished = is_finished(config, state.step, state.validations_since_best)
                state.elapsed += watch.lap()  # excluded from the seconds of the rates
                due = finished or state.step % config.checkpoint_every == 0
                if due or self.updates.wants_stop:
                    with phase("saving a checkpoint"):
                        self._save(writer, metrics, due)
                if finished or self.updates.wants_stop:
                    break
            if writer:
                with phase("saving a checkpoint"):
                    writer.wait()
            self.ranks.fail_together(writer.failure if writer else None)
        return TrainOutcome(state.step, finished)

    def _is_due(self, step: int) -> bool:
        """Return whether all updates must be counted after this one: for a metric line, a validation, a checkpoint or the end."""
        config = self.config
        every = (config.log_every, config.validate_every, config.checkpoint_every)
        return step == config.max_steps or any(step % number == 0 for number in every)

    def _metrics(self, result: StepResult) -> dict[str, float | None]:
        """Return the metric line of a log step."""
        return {
            "epoch": self.plan.epoch(self.state.step - 1),
            "lr": result.learning_rate,
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            **self.state.take_metrics(self.ranks.world_size, self.task.auxiliary_loss),
            "memory_gib": peak_memory(self.ranks.device) / 2**30,
            "elapsed": self.state.elapsed,
        }

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return loss and negative log-likelihood per target of the validation split, and the task's metrics, over all ranks.

        It uses the moving average of the weights, if there is one.
        """
        assert self.valid is not None  # the data set has this split
        started = time.monotonic()
        totals = torch.zeros(self.task.num_sums, dtype=torch.float64, device=self.ranks.device)
        tokens, failure = 0, None
        average, model = self.train_step.average, self.train_step.model
        model.eval()
        with average.in_place() if average else nullcontext():
            for rows in plan_in_order(self.valid.source.lengths, self.config.batch.max_tokens):
                rank_batch = self.valid.rank_batch(rows)
                tokens += rank_batch.global_tokens
                try:
                    totals += self.valid.add_up(rank_batch, self.train_step.validate)
                except UserError as error:
                    failure = str(error)
                    break
        model.train()
        self.train_step.finish_passes()
        self.ranks.fail_together(failure)
        metrics = self.task.metrics(self.ranks.sum(totals), tokens)
        if self.decoded and self.decoded.is_due(self.state.step):
            metrics[self.task.score] = self.decoded.score(self.train_step)
        seconds = time.monotonic() - started
        return {**metrics, "seconds": seconds, "elapsed": self.state.elapsed + seconds}

    def _save(self, writer: CheckpointWriter | None, valid: dict[str, float] | None, due: bool) -> None:
        """Write a checkpoint if there is a `writer`. If weights are in parts, the other ranks send theirs."""
        state, train_step = self.state, self.train_step
        if writer is None and not train_step.is_sharded:
            return
        meta = {
            **self.meta,
            "epoch": self.plan.epoch(state.step),
            "world_size": self.ranks.world_size,
            "due": due,
            "valid_nll": valid["nll"] if valid and math.isfinite(valid["nll"]) else None,
            **self.task.checkpoint_facts(valid),
            "validations_since_best": state.validations_since_best,
        }
        average = train_step.average.weights if train_step.average else None
        if train_step.loss_scale:
            state.loss_scale = train_step.loss_scale.state()
        snapshot = take_snapshot(state.step, train_step.model, train_step.optimizer, asdict(state), meta, average)
        if writer:
            writer.write(snapshot)
