"""Run folders in an object store: every machine works in a local folder, its mirror of the folder in the store.

The content of the store counts, so another machine can continue from it. A folder with a `meta.json` (a checkpoint, the average)
is uploaded with that file last. So the folder is complete in the store when that file exists. Every other file is uploaded when
it changed. Several files travel at a time.
"""

import fnmatch
import hashlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath

from treenet.runs.checkpoint import (
    INITIAL,
    META,
    checkpoint_folders,
    checkpoint_step,
    read_object,
    remove_checkpoint,
)
from treenet.runs.result_entries import PROBES, SCORES, SEARCHED
from treenet.runs.run_folder import FACTS, is_packed_run, unpack_run
from treeproc.common.errors import UserError, rewording
from treeproc.common.files import (
    OTHER_CACHE,
    TEMPORARY_PREFIX,
    atomic_output,
    cache_folder,
    file_lock,
    json_bytes,
    locked,
    remove_leftovers,
)
from treeproc.common.folder_kinds import CONFIG, RESULTS, claim_folder
from treeproc.common.messages import warn
from treeproc.common.storage import AnyPath, RemotePath, inside
from treeproc.common.store_requests import give_up_after, may_give_up, run_all

# Seconds between two searches for files to upload and for a request to stop.
POLL_S = 2.0
RAY_FOLDER = "ray"  # Ray Train's own notes, in the run folder during training
STOP_FILE = "stop-requested"
_OF_ENTRIES = (SCORES, PROBES)  # to which several commands add
_OF_TRAINING = (CONFIG, FACTS, "metrics.jsonl", "provenance.json")  # which no command writes into a mirror to read
_LIKE_STORE = 0  # time of change of a file that is the same in the store: one that was written here since then has another
_USED = ".used-lock"  # of a mirror to read, held by those that read and write there
_NEVER_PULLED = (f"{RAY_FOLDER}/", "tensorboard/")  # a resumed run starts a new event file


class RunMirror:
    """The run folder `out` of this machine, and the `folder` to work in, which is the same. Nothing is fetched or uploaded."""

    out: AnyPath

    def __init__(self, folder: Path):
        self.out = self.folder = folder

    def pull(self) -> None:
        """Make the local folder equal the run."""

    def push(self) -> None:
        """Make the run equal the local folder. Raises UserError if the store refuses."""

    def watch(self, stop_file: Path) -> AbstractContextManager[None]:
        """Push in a thread, and at the end. A request to stop creates `stop_file` here."""
        return nullcontext()

    def check_folders(self) -> None:
        """Raise UserError if a folder that the mirror should read is not there."""

    def last_step(self) -> int:
        """Return the step of the last checkpoint, or 0."""
        return max(map(checkpoint_step, checkpoint_folders(self.out)), default=0)

    def ask_to_stop(self) -> None:
        """Ask the machine that trains to stop."""

    def forget_stop(self) -> None:
        """Take such a request back."""

    def remove_ray_folder(self) -> None:
        """Remove the folder RUN/ray of Ray Train, which holds markers of a finished run."""
        shutil.rmtree(self.folder / RAY_FOLDER, ignore_errors=True)


class StoredRun(RunMirror):
    """A run folder in an object store. `folder` is its mirror on this machine.

    `only` has patterns of folders such as "averaged" or "checkpoints/*". With it, the mirror reads those folders, and the weights
    that the run started from, which count as its untrained ones. It writes results beside them, and removes nothing in the store
    but the file of a search that was completed.
    """

    out: RemotePath

    def __init__(self, out: RemotePath, only: Collection[str] | None = None):
        super().__init__(_place(out, reads=only is not None))
        self.out, self._only = out, only
        self._same: dict[str, tuple[int, int]] = {}  # size and time of local files that are the same in the store
        self._folders_there: set[str] = set()
        self._entries: dict[str, dict] = {}  # of results, as they were pulled

    def pull(self) -> None:
        """Make the local folder equal the one in the store, without incomplete uploads.

        A mirror to read keeps its local results while another process uses it, which may be about to upload them.
        """
        with _exclusive(self.folder):
            there = self.out.objects()
            folders = _folders_with_meta(there)
            cut_off = {_folder_of(name) for name in there if name.startswith("checkpoints/")} - folders
            self._folders_there = set(folders)
            is_free = self._only is None or _is_free(self.folder)
            self._remove_all_but(there, folders, is_free)
            for folder in cut_off if self._only is None else ():
                self._remove_there(folder)
            for folder in sorted(filter(self._reads, folders)):
                with suppress(FileNotFoundError):  # the machine that trains has just removed it
                    self._pull_folder(folder, [name for name in there if _folder_of(name) == folder], there)
            others = [name for name in there if _is_pulled(name) and _folder_of(name) not in folders | cut_off]
            run_all(self._download, [name for name in others if not self._keeps(name, there[name], is_free)])
            self._same = {name: _stamp((self.folder / name).stat()) for name in _files_below(self.folder)}
            self._entries = {name: read_object(self.folder / name) for name in _OF_ENTRIES}

    def push(self) -> None:
        """Upload changed files, and remove checkpoints that were removed here. Raises UserError if the store refuses."""
        names = _files_below(self.folder)
        folders = _folders_with_meta(names)
        if CONFIG in names:
            self._upload(CONFIG)  # first: it says that the folder is a run
        run_all(self._upload, [n for n in names if _folder_of(n) not in folders and not n.startswith("checkpoints/")])
        for folder in sorted(folders, key=lambda name: (name != INITIAL, name)):  # checkpoints may need those weights
            with suppress(FileNotFoundError):  # a later checkpoint has replaced it
                self._push_folder(folder, [name for name in names if _folder_of(name) == folder])
        if self._only is None:
            for folder in self._folders_there - folders:
                self._remove_there(folder)
        for name in [one for one in self._same if one.startswith(SEARCHED) and one not in names]:
            (self.out / name).unlink(missing_ok=True)
            del self._same[name]

    @contextmanager
    def watch(self, stop_file: Path) -> Iterator[None]:
        """Upload changes in a thread, and at the end. An object with the name of `stop_file` creates that file here.

        The work continues while the store cannot be reached, and the missing files follow later. Raises UserError if the store
        does not come back before the end.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._follow, args=(stop_file, done), daemon=True)
        thread.start()
        with may_give_up():
            try:
                yield
            except BaseException as error:
                give_up_after(error)
                done.set()
                thread.join()
                with suppress(UserError):
                    self.push()
                raise
        done.set()
        thread.join()
        self.push()

    def check_folders(self) -> None:
        for folder in self._only or ():
            if not fnmatch.filter(self._folders_there, folder):
                there = ", ".join(sorted(self._folders_there)) or "none"
                raise UserError(f"{self.out / folder} is missing; train to the end, or choose another (there are: {there})")

    def ask_to_stop(self) -> None:
        (self.out / STOP_FILE).write_bytes(b"")

    def forget_stop(self) -> None:
        (self.out / STOP_FILE).unlink(missing_ok=True)

    def remove_ray_folder(self) -> None:
        run_all(lambda name: (self.out / RAY_FOLDER / name).unlink(missing_ok=True), (self.out / RAY_FOLDER).objects())

    def _follow(self, stop_file: Path, done: threading.Event) -> None:
        last_error = ""
        while not done.wait(POLL_S):
            try:
                if (self.out / STOP_FILE).exists():
                    stop_file.touch()
                self.push()
                last_error = ""
            except UserError as error:
                if not last_error:
                    warn(f"warning: {error}; training goes on and will upload later")
                last_error = str(error)

    def _reads(self, folder: str) -> bool:
        return self._only is None or folder == INITIAL or any(fnmatch.fnmatchcase(folder, pattern) for pattern in self._only)

    def _remove_all_but(self, there: Collection[str], folders: Collection[str], results: bool) -> None:
        """Remove files that the store does not have, with `results` those outside of checkpoints too.

        Either their upload was never finished, or they were removed there. A search that was killed continues from its file.
        """
        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        for name in _files_below(self.folder):
            folder = _folder_of(name)
            if folder.startswith("checkpoints/"):
                if folder not in folders:
                    remove_checkpoint(self.folder / folder)
            elif name not in there and results and not name.startswith(SEARCHED):
                (self.folder / name).unlink(missing_ok=True)

    def _keeps(self, name: str, size: int, is_free: bool) -> bool:
        """Return whether the file here stays, because it may have more than the one in the store, which has `size` bytes."""
        try:
            here = (self.folder / name).stat()
        except FileNotFoundError:
            return False
        is_new = here.st_mtime_ns != _LIKE_STORE and name not in _OF_TRAINING
        return (not is_free and is_new) or (name.startswith(SEARCHED) and here.st_size >= size)

    def _pull_folder(self, folder: str, names: list[str], there: dict[str, int]) -> None:
        here, meta = inside(self.folder, folder), f"{folder}/{META}"
        content = (self.out / meta).read_bytes()
        if not (
            (here / META).is_file()
            and (here / META).read_bytes() == content
            and all((self.folder / name).is_file() and (self.folder / name).stat().st_size == there[name] for name in names)
        ):
            remove_checkpoint(self.folder / folder)
            run_all(self._download, [name for name in names if name != meta])
            self._download(meta)

    def _push_folder(self, folder: str, names: list[str]) -> None:
        meta = f"{folder}/{META}"
        stamp = _stamp((self.folder / meta).stat())
        if self._same.get(meta) == stamp:
            return
        self._folders_there.add(folder)
        (self.out / meta).unlink(missing_ok=True)
        run_all(self._put, [name for name in names if name != meta])
        self._put(meta)
        self._same[meta] = stamp

    def _remove_there(self, folder: str) -> None:
        (self.out / folder / META).unlink(missing_ok=True)
        run_all(lambda name: (self.out / folder / name).unlink(missing_ok=True), (self.out / folder).objects())
        self._folders_there.discard(folder)

    def _download(self, name: str) -> None:
        path = inside(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (self.out / name).open() as source, atomic_output(path) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        os.utime(str(path), ns=(_LIKE_STORE, _LIKE_STORE))

    def _put(self, name: str) -> None:
        with open(self.folder / name, "rb") as file:
            (self.out / name).write_file(file)

    def _upload(self, name: str) -> None:
        with suppress(FileNotFoundError), open(self.folder / name, "rb") as file:  # a file may disappear during this loop
            stamp = _stamp(os.fstat(file.fileno()))  # of what is open: another thread may replace the file
            if self._same.get(name) != stamp:
                if self._only is not None and name in _OF_ENTRIES:
                    (self.out / name).write_bytes(self._with_entries_there(name))
                else:
                    (self.out / name).write_file(file)
                os.utime(file.fileno(), ns=(_LIKE_STORE, _LIKE_STORE))
                self._same[name] = stamp[0], _LIKE_STORE

    def _with_entries_there(self, name: str) -> bytes:
        """Return a file of results with the entries that other machines wrote since the pull."""
        own, before = read_object(self.folder / name), self._entries.get(name, {})
        new = {key: entry for key, entry in own.items() if before.get(key) != entry}
        return json_bytes(read_object(self.out / name) | new)


def mirror_of(out: AnyPath, only: Collection[str] | None = None) -> RunMirror:
    """Return the mirror of a run folder, to read the folders `only`, as `StoredRun` takes them, or to train in."""
    return StoredRun(out, only) if isinstance(out, RemotePath) else RunMirror(out)


@contextmanager
def open_run(out: AnyPath) -> Iterator[RunMirror]:
    """Open a run folder to train in. No other process of this machine may write to it until the end.

    If it is in an object store, it is downloaded first. Changes are uploaded at the end, also after an error.
    """
    mirror = mirror_of(out)
    with may_give_up(), locked(out):
        mirror.pull()
        remove_leftovers(mirror.folder)
        with _pushed_at_end(mirror):
            yield mirror


@contextmanager
def _pushed_at_end(mirror: RunMirror) -> Iterator[None]:
    """Push at the end, also after an error. Then the store's own errors are left out. Other errors name the run in the store."""
    try:
        with rewording({str(mirror.folder): str(mirror.out)}):
            yield
    except BaseException as error:
        give_up_after(error)
        with suppress(UserError):
            mirror.push()
        raise
    mirror.push()


@contextmanager
def read_run(out: AnyPath, *folders: str) -> Iterator[Path]:
    """Open a run folder with some of its folders, given as names or patterns; or the zip of one, which is only read.

    Results written beside them go to the store at the end, also after an error: a command promises that it kept them.

    Training may continue at the same time. Raises UserError if a folder is not in the store.
    """
    if is_packed_run(out):
        yield unpack_run(out)
        return
    mirror = mirror_of(out, folders)
    mirror.pull()
    mirror.check_folders()
    used = file_lock(mirror.folder / _USED, shared=True) if isinstance(out, RemotePath) else nullcontext()
    with may_give_up(), used, _pushed_at_end(mirror):
        yield mirror.folder


@contextmanager
def open_results(out: AnyPath, *folders: str) -> Iterator[Path]:
    """Open a run folder as `read_run` does, for a command that writes results into it.

    Raises UserError if `out` is a folder of another kind, or a zip.
    """
    if is_packed_run(out):
        raise UserError(f"{out}: the command writes its results beside the run; unpack the zip, and give the folder")
    claim_folder(out, RESULTS)
    with read_run(out, *folders) as folder:
        remove_leftovers(folder)
        yield folder


def _place(remote: RemotePath, reads: bool) -> Path:
    """Return the local place of a run. Two runs never share a folder, and no run is inside another."""
    digest = hashlib.sha256(str(remote).encode()).hexdigest()[:12]
    return cache_folder() / "runs" / f"{remote.name}-{digest}{'-read' * reads}"


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let the ranks of one machine fetch the run one after the other. The first one does the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to the cache {folder}: {error.strerror}; {OTHER_CACHE}") from None
    with file_lock(folder / ".pull-lock"):
        yield


def _is_free(folder: Path) -> bool:
    """Return whether no other process reads a run in this mirror."""
    try:
        with file_lock(folder / _USED, wait=False):
            return True
    except BlockingIOError:
        return False


def _is_pulled(name: str) -> bool:
    """Return whether an object belongs into the mirror. Locks and files of Ray do not."""
    hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    return not (hidden or name.startswith(_NEVER_PULLED) or name == STOP_FILE)


def _folders_with_meta(names: Collection[str]) -> set[str]:
    """Return the folders below the run, without the run itself, that have a meta.json."""
    return {_folder_of(name) for name in names if PurePosixPath(name).name == META} - {""}


def _folder_of(name: str) -> str:
    parent = str(PurePosixPath(name).parent)
    return "" if parent == "." else parent


def _files_below(folder: Path) -> list[str]:
    """Return the names of files that belong to the run, without locks, incomplete files and files of Ray."""
    found = []
    for root, folders, files in os.walk(folder):
        place = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY_PREFIX) and str(place / name) != RAY_FOLDER]
        found += [(place / name).as_posix() for name in files if not name.startswith(".") and name != STOP_FILE]
    return sorted(found)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
