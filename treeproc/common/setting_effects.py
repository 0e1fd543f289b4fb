"""Effects of settings. A field names its effect: `Annotated[int, Effect.NONE]`. Without one, it changes results."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import eq
from typing import Any, get_args

from pydantic import BaseModel


class Effect(Enum):
    """The reach of a setting: the results that a change of it leaves the same."""

    PROGRESS = "how far a run goes, and which checkpoints count; finished updates stay the same"
    NONE = "where and how fast the command computes, or how much it prints"


def unrecorded(default: object) -> Callable[[object], bool]:
    """Mark a setting that records leave out at its default: `Field(0.0, exclude_if=unrecorded(0.0))`.

    Runs made before the setting have no entry of it, and fingerprints must stay the same.
    """
    return partial(eq, default)


def keys_with(cls: type[BaseModel], *effects: Effect) -> tuple[str, ...]:
    """Return the dotted keys of the settings with one of the effects; a section that has one is one key."""
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        if any(effect in field.metadata for effect in effects):
            keys.append(name)
        elif section := _section(field.annotation):
            keys += [f"{name}.{key}" for key in keys_with(section, *effects)]
    return tuple(keys)


def is_below(key: str, keys: tuple[str, ...]) -> bool:
    """Return whether a dotted key is one of `keys`, or lies in one that is a section."""
    return f"{key}.".startswith(tuple(f"{one}." for one in keys))


def excluded(cls: type[BaseModel], *effects: Effect) -> dict[str, Any]:
    """Return the settings with one of the effects, in the form of pydantic's `exclude`."""
    found: dict[str, Any] = {}
    for key in keys_with(cls, *effects):
        place, (*sections, last) = found, key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = True
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the settings that a field, optional or not, holds."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
