"""Inputs whose lines can be read in parts: plain or .gz files of parallel lines, on disk or in an object store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeproc.common.files import atomic_write, file_size, json_bytes, read_json
from treeproc.common.progress import phase
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.readers.line_ranges import CHUNK_BYTES, CutSide, Stamp, cut_file, stamp_of
from treeproc.stages.line_counts import CountLines, Unpack, mark_of
from treeproc.stages.running import Run, run_here
from treeproc.stages.text import Inputs

# Bytes of one job that counts lines.
COUNTED_BYTES = 256 << 20
# Up to here counting takes less time than the start of processes.
_COUNTED_HERE = 1 << 30


class CannotRead(UserError):
    """A file cannot be read, or is a damaged .gz file."""


@dataclass(frozen=True)
class CutInputs:
    """Both sides of every split that has files."""

    sides: Mapping[str, tuple[CutSide, CutSide]]

    def of(self, inputs: Inputs, split: str) -> tuple[CutSide, CutSide]:
        """The sides that a split is read from."""
        return self.sides[split if inputs.splits[split].source else "train"]

    def examples(self, inputs: Inputs) -> dict[str, int]:
        """The number of examples of every split: of the longer side where one is shorter."""
        return {s: inputs.examples_before(s, max(side.lines for side in self.of(inputs, s))) for s in inputs.splits}


def paths_of(inputs: Inputs) -> list[AnyPath]:
    """The files of all splits and sides, each once."""
    return list(dict.fromkeys(path for files in inputs.splits.values() for side in (files.source, files.target) for path in side))


def bytes_that_can_be_cut(inputs: Inputs) -> int:
    """Bytes of the inputs if their lines can be read in parts, else 0."""
    paths = paths_of(inputs)
    if inputs.format != "parallel" or not all(path.is_file() for path in paths):
        return 0
    return sum(map(file_size, paths))


def cut_inputs(inputs: Inputs, work: AnyPath, run: Run) -> CutInputs:
    """Count the lines of all inputs. What was counted or unpacked before is in the folder `work`, and is not done again.

    Raises CannotRead for a file that cannot be read.
    """
    names = paths_of(inputs)
    for name in names:
        try:
            name.open("rb").close()
        except OSError as error:
            raise CannotRead(f"cannot read {name}: {error.strerror or error}") from None
    plain = _unpacked(names, work, run)
    stamps = {name: stamp_of(path) for name, path in plain.items()}
    counts = _counted(plain, stamps, work, run)
    files = {name: cut_file(path, str(name), stamps[name], counts[str(name)], CHUNK_BYTES) for name, path in plain.items()}
    return CutInputs(
        {
            split: (CutSide(tuple(files[p] for p in sides.source)), CutSide(tuple(files[p] for p in sides.target)))
            for split, sides in inputs.splits.items()
            if sides.source
        }
    )


def _unpacked(names: Sequence[AnyPath], work: AnyPath, run: Run) -> dict[AnyPath, AnyPath]:
    """Where the lines of each file are."""
    plain = {name: work / f"unpacked-{i:04d}" if name.suffix == ".gz" else name for i, name in enumerate(names)}
    packed = [name for name, path in plain.items() if path != name and not mark_of(path).exists()]
    jobs = [{"path": str(name.absolute()), "to": str(plain[name])} for name in packed]
    with phase("unpacking"):
        for number, complete in run(Unpack, {}, jobs):
            if not complete:
                raise CannotRead(f"cannot read {packed[number]}: it is not a complete .gz file; copy it again")
    return {name: path.absolute() for name, path in plain.items()}


def _counted(plain: Mapping[AnyPath, AnyPath], stamps: Mapping[AnyPath, Stamp], work: AnyPath, run: Run) -> dict[str, list[int]]:
    """Line ends in every chunk of each file, by the name of the file."""
    note = work / "lines.json"
    if note.exists():
        return read_json(note)
    chunk, step = CHUNK_BYTES, max(CHUNK_BYTES, COUNTED_BYTES // CHUNK_BYTES * CHUNK_BYTES)
    jobs, owners = [], []
    for name, path in plain.items():
        for start in range(0, stamps[name].size, step):
            jobs.append({"path": str(path), "start": start, "stop": min(start + step, stamps[name].size)})
            owners.append(str(name))
    with phase("counting lines"):
        is_small = sum(stamp.size for stamp in stamps.values()) <= _COUNTED_HERE
        found = dict((run_here if is_small else run)(CountLines, {"chunk": chunk}, jobs))
    counts: dict[str, list[int]] = {str(name): [] for name in plain}
    for number, owner in enumerate(owners):
        counts[owner] += found[number]
    atomic_write(note, json_bytes(counts))
    return counts
