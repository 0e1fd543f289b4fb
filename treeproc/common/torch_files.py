"""Files of PyTorch from untrusted sources: nothing in them is executed, and damage is reported in one line."""

import zipfile
from pathlib import Path
from typing import Any

from treeproc.common.errors import UserError, one_line

_MESSAGE_CHARS = 150


def check_archive(path: Path, hint: str) -> None:
    """Compare a file with its own checksums, where it has some: PyTorch's older form has none.

    Raises UserError, which ends in `hint`, for a file that is cut off or changed, or whose parts are larger than the file.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
        if begin == b"\x80\x02":  # a pickle, as PyTorch wrote them before 1.6 and some still do
            return
        if begin != b"PK":
            raise UserError(f"{path} is {'not a PyTorch file' if begin else 'empty'}; {hint}")
        with zipfile.ZipFile(path) as archive:
            # PyTorch compresses nothing: what unpacks to more than there is was made to fill the memory.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise UserError(f"{path} is not a PyTorch file: its parts are compressed; {hint}")
            damaged = archive.testzip()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {hint}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged ({one_line(str(error), _MESSAGE_CHARS)}); {hint}") from None
    if damaged:
        raise UserError(f"{path} is damaged: {one_line(damaged, _MESSAGE_CHARS)} has the wrong checksum; {hint}")


def load_archive(path: Path, hint: str) -> Any:
    """Load tensors and plain values that `torch.save` wrote. Raises UserError, which ends in `hint`, for anything else."""
    import torch

    check_archive(path, hint)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch and pickle raise any kind on damaged files
        message = one_line(f"{type(error).__name__}: {error}", _MESSAGE_CHARS)
        raise UserError(f"{path} is damaged, or does not hold tensors ({message}); {hint}") from None
