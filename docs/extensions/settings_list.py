"""The directives `settings` and `synonyms`: settings with values, default and meaning, made of their definitions."""

import types
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from chosen_settings import chosen_settings
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from treeproc.common.hub import HubModel
from treeproc.common.settings import REQUIRED, describe_default
from treeproc.common.storage import RemotePath
from treeproc.common.synonyms import SYNONYMS


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
    known = {str: "text", int: "integer", float: "number", bool: "true, false", Path: "path", Any: "any", HubModel: "name"}
    return known.get(annotation, getattr(annotation, "__name__", str(annotation)))


def index_entries(words: list[str], place: str, first: bool = True) -> addnodes.index:
    """Entries of the index, which the search of the site shows before all else; after all else unless `first`."""
    spelt = dict.fromkeys(spelling for word in words for spelling in (word, word.replace("_", " ")))
    return addnodes.index(entries=[("single", word, place, "main" if first else "", None) for word in spelt])


class SettingsList(SphinxDirective):
    """`{settings} package.module.Class [SECTION ...] [!SECTION ...]`: each with a place to link to, found by any of its names."""

    required_arguments: ClassVar[int] = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        found = nodes.definition_list()
        first = not self.env.docname.endswith("/commands")  # most readers look for those of preprocessing and training
        command = self.arguments[0].split()[0].rpartition(".")[2]
        for fact in chosen_settings(self.arguments[0]):
            place = nodes.make_id(f"{command}-{fact.name}")
            elsewhere = [word for word, meant in SYNONYMS.items() if meant == fact.name]
            words = [fact.name, fact.name.rpartition(".")[2], *elsewhere]
            entries = index_entries(words, place, first)
            term = nodes.term("", "", nodes.literal("", fact.name), entries, ids=[place])
            default = "required" if fact.default is REQUIRED else f"default: {describe_default(fact.default)}"
            lines = [
                f"{fact.description[:1].upper()}{fact.description[1:]}.",
                "",
                f"*{describe_type(fact.annotation)}; {default}*",
            ]
            if elsewhere:
                lines[0] += f" Elsewhere: {', '.join(f'`{word}`' for word in elsewhere)}."
            meaning = nodes.definition()
            self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, meaning)
            found += nodes.definition_list_item("", term, meaning)
        return [found]


class SynonymTable(SphinxDirective):
    """`{synonyms}`: the words of other toolkits, and what to write here."""

    def run(self) -> list[nodes.Node]:
        here = [f"{meant[:1].upper()}{meant[1:]}" if " " in meant else f"`{meant}`" for meant in SYNONYMS.values()]
        lines = [
            "| elsewhere | here |",
            "|---|---|",
            *(f"| `{word}` | {what} |" for word, what in zip(SYNONYMS, here, strict=True)),
        ]
        container = nodes.container(ids=["synonyms"])
        container += index_entries([word for word, meant in SYNONYMS.items() if " " in meant], "synonyms")
        self.state.nested_parse(StringList(lines, "synonyms"), self.content_offset, container)
        return [container]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("settings", SettingsList)
    app.add_directive("synonyms", SynonymTable)
    return {"parallel_read_safe": True}
