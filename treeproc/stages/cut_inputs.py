"""Inputs whose examples can be read in parts: files on disk or in an object store, of a format with `ranges`.

Compressed files are unpacked first.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from treeproc.common.files import atomic_write, file_size, json_bytes, read_json
from treeproc.common.progress import phase
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import StoreRefuses
from treeproc.readers import FORMATS
from treeproc.readers.example_ends import NotCut
from treeproc.readers.line_ranges import CHUNK_BYTES, CutSide, Stamp, cut_file, stamp_of
from treeproc.readers.numbered_lines import text_blocks
from treeproc.readers.packed_files import is_archive, is_packed
from treeproc.stages.example_offsets import CountEnds, Unpack, mark_of
from treeproc.stages.run_jobs import Run, run_here
from treeproc.stages.text import Inputs

# Bytes of one job that counts examples.
COUNTED_BYTES = 256 << 20
# Up to here counting takes less time than the start of processes, except for sentences.
_COUNTED_HERE = 1 << 30


class CannotRead(UserError):
    """A file cannot be read, or is not what it must be."""


@dataclass(frozen=True)
class CutInputs:
    """The sides of every split that has files."""

    sides: Mapping[str, list[CutSide]]

    def of(self, inputs: Inputs, split: str) -> list[CutSide]:
        """Return the source that a split is read from, and the target if there is one."""
        return self.sides[split if inputs.splits[split].source else "train"]

    def examples(self, inputs: Inputs) -> dict[str, int]:
        """Return the number of examples of every split: of the longer side where one is shorter."""
        return {s: inputs.examples_before(s, max(side.lines for side in self.of(inputs, s))) for s in inputs.splits}


def paths_of(inputs: Inputs) -> list[AnyPath]:
    """Return the files of all splits and sides, each once."""
    return list(dict.fromkeys(path for files in inputs.splits.values() for side in (files.source, files.target) for path in side))


def bytes_that_can_be_cut(inputs: Inputs) -> int:
    """Return the bytes of the inputs if their examples can be read in parts, else 0."""
    paths = paths_of(inputs)
    if FORMATS[inputs.format].ranges is None or not all(path.is_file() for path in paths):
        return 0
    if inputs.format != "parallel" and any(map(is_archive, paths)):
        return 0
    files = inputs.splits.values()
    if {path for some in files for path in some.source} & {path for some in files for path in some.target}:
        return 0  # a file ends its examples in one way
    return sum(map(file_size, paths))


def _ends_of(inputs: Inputs) -> dict[AnyPath, str]:
    """Return how the examples of each file end."""
    ranges = FORMATS[inputs.format].ranges
    assert ranges is not None  # `bytes_that_can_be_cut`
    sources = {path for files in inputs.splits.values() for path in files.source}
    return {path: ranges.ends if path in sources else "lines" for path in paths_of(inputs)}


def cut_inputs(inputs: Inputs, work: AnyPath, run: Run) -> CutInputs:
    """Count the examples of all inputs. What was counted or unpacked before is in the folder `work`, and is not done again.

    Raises CannotRead for a file that cannot be read or cut.
    """
    names, ends = paths_of(inputs), _ends_of(inputs)
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
    return CutInputs(
        {
            split: [CutSide(tuple(files[path] for path in side)) for side in (sides.source, sides.target) if side]
            for split, sides in inputs.splits.items()
            if sides.source
        }
    )


def _check_beginning(inputs: Inputs, name: AnyPath) -> None:
    """Raise CannotRead for a file that cannot be opened or plainly has another format."""
    ranges = FORMATS[inputs.format].ranges
    assert ranges is not None  # `bytes_that_can_be_cut`
    is_source = any(name in files.source for files in inputs.splits.values())
    try:
        with closing(text_blocks(name, ranges.reading if is_source or inputs.format == "parallel" else "lines")) as blocks:
            next(blocks, None)
    except StoreRefuses:
        raise
    except UserError as error:
        raise CannotRead(str(error)) from None


def _check_empty(inputs: Inputs, name: AnyPath) -> None:
    """Raise CannotRead for a file without an example in which its reader finds something else."""
    try:
        deque(FORMATS[inputs.format].read([cast(Path, name)], []), maxlen=0)
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
        return read_json(note)
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
