"""The training loop, the same with and without Ray: one call is one rank.

The gradient of a step is the sum over all ranks' target tokens divided by the number of target
tokens of the global batch, so the number of ranks changes neither batches nor gradients. Every
step seeds its own dropout from (seed, step, rank): a resumed run repeats an uninterrupted one.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from treenet.batch import TreeBatch
from treenet.config import TrainConfig
from treenet.data import ExampleSource, Prefetcher
from treenet.models import VocabSizes, build_model, model_class
from treenet.plan import BatchPlan, plan_in_order
from treenet.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from treenet.training.logs import MetricLog, describe_metrics
from treenet.training.losses import LossSums, label_smoothed_nll
from treenet.training.optimizer import build_optimizer, learning_rate
from treeproc.progress import Progress
from treeproc.settings import UserError
from treeproc.shards import read_index

MAX_SKIPPED_IN_ROW = 20


class TrainingDiverged(UserError):
    """Raised on all ranks at once when no update was finite for too long: a restart would repeat it."""


@dataclass
class TrainState:
    """What a checkpoint keeps beside weights and optimiser. Sums run since the last metric line."""

    step: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    elapsed: float = 0.0
    loss_sum: float = 0.0
    nll_sum: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class StepBatch:
    """A rank's share of a global batch. `weight` is 0 for a rank without examples, which takes part with a stand-in."""

    batch: TreeBatch
    weight: float
    global_tokens: int


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int
    finished: bool


def train(
    config: TrainConfig,
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[dict], None] = lambda metrics: None,
    show_progress: bool = True,
) -> Outcome:
    """Train to `config.max_steps` from the latest whole checkpoint in `run_dir`.

    With world_size > 1 a process group must be there. `should_stop` is asked at every step, on every
    rank; one yes saves a checkpoint and returns. `report` gets the metrics of every log step, on every rank.
    """
    torch.set_flush_denormal(True)
    return _Run(config, run_dir, rank, world_size, torch.device(device)).train(should_stop, report, show_progress)


class _Run:
    """One rank of a run: model, optimiser, data and state."""

    def __init__(self, config: TrainConfig, run_dir: Path, rank: int, world_size: int, device: torch.device):
        self.config, self.run_dir, self.rank, self.world_size, self.device = config, run_dir, rank, world_size, device
        encoded = config.data / "encoded"
        index = read_index(encoded)
        trees = model_class(config.model).reads_trees
        self.source = ExampleSource(encoded, "train", trees)
        self.plan = BatchPlan.build(
            self.source.lengths, config.batch, text_fingerprint=index["text_fingerprint"], seed=config.seed
        )
        self.valid = ExampleSource(encoded, "valid", trees) if "valid" in index["totals"] else None
        self.meta = {
            "data_fingerprint": index["fingerprint"],
            "num_pieces": index["num_pieces"],
            "num_labels": index["num_labels"],
            "model": config.model.model_dump(mode="json"),
        }
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, VocabSizes(index["num_pieces"], index["num_labels"])).to(device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.state = TrainState()
        if folder := self._resume_folder():
            state = load_checkpoint(folder, self.model, self.optimizer, data_fingerprint=self.meta["data_fingerprint"])
            self.state = TrainState(**state)
        self.replica: nn.Module = self.model
        if world_size > 1:
            self.replica = DistributedDataParallel(self.model, device_ids=[device] if device.type == "cuda" else None)

    def _resume_folder(self) -> Path | None:
        """Rank 0 chooses the checkpoint; the others follow, whatever they see on their disk."""
        chosen = [latest_checkpoint(self.run_dir) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(chosen, src=0, device=self.device)
        return chosen[0]

    def train(self, should_stop: Callable[[], bool], report: Callable[[dict], None], show_progress: bool) -> Outcome:
        config, state = self.config, self.state
        if state.step >= config.max_steps:
            return Outcome(state.step, finished=True)
        self._rehearse()
        leads = self.rank == 0
        stream = Prefetcher(self._stream())
        log = MetricLog(self.run_dir, state.step) if leads else None
        progress = Progress("train", config.max_steps, unit="steps", initial=state.step) if leads and show_progress else None
        with stream, log or nullcontext(), progress or nullcontext():
            self._started = self._logged = time.monotonic()
            saved_step, waited, stop = state.step, 0.0, False
            for item in stream:
                rate, stop = self._step(item, should_stop())
                if progress:
                    progress.update()
                if state.step % config.log_every == 0:
                    metrics = self._log_line(rate, stream.waited - waited)
                    if progress:
                        progress.update(0, postfix=describe_metrics(metrics))
                    waited = stream.waited
                    if log:
                        log.write("train", state.step, **metrics)
                    report({"step": state.step, **metrics})
                paused = time.monotonic()
                last = stop or state.step == config.max_steps
                if self.valid and (state.step % config.validate_every == 0 or state.step == config.max_steps):
                    metrics = self._validate()
                    if log:
                        log.write("valid", state.step, **metrics)
                if last or state.step % config.checkpoint_every == 0:
                    self._save()
                    saved_step = state.step
                self._logged += time.monotonic() - paused  # the rate is of training alone
                if last:
                    break
        return Outcome(saved_step, finished=saved_step >= config.max_steps)

    def _stream(self) -> Iterator[StepBatch]:
        for step in range(self.state.step, self.config.max_steps):
            yield self._share(self.plan.batch(step))

    def _share(self, rows: np.ndarray) -> StepBatch:
        """This rank's examples of a global batch, or a stand-in of weight 0: every rank must take part in the reduction."""
        mine = rows[self.rank :: self.world_size]
        weight = 1.0 if len(mine) else 0.0
        return StepBatch(self.source.batch(mine if len(mine) else rows[:1]), weight, self.source.target_tokens(rows))

    def _loss(self, model: nn.Module, batch: TreeBatch) -> LossSums:
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = model(batch)
        return label_smoothed_nll(logits, batch.tgt_out, self.config.optimizer.label_smoothing)

    def _backward(self, item: StepBatch) -> LossSums:
        """Gradients of the mean over the global batch; returns this rank's sums."""
        sums = self._loss(self.replica, item.batch)
        # DDP averages over ranks: times world_size makes it the sum, over the tokens of all ranks the mean.
        (sums.loss * (item.weight * self.world_size / item.global_tokens)).backward()
        return LossSums(sums.loss.detach() * item.weight, sums.nll * item.weight)

    def _rehearse(self) -> None:
        """Forward and backward of the batch that needs the most memory, without an update.

        Running out of memory shows now and not after hours; and DDP orders its buckets by the first
        backward, so that a resumed run sums gradients in the same order as an uninterrupted one.
        """
        rows = self.plan.hardest_batch()
        try:
            self._backward(self._share(rows))
        except torch.OutOfMemoryError:
            raise UserError(
                f"a batch of {len(rows)} examples does not fit into the memory of {self.device}: lower batch.max_tokens = "
                f"{self.config.batch.max_tokens}, shorten batch.max_leaves, or use more workers"
            ) from None
        self.optimizer.zero_grad()

    def _step(self, item: StepBatch, wants_stop: bool) -> tuple[float, bool]:
        """One update. Returns (learning rate, whether any rank wants to stop)."""
        state = self.state
        rate = learning_rate(self.config.optimizer, state.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(self._step_seed(state.step))
        sums = self._backward(item)
        totals = torch.stack([sums.loss.double(), sums.nll.double(), sums.loss.new_tensor(wants_stop, dtype=torch.float64)])
        if self.world_size > 1:
            dist.all_reduce(totals)
        grad_norm = torch.nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        loss_sum, nll_sum, stop, norm = torch.cat([totals, grad_norm.double().view(1)]).tolist()
        if math.isfinite(loss_sum) and math.isfinite(norm):
            self.optimizer.step()
            state.skipped_in_row = 0
            state.loss_sum += loss_sum
            state.nll_sum += nll_sum
            state.tokens += item.global_tokens
        else:
            state.skipped += 1
            state.skipped_in_row += 1
        self.optimizer.zero_grad()
        state.step += 1
        self._grad_norm = norm if math.isfinite(norm) else None
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
            raise TrainingDiverged(
                f"loss or gradient was not finite in {MAX_SKIPPED_IN_ROW} updates in a row, up to step {state.step}: "
                f"lower optimizer.learning_rate = {self.config.optimizer.learning_rate} or raise optimizer.warmup_steps, "
                "and use another --out"
            )
        return rate, stop > 0

    def _step_seed(self, step: int) -> int:
        words = np.random.SeedSequence([self.config.seed % 2**32, step, self.rank]).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def _log_line(self, rate: float, waited: float) -> dict:
        """Metrics since the last line; starts new sums."""
        state, now = self.state, time.monotonic()
        seconds = max(now - self._logged, 1e-9)
        line = {
            "epoch": self.plan.epoch(state.step - 1),
            "loss": state.loss_sum / state.tokens if state.tokens else None,
            "nll": state.nll_sum / state.tokens if state.tokens else None,
            "lr": rate,
            "grad_norm": self._grad_norm,
            "tokens_per_s": state.tokens / seconds,
            "data_wait": waited / seconds,
            "skipped": state.skipped,
            "elapsed": self._total_elapsed(),
        }
        self._logged = now
        state.loss_sum, state.nll_sum, state.tokens = 0.0, 0.0, 0
        return line

    def _total_elapsed(self) -> float:
        """Seconds of training, those before the resume included."""
        return self.state.elapsed + time.monotonic() - self._started

    @torch.no_grad()
    def _validate(self) -> dict:
        """Loss and negative log-likelihood a target token of the validation split, over all ranks."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        tokens = 0
        self.model.eval()
        for rows in plan_in_order(self.valid.lengths, self.config.batch.max_tokens):
            tokens += self.valid.target_tokens(rows)
            if len(mine := rows[self.rank :: self.world_size]):
                totals += torch.stack(self._loss(self.model, self.valid.batch(mine))).double()
        self.model.train()
        if self.world_size > 1:
            dist.all_reduce(totals)
        loss, nll = (totals / tokens).tolist()
        return {"loss": loss, "nll": nll, "perplexity": math.exp(min(nll, 700.0)), "elapsed": self._total_elapsed()}

    def _save(self) -> None:
        if self.rank == 0:
            state = {**asdict(self.state), "elapsed": self._total_elapsed()}
            meta = {**self.meta, "epoch": self.plan.epoch(self.state.step), "world_size": self.world_size}
            save_checkpoint(
                self.run_dir, self.state.step, self.model, self.optimizer, state, meta, keep=self.config.keep_checkpoints
            )
