"""Results in a run folder: a file translations.NAME.txt and the entry NAME of scores.json for each."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treenet.inference.metrics import check_lines
from treeproc.files import atomic_write, json_bytes, read_json
from treeproc.settings import UserError
from treeproc.shards import fingerprint
from treeproc.storage import inside

SCORES = "scores.json"
PARSE = "unsupervised_parse."  # what the names of parses begin with, which are no translations
_TRANSLATIONS = re.compile(r"translations\.(.+)\.txt")


def translations_path(folder: Path, name: str) -> Path:
    """Raises UserError for a recorded name that leaves the folder."""
    return inside(folder, f"translations.{name}.txt")


def read_scores(folder: Path) -> dict[str, dict]:
    """The entries of scores.json, none where there is no such file yet."""
    path = folder / SCORES
    return read_json(path, "remove it and run the same command again") if path.exists() else {}


def write_result(folder: Path, name: str, lines: Sequence[str], references: Sequence[str], scores: dict) -> dict:
    """Write translations and scores; returns the entry, with hashes of what was scored against what."""
    content = "".join(f"{line}\n" for line in lines).encode()
    scores = scores | {
        "translations_sha256": hashlib.sha256(content).hexdigest(),
        "references_fingerprint": fingerprint(list(references)),
    }
    everything = {**read_scores(folder), name: scores}
    atomic_write(translations_path(folder, name), content)
    atomic_write(folder / SCORES, json_bytes(everything))
    return scores


@dataclass(frozen=True)
class System:
    """Translations of a split, and what scores.json says of them: nothing of a file of another system."""

    name: str
    lines: list[str]
    scores: dict | None = None
    run: Path | None = None

    def check(self, split: str, references: Sequence[str], of: str) -> None:
        """Raises UserError when these are no translations of that split, or of other references; `of` is their name."""
        if self.scores is not None and self.scores["split"] != split:
            raise UserError(f"{self.name} holds translations of {self.scores['split']}, but {split} was asked for")
        if self.scores is not None and self.scores["references_fingerprint"] != fingerprint(list(references)):
            raise UserError(
                f"{self.name} was scored against other references than those of {of}; compare translations of the same lines"
            )
        check_lines(self.lines, references, self.name, of)


def result_in_run(path: Path) -> str | None:
    """NAME of a file RUN/translations.NAME.txt that RUN/scores.json knows; None for any other file."""
    match = _TRANSLATIONS.fullmatch(path.name)
    return match[1] if match and match[1] in read_scores(path.parent) else None


def read_system(run: Path, name: str) -> System:
    """The result `name` of a run folder.

    Raises UserError when it is not there, or its translations are not those that were scored.
    """
    redo = f"run workflows/evaluate.py --out {run} split={name.partition('.')[0]}"
    path, everything = translations_path(run, name), read_scores(run)
    scores = everything.get(name)
    if not path.is_file() or not isinstance(scores, dict):
        raise UserError(f"{run} has no translations of {name} (scored are: {', '.join(everything) or 'none'}); {redo}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != scores.get("translations_sha256"):
        raise UserError(f"{path} is not the file that {SCORES} has the scores of; {redo}")
    return System(str(path), content.decode().split("\n")[:-1], scores, run)
