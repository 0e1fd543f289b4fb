"""Finished parts of an output, on disk until the output is complete. After a kill, the same command continues after them."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from treenet.runs.checkpoint import META
from treenet.runs.chosen_checkpoint import checkpoint_path
from treenet.translation.line_translator import Translated, local_runs
from treenet.translation.translate_settings import LineSettings
from treeproc.common.files import atomic_write, json_bytes, read_json, remove_leftovers
from treeproc.common.settings import Effect, UserError, excluded
from treeproc.common.storage import AnyPath


class PartStore:
    """Results in OUTPUT.parts, one file for each part.

    A file counts only if lines, settings and checkpoints are the same as before.
    """

    def __init__(self, settings: LineSettings, runs: Sequence[AnyPath]):
        self._folder = settings.output.parent / f"{settings.output.name}.parts"
        self._made_of = [settings.model_dump_json(exclude=excluded(type(settings), Effect.NONE))]
        for run in local_runs(settings, runs):
            files = [run / "config.yaml", *(checkpoint_path(run, checkpoint) / META for checkpoint in settings.checkpoints)]
            self._made_of += [path.read_bytes().decode(errors="replace") if path.is_file() else "" for path in files]

    def find(self, lines: Sequence, first: int) -> Translated | None:
        """Return the stored translation of these lines, or None. The first line has the 0-based number `first`."""
        path = self._path(first)
        try:
            stored = read_json(path) if path.is_file() else {}
            if stored.pop("key", None) != self._key(lines, first):
                return None
            messages = {name: [(number, message) for number, message in stored.pop(name)] for name in ("problems", "notes")}
            return Translated(**stored, **messages)
        except (UserError, KeyError, TypeError, ValueError):  # damaged, so it is translated again
            return None

    def keep(self, lines: Sequence, first: int, result: Translated) -> None:
        """Store a part. Raises UserError if the disk or the store refuses."""
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self._folder}: {error.strerror}; choose another output") from None
        atomic_write(self._path(first), json_bytes({"key": self._key(lines, first), **asdict(result)}))

    def remove(self) -> None:
        """Remove the parts, because the output is complete. What others put beside them stays."""
        for path in self._folder.glob("*.json"):
            if path.name.removesuffix(".json").isdecimal():
                path.unlink(missing_ok=True)
        if isinstance(self._folder, Path):
            remove_leftovers(self._folder)
            with suppress(OSError):
                self._folder.rmdir()

    def _path(self, first: int) -> AnyPath:
        return self._folder / f"{first + 1}.json"

    def _key(self, lines: Sequence, first: int) -> str:
        return hashlib.sha256(repr((self._made_of, first, list(lines))).encode()).hexdigest()
