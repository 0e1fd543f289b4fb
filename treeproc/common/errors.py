"""The error that every command turns into one line, the form of values in such a line, and checks of arguments that raise it.

A check names the argument, what it must be, and what it is.
"""

import operator
import re
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

from treeproc.common.command_names import as_called

# A message and the word that goes before it are a line of at most 500 characters.
MOST_CHARACTERS = 480
# User and password of a URI, up to the last @ of a word; and its query, which may hold a token.
_CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
_QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")


class UserError(Exception):
    """Bad input or configuration: one line with the mistake, its place, and what to do.

    A message that is too long loses its middle. It begins with the place, and ends with what to do. A script of `workflows/`
    in it gets the name by which the user calls it.
    """

    def __init__(self, message: str):
        super().__init__(one_line(as_called(message)))


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
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub("***@", text)) if "://" in text else text


def printable(text: str) -> str:
    """Return text of several lines as a terminal may have it: no character in it gives the terminal a command."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


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
