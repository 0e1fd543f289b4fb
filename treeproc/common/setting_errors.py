"""Errors of settings in one line: the place, the expected value, and the most similar key."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from treeproc.common.command_names import is_from_python
from treeproc.common.errors import one_line, shown

COMMAND_LINE = "the command line"
_NAME = "NAME"  # stands for any key of a dict of settings
_MOST_MEANT = 3


def describe_error(error: ValidationError, cls: type[BaseModel], where: str, overridden: Sequence[str] = ()) -> str:
    """The first mistake in the settings `cls`; `overridden` are the dotted keys that the command line gave."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(one_line(str(part), 80) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        message = "unknown key; " + _meant(cls, [str(part) for part in first["loc"]])
    elif first["type"] == "missing":
        message = _missing(cls, path)
    else:
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            message += f", but is {shown(first['input'])}"
    return f"{_origin(path, where, overridden)}: {path + ': ' if path else ''}{message}"


def _origin(path: str, where: str, overridden: Sequence[str]) -> str:
    """The file, the command line, or both, where the value at `path` came from."""
    if where == COMMAND_LINE or any(path == key or path.startswith(f"{key}.") for key in overridden):
        return COMMAND_LINE
    within = [key for key in overridden if not path or key.startswith(f"{path}.")]
    return f"{where} with {', '.join(within)} from {COMMAND_LINE}" if within else where


def _missing(cls: type[BaseModel], path: str) -> str:
    description = next((described for name, described in dotted_fields(cls) if name == path), "")
    explained = f" ({description})" if description else ""
    if is_from_python():
        return f"is missing{explained}; give {path}=..."
    return f"is missing{explained}; write {path}=... on {COMMAND_LINE}, or {path}: ... into the file"


def _meant(cls: type[BaseModel], loc: list[str]) -> str:
    names = nearest(cls, ".".join(loc), _siblings(cls, loc))
    if names:
        return f"did you mean {' or '.join(names)}?"
    return f"the keys are {', '.join(_siblings(cls, loc))}" if is_from_python() else "--help lists all keys"


def nearest(cls: type[BaseModel], key: str, siblings: Sequence[str] = ()) -> list[str]:
    """Dotted names of the settings that an unknown key may have meant, the likeliest first.

    The same name in another section; else a name like it, of `siblings` first.
    """
    parent, _, last = key.rpartition(".")
    names = [name for name, _ in dotted_fields(cls)]
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return same[:_MOST_MEANT]
    if close := get_close_matches(last, siblings, 1):
        return [f"{parent}.{close[0]}" if parent else close[0]]
    by_end: dict[str, list[str]] = {}
    for name in names:
        by_end.setdefault(name.rpartition(".")[2], []).append(name)
    close = get_close_matches(last, by_end, 1, 0.75)
    return by_end[close[0]][:_MOST_MEANT] if close else get_close_matches(key, names, 1, 0.8)


def _siblings(cls: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """The names of the settings beside the last part of `loc`."""
    current: Any = cls
    for part in loc[:-1]:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(part)
            current = field.annotation if field else None
        elif get_origin(current) is dict:
            current = get_args(current)[1]
        if inner := _settings_in(current):
            current = inner
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """The settings that a field, optional or not, holds."""
    found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
    return found[0] if found and get_origin(annotation) is not dict else None


def dotted_fields(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, description) of every setting; NAME stands for the keys of a dict of settings."""
    for name, field in cls.model_fields.items():
        if inner := _settings_in(field.annotation):
            yield from dotted_fields(inner, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", field.description or ""
        if get_origin(field.annotation) is dict and (inner := _settings_in(get_args(field.annotation)[1])):
            yield from dotted_fields(inner, f"{prefix}{name}.{_NAME}.")
