"""Ranges of the examples of inputs: read from front to back, or from where a range begins.

Files can be cut that are on disk or in an object store, of a format with `ranges`. Compressed files are unpacked first.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import IO

from treeproc.common.files import MADE_AGAIN, atomic_output, atomic_write, file_size, json_bytes, read_json
from treeproc.common.messages import phase
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.common.store_requests import StoreRefuses
from treeproc.readers import FORMATS, Ranges, convert_rows
from treeproc.readers.example_ends import NotCut
from treeproc.readers.line_ranges import (
    CHUNK_BYTES,
    CutSide,
    Piece,
    Stamp,
    cut_file,
    look_at_ends,
    read_examples,
    read_range,
    stamp_of,
)
from treeproc.readers.numbered_lines import text_blocks
from treeproc.readers.packed_files import is_archive, is_packed, open_input
from treeproc.stages.inputs import Inputs
from treeproc.stages.run_jobs import Run, run_here

# Bytes of one job that counts examples.
COUNTED_BYTES = 256 << 20
# Up to here counting takes less time than the start of processes, except for sentences.
_COUNTED_HERE = 1 << 30
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TextRange:
    """The examples in a range of the lines of a split; its number is unique among the ranges of one step.

    Without pieces of files, it is read from the front of the split: so many examples from `first_id` on, or all.
    """

    split: str
    number: int
    first_id: int
    start: int = 0  # the first line, from 0, over the files of the split
    source: Sequence[Piece] = ()
    target: Sequence[Piece] = ()
    examples: int | None = None

    def job(self) -> dict:
        """Return the range as JSON, for `range_of`."""
        return {"range": asdict(self)}


def range_of(values: Mapping) -> TextRange:
    """Return the range of a `job`."""
    return TextRange(**{**values, **{side: list(map(_piece_of, values[side])) for side in ("source", "target")}})


def _piece_of(values: Mapping) -> Piece:
    return Piece(**{**values, "stamp": Stamp(*values["stamp"])})


class ReadRange:
    """Reads the examples of ranges. Uncut files stay open, so that the next range goes on where the last one ended."""

    def __init__(self, inputs: Inputs):
        self._inputs, self._split, self._next = inputs, "", 0
        self._rows: Iterator[dict] = iter(())

    def __call__(self, part: TextRange) -> Iterator[dict]:
        """Return the examples of a range, as `Inputs.rows` has them, with `example_id`. Raises UserError on bad input."""
        rows = self._cut(part) if part.source else self._go_on(part)
        return _with_column(rows, "example_id", count(part.first_id))

    def _cut(self, part: TextRange) -> Iterator[dict]:
        rows = read_examples(part.source, _ranges(self._inputs).read)
        if part.target:
            # As in `pair_up`, the source comes first: of two bad lines the first one is named.
            rows = _with_column(rows, "target", read_range(part.target))
        return self._inputs.of_split(
            part.split, convert_rows(rows, self._inputs.tokenized, self._inputs.normalization), part.start
        )

    def _go_on(self, part: TextRange) -> Iterator[dict]:
        if part.split != self._split or part.first_id < self._next:
            self._split, self._next, self._rows = part.split, 0, self._inputs.rows(part.split)
        skipped = part.first_id - self._next
        self._next = sys.maxsize if part.examples is None else part.first_id + part.examples
        return islice(self._rows, skipped, None if part.examples is None else skipped + part.examples)


def _with_column(rows: Iterator[dict], name: str, values: Iterable) -> Iterator[dict]:
    for row, value in zip(rows, values, strict=name == "target"):
        row[name] = value
        yield row


class CannotRead(UserError):
    """A file cannot be read, or is not what it must be."""


def bytes_that_can_be_cut(inputs: Inputs) -> int:
    """Return the bytes of the inputs if their examples can be read in parts, else 0."""
    paths = inputs.paths()
    if FORMATS[inputs.format].ranges is None or not all(path.is_file() for path in paths):
        return 0
    if inputs.format != "parallel" and any(map(is_archive, paths)):
        return 0
    files = inputs.splits.values()
    if {path for some in files for path in some.source} & {path for some in files for path in some.target}:
        return 0  # a file ends its examples in one way
    return sum(map(file_size, paths))


def _ranges(inputs: Inputs) -> Ranges:
    ranges = FORMATS[inputs.format].ranges
    assert ranges is not None  # `bytes_that_can_be_cut`
    return ranges


def _ends_of(inputs: Inputs) -> dict[AnyPath, str]:
    """Return how the examples of each file end."""
    sources = {path for files in inputs.splits.values() for path in files.source}
    return {path: _ranges(inputs).ends if path in sources else "lines" for path in inputs.paths()}


def cut_inputs(inputs: Inputs, work: AnyPath, run: Run) -> dict[str, list[CutSide]]:
    """Count the examples of all inputs. What was counted or unpacked before is in the folder `work`, and is not done again.

    Returns the source that each split is read from, and its target if there is one.
    Raises CannotRead for a file that cannot be read or cut.
    """
    names, ends = inputs.paths(), _ends_of(inputs)
    for name in names:
        _check_beginning(inputs, name)
    plain = _unpacked(names, work, run)
    stamps = {name: stamp_of(path) for name, path in plain.items()}
    found = _counted(plain, stamps, ends, work, run)
    files = {}
    for name, path in plain.items():
        try:
            cut = cut_file(path, str(name), stamps[name], found[str(name)], CHUNK_BYTES, ends[name])
        except NotCut as error:
            raise CannotRead(f"{name}: {error}") from None
        if not cut.lines and ends[name] != "lines":
            _check_empty(inputs, name)
        files[name] = cut
    sides = {}
    for split in inputs.splits:
        read = inputs.files(split)
        sides[split] = [CutSide(tuple(files[path] for path in side)) for side in (read.source, read.target) if side]
    return sides


def _check_beginning(inputs: Inputs, name: AnyPath) -> None:
    """Raise CannotRead for a file that cannot be opened or plainly has another format."""
    is_source = any(name in files.source for files in inputs.splits.values())
    reading = _ranges(inputs).reading if is_source or inputs.format == "parallel" else "lines"
    with _bad_input(), closing(text_blocks(name, reading)) as blocks:
        next(blocks, None)


def _check_empty(inputs: Inputs, name: AnyPath) -> None:
    """Raise CannotRead for a file without an example in which its reader finds something else."""
    with _bad_input():
        deque(FORMATS[inputs.format].read([name], []), maxlen=0)


@contextmanager
def _bad_input() -> Iterator[None]:
    try:
        yield
    except StoreRefuses:
        raise
    except UserError as error:
        raise CannotRead(str(error)) from None


def _unpacked(names: Sequence[AnyPath], work: AnyPath, run: Run) -> dict[AnyPath, AnyPath]:
    """Return where the lines of each file are."""
    plain = {name: work / f"unpacked-{i:04d}" if is_packed(name.name) else name for i, name in enumerate(names)}
    packed = [name for name, path in plain.items() if path != name and not mark_of(path).exists()]
    jobs = [{"path": str(name.absolute()), "to": str(plain[name])} for name in packed]
    with phase("unpacking"):
        for number, complete in run(Unpack, {}, jobs):
            if not complete:
                raise CannotRead(f"cannot read {packed[number]}: it is not a complete compressed file; copy it again")
    return {name: path.absolute() for name, path in plain.items()}


def _counted(
    plain: Mapping[AnyPath, AnyPath], stamps: Mapping[AnyPath, Stamp], ends: Mapping[AnyPath, str], work: AnyPath, run: Run
) -> dict[str, list]:
    """Return what is known of the ends of examples in every chunk of each file, by the name of the file."""
    note = work / "ends.json"
    if note.exists():
        return read_json(note, MADE_AGAIN)
    chunk, step = CHUNK_BYTES, max(CHUNK_BYTES, COUNTED_BYTES // CHUNK_BYTES * CHUNK_BYTES)
    jobs, owners = [], []
    for name, path in plain.items():
        for start in range(0, stamps[name].size, step):
            stop = min(start + step, stamps[name].size)
            jobs.append({"path": str(path), "kind": ends[name], "start": start, "stop": stop})
            owners.append(str(name))
    with phase("counting examples"):
        is_small = sum(stamp.size for stamp in stamps.values()) <= _COUNTED_HERE and "sentences" not in ends.values()
        results = dict((run_here if is_small else run)(CountEnds, {"chunk": chunk}, jobs))
    found: dict[str, list] = {str(name): [] for name in plain}
    for number, owner in enumerate(owners):
        if results[number] is None:
            raise CannotRead(f"cannot read {owner}: a line is too long")
        found[owner] += results[number]
    atomic_write(note, json_bytes(found))
    return found


class CountEnds:
    """Looks at the ends of examples in every chunk of a range of bytes of a file. Returns nothing if the file cannot be cut."""

    def __init__(self, chunk: int):
        self._chunk = chunk

    def __call__(self, path: str, kind: str, start: int, stop: int) -> list | None:
        try:
            return look_at_ends(as_path(path), kind, start, stop, self._chunk)
        except NotCut:
            return None


class Unpack:
    """Unpacks a compressed file from front to back. Returns whether it could read the file to its end; if not, it leaves no file.

    It writes `mark_of` the file last. Raises UserError when the disk or the store refuses.
    """

    def __call__(self, path: str, to: str) -> bool:
        target, size = as_path(to), 0
        try:
            with _output(target) as file:
                for content in _content_of(as_path(path)):
                    size += file.write(content)
        except _Unreadable:
            return False
        atomic_write(mark_of(target), json_bytes({"bytes": size}))
        return True


def mark_of(path: AnyPath) -> AnyPath:
    """Return the file that says of another file of a work folder that it is complete."""
    return path.parent / f"{path.name}.json"


def _output(path: AnyPath) -> AbstractContextManager[IO[bytes]]:
    """Open a stream to a file or object. Unpacked text may be larger than the disk of a node, so no local file holds it first."""
    return path.open_output() if isinstance(path, RemotePath) else atomic_output(path)


class _Unreadable(Exception):
    """The packed file cannot be read. An error of the disk while writing is not this error."""


def _content_of(path: AnyPath) -> Iterator[bytes]:
    try:
        with open_input(path) as packed:
            while content := packed.read(_READ_BYTES):
                yield content
    except OSError as error:
        raise _Unreadable from error
