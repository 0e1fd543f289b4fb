"""The facts of a run folder in run.json, the checkpoint that a command takes, and run folders in a zip file.

A checkpoint is `averaged`, `initial`, the number of a step, or the path of a folder.

A zip is unpacked once into the cache, after all that a zip from elsewhere may hold is checked. Nothing is written outside the new
folder. It appears under the hash of the zip when every member has its checksum.
"""

import hashlib
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, overload

from pydantic import Field
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.runs.checkpoint import AVERAGED, INITIAL, META, WEIGHTS, folder_name, read_object
from treeproc.common.errors import one_line, quoted
from treeproc.common.files import TEMPORARY_PREFIX, cache_folder, file_lock, read_json
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, DataPath, RemotePath, as_path, open_seekable

FACTS = "run.json"
EXPORT_FACTS = "export.json"  # of an exported run: what it is, and its files


class InitFacts(TypedDict):
    """The weights of another run that a run started from, and how many parameters took values of them."""

    checkpoint: str
    weights_sha256: str
    vocab_fingerprint: str
    task: str
    model: str
    taken: int
    in_part: int
    new: int


class CorpusFacts(TypedDict):
    """A file of the training split: its examples, their weight, and how many of them an epoch has, copies included."""

    file: str
    examples: int
    weight: float
    in_epoch: int


class RunFacts(TypedDict, total=False):
    """The fields of run.json that readers use."""

    data_fingerprint: str
    vocab_fingerprint: str
    pieces_fingerprint: str  # missing in earlier runs, as the next
    tree_settings: dict[str, Any]  # of the data set: how its trees were made
    num_pieces: int
    num_labels: int
    num_pos_tags: int
    num_deprels: int
    num_classes: int
    classes: list[str]  # names in the order of their numbers
    pairs: bool  # only with classes of pairs
    parameters: int
    frozen: int  # of the parameters; only with `freeze`
    init: InitFacts  # only with `init`
    initial: str  # sha256 of the weights in RUN/initial; only with `init` or a pretrained encoder
    examples: int
    leaves: int
    nodes: int
    target_tokens: int
    left_out: dict[str, int]
    batches_per_epoch: int
    pretrained: dict  # the settings and the tokenizer of a pretrained encoder
    states: str  # sha256 of the encoder whose states the run reads; only with `frozen_states`
    corpora: list[CorpusFacts]  # only with `batch.corpora`


def read_facts(run_dir: AnyPath, hint: str = "", needed: tuple[str, ...] = ()) -> RunFacts:
    """Read the facts of a run. Raises UserError with `hint` if they cannot be read or lack something `needed`."""
    return read_json(run_dir / FACTS, hint or "restore it", RunFacts, needed)


# Settings of commands that read a run.
Checkpoint = Annotated[
    str,
    Field(coerce_numbers_to_str=True, description="'averaged', the number of a step, or the path of a checkpoint folder"),
]
OtherData = Annotated[
    DataPath | None, Field(description="another data set of the same vocabulary; unset, the data set of the run")
]


def checkpoint_names(checkpoint: str) -> tuple[str, ...]:
    """Return the folder in a run of `averaged`, `initial` or a step number; nothing for a path, which is elsewhere."""
    if re.fullmatch("[0-9]{1,18}", checkpoint):
        return (f"checkpoints/{folder_name(int(checkpoint))}",)
    return (checkpoint,) if checkpoint in (AVERAGED, INITIAL) else ()


def absolute_checkpoint(checkpoint: str) -> str:
    """Return a checkpoint for a process with another working folder: a path becomes absolute."""
    return checkpoint if checkpoint_names(checkpoint) else str(as_path(checkpoint).absolute())


@overload
def checkpoint_path(run: Path, checkpoint: str) -> Path: ...
@overload
def checkpoint_path(run: AnyPath, checkpoint: str) -> AnyPath: ...
def checkpoint_path(run: AnyPath, checkpoint: str) -> AnyPath:
    """Return the folder of `averaged`, of `initial`, of a step number, or of a path to a checkpoint. It need not exist.

    Raises UserError for the URI of a checkpoint.
    """
    if names := checkpoint_names(checkpoint):
        return run / names[0]
    if isinstance(place := as_path(checkpoint), RemotePath):
        raise UserError(f"checkpoint must be averaged, a step or a local path, but is {place}; give its run as --out, and a step")
    return place


def name_in_results(run: Path, folder: Path) -> str:
    """Return the name of a checkpoint folder in results of `run`: of one that is not its own, `weights-` and two folders' names.

    The parts of a result's name have a dot between them, so these names have none.
    """
    place = folder.resolve()
    if place in (run.resolve() / name for name in (AVERAGED, INITIAL, f"checkpoints/{place.name}")):
        return place.name
    other = place.parent.parent if place.parent.name == "checkpoints" else place.parent
    return f"weights-{other.name}-{place.name}".replace(".", "_")


def recorded_sha256(folder: AnyPath) -> str | None:
    """Return the sha256 of the weights in a checkpoint folder, from its meta.json; None if there are no weights."""
    return hash_in(read_object(folder / META), WEIGHTS)


def hash_in(meta: Mapping, file: str) -> str | None:
    """Return the sha256 of a file that a meta.json names; None if it names none."""
    try:
        return meta["files"][file]["sha256"]
    except (KeyError, TypeError):
        return None


_MOST_MEMBERS = 10_000
_MOST_PER_BYTE = 100  # unpacked bytes of a packed one: weights hardly shrink, texts to a tenth
_AGAIN = "zip the run again, or copy the zip again"


def is_packed_run(path: AnyPath) -> bool:
    """Return whether a path is a zip file, by its name."""
    return path.suffix == ".zip" and path.is_file()


def is_unpacked(run: Path) -> bool:
    """Return whether a folder is that of a zip in the cache, where changes are lost."""
    places = cache_folder() / "runs"
    return run.is_relative_to(places) and re.fullmatch(r".+\.zip-[0-9a-f]{32}", run.relative_to(places).parts[0]) is not None


def choose_remedy(run: Path, own: str, zipped: str) -> str:
    """Return what mends a run: `own` in its folder, or `zipped` if it came in a zip. An exported run can only be copied."""
    if (run / EXPORT_FACTS).is_file():
        return "copy the exported run again"
    return zipped if is_unpacked(run) else own


def unpack_run(path: AnyPath) -> Path:
    """Return the folder of the run in a zip file, which has the run itself or one folder with it.

    Raises UserError for a file that is no such zip or is damaged, and for a member that is a link or has a place elsewhere.
    """
    places = cache_folder() / "runs"
    try:
        with open_seekable(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has `readinto`
            place = places / f"{path.name}-{digest[:32]}"
            places.mkdir(parents=True, exist_ok=True)
            with file_lock(places / ".unpack-lock"):
                archive = zipfile.ZipFile(file)
                if not _is_whole(archive, place):
                    shutil.rmtree(place, ignore_errors=True)
                    _unpack(path, archive, place)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a zip file ({quoted(str(error))}); {_AGAIN}") from None
    except OSError as error:
        raise UserError(f"cannot unpack {path}: {error.strerror or error}; free space, or set TREE_ATTENTION_CACHE") from None
    return next(found.parent for found in (place / CONFIG, *place.glob(f"*/{CONFIG}")) if found.is_file())


def _is_whole(archive: zipfile.ZipFile, place: Path) -> bool:
    """Return whether the files of the archive are in a folder as they were unpacked: a cache may be cleaned, or damaged."""
    try:
        return place.is_dir() and all(
            _crc32(place / member.filename) == member.CRC for member in archive.infolist() if not member.is_dir()
        )
    except OSError:
        return False


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found = zlib.crc32(block, found)
    return found


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
    runs = sorted(str(name.parent) for name in names if name.name == CONFIG and len(name.parts) <= 2)
    if not runs:
        raise UserError(f"{path} has no {CONFIG}, so it is not the zip of a run; zip the folder of a run")
    if "." not in runs and len(runs) > 1:
        raise UserError(f"{path} has several runs ({one_line(', '.join(runs), 160)}); zip the folder of one")
    if len(set(names)) < len(names) or not {one for name in names for one in name.parents}.isdisjoint(names):
        raise UserError(f"{path} has a file twice, or one that is a folder too; {_AGAIN}")
