"""The text stage in parts that know nothing of each other: blocks are checked, keys gathered and shards written.

Tasks of Ray do the parts, or this process does. Ray's tasks need plain or compressed files of some formats, on disk or in an
object store, and cut them to blocks. This process reads everything from front to back, each split as one block. What parts leave
lies in a work folder beside the stages. A hash of inputs and settings names the folder. A job that was killed goes on from it.
"""

import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import IO

import numpy as np

from treeproc.common.files import MADE_AGAIN, atomic_write, json_bytes, read_json
from treeproc.common.messages import Progress, phase
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.store_requests import StoreRefuses, in_parallel
from treeproc.readers.line_ranges import CutSide, FilesChanged, read_range
from treeproc.readers.numbered_lines import join_names, unequal, warn_of_file_ends
from treeproc.shards.schema import in_order, shard_name
from treeproc.shards.store import ShardRecord, fingerprint_of, finished_shards
from treeproc.stages.cut_inputs import CannotRead, TextRange, cut_inputs, mark_of
from treeproc.stages.filters import FilterConfig, stride_of
from treeproc.stages.inputs import Inputs, input_stamp
from treeproc.stages.keys import SplitHash, keys_file, number_of_partitions
from treeproc.stages.pair_notices import windows
from treeproc.stages.run_jobs import Run, grouped, hasher, in_number_order, run_here
from treeproc.stages.text_blocks import NEAR, OVERLAP, CheckBlock, GatherKeys, ReadLines, WriteText, gathered_file, read_notes
from treeproc.stages.text_warnings import TextNotices, Wanted

# Lines of a block: a task of seconds, and about 256 of them where there are less than 256 million lines.
LEAST_BLOCK, MOST_BLOCK, _BLOCKS = 50_000, 1_000_000, 256
_WORK = ".work-"
_OURS = re.compile(rf"{re.escape(_WORK)}[0-9a-f]{{16}}")
# A change of what parts leave in the work folder.
_VERSION = 8


class BadInput(UserError):
    """The inputs cannot be read as they must be: nothing of the text stage was written."""


class TextWork:
    """The reading of the inputs of the data set `out`, and the writing of its text shards.

    `tasks` gives what runs jobs in tasks that see a folder. Without it, this process runs them.
    """

    def __init__(
        self, out: AnyPath, inputs: Inputs, filters: FilterConfig, wanted: Mapping[str, Wanted],
        tasks: Callable[[AnyPath], Run] | None = None, tags: Sequence[str] = (),
    ):  # fmt: skip
        self._out, self._inputs, self._filters, self._wanted, self._tags = out, inputs, filters, wanted, tags
        self._stamps, self._is_cut = input_stamp(inputs), tasks is not None
        kinds = {side: one.kinds for side, one in wanted.items()}
        order = list(inputs.splits)  # it numbers the files and blocks of the work folder
        self._work = out / f"{_WORK}{fingerprint_of(_VERSION, self._is_cut, order, self._stamps, filters.identity(), kinds)}"
        self._work.mkdir(parents=True, exist_ok=True)
        self._run = run_here if tasks is None else tasks(self._work)
        self._cut: dict[str, list[CutSide]] = {}

    def counts(self) -> dict[str, int]:
        """Count the examples of every split: of the longer side where one is shorter. Raises BadInput as `digests` does."""
        if not self._is_cut:
            return self._checked()["counts"]
        return {s: self._inputs.examples_before(s, max(side.lines for side in sides)) for s, sides in self._lines().items()}

    def digests(self) -> dict[str, str]:
        """Hash the content of every split, after its lines were checked. Raises BadInput for the first bad line."""
        return self._checked()["digests"]

    def train_files(self) -> list[int]:
        """Count the examples of each source file of train, before `hold_out`. The inputs were read without an error before."""
        if self._is_cut:
            return [file.lines for file in self._lines()["train"][0].files]
        return self._inputs.count_train_files()

    def write(self, fingerprint: str, rows_per_shard: int, notices: TextNotices, dropped: IO[bytes]) -> Iterator[ShardRecord]:
        """Yield the records of all shards as they land; those that are finished are not written again.

        `notices` and `dropped` are complete after the last one.
        """
        parts = self._work / f"shards-{fingerprint}"  # its notes are those of these shards alone
        parts.mkdir(exist_ok=True)
        counts = self.counts()
        numbers = {split: -(-counts[split] // rows_per_shard) for split in in_order(self._inputs.splits)}
        places = [(split, index) for split, number in numbers.items() for index in range(number)]
        names = [shard_name(split, index, numbers[split]) for split, index in places]
        with phase("looking for finished shards"):
            found = finished_shards(self._out / "text", names, [fingerprint] * len(names), hasher(self._run))
        noted = in_parallel(lambda place: bool(found[place] and read_notes(parts / names[place])), range(len(names)))
        found = [record if has_notes else None for record, has_notes in zip(found, noted, strict=True)]
        yield from filter(None, found)
        arguments = {
            "folder": self._out / "text", "parts": parts, "work": self._work, "inputs": self._inputs, "filters": self._filters,
            "partitions": number_of_partitions(counts.get("train", 0)), "wanted": self._wanted, "fingerprint": fingerprint,
            "tags": self._tags,
        }  # fmt: skip

        def shard(place: int) -> dict:
            split, index = places[place]
            first, last = index * rows_per_shard, min((index + 1) * rows_per_shard, counts[split]) - 1
            return {"name": names[place], "index": index, **self._examples(split, index, first, last).job()}

        missing = {names[place]: place for place, record in enumerate(found) if record is None}
        groups = grouped([(rows_per_shard, place) for place in missing.values()])
        for _, written in self._run(WriteText, arguments, [{"shards": [*map(shard, group)]} for group in groups]):
            for record in written:
                found[missing[record.name]] = record
                yield record
        every_note = in_parallel(lambda name: read_notes(parts / name), names)
        for name, (split, _), notes in zip(names, places, every_note, strict=True):
            if notes is None:
                raise UserError(f"{parts / name} is damaged; run the same command again")
            notices.merge(split, notes[0])
            dropped.write(notes[1])
        self._sample(notices, list(filter(None, found)))
        self._check_stamps()

    def remove(self) -> None:
        """Remove what parts left in the work folder."""
        remove_folder(self._work)

    def _checked(self) -> dict:
        """Check all lines; return the number of examples and the hash of every split."""
        note = self._work / "checked.json"
        if note.exists():
            return read_json(note, MADE_AGAIN, needed=("counts", "digests"))
        for other in work_folders(self._out):
            if other != self._work:
                remove_folder(other)
        blocks, problem = self._blocks()
        keep, counts = self._filters.drop_duplicates, Counter(dict.fromkeys(self._inputs.splits, 0))
        hashes = {split: SplitHash(self._work, keys_at_end=keep and split == "train") for split in self._inputs.splits}
        total = sum(self.counts().values()) if self._is_cut else 0
        with Progress("text check", total, unit="examples") if self._is_cut else nullcontext() as progress:
            for part, result in self._check(blocks):
                if "error" in result:
                    raise self._refusal(self._said(result["error"]))
                hashes[part.split].add(part.number, result.get("marks"))
                counts[part.split] += result["examples"]
                if progress is not None:
                    progress.update(result["examples"])
        if problem is not None:
            raise self._refusal(self._said(str(problem)))
        with phase("looking for duplicates"):
            self._gather(blocks, number_of_partitions(counts["train"]))
        self._check_stamps()
        found = {"counts": dict(counts), "digests": {split: one.hexdigest() for split, one in hashes.items()}}
        atomic_write(note, json_bytes(found))
        return found

    def _lines(self) -> dict[str, list[CutSide]]:
        if not self._cut:
            try:
                self._cut = cut_inputs(self._inputs, self._work, self._run)
            except CannotRead as error:
                raise self._refusal(self._said_by_a_pass(str(error))) from None
        return self._cut

    def _said(self, message: str) -> str:
        """Return the message of one process about bad input. A task knows numbers of lines only if examples are lines."""
        return message if not self._is_cut or self._inputs.format == "parallel" else self._said_by_a_pass(message)

    def _said_by_a_pass(self, otherwise: str) -> str:
        """Return the message of a pass over the inputs from front to back, which reads a damaged file up to the damage."""
        try:
            for split in self._inputs.splits:
                if not sum(1 for _ in self._inputs.rows(split)):
                    raise self._inputs.no_example(split)
        except StoreRefuses:
            raise
        except UserError as error:
            return str(error)
        return otherwise

    def _refusal(self, message: str) -> BadInput:
        self.remove()
        return BadInput(message)

    def _blocks(self) -> tuple[list[TextRange], UserError | None]:
        """Return all blocks up to the first split with unequal sides or without an example, and the message about that split."""
        inputs = self._inputs
        if not self._is_cut:
            return [TextRange(split, number, 0) for number, split in enumerate(inputs.splits)], None
        blocks: list[TextRange] = []
        cut = self._lines()
        most = max(side.lines for sides in cut.values() for side in sides)
        size = min(MOST_BLOCK, max(LEAST_BLOCK, -(-most // _BLOCKS)))
        for split, sides in cut.items():
            lines = min(side.lines for side in sides)
            for start in range(0, lines, size):
                blocks.append(self._range(split, len(blocks), start, min(start + size, lines)))
            if any(side.lines != lines for side in sides):
                return blocks, self._unequal(split)
            if not inputs.examples_before(split, lines):
                return blocks, inputs.no_example(split)
            if len(sides) == 2:
                unit = "lines" if inputs.format == "parallel" else "sentences"
                left, right = ([(file.name, file.lines) for file in side.files] for side in sides)
                warn_of_file_ends(left, right, unit)
        return blocks, None

    def _examples(self, split: str, number: int, first: int, last: int) -> TextRange:
        """Return the range of these examples of a split, the last included."""
        if not self._is_cut:
            return TextRange(split, number, first, examples=last + 1 - first)
        return self._range(split, number, self._inputs.line(split, first) - 1, self._inputs.line(split, last))

    def _range(self, split: str, number: int, start: int, stop: int) -> TextRange:
        sides = self._lines()[split]
        first_id = self._inputs.examples_before(split, start)
        source, target = (*(side.pieces(start, stop) for side in sides), ())[:2]
        return TextRange(split, number, first_id, start, source, target)

    def _unequal(self, split: str) -> UserError:
        sides, files = self._lines()[split], self._inputs.files(split)
        shorter, longer = sorted(sides, key=lambda side: side.lines)
        try:
            if self._inputs.format == "parallel":  # of other formats, one process looks for the message
                deque(read_range(longer.pieces(shorter.lines, longer.lines)), maxlen=0)
        except (FilesChanged, StoreRefuses):
            raise
        except UserError as error:
            return error
        return unequal(join_names(files.source), sides[0].lines, join_names(files.target), sides[1].lines)

    def _check(self, blocks: Sequence[TextRange]) -> Iterator[tuple[TextRange, dict]]:
        """Yield every block and its result, in order."""
        there = set(self._work.glob("block-*.json"))
        marks = {part.number: keys_file(self._work, part.number, "json") for part in blocks}
        known = [number for number, mark in marks.items() if mark in there]
        found = dict(zip(known, in_parallel(lambda number: read_json(marks[number], MADE_AGAIN), known), strict=True))
        todo = [part for part in blocks if part.number not in found]
        partitions = number_of_partitions(self.counts().get("train", 0)) if self._is_cut else None
        arguments = {"work": self._work, "inputs": self._inputs, "filters": self._filters, "partitions": partitions}
        fresh = in_number_order(self._run(CheckBlock, arguments, [part.job() for part in todo]))
        for part in blocks:
            yield part, found[part.number] if part.number in found else next(fresh)

    def _gather(self, blocks: Sequence[TextRange], partitions: int) -> None:
        """Gather the keys that examples of train are compared with."""
        if "train" not in self._inputs.splits:
            return
        train = [(part.number, part.first_id) for part in blocks if part.split == "train"]
        others = [part.number for part in blocks if part.split != "train"]
        kinds = [(kind, 0) for kind in (OVERLAP, NEAR)] if others else []
        if self._filters.drop_duplicates:
            kinds += [("duplicates", number) for number in range(partitions)]
        there = set(self._work.glob("*.gathered.json"))
        jobs = [
            {"kind": kind, "partition": number}
            for kind, number in kinds
            if mark_of(gathered_file(self._work, kind, number)) not in there
        ]
        arguments = {"work": self._work, "blocks": train, "others": others, "partitions": partitions}
        deque(self._run(GatherKeys, arguments, jobs), maxlen=0)

    def _sample(self, notices: TextNotices, records: list[ShardRecord]) -> None:
        """Give the notices the lines whose language is checked, every n-th of a split, and the pairs whose sides are compared."""
        sides = [side for side, one in self._wanted.items() if one.language is not None]
        has_pairs = "target" in self._wanted
        for split in in_order(self._inputs.splits) if sides or has_pairs else ():
            of_split = [record for record in records if record.split == split]
            rows = sum(record.rows for record in of_split)
            of_language, of_pairs = range(0, rows, stride_of(rows)) if sides else (), windows(rows) if has_pairs else ()
            places, first, chosen = np.union1d(of_language, of_pairs).astype(int), 0, []
            for record in of_split:
                inside = places[slice(*np.searchsorted(places, [first, first + record.rows]))] - first
                if len(inside):
                    chosen.append((record.rows, (record, inside.tolist())))
                first += record.rows
            jobs = [{"shards": group} for group in grouped(chosen)]
            arguments = {"folder": self._out / "text", "sides": list(self._wanted)}
            found = [row for some in in_number_order(self._run(ReadLines, arguments, jobs)) for row in some]
            row_at = dict(zip(places.tolist(), found, strict=True))
            for side in sides:
                chosen_rows = [row_at[place] for place in of_language]
                notices.add_sample(split, side, [row["example_id"] for row in chosen_rows], [row[side] for row in chosen_rows])
            if has_pairs:
                notices.add_pairs(
                    split, [(row["example_id"], row["source"], row["target"]) for row in map(row_at.__getitem__, of_pairs)]
                )

    def _check_stamps(self) -> None:
        if input_stamp(self._inputs) != self._stamps:
            raise FilesChanged("the input files changed while they were read; run the same command again")


def remove_work(out: AnyPath) -> None:
    """Remove all work folders of a data set."""
    for work in work_folders(out):
        remove_folder(work)


def has_work(out: AnyPath) -> bool:
    """Return whether a job left something for a job that continues."""
    return any(isinstance(work, RemotePath) or any(work.iterdir()) for work in work_folders(out))


def work_folders(out: AnyPath) -> list[AnyPath]:
    """Return all work folders of a data set."""
    found = out.folders() if isinstance(out, RemotePath) else out.glob(f"{_WORK}*")
    return [folder for folder in found if _OURS.fullmatch(folder.name)]


def remove_folder(work: AnyPath) -> None:
    """Remove a folder, to which a task of a job that was killed may still write for a moment."""
    if isinstance(work, RemotePath):
        return work.remove_objects()
    for _ in range(50):
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        time.sleep(0.1)
    raise UserError(f"cannot remove {work}; remove it, and run the same command again")
