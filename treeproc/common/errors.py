"""The error that every command turns into one line, and the form of values in such a line."""

import re
import reprlib

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
