"""RUN/averaged/model.safetensors: the mean of a run's last or best checkpoints, or its moving average of the weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treenet.training.checkpoint import (
    AVERAGE,
    META,
    WEIGHTS,
    checkpoint_folders,
    checkpoint_step,
    is_whole,
    publish,
    validation_criterion,
)
from treenet.training.tasks import workflow_of
from treeproc.files import read_json
from treeproc.settings import UserError

AVERAGED = "averaged"
Choice = Literal["last", "best", "ema"]
# What checkpoints must have in common: pieces and labels are rows of tables, and row 17 must mean the same in all of them.
_IDENTITY = ("model", "num_pieces", "num_labels", "data_fingerprint")


def average_checkpoints(run_dir: Path, choice: Choice, count: int) -> Path:
    """Write RUN/averaged, and return that folder, unless it holds the very same average already.

    `last` and `best` take the mean of `count` checkpoints that are whole, fewer where there are fewer; `ema` takes the
    moving average of the latest. Raises UserError when there is none, or when they are of different models or data.
    """
    chosen = choose_checkpoints(run_dir, choice, count)
    file = AVERAGE if choice == "ema" else WEIGHTS
    metas = [read_json(folder / META) for folder in chosen]
    _check_identity(chosen, metas)
    meta = {name: value for name, value in metas[-1].items() if name != "files"}
    meta["averaged_steps"] = [checkpoint_step(folder) for folder in chosen]
    meta["averaged_files"] = [{"name": file, **facts["files"][file]} for facts in metas]
    folder = run_dir / AVERAGED
    if not (is_whole(folder) and meta.items() <= read_json(folder / META).items()):
        weights = average_weights(checkpoint / file for checkpoint in chosen)
        publish(folder, {WEIGHTS: lambda path: save_file(weights, str(path))}, meta)
    return folder


def choose_checkpoints(run_dir: Path, choice: Choice, count: int) -> list[Path]:
    """Folders of whole checkpoints by ascending step: the last ones, or those with the best validation; one for `ema`.

    Raises UserError when there is none of the kind.
    """
    whole = [folder for folder in checkpoint_folders(run_dir) if is_whole(folder)]
    if not whole:
        raise UserError(f"{run_dir / 'checkpoints'} has no whole checkpoint; run {workflow_of(run_dir)} --out {run_dir} first")
    if choice == "last":
        return whole[-count:]
    if choice == "ema":
        if AVERAGE not in read_json(whole[-1] / META)["files"]:
            raise UserError(f"{whole[-1]} has no moving average; train with ema_decay, for example 0.999, or choose last or best")
        return whole[-1:]
    values = {folder: validation_criterion(read_json(folder / META)) for folder in whole}
    validated = [folder for folder in whole if values[folder] is not None]
    if not validated:
        raise UserError(
            f"{run_dir / 'checkpoints'} has no checkpoint of an update that was validated; make checkpoint_every and "
            "validate_every multiples of each other, or average the last ones"
        )
    return sorted(sorted(validated, key=values.get)[:count])


def _check_identity(folders: Sequence[Path], metas: Sequence[dict]) -> None:
    for folder, meta in zip(folders[1:], metas[1:], strict=True):
        differ = [name for name in _IDENTITY if meta.get(name) != metas[0].get(name)]
        if differ:
            raise UserError(f"{folder} and {folders[0]} differ in {', '.join(differ)}, and have no average; remove one of them")


def average_weights(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Mean of weight files, summed in float64. Raises UserError when names, shapes or number types differ."""
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
                _check_alike(path, first, name, "shape", tuple(value.shape), tuple(sums[name].shape))
                _check_alike(path, first, name, "type", value.dtype, types[name])
                sums[name] += value
        first, count = first or path, count + 1
    return {name: (total / count).to(types[name]) for name, total in sums.items()}


def _check_alike(path: Path, first: Path | None, name: str, what: str, value: object, expected: object) -> None:
    if value != expected:
        raise UserError(f"{path}: {name} must have {what} {expected} as in {first}, but has {value}")
