"""How messages name commands: as scripts of a checkout, or as the installed `tree-attention COMMAND`."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

PROGRAM = "tree-attention"
# A script is the command of its name, with hyphens; translation is what `train` trains.
_RENAMED = {"train_wmt": "train"}
_NAMED = re.compile(
    r"(?:(?:\.venv/bin/)?python )?\bworkflows/(\w+)\.py\b|python -m treeproc\.(inspect|verify)\b"
    r"|\bworkflows/configs/(\w+)\.yaml\b|\bworkflows/(configs)\b(?!/)"
)
_SECTION = re.compile(r"\bdecoding\.(?=[a-z])")  # its settings are keywords of the library
_FROM_PYTHON = ContextVar("_FROM_PYTHON", default=False)
_HAS_SCRIPTS = (Path(__file__).resolve().parents[2] / "workflows").is_dir()


@contextmanager
def from_python() -> Iterator[None]:
    """A call of the library, for `with` and as a decorator: its messages name arguments, and commands as they are installed."""
    before = _FROM_PYTHON.set(True)
    try:
        yield
    finally:
        _FROM_PYTHON.reset(before)


def is_from_python() -> bool:
    """Whether a call of the library runs, and no command."""
    return _FROM_PYTHON.get()


def command_of(script: str) -> str:
    """The command of a script of `workflows/`, for example `train` of `train_wmt`."""
    return _RENAMED.get(script, script.replace("_", "-"))


def running_command() -> str:
    """The command that this process runs, for example `train`; the name of another program as it is."""
    program = sys.argv[0] if sys.argv else ""
    if program.startswith(f"{PROGRAM} "):
        return program.removeprefix(f"{PROGRAM} ")
    return command_of(Path(program).stem)


def as_called(text: str) -> str:
    """A text that names scripts and their configurations, with the names that the user of this process types.

    Every message that proposes a command passes through here. `UserError` calls it for its message.
    """
    if is_from_python():
        return _SECTION.sub("", _NAMED.sub(_as_installed, text))
    return text if _calls_scripts() else _NAMED.sub(_as_installed, text)


def _calls_scripts() -> bool:
    """Whether this process is a script of `workflows/`. Other programs have the scripts if they run from a checkout."""
    program = sys.argv[0] if sys.argv else ""
    if program.startswith(f"{PROGRAM} "):  # treenet/cli/main.py names the process so; its child processes keep the name
        return False
    return _HAS_SCRIPTS or Path(program).parent.name == "workflows"


def _as_installed(found: re.Match[str]) -> str:
    script, module, config, folder = found.groups()
    return config or f"{PROGRAM} {command_of(script or module or folder)}"
