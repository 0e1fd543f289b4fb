"""Strict settings: pydantic models read from YAML 1.2 files and `key=value` overrides.

Every mistake a user can make becomes a `UserError` with one line. Nothing here knows what the settings are about. A field names
the effect of its setting: `Annotated[int, Effect.NONE]`. Without one, it changes results.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import Enum
from functools import partial
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from treeproc.common.errors import UserError, from_python, quoted
from treeproc.common.hub import HubModel
from treeproc.common.setting_errors import COMMAND_LINE, describe_error
from treeproc.common.setting_facts import list_settings, types_in, value_at, walk_fields
from treeproc.common.storage import AnyPath, RemotePath, as_path, scheme_of
from treeproc.common.yaml_reader import MOST_BYTES, Yaml12Dumper, find_comment, read_yaml

# Ray sets it in the process of a submitted job alone, and unpacks the job's working folder into a folder of that name. Its
# documentation promises neither.
_JOB_VARIABLE, _WORKING_FOLDERS = "RAY_JOB_CONFIG_JSON_ENV_VAR", "working_dir_files"


class Effect(Enum):
    """The reach of a setting: the results that a change of it leaves the same."""

    PROGRESS = "how far a run goes, and which checkpoints count; finished updates stay the same"
    NONE = "where and how fast the command computes, or how much it prints"


def later_field(default: Any, **options: Any) -> Any:
    """Return the field of a setting that records leave out at its default.

    Runs made before the setting have no entry of it, and fingerprints must stay the same.
    """
    return Field(default, exclude_if=partial(eq, default), **options)


def keys_with(cls: type[BaseModel], *effects: Effect) -> tuple[str, ...]:
    """Return the dotted keys of the settings with one of the effects; a section that has one is one key."""
    keys: tuple[str, ...] = ()
    for name, field, _ in walk_fields(cls, optional=True):
        if any(effect in field.metadata for effect in effects) and not is_below(name, keys):
            keys += (name,)
    return keys


def is_below(key: str, keys: tuple[str, ...]) -> bool:
    """Return whether a dotted key is one of `keys`, or lies in one that is a section."""
    return f"{key}.".startswith(tuple(f"{one}." for one in keys))


def settings_with(cls: type[BaseModel], *effects: Effect) -> dict[str, Any]:
    """Return the settings with one of the effects, in the form of pydantic's `include` and `exclude`."""
    return nested(dict.fromkeys(keys_with(cls, *effects), True))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted keys as sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        place, (*sections, last) = found, key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return found


class SettingsError(UserError, ValueError):
    """A mistake in settings that are made by a call in Python. It is also a ValueError, as pydantic's own error."""


if TYPE_CHECKING:  # type checkers read the fields as the arguments of a call
    from pydantic._internal._model_construction import ModelMetaclass as _Checked
else:

    class _Checked(type(BaseModel)):
        """Mistakes in a call raise UserError, as mistakes in a file do."""

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                with from_python():
                    raise SettingsError(describe_error(error, cls, cls.__name__)) from None


class Settings(BaseModel, metaclass=_Checked):
    """Base of all settings: unknown keys are refused, values do not change after checking."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    # Dotted names of dicts, each with the dict whose keys it repeats. If the command line replaces the second one, the entries
    # of the first one in a file may name keys that are gone.
    names_of: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` as a number, though Python counts it as 1, and numbers that need more than 64 bits."""
        assert info.field_name is not None  # it checks fields, not whole settings
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, str) and _is_list_of_paths(annotation):
            value = [value]
        values = [value, *value] if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict) and any(get_origin(one) is dict for one in (annotation, *get_args(annotation))):
            values += [*value, *value.values()]
        for one in values:
            if one == "" and _mentions(annotation, Path):
                raise ValueError("must be a path, but is empty")
            if (scheme := scheme_of(one)) and _mentions(annotation, Path) and not _mentions(annotation, RemotePath, str, Any):
                raise ValueError(f"must be a local path, but is a URI ({scheme}://...)")
            if isinstance(one, bool) and not _mentions(annotation, bool, Any):
                raise ValueError(f"must not be a truth value, but is {str(one).lower()}")
            if isinstance(one, int) and abs(one) >= 2**63:
                raise ValueError(f"must be a number of at most 64 bits, but is {quoted(one)}")
        return value


def _mentions(annotation: Any, *types: Any) -> bool:
    """Return whether one of the types is part of an annotation."""
    return any(annotation is one for one in types) or any(_mentions(part, *types) for part in get_args(annotation))


def _is_list_of_paths(annotation: Any) -> bool:
    """Return whether an annotation takes a list of paths and nothing else. One path is then a list of one."""
    members = types_in(annotation)
    return len(members) == 1 and get_origin(members[0]) in (list, tuple) and _mentions(members[0], Path)


SettingsT = TypeVar("SettingsT", bound=Settings)


_MOST_SECTIONS = 20


def _apply_override(values: dict, override: str, defaults: Mapping[str, dict]) -> str:
    """Put the value of `key=value` into its place. Returns the dotted key.

    `defaults` are those of settings whose keys the user chooses: one more key does not replace them.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"{quoted(override)} must have the form key=value; --help lists the keys")
    _check_no_comment(key.strip(), text)
    if (opened := text.strip()[:1]) in ("[", "{") and text.strip()[-1] != {"[": "]", "{": "}"}[opened]:
        raise UserError(f"override {quoted(override)}: lacks its closing bracket; write it without blanks, or in quotation marks")
    key = key.strip()
    *parents, last = key.split(".")
    if len(parents) > _MOST_SECTIONS:
        raise UserError(f"override {quoted(override)}: no setting has so many sections in its name")
    target = values
    for depth, name in enumerate(parents, 1):
        target = target.setdefault(name, deepcopy(defaults.get(".".join(parents[:depth]), {})))
        if not isinstance(target, dict):
            raise UserError(f"override {quoted(override)}: {quoted(name)} is a single value, and has no keys")
    target[last] = read_yaml(text, f"override {quoted(override)}")
    return key


def _check_no_comment(key: str, text: str) -> None:
    """Raise UserError for a value of the command line that YAML would cut at a #: it may be the name of another file."""
    if comment := find_comment(text):
        whole = '["a #b", c]' if text.strip()[:1] in ("[", "{") else json.dumps(text.strip(), ensure_ascii=False)
        raise UserError(
            f"override {quoted(f'{key}={text}')}: {quoted(comment)} is a comment in YAML; leave it out, or give the value in "
            f"quotation marks, as {shlex.quote(f'{key}={whole}')}"
        )


def build_settings(cls: type[SettingsT], values: dict, where: str, overridden: Sequence[str] = ()) -> SettingsT:
    """Check `values` against `cls`. Raises UserError with the path of the first bad field and where it came from.

    That is `where`, or the command line for the dotted keys in `overridden`.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_error(error, cls, where, overridden)) from None


def load_settings(cls: type[SettingsT], path: AnyPath | None, overrides: Sequence[str] = (), **values: Any) -> SettingsT:
    """Read settings from a YAML file, then `values`, then dotted `key=value` overrides."""
    merged: dict = {}
    where = COMMAND_LINE
    if path is not None:
        where = str(path)
        try:
            with as_path(path).open("rb") as file:
                text = file.read(MOST_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}") from None
        merged = read_yaml(text, where) or {}
        if not isinstance(merged, dict):
            raise UserError(f"{path}: must hold keys and values, but is a {type(merged).__name__}")
    merged.update(values)
    defaults = {facts.name: facts.default for facts in list_settings(cls) if isinstance(facts.default, dict)}
    keys = [_apply_override(merged, override, defaults) for override in overrides]
    for name, named in cls.names_of.items():
        if named in keys and not any(key == name or key.startswith(f"{name}.") for key in keys):
            _keep_names(merged, name, named)
    return build_settings(cls, merged, where, keys)


def _keep_names(values: dict, name: str, named: str) -> None:
    """Leave only those entries in the dict `name` of a file whose keys are in the dict `named`, which the command line gave."""
    section, _, last = name.rpartition(".")
    inner, given = value_at(values, section), value_at(values, named)
    if isinstance(inner, dict) and isinstance(inner.get(last), dict) and isinstance(given, dict):
        inner[last] = {key: value for key, value in inner[last].items() if key in given}


def dump_settings(settings: Settings) -> str:
    """Return the settings as YAML text that `load_settings` reads back to an equal object."""
    return yaml.dump(settings.model_dump(mode="json"), Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the lines `key: old -> new` for everything that differs between two nested dicts."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [key for key in new if key not in old]
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def in_submitted_job() -> bool:
    """Return whether this process is a job of `ray job submit`, by its environment or by its working folder, a temporary copy."""
    if _JOB_VARIABLE in os.environ:
        return True
    try:
        return _WORKING_FOLDERS in Path.cwd().parts
    except FileNotFoundError:  # the folder is gone
        return False


def is_sent_to_a_cluster() -> bool:
    """Return whether this process is a submitted job, or RAY_ADDRESS names a cluster."""
    return in_submitted_job() or os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def refuse_relative_in_job(paths: Mapping[str, AnyPath | HubModel | None]) -> None:
    """Refuse relative paths in a job of `ray job submit`, whose working folder is a temporary copy that is lost.

    Raises UserError for the first of the named paths that is relative. None stands for a path that is not set.
    """
    if not in_submitted_job():
        return
    for name, path in paths.items():
        if path is not None and not path.is_absolute():
            raise UserError(
                f"{name} must be an absolute path in a submitted job, but is {path}: "
                "a job runs in a temporary copy of the working folder"
            )
