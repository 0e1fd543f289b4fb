"""The ledger of a grid of runs: the state of every cell, on disk in FOLDER/ledger.json.

A cell is a name with settings. Its run is in FOLDER/cells/NAME and continues from its own checkpoints. So no run needs the ledger
to resume. The ledger has the remaining cells, their order, and what happened.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Required

from pydantic import with_config
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.config import OPERATIONAL, TrainConfig
from treenet.runs.mirror import mirror_of
from treeproc.common.errors import quoted
from treeproc.common.files import atomic_write, file_lock, json_bytes, lock_place, read_json
from treeproc.common.settings import UserError, build_settings, differences, is_below
from treeproc.common.storage import AnyPath, inside

LEDGER = "ledger.json"
_LOCK, _CELL_LOCK = ".ledger-lock", ".cell-lock"  # of FOLDER, held for one change, and of FOLDER/cells/NAME, held while it runs
WAITING, RUNNING, INTERRUPTED, FAILED, DONE = "waiting", "running", "interrupted", "failed", "done"
STOPPED = "stopped"  # by a search over settings, before its end
_ENCODER_FILES = ("the weights", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class Cell:
    """One run of a grid. `labels` are its coordinates, for reports; `data_fingerprint` is of the encoded data set.

    `encoder` has the hashes of the pretrained encoder's files (`_ENCODER_FILES`); it is empty without an encoder. The first
    records that we made have that of the weights alone, or none.
    """

    name: str
    labels: Mapping[str, Any]
    config: TrainConfig
    folder: AnyPath
    data_fingerprint: str
    encoder: str = ""


@dataclass(frozen=True)
class CellResult:
    """The outcome of one start of a cell: `done` with a result, `failed` with an error of one line, or `interrupted`."""

    status: str
    seconds: float
    result: dict = field(default_factory=dict)
    error: str = ""


@dataclass
class Entry:
    """A cell as an entry of ledger.json."""

    labels: dict
    settings: dict
    data_fingerprint: str
    status: str = WAITING
    starts: int = 0
    start_step: int = 0  # of the checkpoint that the last start continued from
    seconds: float = 0.0  # of all starts, without those whose process died
    result: dict = field(default_factory=dict)
    error: str = ""
    encoder: str = ""


@with_config(extra="forbid")
class _EntryForm(TypedDict, total=False):
    """The fields of `Entry`, as JSON."""

    labels: Required[dict[str, Any]]
    settings: Required[dict]
    data_fingerprint: Required[str]
    status: Literal["waiting", "running", "interrupted", "failed", "done", "stopped"]
    starts: int
    start_step: int
    seconds: float
    result: dict[str, float | None]
    error: str
    encoder: str


class _LedgerForm(TypedDict):
    cells: dict[str, _EntryForm]


def last_step(run_dir: AnyPath) -> int:
    """Return the step of the latest checkpoint, in a store of the latest complete one; 0 without one."""
    return mirror_of(run_dir).last_step()


class Ledger:
    """The entries of all cells that a grid has or ever had. Every change is on disk when the call returns.

    Several processes may work on one ledger, in a store those of one machine. Each change is made to the present file. A running
    cell belongs to the process that holds its lock. The system releases the lock if that process dies.
    """

    def __init__(self, path: AnyPath, entries: dict[str, Entry]):
        self._path, self.entries = path, entries
        self._starts: dict[str, int] = {}  # of the cells at the start of this command

    @classmethod
    def read(cls, folder: AnyPath) -> "Ledger":
        """Read the present ledger; it is empty if there is none."""
        path = folder / LEDGER
        if not path.exists():
            return cls(path, {})
        hint = f"remove it and run the same command again: finished runs in {folder / 'cells'} are kept"
        cells = read_json(path, hint, _LedgerForm)["cells"]
        for name in cells:
            inside(folder / "cells", name)
        return cls(path, {name: Entry(**facts) for name, facts in cells.items()})

    @classmethod
    def open(cls, folder: AnyPath, cells: Iterable[Cell]) -> "Ledger":
        """Open the ledger and add `cells` to it. Cells of an earlier grid stay.

        A cell that was running in a dead process becomes interrupted. Raises UserError if a cell that was started now has other
        settings or other data, unless it failed before its first checkpoint.
        """
        ledger = cls(folder / LEDGER, {})
        with ledger._changed():
            for cell in cells:
                old = ledger.entries.get(cell.name)
                new = entry_of(cell)
                if old is None or not old.starts:
                    ledger.entries[cell.name] = new
                elif _may_change(cell, old):
                    ledger.entries[cell.name] = replace(
                        new, status=FAILED, starts=old.starts, seconds=old.seconds, error=old.error
                    )
                else:
                    refuse_changes(folder, cell, old)
                    old.settings = new.settings
            ledger._interrupt_dead()
            for name, entry in ledger.entries.items():
                if entry.status == DONE and not (folder / "cells" / name / "scores.json").exists():
                    entry.status = INTERRUPTED  # its folder was removed or emptied
        ledger._starts = {name: entry.starts for name, entry in ledger.entries.items()}
        return ledger

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise UserError as `open` does, and write nothing."""
        for cell in cells:
            if (old := self.entries.get(cell.name)) is not None and not _may_change(cell, old):
                refuse_changes(self._path.parent, cell, old)

    def in_order(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells that are not done: interrupted ones first, failed ones last.

        Cells that failed since this command began are not there.

        An interrupted cell moves behind the cells that were never started if it has no newer checkpoint than at its last start.
        Such a cell may end the driver each time, and the others would never run. A running cell counts as interrupted.
        """

        def is_left(name: str) -> bool:
            entry = self.entries[name]
            return entry.status != DONE and not (entry.status == FAILED and entry.starts > self._starts.get(name, 0))

        def rank(cell: Cell) -> int:
            entry = self.entries[cell.name]
            if entry.status in (INTERRUPTED, RUNNING):
                return 0 if last_step(cell.folder) > entry.start_step else 2
            return {WAITING: 1, FAILED: 3}[entry.status]

        return sorted((cell for cell in cells if is_left(cell.name)), key=rank)

    @contextmanager
    def taken(self, cells: Iterable[Cell]) -> Iterator[Cell | None]:
        """Start the first cell in order that no process has, and hold it inside this context. None without one."""
        with ExitStack() as stack:
            with self._refreshed():
                cell = next((cell for cell in self.in_order(cells) if _hold(cell.folder, stack)), None)
                if cell is not None:
                    self._start(cell)
                    self._write()
            yield cell

    def start(self, cell: Cell) -> None:
        """Mark a cell as started, perhaps a new one. Its driver holds the whole folder."""
        with self._changed():
            self._start(cell)

    def end(self, cell: Cell, result: CellResult) -> None:
        with self._changed():
            entry = self.entries[cell.name]
            entry.status, entry.result, entry.error = result.status, result.result, result.error
            entry.seconds += result.seconds

    def reopen(self, cell: Cell) -> None:
        """Make a cell that is done run again."""
        with self._changed():
            self.entries[cell.name].status = INTERRUPTED

    def interrupt_dead(self) -> None:
        """Mark the cells as interrupted that were running in processes that died."""
        with self._changed():
            self._interrupt_dead()

    def counts(self) -> str:
        """Return the number of cells by status, for a person."""
        counts = Counter(entry.status for entry in self.entries.values())
        return ", ".join(f"{counts[name]} {name}" for name in (DONE, RUNNING, INTERRUPTED, WAITING, FAILED) if counts[name])

    def refresh(self) -> None:
        """Read what other processes wrote."""
        self.entries |= Ledger.read(self._path.parent).entries

    @contextmanager
    def _refreshed(self) -> Iterator[None]:
        """Read the entries of the file. No other process changes it inside this context."""
        with file_lock(lock_place(self._path.parent / _LOCK)):
            self.refresh()
            yield

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Read the entries of the file, and write them back at the end, unless an error is raised."""
        with self._refreshed():
            yield
            self._write()

    def _interrupt_dead(self) -> None:
        for name, entry in self.entries.items():
            if entry.status == RUNNING:
                with ExitStack() as stack:
                    if _hold(self._path.parent / "cells" / name, stack):
                        entry.status = INTERRUPTED

    def _start(self, cell: Cell) -> None:
        entry = self.entries.setdefault(cell.name, entry_of(cell))
        entry.status, entry.start_step, entry.error = RUNNING, last_step(cell.folder), ""
        entry.starts += 1

    def _write(self) -> None:
        cells = {name: asdict(entry) for name, entry in self.entries.items()}
        atomic_write(self._path, json_bytes({"cells": cells}, _LedgerForm))


def _may_change(cell: Cell, old: Entry) -> bool:
    """Return whether nothing depends on the settings of an entry: no start, or a failure before the first checkpoint."""
    return not old.starts or (old.status == FAILED and not last_step(cell.folder))


def entry_of(cell: Cell) -> Entry:
    """Return the entry of a cell that was not started."""
    return Entry(dict(cell.labels), cell.config.model_dump(mode="json"), cell.data_fingerprint, encoder=cell.encoder)


def _hold(folder: AnyPath, stack: ExitStack) -> bool:
    """Hold the folder of a cell until `stack` closes, unless another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(file_lock(lock_place(folder / _CELL_LOCK), wait=False))
    except BlockingIOError:
        return False
    return True


def changed_settings(labels: Mapping, settings: dict, data_fingerprint: str, encoder: str, cell: Cell, where: str) -> list[str]:
    """Return the differences between a recorded cell, in the file `where`, and the present one.

    They are its labels, and all settings, data and files of a pretrained encoder that its scores depend on.
    """
    # Records leave out settings at their defaults.
    before = build_settings(TrainConfig, settings, where).model_dump(mode="json")
    lines = differences(before, cell.config.model_dump(mode="json"))
    if not lines and list(before.get("lr_scale", ())) != list(cell.config.lr_scale):  # a dump has it only if it is set
        lines = ["lr_scale: another order of the same patterns"]  # of which the first that matches counts
    changed = differences(dict(labels), dict(cell.labels), "labels")
    changed += [line for line in lines if not is_below(line.partition(":")[0], OPERATIONAL)]
    if data_fingerprint != cell.data_fingerprint:
        changed.append(f"data fingerprint: {data_fingerprint} -> {cell.data_fingerprint}")
    hashes = zip(_ENCODER_FILES, encoder.split(), cell.encoder.split(), strict=False)  # of the files that both know
    changed += [f"{name} in {cell.config.model.pretrained.folder}" for name, before, now in hashes if before != now]
    return changed


def refuse_changes(folder: AnyPath, cell: Cell, old: Entry) -> None:
    """Raise UserError if an entry of the ledger in `folder` has other settings or other data than the present cell."""
    recorded = old.labels, old.settings, old.data_fingerprint, old.encoder
    if changed := changed_settings(*recorded, cell, str(folder / LEDGER)):
        raise UserError(
            f"{folder} holds cells with other settings ({cell.name}: {'; '.join(changed)}); choose another --out, or give the "
            "old settings"
        )


def check_labels(labels: Mapping, where: str, kinds: Mapping[str, type]) -> None:
    """Raise UserError for labels with other names or types."""
    for label, kind in kinds.items():
        value = labels.get(label)
        if not isinstance(value, (kind, int) if kind is float else kind):
            raise UserError(f"{where} is damaged: label {label} is {quoted(value)}; restore it")
