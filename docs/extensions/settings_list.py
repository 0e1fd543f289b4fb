"""The directive `settings`: all settings of a command with values, default and meaning, made of their definitions."""

import importlib
import types
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from treeproc.common.settings import REQUIRED, describe_default, list_settings
from treeproc.common.storage import RemotePath


def describe_type(annotation: Any) -> str:
    """A type as a user of YAML writes values of it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is Annotated:
        return describe_type(parts[0])
    if origin in (Union, types.UnionType):
        names = ["path or URI" if part is RemotePath else describe_type(part) for part in parts if part is not type(None)]
        names = [name for name in names if name != "path"] if "path or URI" in names else names
        return " or ".join([*names, "null"] if type(None) in parts else names)
    if origin in (list, tuple):
        return "list of " + describe_type(parts[0])
    if origin is dict:
        return "mapping"
    known = {str: "text", int: "integer", float: "number", bool: "true, false", Path: "path", Any: "any"}
    return known.get(annotation, getattr(annotation, "__name__", str(annotation)))


class SettingsList(Directive):
    """`{settings} package.module.Class`."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        lines: list[str] = []
        for fact in list_settings(getattr(importlib.import_module(module), name)):
            default = "required" if fact.default is REQUIRED else f"default: {describe_default(fact.default)}"
            meaning = f"{fact.description[:1].upper()}{fact.description[1:]}."
            lines += [f"`{fact.name}`", f": {meaning}", "", f"  *{describe_type(fact.annotation)}; {default}*", ""]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, container)
        return container.children


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("settings", SettingsList)
    return {"parallel_read_safe": True}
