"""Files of a workflow that were made completely, so that the same command does not make them again."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treeproc.common.files import atomic_write, file_sha256, json_bytes, read_json
from treeproc.common.settings import UserError
from treeproc.shards.store import fingerprint_of

MADE = "made.json"


class _Step(TypedDict):
    """A finished step: the fingerprint of its inputs, and the SHA-256 of its files by name."""

    inputs: str
    files: dict[str, str]


class MadeFiles:
    """The record FOLDER/made.json of finished steps."""

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / MADE
        self._steps: dict = read_json(self._path, "choose another --out", dict[str, _Step]) if self._path.exists() else {}

    def began(self, step: str) -> bool:
        """Return whether a step was made before, perhaps from other inputs."""
        return step in self._steps

    def has(self, step: str, files: Sequence[Path], *inputs: object) -> bool:
        """Return whether the files of a step are complete and unchanged.

        Raises UserError if they were made from other inputs.
        """
        if step not in self._steps:
            return False
        found = self._steps[step]
        if found["inputs"] != fingerprint_of(*inputs):
            raise UserError(f"{self._folder} holds the step '{step}' of other data or settings; choose another --out")
        return all(path.is_file() and found["files"].get(path.name) == file_sha256(path) for path in files)

    def add(self, step: str, files: Sequence[Path], *inputs: object) -> None:
        """Record the files of a step that is finished."""
        self._steps[step] = _Step(inputs=fingerprint_of(*inputs), files={path.name: file_sha256(path) for path in files})
        atomic_write(self._path, json_bytes(self._steps))
