"""What a run folder says of itself: its facts in run.json, and the checkpoint that a command takes.

A checkpoint is `averaged`, `initial`, the number of a step, or the path of a folder.
"""

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

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
from treeproc.common.command_names import advise
from treeproc.common.files import read_json
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, DataPath

FACTS = "run.json"


class InitFacts(TypedDict):
    """The weights of another run that a run started from, and how many parameters took values of them."""

    checkpoint: str
    weights_sha256: str
    vocab_fingerprint: str
    task: str
    model: str
    taken: int
    in_part: int
    new: int


class CorpusFacts(TypedDict):
    """A file of the training split: its examples, their weight, and how many of them an epoch has, copies included."""

    file: str
    examples: int
    weight: float
    in_epoch: int


class RunFacts(TypedDict, total=False):
    """The fields of run.json that readers use. Runs of earlier versions lack some."""

    data_fingerprint: str
    vocab_fingerprint: str
    num_pieces: int
    num_labels: int
    num_pos_tags: int
    num_deprels: int
    num_classes: int
    pairs: bool  # only with classes of pairs
    parameters: int
    frozen: int  # of the parameters; only with `freeze`
    init: InitFacts  # only with `init`
    examples: int
    leaves: int
    nodes: int
    target_tokens: int
    left_out: dict[str, int]
    batches_per_epoch: int
    pretrained: dict  # the settings and the tokenizer of a pretrained encoder
    states: str  # sha256 of the encoder whose states the run reads; only with `frozen_states`
    corpora: list[CorpusFacts]  # only with `batch.corpora`


def read_facts(run_dir: AnyPath, hint: str = "", needed: tuple[str, ...] = ()) -> RunFacts:
    """Read the facts of a run. Raises UserError with `hint` if they cannot be read or lack something `needed`."""
    return read_json(run_dir / FACTS, hint or advise("restore it", "choose another --out"), RunFacts, needed)


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
