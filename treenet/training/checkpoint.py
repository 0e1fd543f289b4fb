"""Checkpoints: RUN/checkpoints/step_XXXXXXXX/{model.safetensors,trainer.pt,meta.json}, and their average.

A checkpoint is written to a temporary folder, synced and renamed. `meta.json` holds size and hash
of the other files; a checkpoint that does not agree with it is passed over, never loaded. Nothing
that is loaded can execute code. There is no random state inside: every step seeds its own.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn

from treeproc.files import TEMPORARY_PREFIX, file_sha256, json_bytes, read_json, sync_folder
from treeproc.settings import UserError

WEIGHTS, TRAINER, META = "model.safetensors", "trainer.pt", "meta.json"


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
            (folder / name).stat().st_size == facts["bytes"] and file_sha256(folder / name) == facts["sha256"]
            for name, facts in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint of the highest step; says on standard error which ones it passes over."""
    for folder in reversed(checkpoint_folders(run_dir)):
        if is_whole(folder):
            return folder
        print(f"warning: {folder} is not whole; looking for an earlier checkpoint", file=sys.stderr)
    return None


def _publish(folder: Path, write: dict, meta: dict) -> None:
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


def save_checkpoint(
    run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, meta: dict, *, keep: int
) -> Path:
    """Write the checkpoint of `step` and remove all but the last `keep`. `state` holds plain numbers."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    trainer = {"optimizer": optimizer.state_dict(), "state": state}
    writers = {WEIGHTS: lambda path: save_model(model, str(path)), TRAINER: lambda path: torch.save(trainer, path)}
    _publish(folder, writers, {"step": step, **meta})
    folders = checkpoint_folders(run_dir)
    # The run resumed from the latest whole checkpoint, so a later one is damaged: it must not push out a whole one.
    done = [path for path in folders if checkpoint_step(path) <= step]
    for old in done[:-keep] + folders[len(done) :]:
        remove_checkpoint(old)
    for stale in folder.parent.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    return folder


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, data_fingerprint: str) -> dict:
    """Load weights and optimiser in place and return `state`. Raises UserError when the checkpoint is of another run."""
    meta = read_json(folder / META)
    if meta["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"{folder} was trained on data {meta['data_fingerprint']}, this run is on {data_fingerprint}; use another --out"
        )
    load_weights(model, folder)
    device = next(model.parameters()).device
    trainer = torch.load(folder / TRAINER, map_location=device, weights_only=True)
    optimizer.load_state_dict(trainer["optimizer"])
    return trainer["state"]


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load model.safetensors of a checkpoint or of RUN/averaged. Raises UserError when it is missing or does not fit."""
    try:
        load_model(model, folder / WEIGHTS)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


def average_weights(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Mean of weight files, summed in float64. Raises UserError when names or shapes differ."""
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    first, count = None, 0
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if first is not None and names != set(sums):
                raise UserError(f"{path} and {first} hold different weights: {', '.join(sorted(names ^ set(sums))[:5])}")
            for name in names:
                value = file.get_tensor(name)
                if first is None:
                    sums[name], types[name] = torch.zeros(value.shape, dtype=torch.float64), value.dtype
                if value.shape != sums[name].shape:
                    raise UserError(
                        f"{path}: {name} must have shape {tuple(sums[name].shape)} as in {first}, but has {tuple(value.shape)}"
                    )
                sums[name] += value
        first, count = first or path, count + 1
    return {name: (total / count).to(types[name]) for name, total in sums.items()}


def average_checkpoints(run_dir: Path, count: int) -> Path:
    """Average the last `count` whole checkpoints (fewer when there are fewer) into RUN/averaged and return that folder."""
    whole = [folder for folder in reversed(checkpoint_folders(run_dir)) if is_whole(folder)][:count]
    if not whole:
        raise UserError(f"{run_dir / 'checkpoints'} has no whole checkpoint; run workflows/train_wmt.py --out {run_dir} first")
    weights = average_weights(folder / WEIGHTS for folder in whole)
    meta = {name: value for name, value in read_json(whole[0] / META).items() if name != "files"}
    meta["averaged_steps"] = sorted(checkpoint_step(folder) for folder in whole)
    _publish(run_dir / "averaged", {WEIGHTS: lambda path: save_file(weights, str(path))}, meta)
    return run_dir / "averaged"
