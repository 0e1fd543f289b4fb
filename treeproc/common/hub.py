"""Pretrained models by their names on the hub of Hugging Face: `google-bert/bert-base-uncased`, or with `@REVISION` behind it.

The files stand in the cache that all programs of Hugging Face share. What is missing there is fetched, but only what a command
reads: settings, tokenizer and weights in safetensors. Nothing of it is executed. Records have the name and the commit hash of the
revision, so every later command reads the same files, also after the branch has moved.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from treeproc.common.errors import UserError, first_line, one_line, require
from treeproc.common.messages import is_quiet, phase
from treeproc.common.setting_facts import value_at
from treeproc.common.storage import AnyPath, as_path, validate_path
from treeproc.common.yaml_reader import read_yaml

_PART = r"[A-Za-z0-9_](?:[\w-]|\.(?!\.)){0,95}"
_NAME = re.compile(rf"((?:{_PART}/)?{_PART})(?:@([A-Za-z0-9_][\w./-]*))?", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{40}")

CONFIG = "config.json"
# Patterns of files.
PIECES = (CONFIG, "tokenizer.json")
TOKENIZER = (CONFIG, "*token*.json", "vocab.*", "merges.*", "*.model")  # of any tokenizer of transformers
_WEIGHTS = "model*.safetensors*"  # in one file, or in several with an index
_IN_ONE_FILE = "model.safetensors"


@dataclass(frozen=True)
class HubModel:
    """A model of the hub. Settings have it in the place of a folder, so it has what they need of a path."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit hash."""
        return self.revision is not None and _HASH.fullmatch(self.revision) is not None

    def is_absolute(self) -> bool:
        return True

    def absolute(self) -> "HubModel":
        return self

    def resolve(self) -> "HubModel":
        return self


def model_place(value: str, here: Path | None = None) -> AnyPath | HubModel:
    """Return the place of a pretrained model: a path that exists, seen from `here`, else a name of the hub, else a path."""
    match = _NAME.fullmatch(value)
    return HubModel(match[1], match[2]) if match and not Path(here or "", value).exists() else as_path(value)


def _validate(value: object) -> AnyPath | HubModel:
    if isinstance(value, HubModel):
        return value
    path = validate_path(value)
    return model_place(value) if isinstance(value, str) else path


# The type of a setting that takes the folder or the name of a pretrained model.
ModelPlace = Annotated[AnyPath | HubModel, PlainValidator(_validate), PlainSerializer(str, return_type=str, when_used="json")]


def name_elsewhere(place: str) -> str:
    """Return what means something on other machines: the last name of a path, and a name of the hub with its hash as it is."""
    return place if _pinned(place) else PurePosixPath(place).name


def are_other_models(place: object, other: object) -> bool:
    """Return whether two recorded places are names of the hub for different models or commits. The places of folders can move."""
    return place != other and None not in (_pinned(place), _pinned(other))


def _pinned(place: object) -> HubModel | None:
    match = _NAME.fullmatch(place) if isinstance(place, str) else None
    model = HubModel(match[1], match[2]) if match else None
    return model if model is not None and model.is_pinned else None


def pin(setting: str, place: AnyPath | HubModel, *records: tuple[AnyPath, str]) -> AnyPath | HubModel:
    """Return a model of the hub with its commit hash as the revision, and a path as it is.

    A name without a revision has the hash that a record has for this name: the setting of a dotted name in the config.yaml of a
    folder. Without such a record, the hub says the hash, or the cache if there is no network. Raises UserError as `local_folder`.
    """
    if not isinstance(place, HubModel) or place.is_pinned:
        return place
    for folder, key in records if place.revision is None else ():
        if (recorded := _pinned(_recorded(folder, key))) is not None and recorded.name == place.name:
            return recorded
    return HubModel(place.name, _snapshot(setting, place, [CONFIG]).name)


def _recorded(folder: AnyPath, key: str) -> object:
    """Return a setting in the config.yaml of a folder; None if there is none."""
    path = folder / "config.yaml"
    try:
        return value_at(read_yaml(path.read_text(encoding="utf-8"), str(path)), key)
    except (OSError, UnicodeDecodeError):
        return None


def local_folder(setting: str, place: AnyPath | HubModel, files: Sequence[str] = PIECES, *, weights: bool = False) -> AnyPath:
    """Return the folder of a model. Of one of the hub, fetch what the cache lacks of these `files`, and of its weights.

    Raises UserError if the model has no such files, or if they cannot be fetched.
    """
    if not isinstance(place, HubModel):
        return place
    return _snapshot(setting, place, [*files, *([_WEIGHTS] if weights else [])])


def _snapshot(setting: str, model: HubModel, patterns: Sequence[str]) -> Path:
    """Return the folder of a commit in the cache, with all files of the model that fit the patterns."""
    require("huggingface_hub", f"{setting}={model}")
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if model.is_pinned:  # else the hub knows which commit is the newest
        files = [_IN_ONE_FILE if pattern == _WEIGHTS else pattern for pattern in patterns]
        cached = [try_to_load_from_cache(model.name, file, revision=model.revision) for file in files]
        if all(isinstance(path, str) for path in cached):
            return Path(cached[0]).parent
    try:
        with phase(f"fetching {model}"), _few_messages():
            folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(patterns)))
    except Exception as error:  # of the package, of its HTTP client, or of the disk
        raise UserError(f"{setting}: {_why_not(model, patterns, error)}") from None
    for pattern, name in {_WEIGHTS: _IN_ONE_FILE, **{name: name for name in patterns if "*" not in name}}.items():
        if pattern in patterns and not any(folder.glob(pattern)):
            raise UserError(
                f"{setting}: {model} has no {name}; choose an encoder with {', '.join(PIECES)} and weights in safetensors, or if "
                f"only the cache lacks it: {_command(model, patterns)}"
            )
    return folder


@contextmanager
def _few_messages() -> Iterator[None]:
    """Leave out the client's messages about repeated requests, and its progress where no person follows it."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    hides = (is_quiet() or not sys.stderr.isatty()) and not are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if hides:
            enable_progress_bars()


def _command(model: HubModel, patterns: Sequence[str]) -> str:
    """Return the command that fetches these files, and all that a pretrained encoder has."""
    revision = [] if model.revision is None else ["--revision", model.revision]
    return shlex.join(["hf", "download", model.name, *revision, *dict.fromkeys([*PIECES, *patterns, _WEIGHTS])])


def _why_not(model: HubModel, patterns: Sequence[str], error: Exception) -> str:
    """Return why a model was not fetched, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    cause: BaseException = error
    while isinstance(cause, LocalEntryNotFoundError) and cause.__cause__ is not None:  # what kept the client from asking
        cause = cause.__cause__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if isinstance(cause, GatedRepoError):
        return f"{hub} gives {model} only to users who accepted its terms; accept them at {hub}/{model.name}, then hf auth login"
    if isinstance(cause, RevisionNotFoundError):
        return f"{model.name} has no revision {model.revision} on {hub}; give a branch, a tag or a commit hash"
    if isinstance(cause, RepositoryNotFoundError) or status in (401, 403, 404):
        return (
            f"{model.name} is not a folder here, and {hub} shows no model of this name ({status}); correct it, or log in with "
            "hf auth login if the model is private"
        )
    if isinstance(error, LocalEntryNotFoundError):
        why = f"{hub} cannot be reached ({one_line(first_line(cause), 80)})" if status is None else f"{hub} answers {status}"
        why = "HF_HUB_OFFLINE is set" if isinstance(cause, OfflineModeIsEnabled) else why
        return (
            f"{model} is not a folder here, the cache {cache} lacks it or a part of it, and {why}; where there is a network: "
            f"{_command(model, patterns)}"
        )
    if isinstance(error, OSError) and error.errno:
        return f"cannot write {model} to {cache}: {error.strerror}; free space, or set HF_HOME to another folder"
    return f"cannot fetch {model} from {hub}: {one_line(first_line(error), 160)}; repeat the same command"
