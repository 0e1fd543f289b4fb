"""Checkpoints: RUN/checkpoints/step_XXXXXXXX/{model.safetensors,trainer.pt,meta.json}.

A moving average of the weights, if there is one, is in ema.safetensors under the same names. A checkpoint is written to a
temporary folder, synced and renamed. `meta.json` holds the size and hash of the other files, and its own hash. Readers skip a
checkpoint that does not match its hashes. Nothing that is loaded can execute code. A checkpoint has no random state, because
every step makes its own seeds.

If a run has RUN/initial, the weights that `freeze` keeps stand only there. Its checkpoints and its average leave them out. Their
meta.json has the entry `frozen`: the names of these weights, and the hash of the file with them.

Tensors may be in parts, one per rank (DTensor). The code recognises them by their methods. The import of their class takes two
seconds, which most runs can save.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeGuard, overload

from safetensors import SafetensorError

from treenet.config import TrainConfig
from treeproc.common.files import file_sha256, json_bytes, locked_entry, remove_leftovers, sync_folder, temporary_beside
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath

if TYPE_CHECKING:  # commands read the names of checkpoints before they load PyTorch
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> "TypeGuard[DTensor]":
    """Return whether a tensor is in parts."""
    return hasattr(value, "full_tensor")


def complete(tensor: "Tensor") -> "Tensor":
    """Return the complete tensor. All ranks must call this for the same tensors in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_part(tensor: "Tensor") -> "Tensor":
    """Return this rank's part of a tensor, in the same memory. For a tensor that is not in parts, it is the whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def in_parts_like(value: "Tensor", like: "Tensor") -> "Tensor":
    """Cut a complete tensor into parts as `like` is, which has the same shape. Every rank has it, and keeps its part."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def copy_complete(value: "Tensor", into: "Tensor") -> None:
    """Copy a complete tensor into one of the same shape, which may be in parts."""
    import torch

    with torch.no_grad():
        local_part(into).copy_(local_part(in_parts_like(value, into)))


WEIGHTS, AVERAGE, TRAINER, META = "model.safetensors", "ema.safetensors", "trainer.pt", "meta.json"
AVERAGED = "averaged"  # the folder of the trained model in a run: the mean of checkpoints
INITIAL = "initial"  # the folder of the weights before the first update, of a run that starts from other weights than its seed's
ANCESTORS = (
    "ancestors"  # in meta.json: {NAME: sha256 of its weights} of the checkpoints beside it that it continues, its parent last
)
FROZEN = "frozen"  # in meta.json: {"names": [...], "sha256": of RUN/initial/model.safetensors}
FIRST_UPDATE = "first_update"  # in meta.json: the time of the run's first update, UTC

_PREFIX = "step_"


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint at `step`."""
    return f"{_PREFIX}{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a folder of this name holds a checkpoint. Names such as step_9999999x only look similar."""
    digits = name.removeprefix(_PREFIX)
    return digits.isascii() and digits.isdigit() and name == folder_name(int(digits))


@overload
def checkpoint_folders(run_dir: Path) -> list[Path]: ...
@overload
def checkpoint_folders(run_dir: AnyPath) -> Sequence[AnyPath]: ...
def checkpoint_folders(run_dir: AnyPath) -> Sequence[AnyPath]:
    """Return the folders of checkpoints by ascending step, complete or not; in a store those that are complete."""
    folder = run_dir / "checkpoints"
    if isinstance(folder, RemotePath):
        names = (name.parent.name for name in map(PurePosixPath, folder.objects()) if name.name == META)
        return sorted((folder / name for name in names if is_checkpoint_name(name)), key=checkpoint_step)
    found = (path for path in folder.glob(f"{_PREFIX}*") if is_checkpoint_name(path.name) and path.is_dir())
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: PurePath | RemotePath) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def find_fault(folder: Path, needed: Collection[str] = (WEIGHTS,)) -> str | None:
    """Return the fault of a folder that is not a complete checkpoint or average, in a few words; None for a complete one.

    meta.json must match its hash and the step in the folder's name. It must name the files `needed`.
    Every file that it names must exist with its size and hash. So must the file with its frozen weights.
    """
    try:
        return _find_fault(folder, needed) or find_fault_of_frozen(folder)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _find_fault(folder: Path, needed: Collection[str]) -> str | None:
    if not (folder / META).is_file():
        return f"{META} is missing"
    meta = read_meta(folder)
    if not meta:
        return f"{META} is damaged"
    if is_checkpoint_name(folder.name) and meta.get("step", checkpoint_step(folder)) != checkpoint_step(folder):
        return f"its {META} is of step {meta['step']}"
    if FROZEN in meta and not frozen_weights(meta):
        return f"its {META} does not name its frozen weights"
    files = meta.get("files")
    if not isinstance(files, dict) or not files.keys() >= set(needed):
        return f"its {META} does not name {' and '.join(needed)}"
    for name, facts in files.items():
        if not name or name == ".." or Path(name).name != name:
            return f"its {META} names a file of another folder"
        if not (folder / name).is_file():
            return f"{name} is missing"
        if not isinstance(facts, dict) or facts.get("bytes") != (folder / name).stat().st_size:
            return f"{name} has another size than its {META} says"
        if facts.get("sha256") != file_sha256(folder / name):
            return f"{name} is damaged"
    return None


def find_fault_of_frozen(folder: Path) -> str | None:
    """Return the fault of the file with the frozen weights of a checkpoint or an average; None without one."""
    if not (sha256 := frozen_sha256(read_meta(folder))):
        return None
    place = initial_folder(folder)
    fault = _find_fault(place, (WEIGHTS,))
    if fault is None and read_meta(place)["files"][WEIGHTS]["sha256"] != sha256:
        fault = "it has other weights"
    return fault and f"its frozen weights are in {place}: {fault}"


def check_frozen(folder: Path) -> None:
    """Raise UserError if the frozen weights of a checkpoint or an average are missing or damaged."""
    if fault := find_fault_of_frozen(folder):
        raise UserError(
            f"{folder}: {fault}; copy that folder from a copy of the run, or repeat its training command, which writes it"
        )


def frozen_weights(meta: Mapping) -> list[str]:
    """Return the names of the weights that a checkpoint leaves out, because they are frozen."""
    frozen = meta.get(FROZEN)
    names = frozen.get("names") if isinstance(frozen, dict) and isinstance(frozen.get("sha256"), str) else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def frozen_sha256(meta: Mapping) -> str | None:
    """Return the hash of the file with the frozen weights of a checkpoint; None if the checkpoint leaves none out."""
    return meta[FROZEN]["sha256"] if frozen_weights(meta) else None


def lineage(folder: Path) -> dict[str, str]:
    """Return the ancestors of what continues a checkpoint: those of the checkpoint, and itself."""
    meta = read_meta(folder)
    return {**meta.get(ANCESTORS, {}), folder.name: meta["files"][WEIGHTS]["sha256"]}


def initial_folder(folder: Path) -> Path:
    """Return RUN/initial of a checkpoint or an average."""
    return (folder.parent.parent if is_checkpoint_name(folder.name) else folder.parent) / INITIAL


def is_complete(folder: Path) -> bool:
    """Return True if a checkpoint or an average has no fault: see `find_fault`."""
    return find_fault(folder) is None


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the complete checkpoint of the highest step. It prints the skipped ones on standard error."""
    for folder in reversed(checkpoint_folders(run_dir)):
        fault = find_fault(folder, needed=(WEIGHTS, TRAINER))
        if fault is None:
            return folder
        warn(f"warning: {folder} is not complete ({fault}); looking for an earlier checkpoint")
    return None


def remove_checkpoint(folder: Path) -> None:
    """Remove a folder. A kill at any moment leaves nothing that counts as complete."""
    (folder / META).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, write: dict, meta: dict) -> None:
    """Write files with their writers {name: function of path}, then meta.json; sync; and rename to `folder`."""

    def fill(temporary: Path) -> list[str]:
        for name, function in write.items():
            function(temporary / name)
        return list(write)

    publish_folder(folder, fill, meta)


def publish_folder(
    folder: Path,
    fill: Callable[[Path], Sequence[str]],
    meta: dict,
    meta_name: str = META,
    remove: Callable[[Path], None] = remove_checkpoint,
) -> None:
    """Let `fill` write files into a temporary folder, and return their names. Then write their facts, sync and rename.

    The facts are `meta` with the size and hash of every file, in `meta_name`. `remove` removes an earlier folder. Raises
    UserError if the disk refuses.
    """
    temporary = temporary_beside(folder)
    try:
        remove_leftovers(folder.parent, folder.name)
        temporary.mkdir(parents=True)
        with locked_entry(temporary):
            names = fill(temporary)
            files = {
                name: {"bytes": (temporary / name).stat().st_size, "sha256": file_sha256(temporary / name)} for name in names
            }
            (temporary / meta_name).write_bytes(json_bytes(_seal({**meta, "files": files})))
            for name in (*names, meta_name):
                with open(temporary / name, "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(temporary)
            remove(folder)
            os.replace(temporary, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"cannot write {folder}: {error}; free space, then run the same command again") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _seal(meta: dict) -> dict:
    """Return `meta` as JSON has it, with a hash over all of it."""
    content = json.loads(json_bytes(meta))
    return {**content, "sha256": _meta_sha256(content)}


def _meta_sha256(meta: dict) -> str:
    """Return the sha256 of the canonical JSON of `meta` without the hash itself."""
    content = {name: value for name, value in meta.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_meta(folder: AnyPath) -> dict:
    """Read meta.json of a checkpoint or an average; empty if it is missing or damaged."""
    meta = read_object(folder / META)
    return meta if meta.get("sha256") == _meta_sha256(meta) else {}


def describe_choices(config: TrainConfig, meta: Mapping) -> tuple[str, str]:
    """Return the choice of the average with this meta.json, and that of the settings: `last=5` or `ema=true`."""
    now = config.average, config.average_checkpoints
    then = meta.get("averaged_choice", now[0]), meta.get("averaged_asked", now[1])
    before, after = ("ema=true" if choice == "ema" else f"{choice}={count}" for choice, count in (then, now))
    return before, after


def read_object(path: AnyPath) -> dict:
    """Read a JSON object; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Snapshot:
    """A training state in CPU memory. Further steps do not change it."""

    step: int
    weights: "dict[str, Tensor]"
    average: "dict[str, Tensor] | None"  # the moving average of the weights
    trainer: dict  # state of the optimiser, and plain numbers
    meta: dict


def take_snapshot(
    step: int,
    model: "nn.Module",
    optimizer: "torch.optim.Optimizer",
    state: dict,
    meta: dict,
    average: "dict[str, Tensor] | None" = None,
) -> Snapshot:
    """Copy the training state. `state` holds plain numbers; `meta`, for readers, becomes meta.json.

    Shared weights are copied once, and those that `meta` names as frozen are left out.

    If weights are in parts, all ranks must call this.
    """
    trainer = {"optimizer": optimizer.state_dict(), "state": state}
    frozen = frozenset(frozen_weights(meta))

    def copy(named: "dict[str, Tensor]") -> "dict[str, Tensor]":
        return _copy({name: value for name, value in named.items() if name not in frozen})

    averaged = None if average is None else copy(average)
    return Snapshot(step, copy(stored_weights(model)), averaged, _copy(trainer), {"step": step, **meta})


def stored_weights(model: "nn.Module") -> "dict[str, Tensor]":
    """Return the weights that a file of the model has, by name: each shared one once."""
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    return {name: value for name, value in model.state_dict().items() if name not in repeated}


def _copy(value: Any) -> Any:
    """Return `value`, of nested dicts and lists, with all its tensors copied to CPU memory."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return complete(value.detach()).to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def write_checkpoint(run_dir: Path, snapshot: Snapshot, *, keep: int, best: bool = False) -> Path:
    """Write a checkpoint, and remove older ones.

    The last `keep` stay; with `best`, the latest and the `keep` best validated stay.

    A stop may save a checkpoint that is not `due` by its meta. It does not count for `keep`, and the next write removes it. So an
    interrupted run averages the same checkpoints as an undisturbed one. Raises UserError if the disk refuses.
    """
    from safetensors.torch import save_file

    folder = run_dir / "checkpoints" / folder_name(snapshot.step)
    writers = {
        WEIGHTS: lambda path: save_file(snapshot.weights, path, {"format": "pt"}),
        TRAINER: lambda path: _torch_save(snapshot.trainer, path),
    }
    if (average := snapshot.average) is not None:
        writers[AVERAGE] = lambda path: save_file(average, path, {"format": "pt"})
    publish(folder, writers, snapshot.meta)
    folders = checkpoint_folders(run_dir)
    # The run resumed from the latest complete checkpoint, so a later one is damaged. It must not push out a complete one.
    done = [path for path in folders if checkpoint_step(path) <= snapshot.step]
    due = [path for path in done if read_meta(path).get("due", True)]
    kept = {folder, *(sorted(due, key=_criterion)[:keep] if best else due[-keep:])}
    for path in folders:
        if path not in kept:
            remove_checkpoint(path)
    remove_leftovers(folder.parent)
    return folder


def _torch_save(content: Any, path: Path) -> None:
    """Call `torch.save`, and restore the error of the disk, which `torch.save` hides behind another one."""
    import torch

    try:
        with open(path, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise error.__context__ or error from None


def validation_criterion(meta: Mapping) -> float | None:
    """Return the criterion of a checkpoint's validation, lower is better; None if it was not validated.

    It is the nll, unless the task wrote another criterion.
    """
    value = meta.get("valid_criterion", meta.get("valid_nll"))
    return value if isinstance(value, int | float) else None


def _criterion(folder: Path) -> float:
    value = validation_criterion(read_meta(folder))
    return math.inf if value is None else value
