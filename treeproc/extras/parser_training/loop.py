"""One training loop for all models of a parser: AdamW, averaged weights, the best on dev. It continues after an interruption.

There is no random state to keep, because every step sets its own seed. So a killed run ends with the weights of an undisturbed
one.
"""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from treeproc.common.errors import UserError
from treeproc.common.files import atomic_output, atomic_write, load_archive, remove_leftovers
from treeproc.common.messages import Progress
from treeproc.common.settings import differences
from treeproc.extras.parser_training.config import FIT_CONSTANTS, FitSettings

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
_SECONDS_BETWEEN_CHECKPOINTS = 60.0
_HINT = "remove its folder and run the same command again: this model is then trained from its start"
_NUMBERS = {"step": int, "epoch": int, "batch": int, "evaluated": int, "seconds": float, "best": dict}
Weights = dict[str, Tensor]


class Learner(Protocol):
    """A model, its data and its loss."""

    model: nn.Module

    def batches(self, epoch: int) -> Sequence[Any]:
        """Return the batches of an epoch, the same at every call."""

    def loss(self, batch: Any) -> Tensor:
        """Return a scalar. The model is in training mode, and torch, numpy and random are seeded."""

    def evaluate(self) -> dict[str, float]:
        """Return scores on dev of the present model; the highest "score" is the best."""
        ...

    def save(self, path: Path) -> None:
        """Write the model to a file that `load_models` reads."""
        ...


def fit(learner: Learner, folder: Path, settings: FitSettings, seed: int) -> dict[str, float]:
    """Train, or continue, in `folder`. At the end, `learner.model` has the best weights. Returns their dev scores.

    The folder holds checkpoint.pt, at most a minute old, and metrics.jsonl: {step, epoch, loss, learning_rate, seconds} and, at
    evaluations, the dev scores. The checkpoint has a checksum of every tensor, which is checked. Raises UserError if it is
    damaged or belongs to other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    run = _Run(learner, folder, settings, seed)
    run.resume()
    run.train()
    learner.model.load_state_dict(run.best_weights)
    learner.model.eval()
    return run.best


def read_fit_metrics(folder: Path) -> list[dict]:
    """Read the lines of metrics.jsonl up to the first incomplete or damaged one; empty without such a file."""
    path = folder / METRICS
    records = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not all(isinstance(record.get(name), int | float) for name in ("step", "epoch")):
            break
        records.append(record)
    return records


class _Run:
    def __init__(self, learner: Learner, folder: Path, settings: FitSettings, seed: int):
        self.learner, self.folder, self.settings, self.seed = learner, folder, settings, seed
        self.parameters = [p for p in learner.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, FIT_CONSTANTS["beta2"]), fused=True)
        self.averaged = [p.detach().clone() for p in self.parameters]
        self.step = self.epoch = self.batch = self.evaluated = 0
        self.seconds = 0.0
        self.best: dict[str, float] = {}
        self.best_weights: Weights = {}

    def resume(self) -> None:
        """Load the checkpoint, if there is one, and drop later metrics."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            (self.folder / METRICS).unlink(missing_ok=True)
            return
        state = load_archive(path, _HINT)
        try:
            self._refuse_others(state["settings"])
            self._take_up(state, path)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(f"{path} is not a checkpoint of this training ({type(error).__name__}: {error}); {_HINT}") from None
        kept = [json.dumps(record) + "\n" for record in read_fit_metrics(self.folder) if record["step"] <= self.step]
        atomic_write(self.folder / METRICS, "".join(kept).encode())

    def _take_up(self, state: dict, path: Path) -> None:
        try:
            self.learner.model.load_state_dict(state["model"])
        except RuntimeError:
            raise UserError(f"{path} is of other data, or of a model with other sizes; choose another --out") from None
        self.optimizer.load_state_dict(state["optimizer"])
        self.averaged, self.best_weights = list(state["averaged"]), dict(state["best_weights"])
        shapes = [p.shape for p in self.parameters]
        if [average.shape for average in self.averaged] != shapes:
            raise ValueError("the averaged weights have other sizes")
        for name, kind in _NUMBERS.items():
            setattr(self, name, kind(state[name]))

    def _settings(self) -> dict:
        return self.settings.model_dump() | FIT_CONSTANTS | {"seed": self.seed}

    def _refuse_others(self, theirs: dict) -> None:
        changed = differences(theirs, self._settings())
        if changed:
            raise UserError(f"{self.folder} holds a training with other settings ({'; '.join(changed)}); choose another --out")

    def train(self) -> None:
        epochs = self.settings.epochs
        if self.epoch == epochs:
            return
        saved, losses = time.monotonic(), []
        with Progress(self.folder.name, None, unit="batches", initial=self.step) as progress:
            while self.epoch < epochs:
                batches = self.learner.batches(self.epoch)
                # Epochs may differ in length, so the last step is an estimate until the last epoch.
                progress.total = self.step - self.batch + len(batches) * (epochs - self.epoch)
                for batch in range(self.batch, len(batches)):
                    rate = self._rate((self.epoch + (batch + 0.5) / len(batches)) / epochs)
                    losses.append(self._update(batches[batch], rate))
                    self.step += 1
                    self.batch = batch + 1
                    if self.batch == len(batches):
                        self.epoch, self.batch = self.epoch + 1, 0
                    done = (self.epoch + self.batch / len(batches)) / epochs
                    record = {"step": self.step, "epoch": round(done * epochs, 3), "learning_rate": rate}
                    due = math.floor(done * self.settings.evaluations + 1e-9)
                    if due > self.evaluated:
                        self.evaluated = due
                        record |= self._evaluate()
                    passed = time.monotonic() - saved
                    if "score" in record or passed >= _SECONDS_BETWEEN_CHECKPOINTS:
                        self.seconds += passed
                        saved = time.monotonic()
                        self._save(record | {"loss": sum(losses) / len(losses), "seconds": round(self.seconds, 1)})
                        losses = []
                    progress.update(1, f"loss {record['loss']:.4f}" if "loss" in record else None)

    def _rate(self, done: float) -> float:
        """Return the learning rate after a share `done` of the training: linear up, then linear down."""
        warmup = self.settings.warmup
        return self.settings.learning_rate * (done / warmup if done < warmup else (1 - done) / (1 - warmup))

    def _update(self, batch: Any, rate: float) -> float:
        np.random.seed((self.seed * 1_000_003 + self.step) % 2**32)
        random.seed(self.seed * 1_000_003 + self.step)
        torch.manual_seed(self.seed * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.learner.model.train()
        self.optimizer.zero_grad()
        loss = self.learner.loss(batch)
        loss.backward()
        if not nn.utils.clip_grad_norm_(self.parameters, FIT_CONSTANTS["grad_norm"]).isfinite():
            raise UserError(
                f"{self.folder.name}: the training diverged: its gradients are not finite at step {self.step + 1}; remove "
                f"{self.folder}, and set a lower {self.folder.name}.fit.learning_rate"
            )
        self.optimizer.step()
        # The first steps count less; otherwise the average would remember the start for a long time.
        decay = min(self.settings.average, (1 + self.step) / (10 + self.step)) if self.settings.average else 0.0
        with torch.no_grad():
            for mean, parameter in zip(self.averaged, self.parameters, strict=True):
                mean.lerp_(parameter, 1 - decay)
        return loss.item()

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the averaged weights, and keep them if they are the best so far."""
        model = self.learner.model
        with torch.no_grad():
            own = [p.clone() for p in self.parameters]
            _copy(self.averaged, self.parameters)
            scores = self.learner.evaluate()
            if not self.best or scores["score"] > self.best["score"]:
                self.best = scores
                self.best_weights = {name: value.clone() for name, value in model.state_dict().items()}
            _copy(own, self.parameters)
        return scores

    def _save(self, record: dict[str, float]) -> None:
        with open(self.folder / METRICS, "a") as file:
            file.write(json.dumps(record) + "\n")
        state = {name: getattr(self, name) for name in (*_NUMBERS, "best_weights", "averaged")} | {
            "settings": self._settings(),
            "model": self.learner.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with atomic_output(self.folder / CHECKPOINT) as file:
            torch.save(state, file)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
