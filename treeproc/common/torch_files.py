"""Files that PyTorch wrote, from anybody: nothing in them is executed, and what is damaged is told in one line."""

import zipfile
from pathlib import Path
from typing import Any

from treeproc.common.errors import UserError, one_line

_MOST_SAID = 150


def check_archive(path: Path, mend: str) -> None:
    """Compare a file with its own checksums, where it has some: PyTorch's older form has none.

    Raises UserError, which ends in `mend`, for a file that is cut off or changed, or whose parts are larger than the file.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
        if begin == b"\x80\x02":  # a pickle, as PyTorch wrote them before 1.6 and some still do
            return
        if begin != b"PK":
            raise UserError(f"{path} is {'no file of PyTorch' if begin else 'empty'}; {mend}")
        with zipfile.ZipFile(path) as archive:
            # PyTorch compresses nothing: what unpacks to more than there is was made to fill the memory.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise UserError(f"{path} is no file of PyTorch's, as its parts are compressed; {mend}")
            damaged = archive.testzip()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; {mend}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged ({one_line(str(error), _MOST_SAID)}); {mend}") from None
    if damaged:
        raise UserError(f"{path} is damaged: {one_line(damaged, _MOST_SAID)} has another checksum; {mend}")


def load_archive(path: Path, mend: str) -> Any:
    """What `torch.save` wrote of tensors and plain values. Raises UserError, which ends in `mend`, for anything else."""
    import torch

    check_archive(path, mend)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch and pickle raise any kind on damaged files
        said = one_line(f"{type(error).__name__}: {error}", _MOST_SAID)
        raise UserError(f"{path} is damaged, or is no file of tensors ({said}); {mend}") from None
