"""How messages name commands: as scripts of a checkout, or as the installed `tree-attention COMMAND`."""

import re

PROGRAM = "tree-attention"
# A script is the command of its name, with hyphens; translation is what `train` trains.
_RENAMED = {"train_wmt": "train"}
_NAMED = re.compile(
    r"(?:(?:\.venv/bin/)?python )?\bworkflows/(\w+)\.py\b|python -m treeproc\.(inspect|verify)\b"
    r"|\bworkflows/configs/(\w+)\.yaml\b|\bworkflows/(configs)\b(?!/)"
)
_installed = False


def command_of(script: str) -> str:
    """The command of a script of `workflows/`, for example `train` of `train_wmt`."""
    return _RENAMED.get(script, script.replace("_", "-"))


def name_installed_commands() -> None:
    """From now on `as_called` names installed commands: this process was started as `tree-attention COMMAND`."""
    global _installed
    _installed = True


def as_called(text: str) -> str:
    """A text that names scripts and their configurations, as the user of this process types them."""
    return _NAMED.sub(_as_installed, text) if _installed else text


def _as_installed(found: re.Match[str]) -> str:
    script, module, config, folder = found.groups()
    return config or f"{PROGRAM} {command_of(script or module or folder)}"
