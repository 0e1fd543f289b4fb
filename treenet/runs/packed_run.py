"""Run folders in a zip file: unpacked once into the cache, after all that a zip from elsewhere may hold is checked.

Nothing is written outside the new folder. It appears under the hash of the zip when every member has its checksum.
"""

import hashlib
import shutil
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from treeproc.common.errors import quoted
from treeproc.common.files import TEMPORARY_PREFIX, cache_folder, file_lock
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, open_seekable

_MOST_MEMBERS = 10_000
_MOST_PER_BYTE = 100  # unpacked bytes of a packed one: weights hardly shrink, texts to a tenth
_AGAIN = "zip the run again, or copy the zip again"


def is_packed_run(path: AnyPath) -> bool:
    """Return whether a path is a zip file, by its name."""
    return path.suffix == ".zip" and path.is_file()


def unpack_run(path: AnyPath) -> Path:
    """Return the folder of the run in a zip file, which has the run itself or one folder with it.

    Raises UserError for a file that is no such zip or is damaged, and for a member that is a link or has a place elsewhere.
    """
    places = cache_folder() / "runs"
    try:
        with open_seekable(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            place = places / f"{path.name}-{digest[:32]}"
            places.mkdir(parents=True, exist_ok=True)
            with file_lock(places / ".unpack-lock"):
                if not place.is_dir():
                    _unpack(path, zipfile.ZipFile(file), place)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a zip file ({quoted(str(error))}); {_AGAIN}") from None
    except OSError as error:
        raise UserError(f"cannot unpack {path}: {error.strerror or error}; free space, or set TREE_ATTENTION_CACHE") from None
    return next(found.parent for found in (place / CONFIG, *place.glob(f"*/{CONFIG}")) if found.is_file())


def _unpack(path: AnyPath, archive: zipfile.ZipFile, place: Path) -> None:
    members = [member for member in archive.infolist() if not member.is_dir()]
    _check(path, members)
    temporary = place.with_name(f"{TEMPORARY_PREFIX}{place.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed: the lock is ours
    try:
        for member in members:
            target = temporary / member.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(target, "xb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(path: AnyPath, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise UserError for the first member that does not belong into a run folder, or for a zip of another kind."""
    if len(members) > _MOST_MEMBERS:
        raise UserError(f"{path} has {len(members):,} files, but a run has at most {_MOST_MEMBERS:,}; give the zip of a run")
    for member in members:
        name, parts = quoted(member.filename), PurePosixPath(member.filename).parts
        kind = stat.S_IFMT(member.external_attr >> 16)
        if not parts or parts[0] == "/" or ".." in parts or "\\" in member.filename or ":" in parts[0]:
            raise UserError(f"{path}: the member {name} does not name a file in its folder; {_AGAIN}")
        if kind not in (0, stat.S_IFREG):
            raise UserError(f"{path}: the member {name} is a link or a device, but must be a file; {_AGAIN}")
        if member.flag_bits & 1:
            raise UserError(f"{path}: the member {name} is encrypted; zip the run without a password")
        if member.file_size > _MOST_PER_BYTE * (member.compress_size + 100):
            raise UserError(f"{path}: the member {name} would become {member.file_size:,} bytes; {_AGAIN}")
    names = [PurePosixPath(member.filename) for member in members]
    if not any(name.name == CONFIG and len(name.parts) <= 2 for name in names):
        raise UserError(f"{path} has no {CONFIG}, so it is not the zip of a run; zip the folder of a run")
    if len(set(names)) < len(names) or not {one for name in names for one in name.parents}.isdisjoint(names):
        raise UserError(f"{path} has a file twice, or one that is a folder too; {_AGAIN}")
