"""The checkpoint that a command takes from a run: `averaged`, `initial`, the number of a step, or the path of a folder."""

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from treenet.runs.checkpoint import (
    AVERAGED,
    INITIAL,
    META,
    WEIGHTS,
    check_frozen,
    checkpoint_folders,
    checkpoint_step,
    is_complete,
)
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, DataPath

# Settings of commands that read a run.
Checkpoint = Annotated[
    str,
    Field(coerce_numbers_to_str=True, description="'averaged', the number of a step, or the path of a checkpoint folder"),
]
OtherData = Annotated[
    DataPath | None, Field(description="another data set of the same vocabulary; unset, the data set of the run")
]


def checkpoint_names(checkpoint: str) -> tuple[str, ...]:
    """Return the folder in a run of `averaged`, `initial` or a step number; nothing for a path, which is elsewhere."""
    if re.fullmatch("[0-9]{1,18}", checkpoint):
        return (f"checkpoints/step_{int(checkpoint):08d}",)
    return (checkpoint,) if checkpoint in (AVERAGED, INITIAL) else ()


def absolute_checkpoint(checkpoint: str) -> str:
    """Return a checkpoint for a process with another working folder: a path becomes absolute."""
    return checkpoint if checkpoint_names(checkpoint) else str(Path(checkpoint).absolute())


def checkpoint_path(run: Path, checkpoint: str) -> Path:
    """Return the folder of `averaged`, of `initial`, of a step number, or of a path to a checkpoint. It need not exist."""
    names = checkpoint_names(checkpoint)
    return run / names[0] if names else Path(checkpoint)


def checkpoint_folder(run: Path, checkpoint: str) -> Path:
    """Return the folder `checkpoint_path`. Raises UserError if it has no complete checkpoint."""
    folder = checkpoint_path(run, checkpoint)
    if is_complete(folder):
        return folder
    check_frozen(folder)
    if (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} is damaged; run workflows/average_checkpoints.py --out {run}, or choose another checkpoint")
    steps = ", ".join(str(checkpoint_step(path)) for path in checkpoint_folders(run)) or "none"
    raise UserError(f"{folder / WEIGHTS} is missing; train to the end, or choose a step as checkpoint (there are: {steps})")


def recorded_sha256(folder: AnyPath) -> str | None:
    """Return the sha256 of the weights in a checkpoint folder, from its meta.json; None if there are no weights."""
    try:
        return json.loads((folder / META).read_bytes())["files"][WEIGHTS]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
