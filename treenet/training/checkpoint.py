"""Checkpoints: RUN/checkpoints/step_XXXXXXXX/{model.safetensors,trainer.pt,meta.json}.

A moving average of the weights, if there is one, is in ema.safetensors under the same names. A checkpoint is written to a
temporary folder, synced and renamed. `meta.json` holds size and hash of the other files; a checkpoint that does not agree
with it is passed over, never loaded. Nothing that is loaded can execute code. There is no random state inside: every step
seeds its own.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from treeproc.files import TEMPORARY_PREFIX, file_sha256, json_bytes, read_json, sync_folder
from treeproc.settings import UserError
from treeproc.storage import inside
from treeproc.torch_files import check_archive

WEIGHTS, AVERAGE, TRAINER, META = "model.safetensors", "ema.safetensors", "trainer.pt", "meta.json"


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Folders of checkpoints by ascending step, whole or not."""
    return sorted((run_dir / "checkpoints").glob("step_????????"))


def checkpoint_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def is_whole(folder: Path) -> bool:
    """True when every file that meta.json names is there with its size and hash."""
    try:
        files = json.loads((folder / META).read_bytes())["files"]
        return all(
            inside(folder, name).stat().st_size == facts["bytes"] and file_sha256(folder / name) == facts["sha256"]
            for name, facts in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return False


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint of the highest step; says on standard error which ones it passes over."""
    for folder in reversed(checkpoint_folders(run_dir)):
        if is_whole(folder):
            return folder
        print(f"warning: {folder} is not whole; looking for an earlier checkpoint", file=sys.stderr)
    return None


def publish(folder: Path, write: dict, meta: dict) -> None:
    """Write files with their writers {name: function of path}, then meta.json, sync, and rename to `folder`."""
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, function in write.items():
            function(temporary / name)
        files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": file_sha256(temporary / name)} for name in write}
        (temporary / META).write_bytes(json_bytes({**meta, "files": files}))
        for name in (*write, META):
            with open(temporary / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        remove_checkpoint(folder)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error}; free space, then run the same command again") from None


def remove_checkpoint(folder: Path) -> None:
    """Remove a folder so that a kill midway leaves nothing that counts as whole."""
    (folder / META).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Snapshot:
    """A training state in CPU memory, which further steps do not change."""

    step: int
    weights: dict[str, Tensor]
    average: dict[str, Tensor] | None  # the moving average of the weights
    trainer: dict  # state of the optimiser, and plain numbers
    meta: dict


def take_snapshot(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict,
    meta: dict,
    average: dict[str, Tensor] | None = None,
) -> Snapshot:
    """`state` holds plain numbers; `meta`, for readers, becomes meta.json. Weights that share memory are taken once."""
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    weights = {name: value for name, value in model.state_dict().items() if name not in repeated}
    trainer = {"optimizer": optimizer.state_dict(), "state": state}
    return Snapshot(step, _copy(weights), _copy(average), _copy(trainer), {"step": step, **meta})


def _copy(value: Any) -> Any:
    """`value`, of nested dicts and lists, with all its tensors copied to CPU memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def write_checkpoint(run_dir: Path, snapshot: Snapshot, *, keep: int, best: bool = False) -> Path:
    """Write a checkpoint and remove all but the last `keep`; with `best`, all but the latest and the `keep` best validated.

    One that is not `due` by its meta, but saved where a run was stopped, counts for neither and goes with the next: so
    that an interrupted run averages the checkpoints of an undisturbed one. Raises UserError when the disk refuses.
    """
    folder = run_dir / "checkpoints" / f"step_{snapshot.step:08d}"
    writers = {
        WEIGHTS: lambda path: save_file(snapshot.weights, path, {"format": "pt"}),
        TRAINER: lambda path: _torch_save(snapshot.trainer, path),
    }
    if snapshot.average is not None:
        writers[AVERAGE] = lambda path: save_file(snapshot.average, path, {"format": "pt"})
    publish(folder, writers, snapshot.meta)
    folders = checkpoint_folders(run_dir)
    # The run resumed from the latest whole checkpoint, so a later one is damaged: it must not push out a whole one.
    done = [path for path in folders if checkpoint_step(path) <= snapshot.step]
    due = [path for path in done if _read_meta(path).get("due", True)]
    kept = {folder, *(sorted(due, key=_criterion)[:keep] if best else due[-keep:])}
    for path in folders:
        if path not in kept:
            remove_checkpoint(path)
    for stale in folder.parent.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    return folder


def _torch_save(content: Any, path: Path) -> None:
    """`torch.save`, which hides why the disk refuses behind an error of its own."""
    try:
        with open(path, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise error.__context__ or error from None


def read_meta(folder: Path) -> dict:
    """meta.json of a checkpoint; empty where it is missing or damaged."""
    try:
        return dict(json.loads((folder / META).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _read_meta(folder: Path) -> dict:
    """meta.json of a checkpoint, empty when it is damaged."""
    try:
        return json.loads((folder / META).read_bytes())
    except (OSError, ValueError):
        return {}


def validation_criterion(meta: Mapping) -> float | None:
    """What the validation of a checkpoint is judged by, the lower the better; None when it was not validated.

    The nll, unless the task wrote another.
    """
    return meta.get("valid_criterion", meta.get("valid_nll"))


def _criterion(folder: Path) -> float:
    value = validation_criterion(_read_meta(folder))
    return math.inf if value is None else value


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data_fingerprint: str,
    average: dict[str, Tensor] | None = None,
) -> dict:
    """Load weights, optimiser and moving average in place, and return `state`.

    Raises UserError when the checkpoint is of another run.
    """
    meta = read_json(folder / META)
    if meta["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"{folder} was trained on data {meta['data_fingerprint']}, this run is on {data_fingerprint}; use another --out"
        )
    load_weights(model, folder)
    device = next(model.parameters()).device
    check_archive(folder / TRAINER, "remove the folder and run the same command again")
    trainer = torch.load(folder / TRAINER, map_location=device, weights_only=True)
    optimizer.load_state_dict(trainer["optimizer"])
    if average is not None:
        for name, value in load_file(folder / AVERAGE).items():
            average[name].copy_(value)
    return trainer["state"]


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load model.safetensors of a checkpoint or of RUN/averaged. Raises UserError when it is missing or does not fit."""
    try:
        load_model(model, folder / WEIGHTS)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
