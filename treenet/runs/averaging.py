"""RUN/averaged/model.safetensors: the mean of the last or best checkpoints of a run, or its moving average of the weights."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from treenet.runs.checkpoint import (
    ANCESTORS,
    AVERAGE,
    AVERAGED,
    FROZEN,
    META,
    WEIGHTS,
    check_frozen,
    checkpoint_folders,
    checkpoint_step,
    find_fault,
    frozen_weights,
    is_checkpoint_name,
    is_complete,
    publish,
    read_meta,
    validation_criterion,
)
from treenet.runs.checkpoint_io import open_weights
from treenet.runs.identity import check_weights
from treeproc.common.errors import check_choice
from treeproc.common.files import LOCK, TEMPORARY_PREFIX
from treeproc.common.settings import UserError

Choice = Literal["last", "best", "ema"]


@dataclass
class Selection:
    """The checkpoints to average, by ascending step, and `asked`, their number in the settings.

    `damaged` and `ignored` have the names of others with the reasons. A damaged checkpoint would be in the average if it were
    complete. An ignored entry only looks like a checkpoint, or a kill interrupted its removal.
    """

    asked: int
    folders: list[Path]
    damaged: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


def average_checkpoints(
    run_dir: Path, choice: Choice, count: int, *, allow_fewer: bool = False, allow_damaged: bool = False
) -> Path:
    """Write RUN/averaged, unless it already holds the same average. Returns that folder.

    `last` and `best` take the mean of `count` checkpoints; `ema` takes the moving average of the latest. The average's meta.json
    lists its checkpoints, the number asked for, and each checkpoint that was left out, with the reason.

    Raises UserError if there is no checkpoint, or if one is of another run. It also does so if there are fewer than asked for,
    unless `allow_fewer`. `allow_damaged` leaves out damaged checkpoints; without it they raise UserError.
    """
    if folders := checkpoint_folders(run_dir):
        check_weights(run_dir, *folders)
    chosen = choose_checkpoints(run_dir, choice, count)
    _check(run_dir, chosen, choice, allow_fewer, allow_damaged)
    file = AVERAGE if choice == "ema" else WEIGHTS
    metas = [read_meta(folder) for folder in chosen.folders]
    meta = {name: value for name, value in metas[-1].items() if name not in ("files", "sha256", ANCESTORS)}
    if any(facts.get(FROZEN) != meta.get(FROZEN) for facts in metas):
        meta.pop(FROZEN, None)
    meta["averaged_steps"] = [checkpoint_step(folder) for folder in chosen.folders]
    meta["averaged_files"] = [{"name": file, **facts["files"][file]} for facts in metas]
    meta |= {"averaged_choice": choice, "averaged_asked": chosen.asked, "averaged_left_out": chosen.damaged | chosen.ignored}
    folder = run_dir / AVERAGED
    if not (is_complete(folder) and meta.items() <= read_meta(folder).items()):
        weights = average_weights((checkpoint / file for checkpoint in chosen.folders), frozen_weights(meta))
        publish(folder, {WEIGHTS: lambda path: save_file(weights, str(path))}, meta)
    return folder


def describe_gaps(meta: dict) -> str:
    """Describe the checkpoints that an average leaves out: ` (2 of the 5 asked for); left out: ...`; empty if it has all."""
    steps, left_out = meta["averaged_steps"], meta.get("averaged_left_out", {})
    asked = meta.get("averaged_asked", len(steps))
    note = f" ({len(steps)} of the {asked} asked for)" if len(steps) < asked else ""
    return note + ("; left out: " + ", ".join(f"{name} ({why})" for name, why in left_out.items()) if left_out else "")


def choose_checkpoints(run_dir: Path, choice: Choice, count: int) -> Selection:
    """Return the last checkpoints, or those with the best validation, or the latest for `ema`. There may be fewer than `count`.

    Raises UserError if there is no such checkpoint.
    """
    check_choice("choice", choice, Choice)
    folders = [folder for folder in checkpoint_folders(run_dir) if (folder / META).is_file()]
    metas = {folder: read_meta(folder) for folder in folders}
    ignored = _find_ignored(run_dir, folders)
    if choice == "last":
        found = _select_complete(count, folders[-count:])
    elif choice == "ema":
        found = Selection(1, [])
        while folders and not found.folders:
            found = _select_complete(1, [folders.pop()], found.damaged)
    else:
        judged = ((folder, validation_criterion(metas[folder])) for folder in folders)
        values = {folder: value for folder, value in judged if value is not None}
        unknown = {folder.name: f"{META} is damaged" for folder in folders if not metas[folder]}
        found = _select_complete(count, sorted(sorted(values, key=values.__getitem__)[:count]), unknown)
    found.ignored = ignored
    if not found.folders and not found.damaged:
        if choice == "best" and folders:
            raise UserError(
                f"{run_dir / 'checkpoints'} has no checkpoint with a finite validation; make checkpoint_every and validate_every "
                "multiples of each other, average the last checkpoints, or lower optimizer.learning_rate and choose another --out"
            )
        command = f"tree-attention train --config {quote(str(run_dir / 'config.yaml'))} --out {quote(str(run_dir))}"
        raise UserError(f"{run_dir / 'checkpoints'} has no complete checkpoint; run {command} first")
    return found


def _select_complete(asked: int, folders: Sequence[Path], damaged: dict[str, str] | None = None) -> Selection:
    """Return the complete checkpoints of `folders`, and the faults of the others together with the known ones."""
    faults = {folder: find_fault(folder) for folder in folders}
    damaged = {**(damaged or {}), **{folder.name: fault for folder, fault in faults.items() if fault}}
    return Selection(asked, [folder for folder in folders if not faults[folder]], damaged)


def _find_ignored(run_dir: Path, folders: Sequence[Path]) -> dict[str, str]:
    """Return the entries of the checkpoint folder that are not checkpoints, with the reason, by name."""
    place = run_dir / "checkpoints"
    others = sorted(set(place.iterdir()) - set(folders)) if place.is_dir() else []
    return {path.name: _why_not(path) for path in others if not path.name.startswith((TEMPORARY_PREFIX, LOCK))}


def _why_not(path: Path) -> str:
    if not path.is_dir():
        return "not a folder"
    return f"{META} is missing" if is_checkpoint_name(path.name) else "not the name of a checkpoint"


def _check(run_dir: Path, chosen: Selection, choice: Choice, allow_fewer: bool, allow_damaged: bool) -> None:
    place, command = run_dir / "checkpoints", f"tree-attention average-checkpoints --out {run_dir}"
    steps = ", ".join(str(checkpoint_step(folder)) for folder in chosen.folders) or "none"
    if chosen.damaged and not (allow_damaged and chosen.folders):
        name, why = next(iter(chosen.damaged.items()))
        check_frozen(place / name)
        number = "true" if choice == "ema" else chosen.asked
        remedy = f"{command} {choice}={number} allow_fewer=true averages the complete ones (steps {steps})"
        if not chosen.folders:
            remedy = "none of these is complete; copy them again, or repeat the training command, which writes them anew"
        raise UserError(f"cannot average {place / name}: {why}; the checkpoints stay as they are; {remedy}")
    if len(chosen.folders) < chosen.asked and not allow_fewer:
        kind = "validated checkpoints" if choice == "best" else "checkpoints"
        raise UserError(
            f"{place} has fewer {kind} than {choice}={chosen.asked}: {len(chosen.folders)} (steps {steps}); give "
            f"{choice}={len(chosen.folders)} or allow_fewer=true"
        )
    file = AVERAGE if choice == "ema" else WEIGHTS
    for folder in chosen.folders:
        if file not in read_meta(folder)["files"]:
            raise UserError(f"{folder} has no moving average; train with ema_decay, for example 0.999, or choose last or best")


def average_weights(paths: Iterable[Path], left_out: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the mean of weight files, summed in float64, without the weights `left_out`.

    Raises UserError if names, shapes or number types differ.
    """
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    first, count = None, 0
    for path in paths:
        with open_weights(path) as found:
            stored = {name: weight for name, weight in found.items() if name not in left_out}
            if first is not None and stored.keys() != sums.keys():
                raise UserError(
                    f"{path} and {first} have weights with different names: {', '.join(sorted(stored.keys() ^ sums.keys())[:5])}"
                )
            for name, weight in stored.items():
                value = weight.read()
                if first is None:
                    sums[name], types[name] = torch.zeros(value.shape, dtype=torch.float64), value.dtype
                _check_alike(path, first, name, "shape", tuple(value.shape), tuple(sums[name].shape))
                _check_alike(path, first, name, "type", value.dtype, types[name])
                sums[name] += value
        first, count = first or path, count + 1
    return {name: (total / count).to(types[name]) for name, total in sums.items()}


def _check_alike(path: Path, first: Path | None, name: str, what: str, value: object, expected: object) -> None:
    if value != expected:
        raise UserError(f"{path}: {name} must have {what} {expected} as in {first}, but has {value}")
