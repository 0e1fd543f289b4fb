"""The messages of a command: progress, notes and warnings, on standard error. Results go to standard output.

All go through the loggers of both packages. A program that imports the packages decides itself what it shows of them.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from treeproc.common.errors import one_line

PACKAGES = ("treeproc", "treenet")
_logger = logging.getLogger(__name__)


class _StandardError(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


_handler = _StandardError()


def tell(message: str) -> None:
    """Show a line about progress, which `--quiet` leaves out."""
    _logger.info("%s", _encodable(message))


def warn(message: str) -> None:
    """Show a warning or a note, which `--quiet` keeps."""
    _logger.warning("%s", _encodable(message))


def _encodable(message: str) -> str:
    """Escape halves of characters, which names in damaged files may have and which no stream can write."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")


def is_quiet() -> bool:
    """Return whether the command runs with `--quiet`, and so shows no progress."""
    return _handler.level >= logging.WARNING


def choose_messages(*, quiet: bool = False, verbose: bool = False) -> None:
    """Show only warnings with `quiet`; show also details, and the time of each line, with `verbose`."""
    _handler.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    _handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if verbose else "%(message)s"))


@contextmanager
def messages_shown(*, quiet: bool = False) -> Iterator[None]:
    """Show the messages of both packages on standard error, and warnings of Python's libraries as lines among them."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before, show = [(logger.level, logger.handlers[:]) for logger in loggers], warnings.showwarning
    choose_messages(quiet=quiet)
    for logger in loggers:
        logger.addHandler(_handler)
        logger.setLevel(logging.DEBUG)
    warnings.showwarning = _show_warning
    try:
        yield
    finally:
        warnings.showwarning = show
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
        choose_messages()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning of a library, without the line of code that it comes from."""
    warn(f"warning: {one_line(str(message))}")
