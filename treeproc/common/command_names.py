"""Advice in messages: commands under the names that the user types, and the options and settings that the running one has."""

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from treeproc.common.synonyms import settings_in

PROGRAM = "tree-attention"
# A script is the command of its name, with hyphens. One script has a second name.
_RENAMED = {"train_wmt": "train"}
_NAMED = re.compile(
    r"(?:(?:\.venv/bin/)?python )?\bworkflows/(\w+)\.py\b|python -m treeproc\.(inspect|verify)\b"
    r"|\bworkflows/configs/(\w+)\.yaml\b|\bworkflows/(configs)\b(?!/)"
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_SECTION = re.compile(r"\bdecoding\.(?=[a-z])")  # its settings are keywords of the library
_FROM_PYTHON = ContextVar("_FROM_PYTHON", default=False)
_HAS_SCRIPTS = (Path(__file__).resolve().parents[2] / "workflows").is_dir()


@contextmanager
def from_python() -> Iterator[None]:
    """Mark a call of the library, for `with` and as a decorator: its messages name arguments, and the installed commands."""
    before = _FROM_PYTHON.set(True)
    try:
        yield
    finally:
        _FROM_PYTHON.reset(before)


def is_from_python() -> bool:
    """Return whether a call of the library runs, and no command."""
    return _FROM_PYTHON.get()


def command_of(script: str) -> str:
    """Return the command of a script of `workflows/`, for example `train` of `train_wmt`."""
    return _RENAMED.get(script, script.replace("_", "-"))


def running_command() -> str:
    """Return the command that this process runs, for example `train`; the name of another program as it is."""
    program = sys.argv[0] if sys.argv else ""
    if program.startswith(f"{PROGRAM} "):
        return program.removeprefix(f"{PROGRAM} ")
    return command_of(Path(program).stem)


def as_called(text: str) -> str:
    """Return a text that names scripts and their configurations, with the names that the user of this process types.

    Every message that proposes a command passes through here. `UserError` calls it for its message.
    """
    if is_from_python():
        return _SECTION.sub("", _NAMED.sub(_as_installed, text))
    return text if _calls_scripts() else _NAMED.sub(_as_installed, text)


def _calls_scripts() -> bool:
    """Return whether this process is a script of `workflows/`. Other programs have the scripts if they run from a checkout."""
    program = sys.argv[0] if sys.argv else ""
    if program.startswith(f"{PROGRAM} "):  # treenet/cli/main.py names the process so; its child processes keep the name
        return False
    return _HAS_SCRIPTS or Path(program).parent.name == "workflows"


def _as_installed(found: re.Match[str]) -> str:
    script, module, config, folder = found.groups()
    return config or f"{PROGRAM} {command_of(script or module or folder)}"


class _Running(NamedTuple):
    """The command that this process runs: its options, without an --out that it only reads, and its settings."""

    options: Collection[str] = ()
    has_setting: Callable[[str], bool] = lambda name: False


_running: _Running | None = None


@contextmanager
def command_runs() -> Iterator[None]:
    """Note that a command runs in this process, and not a program that imports the packages."""
    global _running
    before, _running = _running, _Running()
    try:
        yield
    finally:
        _running = before


def note_command(options: Collection[str], has_setting: Callable[[str], bool]) -> None:
    """Note the options and the settings of the command that runs, if one does."""
    global _running
    _running = _running and _Running(options, has_setting)


def advise(*ways: str) -> str:
    """Return those of the ways out that the user has, joined by `or`; empty if there is none.

    A way may name an option (`choose another --out`) or a setting (`give workers=0`). It is left out if the running command does
    not have it, and if no command runs, as in Python.
    """
    return ", or ".join(way for way in ways if _takes(way))


def _takes(way: str) -> bool:
    options, settings = _OPTION.findall(way), settings_in(f"{way} ")
    if _running is None or is_from_python():
        return not options and not settings
    return all(option in _running.options for option in options) and all(map(_running.has_setting, settings))
