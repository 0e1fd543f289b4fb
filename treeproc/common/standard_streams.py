"""Standard input, output and error that the caller closed, with `2>&-` or as some services do."""

import os
import sys

from treeproc.common.command_names import running_command
from treeproc.common.errors import UserError
from treeproc.common.messages import warn

# Commands and options whose result is what they print.
_PRINTING_COMMANDS, _PRINTING_OPTIONS = {"configs", "inspect"}, {"--dry-run", "--help", "-h"}
_output_is_lost = False


def open_lost_streams() -> None:
    """Open the null device under the numbers of the closed streams.

    Otherwise, the next file that the command opens would get the number of a closed stream, and messages of libraries would go
    into that file.
    """
    global _output_is_lost
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is this one
    _output_is_lost = sys.stdout is None
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def check_output(hint: str = "") -> None:
    """Raise UserError if standard output, to which the result goes, was closed. The hint is another way out."""
    if _output_is_lost:
        raise UserError(f"standard output is closed, but the result goes there; open it{hint and f', or {hint}'}")


def note_lost_output(arguments: list[str]) -> None:
    """Refuse a closed standard output for a command that only prints; for others, tell that they print nothing."""
    if not _output_is_lost:
        return
    if running_command() in _PRINTING_COMMANDS or _PRINTING_OPTIONS & {*arguments}:
        check_output()
    warn("note: standard output is closed, so the command does not show what it prints there")
