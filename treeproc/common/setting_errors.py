"""Errors of settings in one line: the place, the expected value, and the key that an unknown one may have meant."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from treeproc.common.errors import is_from_python, one_line, quoted
from treeproc.common.setting_facts import ANY_KEY, section_of, types_in, walk_fields
from treeproc.common.synonyms import SYNONYMS, settings_in

COMMAND_LINE = "the command line"
_PROJECT = Path(__file__).resolve().parents[2]
_MOST_MEANT = 3
_UNKNOWN = "extra_forbidden"  # pydantic's type of the error of an unknown key
# The begin of pydantic's messages about a wrong value, and the end of some.
_INPUT, _REASON = "Input should be ", re.compile(r", (?:unable to|got) .*")
_SEQUENCE = re.compile(r"\ba valid (?:tuple|list)\b")


def describe_error(error: ValidationError, cls: type[BaseModel], where: str, overridden: Sequence[str] = ()) -> str:
    """Return the first mistake in the settings `cls`; `overridden` are the dotted keys that the command line gave."""
    errors = error.errors(include_url=False, include_context=False)
    first = next((one for one in errors if one["type"] == _UNKNOWN), errors[0])
    loc, annotation = _place(cls, first["loc"])
    path = ".".join(one_line(part, 80) for part in loc)
    if first["type"] == _UNKNOWN:
        key = next((one for one in overridden if one.startswith(f"{path}.")), ".".join(loc))
        is_in_list = any(isinstance(part, int) for part in first["loc"])  # which is given as a whole
        siblings = [] if is_in_list else _siblings(cls, loc)
        meant = explain_unknown(cls, key, siblings) or ("" if is_from_python() else "--help lists all keys")
        message = f"unknown key; {meant}" if meant else "unknown key"
    elif first["type"] == "missing" and isinstance(first["loc"][-1], int):  # of a list, which is given as a whole
        path, count = path.rpartition(".")[0], len(get_args(_place(cls, first["loc"][:-1])[1]))
        message = f"must be {count} values, but is {quoted(first['input'])}"
    elif first["type"] == "missing":
        message = _missing(cls, path, where)
    elif first["type"] == "model_type" and (section := section_of(annotation)):
        key = "name" if "name" in section.model_fields else next(iter(section.model_fields))
        message = f"must be settings, such as {path}.{key}, but is {quoted(first['input'])}"
    elif first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
    else:
        message = f"{_expected(errors, cls, loc, annotation)}, but is {quoted(first['input'])}"
        if type(None) in get_args(annotation):
            message += _explained(cls, path)
    return f"{_origin(path, where, overridden)}: {path + ': ' if path else ''}{message}"


def _expected(errors: Sequence[ErrorDetails], cls: type[BaseModel], loc: list[str], annotation: Any) -> str:
    """Return what the setting at `loc` may be: `must be 0 or null`. A union has an error for each of its types."""
    messages = [_SEQUENCE.sub("a list", _REASON.sub("", one["msg"])) for one in errors if _place(cls, one["loc"])[0] == loc]
    allowed = [message.removeprefix(_INPUT) for message in messages if message.startswith(_INPUT)]
    if not allowed:
        return messages[0]
    return f"must be {' or '.join(dict.fromkeys([*allowed, *(['null'] if type(None) in get_args(annotation) else [])]))}"


def _place(cls: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], Any]:
    """Return the names of the settings that lead to an error, and the annotation there.

    They leave out what pydantic adds for a union: which of its types refused the value, and where.
    """
    names, current = [], cls
    for part in loc:
        members = types_in(current)
        if len(members) > 1:
            break
        names.append(str(part))
        current = _inside(members[0], part)
    return names, current


def _inside(annotation: Any, part: str | int) -> Any:
    """Return the annotation of a part of a value: of a setting, of a value of a dict, or of an element."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return next(iter(get_args(annotation)), None)


def _origin(path: str, where: str, overridden: Sequence[str]) -> str:
    """Return the file, the command line, or both, where the value at `path` came from."""
    if where == COMMAND_LINE or any(path == key or path.startswith(f"{key}.") for key in overridden):
        return COMMAND_LINE
    within = [key for key in overridden if not path or key.startswith(f"{path}.")]
    return f"{where} with {', '.join(within)} from {COMMAND_LINE}" if within else where


def _explained(cls: type[BaseModel], path: str) -> str:
    fields = walk_fields(cls, optional=True)
    description = next((field.description for name, field, is_section in fields if name == path and not is_section), "")
    return f" ({description})" if description else ""


def _missing(cls: type[BaseModel], path: str, where: str) -> str:
    if is_from_python():
        return f"is missing{_explained(cls, path)}; give {path}=..."
    into_file = "" if where == COMMAND_LINE or _is_shipped(where) else f", or {path}: ... into the file"
    return f"is missing{_explained(cls, path)}; write {path}=... on {COMMAND_LINE}{into_file}"


def _is_shipped(file: str) -> bool:
    """Return whether a file is part of this project, and so not the user's to edit."""
    return any(Path(file).resolve().is_relative_to(_PROJECT / package) for package in ("treeproc", "treenet"))


def explain_unknown(cls: type[BaseModel], key: str, siblings: Sequence[str] = ()) -> str:
    """Return what an unknown key may have meant: a question with names of settings, or an advice; empty if there is neither."""
    advice = _synonym(cls, key)
    if advice and " " in advice:
        return advice
    names = nearest(cls, key, siblings)
    if names:
        return f"did you mean {' or '.join(names)}?"
    return f"the keys are {', '.join(siblings)}" if is_from_python() and siblings else ""


def nearest(cls: type[BaseModel], key: str, siblings: Sequence[str] = ()) -> list[str]:
    """Return the dotted names of the settings that an unknown key may have meant, the likeliest first.

    The setting that another toolkit calls so, and the same name in another section; else a name like it, of `siblings` first.
    """
    parent, _, last = key.rpartition(".")
    names = setting_names(cls)
    same = [name for name in names if name.rpartition(".")[2] == last]
    foreign = _synonym(cls, key)
    if foreign and " " not in foreign:
        same = [*(name for name in names if _ends_with(name, foreign)), *same]
    if same:
        return list(dict.fromkeys(same))[:_MOST_MEANT]
    if close := get_close_matches(last, siblings, 1):
        return [f"{parent}.{close[0]}" if parent else close[0]]
    by_end: dict[str, list[str]] = {}
    for name in names:
        by_end.setdefault(name.rpartition(".")[2], []).append(name)
    close = get_close_matches(last, by_end, 1, 0.75)
    return by_end[close[0]][:_MOST_MEANT] if close else get_close_matches(key, names, 1, 0.8)


def _synonym(cls: type[BaseModel], key: str) -> str | None:
    """Return the entry of `SYNONYMS` for a key, if `cls` has all settings that the entry names."""
    advice = SYNONYMS.get(key.rpartition(".")[2].lower().replace("-", "_"), "")
    if is_from_python():  # where a section is an argument, and there are no options
        advice = "" if "--" in advice else advice if " " in advice else advice.rpartition(".")[2]
    return advice if advice and all(has_setting(cls, name) for name in settings_in(advice)) else None


def has_setting(cls: type[BaseModel], key: str) -> bool:
    """Return whether `cls` has a setting or a section of this dotted name, itself or in a section."""
    return any(_ends_with(name, key) for name, *_ in walk_fields(cls, optional=True))


def _ends_with(name: str, key: str) -> bool:
    """Return whether the dotted name of a setting is `key`, or ends with it. `ANY_KEY` stands for any word of the key."""
    return name.endswith(f".{key}") or re.fullmatch(re.escape(name).replace(ANY_KEY, "[^.]+"), key) is not None


def _siblings(cls: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Return the names of the settings beside the last part of `loc`."""
    section = section_of(_place(cls, loc[:-1])[1])
    return list(section.model_fields) if section else []


def setting_names(cls: type[BaseModel]) -> list[str]:
    """Return the dotted names of all settings, of optional sections too."""
    return [name for name, _, is_section in walk_fields(cls, optional=True) if not is_section]
