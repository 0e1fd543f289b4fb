"""Outputs at the places that users name: files, devices, pipes, and the open outputs of the process, such as `/dev/stdout`."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from treeproc.common.errors import UserError
from treeproc.common.files import atomic_output, remove_leftovers
from treeproc.common.storage import AnyPath, RemotePath

_OPEN = {"/dev/stdout": 1, "/dev/stderr": 2}
_OPEN_BY_NUMBER = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")


def _descriptor(path: AnyPath) -> int | None:
    """Return the number of the open file of this process that a path names; None for other paths."""
    match = _OPEN_BY_NUMBER.fullmatch(str(path))
    return int(match[1]) if match else _OPEN.get(str(path))


def is_stream(path: AnyPath) -> bool:
    """Return whether a path is a device or a pipe, or a link to one. Such a path passes data on, and is not a file afterwards.

    So is an open output of this process, such as `/dev/stdout`, also if the shell sends it to a file.
    """
    if isinstance(path, RemotePath):
        return False
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another name") from None
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def named_output(path: AnyPath) -> Iterator[IO[bytes]]:
    """Open an output at a place that a user named. A file is `atomic_output`, also behind a link, which stays a link.

    Streams are written to as they are: what the file of a redirect holds already stays. Raises UserError when the place or the
    disk refuses.
    """
    if not is_stream(path):
        if isinstance(path, Path):
            path = Path(os.path.realpath(path))
            remove_leftovers(path.parent, path.name)
        with atomic_output(path) as file:
            yield file
        return
    number = _descriptor(path)
    try:
        # To open /dev/stdout again would empty the file of a redirect. Such a file may take a part of a write, so it is buffered.
        with open(str(path), "wb", buffering=0) if number is None else os.fdopen(os.dup(number), "wb") as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
