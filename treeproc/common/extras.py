"""Packages that take long to load, or that not every installation has: which extra brings each, and how messages say so."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from treeproc.common.command_names import PROGRAM, advise
from treeproc.common.errors import UserError

# Module -> the extra of pyproject.toml that installs it.
EXTRAS = {
    "ctranslate2": "export",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "ray": "ray",
    "py3langid": "parse",
    "requests": "parse",
    "stanza": "parse",
    "matplotlib": "report",
    "sacremoses": "report",
    "scipy": "report",
    "tensorboard": "report",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "optuna": "tune",
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "uvicorn": "serve",
}


@contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage during imports: modules are none, and the search would take a tenth of the time."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. It is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def how_to_install(module: str) -> str:
    """Return `ray is not installed: pip install 'tree-attention[ray]'`, for a module of `EXTRAS`."""
    return f"{module} is not installed: {_command(module)}"


def require(module: str, purpose: str, instead: str = "") -> None:
    """Raise UserError if a module is missing: what needs it, how to install it, and what to do `instead`, if the command can."""
    if not is_installed(module):
        instead = advise(instead)
        raise UserError(f"{_lack(purpose, module)}{f'; or {instead}' if instead else ''}")


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return the message for a user where a module of `EXTRAS` is missing; None for an error that no extra resolves."""
    module = (error.name or "").partition(".")[0]
    return _lack("this", module) if module in EXTRAS else None


def _lack(purpose: str, module: str) -> str:
    return f"{purpose} needs {module}, which is not installed: {_command(module)}"


def _command(module: str) -> str:
    return f"pip install '{PROGRAM}[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"
