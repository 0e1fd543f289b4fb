"""Loads a checkpoint into a model and its optimiser, and writes checkpoints in a thread. Nothing that is loaded executes.

The weights may be in parts.
"""

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file
from torch import Tensor, nn

from treenet.runs.checkpoint import (
    ANCESTORS,
    AVERAGE,
    TRAINER,
    WEIGHTS,
    Snapshot,
    checkpoint_folders,
    copy_complete,
    frozen_weights,
    in_parts_like,
    initial_folder,
    is_sharded,
    lineage,
    read_meta,
    stored_weights,
    write_checkpoint,
)
from treeproc.common.files import check_archive
from treeproc.common.settings import UserError


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor] | None = None
) -> dict:
    """Load weights, optimiser and moving average in place, and return `state`."""
    load_weights(model, folder)
    device = next(model.parameters()).device
    check_archive(folder / TRAINER, "remove the folder and run the same command again")
    in_parts = any(map(is_sharded, model.parameters()))  # then one device may be too small for the complete state
    trainer = torch.load(folder / TRAINER, map_location="cpu" if in_parts else device, weights_only=True)
    moments = trainer["optimizer"]
    if in_parts:
        _cut_moments(moments["state"], optimizer)
    optimizer.load_state_dict(moments)
    if average is not None:
        with open_weights(folder / AVERAGE) as stored:
            for name, weight in stored.items():
                copy_complete(weight.read(), average[name])
    return trainer["state"]


def _cut_moments(state: dict, optimizer: torch.optim.Optimizer) -> None:
    """Cut the optimiser's state, by the number of a parameter, into parts as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        like = parameters[number]
        state[number] = {name: in_parts_like(v, like) if v.shape == like.shape else v for name, v in values.items()}


@dataclass(frozen=True)
class StoredWeight:
    """A weight in an open file."""

    file: Any
    name: str  # in the file

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


@contextmanager
def open_weights(path: Path) -> Iterator[dict[str, StoredWeight]]:
    """Open a file of weights in the folder of a checkpoint or an average, and return all weights by their names.

    Those that the checkpoint leaves out as frozen come from RUN/initial. Raises OSError or SafetensorError, also from `read`.
    """
    frozen = frozen_weights(read_meta(path.parent))
    with ExitStack() as stack:
        file = stack.enter_context(safe_open(path, "pt"))
        found = {name: StoredWeight(file, name) for name in file.keys()}  # noqa: SIM118
        if frozen:
            file = stack.enter_context(safe_open(initial_folder(path.parent) / WEIGHTS, "pt"))
            found |= {name: StoredWeight(file, name) for name in frozen}
        yield found


def copy_weights(folder: Path, path: Path) -> None:
    """Write all weights of a checkpoint or an average into one file: a copy of its file, or this with the frozen ones."""
    if not frozen_weights(read_meta(folder)):
        shutil.copyfile(folder / WEIGHTS, path)
        return
    with open_weights(folder / WEIGHTS) as stored:
        save_file({name: weight.read() for name, weight in stored.items()}, path, {"format": "pt"})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint or of RUN/averaged. Raises UserError if some are missing or do not fit."""
    own = model.state_dict()
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            for name in own.keys() & file.keys():
                if own[name].is_floating_point() and not (dtype := file.get_slice(name).get_dtype()).startswith(("F", "BF")):
                    raise RuntimeError(f"{name} must have floating-point numbers, but has the type {dtype}")  # copied in silence
        if frozen_weights(read_meta(folder)) or any(map(is_sharded, model.parameters())):
            _load_by_name(model, folder)
        else:
            load_model(model, folder / WEIGHTS)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"cannot load {folder / WEIGHTS}: {' '.join(str(error).split())[:300]}") from None


def _load_by_name(model: nn.Module, folder: Path) -> None:
    """Load weights by their names, also frozen ones, into a model whose weights may be in parts."""
    own = stored_weights(model)
    with open_weights(folder / WEIGHTS) as stored:
        if stored.keys() != own.keys():
            raise RuntimeError(f"its parameters and the model's differ: {', '.join(sorted(stored.keys() ^ own.keys()))}")
        for name, weight in stored.items():
            if weight.shape != tuple(own[name].shape):
                raise RuntimeError(f"{name} has the shape {list(weight.shape)}, but in the model {list(own[name].shape)}")
            copy_complete(weight.read(), own[name])


class CheckpointWriter:
    """Writes snapshots in a thread, one at a time and in order. Training waits only if the writer is one checkpoint behind."""

    def __init__(self, run_dir: Path, *, keep: int, best: bool, ancestors: Mapping[str, str] | None = None):
        self._run_dir, self._keep, self._best = run_dir, keep, best
        self._ancestors = dict(ancestors or {})  # of the next checkpoint
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()

    def write(self, snapshot: Snapshot) -> None:
        """Start to write, unless the write before failed. `failure` has its error."""
        self.wait()
        if self.failure is None:
            self._writing = self._thread.submit(self._write, snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        there = {path.name for path in checkpoint_folders(self._run_dir)}
        meta = {**snapshot.meta, ANCESTORS: {name: sha256 for name, sha256 in self._ancestors.items() if name in there}}
        folder = write_checkpoint(self._run_dir, replace(snapshot, meta=meta), keep=self._keep, best=self._best)
        self._ancestors = lineage(folder)

    def wait(self) -> None:
        """Wait until the started write is on disk or has failed."""
        if self._writing:
            self._writing.exception()

    @property
    def failure(self) -> str | None:
        """Return the error of the last write, once it is known."""
        error = self._writing.exception() if self._writing and self._writing.done() else None
        if error is None:
            return None
        if isinstance(error, UserError):
            return str(error)
        raise error
