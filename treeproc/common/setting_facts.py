"""Facts about settings, read from the fields of pydantic models: name, meaning, default and range.

`--help`, `tree-attention settings` and the pages of settings show these facts.
"""

import math
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from treeproc.common.storage import RemotePath

REQUIRED = object()
ANY_KEY = "NAME"  # stands for any key of a dict of settings
_NAMES = {str: "text", int: "integer", float: "number", bool: "true, false", Path: "path", Any: "any"}
_BOUNDS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}


class SettingFacts(NamedTuple):
    """Name, type, default and meaning of one setting."""

    name: str  # of a nested setting dotted; NAME stands for a key that the user chooses
    annotation: Any  # with the bounds, as `Annotated`
    default: Any  # REQUIRED where there is none
    description: str


def types_in(annotation: Any) -> list[Any]:
    """Return the types of a union without null; else the annotation alone."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return [one for one in get_args(annotation) if one is not type(None)] if is_union else [annotation]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings that a field, optional or not, holds."""
    found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
    return found[0] if found and get_origin(annotation) is not dict else None


def walk_fields(cls: type[BaseModel], prefix: str = "", *, optional: bool = False) -> Iterator[tuple[str, FieldInfo, bool]]:
    """Yield (dotted name, field, whether it is a section) of every field. The fields of a section follow it.

    A section that may be null, or a list of sections, counts as a section only with `optional`, and else as one setting.
    """
    for name, field in cls.model_fields.items():
        annotation, place = field.annotation, f"{prefix}{name}"
        section = section_of(annotation)
        if not optional and section is not annotation:
            section = None
        yield place, field, section is not None
        if get_origin(annotation) is dict:
            section, place = section_of(get_args(annotation)[1]), f"{place}.{ANY_KEY}"
        if section:
            yield from walk_fields(section, f"{place}.", optional=optional)


def list_settings(cls: type[BaseModel]) -> Iterator[SettingFacts]:
    """Yield all settings, nested ones with dotted names."""
    for name, field, is_section in walk_fields(cls):
        if not is_section:
            default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
            bounds = [one for one in field.metadata if type(one) in _BOUNDS]
            annotation: Any = Annotated[field.annotation, *bounds] if bounds else field.annotation
            yield SettingFacts(name, annotation, default, field.description or "")


@cache
def default_values(cls: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of all settings that have one by their dotted names, as JSON has them."""
    return to_jsonable_python({one.name: one.default for one in list_settings(cls) if one.default is not REQUIRED})


def describe_fields(cls: type[BaseModel], without_config: Mapping[str, Any]) -> str:
    """Return one line for each setting, for `--help`, and one before the settings of a section that has a description.

    `without_config` has other defaults of a command, nested as the settings are, which hold only without a configuration.
    """
    sections = {name: field.description for name, field, is_section in walk_fields(cls) if is_section and field.description}
    lines = []
    for name, _, default, description in list_settings(cls):
        for section in [section for section in sections if name.startswith(f"{section}.")]:
            lines.append(f"  {section}: {sections.pop(section)}")
        said = "required" if default is REQUIRED else f"default {describe_default(default)}"
        own = value_at(without_config, name)
        said += f"; without a configuration, {describe_default(own)}" if own else ""
        lines.append(f"  {name}: {description} ({said})")
    return "\n".join(lines)


def describe_default(value: object) -> str:
    """Return a default as YAML has it, in one line."""
    plain = TypeAdapter(Any).dump_python(value, mode="json", exclude_defaults=True)
    return yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False).removesuffix("...\n").strip()


def describe_values(annotation: Any, bounds: str = "") -> str:
    """Return what a setting of this type takes, as a user of YAML writes it: `number ≥ 0 and < 1`. `bounds` are of numbers."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is Annotated:
        # A `Field` in the annotation of a part holds its bounds itself.
        own = [bound for one in parts[1:] for bound in getattr(one, "metadata", [one]) if type(bound) in _BOUNDS]
        own.sort(key=lambda bound: list(_BOUNDS).index(type(bound)))
        return describe_values(parts[0], " and ".join(map(_describe_bound, own)) or bounds)
    if origin in (Union, types.UnionType):
        names = ["path or URI" if one is RemotePath else describe_values(one, bounds) for one in parts if one is not type(None)]
        names = [name for name in names if name != "path"] if "path or URI" in names else names
        return " or ".join([*names, "null"] if type(None) in parts else names)
    if origin in (list, tuple):
        count = "" if origin is list or Ellipsis in parts else f"{len(parts)}: "
        return f"list of {count}{describe_values(parts[0])}"
    if origin is dict or section_of(annotation):
        return "mapping"
    name = _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{name} {bounds}" if bounds and annotation in (int, float) else name


def _describe_bound(bound: Any) -> str:
    sign, key = _BOUNDS[type(bound)]
    value = getattr(bound, key)
    return f"{sign} {f'2^{value.bit_length() - 1}' if value in (2**32, 2**63) else f'{value:,}'.removesuffix('.0')}"


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
