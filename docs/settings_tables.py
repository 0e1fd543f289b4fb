"""Writes the tables of settings on our pages: `python docs/settings_tables.py`.

`<!-- settings COMMAND [SECTION ...] [!SECTION ...] -->` begins the table of a command's settings or of its sections, but not of
those with !. `<!-- words of other toolkits -->` begins that of `treeproc/common/synonyms.py`. `<!-- end -->` ends both.
"""

import re
import sys
from functools import cache
from pathlib import Path
from unittest import mock

from treenet.cli.main import COMMANDS
from treenet.cli.settings import Described, settings_of
from treeproc.common.errors import PROGRAM
from treeproc.common.settings import is_below
from treeproc.common.synonyms import ELSEWHERE

DOCS = Path(__file__).resolve().parent
TABLE = re.compile(r"^(<!-- (settings|words of other toolkits)([^\n]*) -->\n).*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """The pages with tables of settings."""
    return [DOCS / "settings.md", *sorted((DOCS / "settings").glob("*.md"))]


@cache
def settings_by_command() -> dict[str, list[Described]]:
    """All settings. Their descriptions name the installed commands."""
    with mock.patch.object(sys, "argv", [f"{PROGRAM} settings"]):
        return {command: settings_of(command) for command in COMMANDS}


def chosen(command: str, *sections: str) -> list[Described]:
    """The settings of a command that a table has."""
    left_out = tuple(section[1:] for section in sections if section.startswith("!"))
    wanted = tuple(section for section in sections if not section.startswith("!"))
    found = settings_by_command()[command]
    if unknown := [one for one in wanted + left_out if not any(is_below(setting.name, (one,)) for setting in found)]:
        raise ValueError(f"{command} has no setting {unknown[0]}")
    return [
        setting for setting in found if (not wanted or is_below(setting.name, wanted)) and not is_below(setting.name, left_out)
    ]


def fill(text: str) -> str:
    """The text of a page with tables of the present settings."""

    def table(found: re.Match[str]) -> str:
        begin, kind, arguments = found.groups()
        rows = settings_rows(*arguments.split()) if kind == "settings" else word_rows()
        return "\n".join([begin, *rows, "", "<!-- end -->"])

    return TABLE.sub(table, text)


def settings_rows(*arguments: str) -> list[str]:
    rows = []
    for one in chosen(*arguments):
        elsewhere = f". Elsewhere: {', '.join(f'`{word}`' for word in one.elsewhere)}" if one.elsewhere else ""
        default = f"`{one.default}`" if one.default else "required"
        rows.append([f"`{one.name}`", prose(one.meaning) + elsewhere, one.values, default])
    return markdown(["setting", "meaning", "values", "default"], rows)


def word_rows() -> list[str]:
    rows = []
    for meant, words in ELSEWHERE.items():
        rows.append([", ".join(f"`{word}`" for word in words.split()), prose(meant) if " " in meant else f"`{meant}`"])
    return markdown(["elsewhere", "here"], rows)


def prose(text: str) -> str:
    """A text in which only backticks are marks of Markdown."""
    parts = text.split("`")
    return "`".join(re.sub(r"[\\<*$\[]", r"\\\g<0>", part) if place % 2 == 0 else part for place, part in enumerate(parts))


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, ["---"] * len(head), *rows]]


if __name__ == "__main__":
    for page in pages():
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
