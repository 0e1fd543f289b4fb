"""The text stage on Ray: blocks are checked, keys gathered and shards written by tasks that know nothing of each other.

Plain or compressed files of some formats can be read so, on disk or in an object store. `LocalText` reads everything else, to the
same bytes. What tasks leave lies in a work folder beside the stages. A hash of inputs and settings names the folder. A job that
was killed goes on from it.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.parallel import in_parallel
from treeproc.common.progress import Progress, phase
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import StoreRefuses
from treeproc.readers.line_ranges import FilesChanged, read_range
from treeproc.readers.numbered_lines import join_names, unequal
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.schema import in_order, shard_name
from treeproc.shards.store import ShardRecord, finished_shards
from treeproc.stages.cut_inputs import CannotRead, CutInputs, cut_inputs
from treeproc.stages.duplicates import number_of_partitions
from treeproc.stages.example_offsets import mark_of
from treeproc.stages.filters import FilterConfig
from treeproc.stages.hash_files import hasher
from treeproc.stages.input_cache import input_stamp
from treeproc.stages.line_lists import LineList
from treeproc.stages.run_jobs import Jobs, Run, grouped, in_number_order
from treeproc.stages.shard_warnings import read_notes
from treeproc.stages.split_hash import SplitHash, keys_file
from treeproc.stages.text import Inputs, no_example, scan
from treeproc.stages.text_blocks import (
    NEAR,
    OVERLAP,
    CheckBlock,
    GatherKeys,
    TextRange,
    WriteText,
    gathered_file,
)  # fmt: skip
from treeproc.stages.text_sample import ReadLines, places_of
from treeproc.stages.text_warnings import TextNotices, Wanted
from treeproc.stages.work_folders import remove_folder, work_folders

# Lines of a block: a task of seconds, and about 256 of them where there are less than 256 million lines.
LEAST_BLOCK, MOST_BLOCK, _BLOCKS = 50_000, 1_000_000, 256


class BadInput(UserError):
    """The inputs cannot be read as they must be: nothing of the text stage was written."""


class TextOnRay:
    """The text stage of the data set `out`, by tasks that `run` runs; they leave in `work` what is not a shard."""

    def __init__(
        self, out: AnyPath, work: AnyPath, inputs: Inputs, filters: FilterConfig, wanted: Mapping[str, Wanted], run: Run
    ):  # fmt: skip
        self._out, self._work, self._inputs, self._filters, self._wanted, self._run = out, work, inputs, filters, wanted, run
        self._stamps = input_stamp(inputs)
        self._work.mkdir(parents=True, exist_ok=True)
        self._cut: CutInputs | None = None

    def counts(self) -> dict[str, int]:
        """Count the examples of every split. Raises BadInput as `digests` does."""
        return self._lines().examples(self._inputs)

    def digests(self) -> dict[str, str]:
        """Hash the content of every split, after its lines were checked. Raises BadInput for the first bad line."""
        note = self._work / "checked.json"
        if note.exists():
            return read_json(note)
        for other in work_folders(self._out):
            if other != self._work:
                remove_folder(other)
        blocks, problem = self._blocks()
        keep = self._filters.drop_duplicates
        hashes = {split: SplitHash(self._work, keys_at_end=keep and split == "train") for split in self._inputs.splits}
        with Progress("text check", sum(self.counts().values()), unit="examples") as progress:
            for part, result in self._check(blocks):
                if "error" in result:
                    raise self._refusal(self._said(result["error"]))
                hashes[part.split].add(part.number, result.get("marks"))
                progress.update(result["examples"])
        if problem is not None:
            raise self._refusal(self._said(str(problem)))
        with phase("looking for duplicates"):
            self._gather(blocks)
        self._check_stamps()
        found = {split: one.hexdigest() for split, one in hashes.items()}
        atomic_write(note, json_bytes(found))
        return found

    def train_files(self) -> list[int]:
        """Count the examples of each source file of train, before `hold_out`."""
        return [file.lines for file in self._lines().of(self._inputs, "train")[0].files]

    def write(self, fingerprint: str, rows_per_shard: int, notices: TextNotices, dropped: LineList) -> Iterator[ShardRecord]:
        """Yield the records of all shards as they land; those that are finished are not written again."""
        parts = self._work / f"shards-{rows_per_shard}"
        parts.mkdir(exist_ok=True)
        numbers = {split: -(-self.counts()[split] // rows_per_shard) for split in in_order(self._inputs.splits)}
        places = [(split, index) for split, number in numbers.items() for index in range(number)]
        names = [shard_name(split, index, numbers[split]) for split, index in places]
        with phase("looking for finished shards"):
            found = finished_shards(self._out / "text", names, [fingerprint] * len(names), hasher(self._run))
        have_notes = in_parallel(lambda place: found.holds(place) and read_notes(parts, names[place]), range(len(names)))
        for place, notes in enumerate(have_notes):
            if not notes:
                found.put(place, None)
        yield from found.present()
        arguments = {
            "folder": self._out / "text", "parts": parts, "work": self._work, "inputs": self._inputs, "filters": self._filters,
            "partitions": self._partitions(), "wanted": self._wanted, "fingerprint": fingerprint,
        }  # fmt: skip
        missing = {names[place]: place for place in found.missing()}
        groups = grouped([(rows_per_shard, place) for place in missing.values()])
        jobs = Jobs(groups, lambda group: {"shards": [self._shard(names[p], *places[p], rows_per_shard) for p in group]})
        for _, written in self._run(WriteText, arguments, jobs):
            for record in (ShardRecord(**facts) for facts in written):
                found.put(missing[record.name], record)
                yield record
        every_note = in_parallel(lambda name: read_notes(parts, name), names)
        for name, (split, _), notes in zip(names, places, every_note, strict=True):
            if notes is None:
                raise UserError(f"{parts / name} is damaged; run the same command again")
            notices.merge(split, notes.notices)
            dropped.extend(notes.dropped)
        self._sample(notices, found.present())
        self._check_stamps()

    def remove(self) -> None:
        """Remove what tasks left in the work folder."""
        remove_folder(self._work)

    def _lines(self) -> CutInputs:
        if self._cut is None:
            try:
                self._cut = cut_inputs(self._inputs, self._work, self._run)
            except CannotRead as error:
                raise self._refusal(self._said_by_a_scan(str(error))) from None
        return self._cut

    def _said(self, message: str) -> str:
        """Return the message of one process about bad input. A task knows numbers of lines only if examples are lines."""
        return message if self._inputs.format == "parallel" else self._said_by_a_scan(message)

    def _said_by_a_scan(self, otherwise: str) -> str:
        """Return the message of a pass over the inputs in one process, which reads a damaged file up to the damage."""
        try:
            scan(self._inputs, self._filters)
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
        blocks: list[TextRange] = []
        cut, inputs = self._lines(), self._inputs
        most = max(side.lines for split in inputs.splits for side in cut.of(inputs, split))
        size = min(MOST_BLOCK, max(LEAST_BLOCK, -(-most // _BLOCKS)))
        for split in inputs.splits:
            sides = cut.of(inputs, split)
            lines = min(side.lines for side in sides)
            for start in range(0, lines, size):
                blocks.append(self._range(split, len(blocks), start, min(start + size, lines)))
            if any(side.lines != lines for side in sides):
                return blocks, self._unequal(split)
            if not inputs.examples_before(split, lines):
                return blocks, no_example(inputs, split)
        return blocks, None

    def _range(self, split: str, number: int, start: int, stop: int) -> TextRange:
        left, *others = self._lines().of(self._inputs, split)
        first_id = self._inputs.examples_before(split, start)
        right = others[0].pieces(start, stop) if others else []
        return TextRange(split, number, start, first_id, left.pieces(start, stop), right)

    def _unequal(self, split: str) -> UserError:
        sides, files = self._lines().of(self._inputs, split), self._inputs.files(split)
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
        found = dict(zip(known, in_parallel(lambda number: read_json(marks[number]), known), strict=True))
        todo = [part for part in blocks if part.number not in found]
        arguments = {
            "work": self._work, "inputs": self._inputs, "filters": self._filters, "partitions": self._partitions(),
        }  # fmt: skip
        fresh = in_number_order(self._run(CheckBlock, arguments, [part.job() for part in todo]))
        for part in blocks:
            yield part, found[part.number] if part.number in found else next(fresh)

    def _partitions(self) -> int:
        return number_of_partitions(self.counts().get("train", 0))

    def _gather(self, blocks: Sequence[TextRange]) -> None:
        """Gather the keys that examples of train are compared with."""
        if "train" not in self._inputs.splits:
            return
        train = [(part.number, part.first_id) for part in blocks if part.split == "train"]
        others = [part.number for part in blocks if part.split != "train"]
        kinds = [(kind, 0) for kind in (OVERLAP, NEAR)] if others else []
        if self._filters.drop_duplicates:
            kinds += [("duplicates", number) for number in range(self._partitions())]
        there = set(self._work.glob("*.gathered.json"))
        jobs = [
            {"kind": kind, "partition": number}
            for kind, number in kinds
            if mark_of(gathered_file(self._work, kind, number)) not in there
        ]
        arguments = {"work": self._work, "blocks": train, "others": others, "partitions": self._partitions()}
        deque(self._run(GatherKeys, arguments, jobs), maxlen=0)

    def _shard(self, name: str, split: str, index: int, rows: int) -> dict:
        """Return the job of a shard."""
        first, last = index * rows, min((index + 1) * rows, self.counts()[split]) - 1
        part = self._range(split, index, self._inputs.line(split, first) - 1, self._inputs.line(split, last))
        return {"name": name, "index": index, **part.job()}

    def _sample(self, notices: TextNotices, records: PackedRecords) -> None:
        """Give the notices the lines whose language is checked."""
        sides = [side for side, one in self._wanted.items() if one.language is not None]
        for split in in_order(self._inputs.splits) if sides else ():
            chosen = places_of(records.take([place for place, record in enumerate(records) if record.split == split]))
            jobs = [{"shards": group} for group in grouped([(one.rows, (asdict(one), places)) for one, places in chosen])]
            for found in in_number_order(self._run(ReadLines, {"folder": self._out / "text", "sides": sides}, jobs)):
                for side in sides:
                    notices.add_sample(split, side, found["example_id"], found[side])

    def _check_stamps(self) -> None:
        if input_stamp(self._inputs) != self._stamps:
            raise FilesChanged("the input files changed while they were read; run the same command again")
