"""A note beside the text shards that identifies inputs that were read before: `text/inputs.json`.

Files whose paths, sizes and times of change are those of the note are not read again. The note holds a hash of these three. It
also holds the number of examples and the digest of every split.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.hash_cache import SETTLED_NS
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.stages.text import Inputs

NOTE = "inputs.json"


class _Form(TypedDict):
    stamps: str
    counts: dict[str, int]
    digests: dict[str, str]


@dataclass(frozen=True)
class InputCounts:
    """What reading the inputs gives: examples and digest of every split."""

    counts: dict[str, int]
    digests: dict[str, str]


def input_stamp(inputs: Inputs) -> str | None:
    """Hash how the inputs are read, and path, size and time of change of every file; None if one has none of these.

    If a part of an archive or table is read, the whole file counts. Raises UserError if an object store refuses.
    """
    facts: list[object] = [inputs.format, inputs.tokenized]
    if inputs.normalization != "none":  # so that older notes stay valid
        facts.append(inputs.normalization)
    if inputs.format == "labelled":
        facts.append(inputs.labelled.model_dump())
    try:
        for split, files in sorted(inputs.splits.items()):
            facts.append([split, files.hold_out])
            for side in (files.source, files.target):
                facts.append([_stamps(path) for path in side])
    except OSError:
        return None
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _stamps(path: AnyPath) -> list[tuple[str, int, int]]:
    if not isinstance(path, Path):
        return [(str(path), *path.stamp())]
    path = path.absolute()
    return [(str(file), (facts := file.stat()).st_size, facts.st_mtime_ns) for file in _files(path)] + [(str(path), 0, 0)]


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    else:
        yield next((one for one in (path, *path.parents) if one.is_file()), path)


def changed_just_now(inputs: Inputs) -> bool:
    """Return whether an object may change again and keep its time, which most stores round to seconds."""
    paths = {path for files in inputs.splits.values() for side in (files.source, files.target) for path in side}
    return any(path.stamp()[1] >= time.time_ns() - SETTLED_NS for path in paths if not isinstance(path, Path))


def read_cached_counts(folder: AnyPath, stamps: str | None) -> InputCounts | None:
    """Read what was noted in a text folder about inputs of these stamps; None if nothing was."""
    if stamps is None or not (folder / NOTE).exists():
        return None
    try:
        note = read_json(folder / NOTE, form=_Form, needed=_Form.__annotations__)
    except UserError:  # a note that is damaged is none
        return None
    return InputCounts(note["counts"], note["digests"]) if note["stamps"] == stamps else None


def write_cached_counts(folder: AnyPath, stamps: str | None, known: InputCounts) -> None:
    """Write the result of reading. Without stamps, remove a note about other inputs."""
    if stamps is None:
        (folder / NOTE).unlink(missing_ok=True)
    else:
        atomic_write(folder / NOTE, json_bytes({"stamps": stamps, **asdict(known)}))
