"""Errors for users: the error that every command turns into one line, the advice in such a line, and checks that raise it.

A check of an argument names it, what it must be, and what it is.
"""

import gc
import operator
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

PROGRAM = "tree-attention"
_FROM_PYTHON = ContextVar("_FROM_PYTHON", default=False)


_SECTION = re.compile(r"(?<![\w./-])decoding\.(?=[a-z])")  # its settings are keywords of the library; a path is none


@contextmanager
def from_python() -> Iterator[None]:
    """Mark a call of the library, for `with` and as a decorator: its messages name arguments, not sections of settings."""
    before = _FROM_PYTHON.set(True)
    try:
        yield
    except UserError as error:
        error.args = (naming_arguments(str(error)),)
        raise
    finally:
        _FROM_PYTHON.reset(before)


def naming_arguments(text: str) -> str:
    """Return a message without the section of the settings that are keywords of the library."""
    return _SECTION.sub("", text)


def is_from_python() -> bool:
    """Return whether a call of the library runs, and no command."""
    return _FROM_PYTHON.get()


def running_command() -> str:
    """Return the command that this process runs, for example `train`; the name of another program without its ending."""
    program = sys.argv[0] if sys.argv else ""
    return program.removeprefix(f"{PROGRAM} ") if program.startswith(f"{PROGRAM} ") else Path(program).stem


# A message and the word that goes before it are a line of at most 500 characters.
MOST_CHARACTERS = 480
_URI = re.compile(r"://([^\s'\"]*)")


class UserError(Exception):
    """Bad input or configuration: one line with the mistake, its place, and what to do.

    A message that is too long loses its middle. It begins with the place, and ends with what to do.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


@contextmanager
def rewording(words: Mapping[str, str]) -> Iterator[None]:
    """Replace words in the messages of a step whose settings or folders have other names in this command."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for old, new in words.items():
            message = re.sub(rf"(?<![\w./-]){re.escape(old)}", new, message)
        error.args = (one_line(message),)
        raise


class CommandEnded(Exception):
    """The end of a command before its work is done. The exit status gives the reason, and `message` is for a person."""

    def __init__(self, status: int, message: str = ""):
        super().__init__(message)
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return text of any length and any characters as one printable line of at most `most` characters."""
    text = without_credentials(text)
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} ... {text[-2 * most :]}"
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= most:
        return text
    head = 2 * most // 3
    return f"{text[:head]} ... {text[head + 5 - most :]}"


def without_credentials(text: str) -> str:
    """Return text in which *** replaces the users, passwords and queries of its URIs."""
    return _URI.sub(_without_credentials, text)


def _without_credentials(uri: re.Match[str]) -> str:
    """Hide what stands before the last @ of a word, and what follows the first question mark after it."""
    _, at, place = uri[1].rpartition("@")
    place, mark, query = place.partition("?")
    return f"://{'***@' * bool(at)}{place}{mark}{'***' * bool(query)}"


# Control characters but for the tab and the line end, halves of characters, and what turns the direction of a text.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text of several lines as a terminal may have it.

    No character in it gives the terminal a command, or is half of one, which no stream can write.
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Short(reprlib.Repr):
    """`repr` that stops early: a value may be of any size and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 80, 80, 40

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_credentials(x), level)


def quoted(value: object) -> str:
    """Return a value as a message shows it: its `repr`, shortened."""
    return one_line(_Short().repr(value), 160)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise UserError unless `value` is one of `choices`: a `Literal`, or a collection of strings."""
    allowed = get_args(choices) or tuple(choices)
    if not isinstance(value, str) or value not in allowed:
        *first, last = allowed
        raise UserError(f"{name} must be {', '.join(first)} or {last}, but is {quoted(value)}")


def check_flag(name: str, value: object) -> None:
    """Raise UserError unless `value` is True or False; "False" would count as true."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False, but is {quoted(value)}")


def as_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a Python, NumPy or PyTorch integer as `int`.

    Raises UserError for anything else, truth values too, and for a number below `least` or above `most`.
    """
    try:
        if "bool" in str(getattr(value, "dtype", type(value))):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be an integer, but is {quoted(value)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"at most {most}" if least is None else f"from {least} to {most}"
        raise UserError(f"{name} must be {limit}, but is {quoted(number)}")
    return number


def check_number(name: str, value: object, least: float, below: float) -> None:
    """Raise UserError unless `value` is a number in [least, below)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
        raise UserError(f"{name} must be a number from {least:g} to below {below:g}, but is {quoted(value)}")


def as_list(name: str, value: Any, what: str) -> list:
    """Return a sequence, or an array of NumPy or PyTorch, as a list. Raises UserError for strings, generators and all else."""
    if isinstance(value, str | bytes | Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise UserError(f"{name} must be a list of {what}, but is {kind_of(value)}")
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        raise UserError(f"{name} must be a list of {what}, but is {kind_of(value)} of one value") from None


def check_type(name: str, value: object, wanted: type) -> None:
    """Raise UserError unless `value` is of type `wanted`."""
    if not isinstance(value, wanted):
        raise UserError(f"{name} must be of type {wanted.__name__}, but is {kind_of(value)}")


def check_string(name: str, value: object) -> None:
    """Raise UserError unless `value` is a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string, but is {kind_of(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{name} must be text that UTF-8 can hold, but has a surrogate: {quoted(value)}")


def kind_of(value: object) -> str:
    """Return what a value is, as a message names it: a short value itself, else its type."""
    if isinstance(value, str):
        return "one string"
    return quoted(value) if value is None or isinstance(value, bool | int | float) else f"a {type(value).__name__}"


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
    "MeCab": "ja",
    "ipadic": "ja",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "optuna": "tune",
    "huggingface_hub": "pretrained",
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "spacy": "spacy",
    "benepar": "benepar",
    "supar": "supar",
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


def require(modules: str | Sequence[str], purpose: str, instead: str = "") -> None:
    """Raise UserError if modules are missing: what needs them, one command that installs them, and what to do `instead`."""
    missing = [module for module in ([modules] if isinstance(modules, str) else modules) if not is_installed(module)]
    if missing:
        raise UserError(f"{_lack(purpose, *missing)}{f'; or {instead}' if instead else ''}")


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return the message for a user where a module of `EXTRAS` is missing; None for an error that no extra resolves."""
    module = (error.name or "").partition(".")[0]
    return _lack("this", module) if module in EXTRAS else None


def _lack(purpose: str, *modules: str) -> str:
    *others, last = modules
    named, verb = (f"{', '.join(others)} and {last}", "are") if others else (last, "is")
    return f"{purpose} needs {named}, which {verb} not installed: {_command(*modules)}"


def _command(*modules: str) -> str:
    """Return the command that installs all modules. It needs no index with this package, because the package is installed."""
    extras = dict.fromkeys(EXTRAS[module] for module in modules if module in EXTRAS)
    others = [module for module in modules if module not in EXTRAS]
    return " ".join(["pip install", *[f"'{PROGRAM}[{','.join(extras)}]'"] * bool(extras), *others])
