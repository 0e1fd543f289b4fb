"""The text stage of a data set: it trusts finished shards, and reads and writes missing shards."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path, PurePath

from treeproc.common.files import atomic_write, file_sha256, json_bytes, remove_leftovers
from treeproc.common.messages import Progress, warn
from treeproc.common.provenance import Recorder
from treeproc.common.settings import UserError, differences
from treeproc.common.storage import AnyPath
from treeproc.readers.numbered_lines import files_below
from treeproc.readers.packed_files import plain_name
from treeproc.shards.schema import SCHEMA_VERSION
from treeproc.shards.store import Index, ShardRecord, fingerprint_of, finished_shards, in_index_order, write_index
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.cut_inputs import bytes_that_can_be_cut
from treeproc.stages.inputs import InputCounts, changed_just_now, input_stamp, read_cached_counts, write_cached_counts
from treeproc.stages.job_report import DROPPED, dropped, has_files, line_list, reasons, say_notices, say_unlearned_classes
from treeproc.stages.run_jobs import choose_run, hasher, previous_index
from treeproc.stages.text_work import TextWork, remove_work

logger = logging.getLogger(__name__)

# Below, Ray takes longer to start than this process to read.
LEAST_BYTES = 64 << 20
_SHOWN = 3  # names of files, and kinds of their names


class NothingLeft(UserError):
    """The filters dropped every example of a split."""


def can_run_on_ray(config: PreprocessConfig) -> bool:
    """Return whether the text stage of a job is for Ray: it is large, its lines can be cut, and all nodes see the files."""
    inputs = config.inputs()
    if config.workers == 0 or bytes_that_can_be_cut(inputs) < LEAST_BYTES:
        return False
    from treeproc.stages import ray_job  # a job without Ray must not load it

    if ray_job.all_nodes_see(inputs):
        return True
    logger.warning(
        "warning: some nodes do not see the input files, so one process reads them; put the files on shared storage, or in an "
        "object store that all nodes may read"
    )
    return False


class TextStage:
    """The text stage of the data set `out`. A finished stage is trusted without reading if its inputs have not changed."""

    def __init__(self, config: PreprocessConfig, out: AnyPath, record: Recorder):
        self.config, self.out, self.record = config, out, record
        self._stamps = input_stamp(config.inputs())
        self._known = read_cached_counts(out / "text", self._stamps)
        self._work: TextWork | None = None

    def settle(self) -> PreprocessConfig:
        """Return the settings with the size of a shard, which depends on all examples. Raises BadInput as `TextWork` does."""
        counts = self._made_work().counts() if self._known is None else self._known.counts
        self.config = self.config.with_shard_size(sum(counts.values()))
        return self.config

    def make(self) -> list[ShardRecord]:
        """Make shards of filtered examples. Another text under the same folder is refused."""
        folder, config, inputs = self.out / "text", self.config, self.config.inputs()
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
        index = previous_index(folder, "inputs")
        if index and self._known and (records := self._finished(index, self._known.digests)):
            logger.info("text: sizes and times of the input files have not changed, so the job does not read them again")
            if [file["file"] for file in index.get("train_files", ())] != self._train_paths():
                self._note_files(index, inputs.count_train_files, self._known.counts)
            remove_work(self.out)
            return records
        work = self._made_work()
        counts, lines = work.counts(), work.digests()
        if index:
            changed = differences(index["inputs"], lines)
            if changed:
                remove_work(self.out)
                names = ", ".join(line.split(":")[0] for line in changed)
                raise UserError(f"the text of {names} differs from the text of {self.out}; choose another --out")
            if records := self._finished(index, lines):
                self._note_files(index, work.train_files, counts)
                self._end(InputCounts(counts, lines))
                return records
        landed, notices, fingerprint = list[ShardRecord](), config.notices(), self._fingerprint(lines)
        self.record.note(text=0)
        with (
            line_list(folder / DROPPED, "split", "line", "reason") as dropped_lines,
            Progress("text", sum(counts.values()), unit="examples") as progress,
        ):
            assert config.rows_per_shard != "auto"  # it is settled
            for record in work.write(fingerprint, config.rows_per_shard, notices, dropped_lines):
                landed.append(record)
                progress.update(record.rows + sum(n for name, n in record.counts.items() if name.startswith("dropped.")))
                self.record.keep_up(text=len(landed))
        self.record.note()
        records = in_index_order(landed)
        filled = {record.split for record in records if record.rows}
        for split in config.splits:
            if split not in filled:
                why = reasons(dropped(records)[split])
                raise NothingLeft(f"splits.{split}: the filters drop all examples (dropped: {why}); change filters or files")
        _remove_others(folder, records)
        columns = ["example_id", *inputs.columns()]
        if classes := config.classes():
            notices.add_classes("train" if "train" in config.splits else next(iter(config.splits)), classes)
        facts: dict = {"notices": notices.facts(), "files": {DROPPED: file_sha256(folder / DROPPED)}}
        facts["train_files"] = self._train_files(work.train_files, counts)
        write_index(folder, records, fingerprint=fingerprint, inputs=lines, columns=columns, dropped=dropped(records), **facts)
        self._end(InputCounts(counts, lines))
        self._say_notices(facts["notices"])
        say_unlearned_classes(records, config.classes())
        return records

    def _made_work(self) -> TextWork:
        """Return what reads and writes: on Ray, whose processes `record` counts, or in this process."""
        if self._work is None:
            config, tasks = self.config, partial(choose_run, True, record=self.record) if can_run_on_ray(self.config) else None
            _say_folders(config)
            self._work = TextWork(self.out, config.inputs(), config.filters, config.notices().wanted, tasks, config.tags())
        return self._work

    def _train_paths(self) -> list[str]:
        return [str(path) for path in self.config.splits["train"].source] if "train" in self.config.splits else []

    def _train_files(self, count_files: Callable[[], list[int]], counts: Mapping[str, int]) -> list[dict]:
        """Return every source file of train with the number of its examples, dropped ones included, held out ones left out.

        Ids of examples count over the files in this order. So they say from which file an example came.
        """
        inputs, paths = self.config.inputs(), self._train_paths()
        if len(paths) < 2:
            return [{"file": path, "examples": counts["train"]} for path in paths]
        ends = [inputs.examples_before("train", end) for end in accumulate(count_files(), initial=0)]
        if ends[-1] != counts["train"]:
            raise UserError("splits.train: the files changed while they were read; run the same command again")
        return [{"file": path, "examples": end - begin} for path, (begin, end) in zip(paths, pairwise(ends), strict=True)]

    def _note_files(self, index: Index, count_files: Callable[[], list[int]], counts: Mapping[str, int]) -> None:
        """Put the files of train into the index of a finished stage: they may be renamed."""
        files = self._train_files(count_files, counts)
        if index.get("train_files") != files:
            atomic_write(self.out / "text" / "index.json", json_bytes(index | {"train_files": files}))

    def _fingerprint(self, lines: dict[str, str], *, earlier: bool = False) -> str:
        config = self.config
        identity = config.filters.identity(earlier=earlier)
        reading = (config.format, config.tokenized, config.labels, identity, config.rows_per_shard)
        normalization = () if config.normalization == "none" else (config.normalization,)
        filters = config.filters  # those that count words, for which a tag is none
        tags = config.tags() if filters.max_ratio or filters.source_script or filters.target_script else []
        return fingerprint_of(SCHEMA_VERSION, lines, *reading, *normalization, *([tags] if tags else []))

    def _finished(self, index: Index, lines: dict[str, str]) -> list[ShardRecord] | None:
        """Return the shards of a text stage that is finished, of inputs of these digests; None if anything is missing."""
        folder, records = self.out / "text", index.records()
        # A finished data set stays what it is: there may be runs of it.
        known = [self._fingerprint(lines, earlier=earlier) for earlier in (False, True)]
        fingerprint = index["fingerprint"] if index.get("fingerprint") in known else known[0]
        if index["inputs"] != lines or not has_files(folder, index):
            return None
        hash_files = hasher(choose_run(self.config.workers != 0, folder, self.record))
        names = [record.name for record in records]
        if None in finished_shards(folder, names, [fingerprint] * len(names), hash_files):
            return None
        self._say_notices(index.get("notices", {}))
        return records

    def _end(self, found: InputCounts) -> None:
        """Note the stamps and digests that identify the inputs, unless the inputs have changed meanwhile."""
        inputs = self.config.inputs()
        same = self._stamps is not None and input_stamp(inputs) == self._stamps and not changed_just_now(inputs)
        write_cached_counts(self.out / "text", self._stamps if same else None, found)
        remove_work(self.out)

    def _say_notices(self, notices: dict) -> None:
        config = self.config
        say_notices(notices, config.parsers(), config.form, config.vocab_from if config.new_pieces is None else None)


def _say_folders(config: PreprocessConfig) -> None:
    """Print the number and the first names of the files of each folder. Note if they have several suffixes."""
    for split, files in config.splits.items() if config.form.ranges or config.format == "documents" else ():
        for folder in (path for path in files.source if isinstance(path, Path) and path.is_dir()):
            try:
                names = [str(file.relative_to(folder)) for file in files_below(folder)]
            except UserError:
                continue  # the reader says it
            endings = (PurePath(plain_name(name)).suffix for name in names)
            suffixes = Counter("" if ending[1:].isdigit() else ending for ending in endings)  # part.001 has none
            shown = ", ".join([*names[:_SHOWN], *["..."] * (len(names) > _SHOWN)])
            logger.info("%s: %s files of %s: %s", split, f"{len(names):,}", folder, shown)
            if len(suffixes) > 1:
                kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.most_common(_SHOWN))
                warn(
                    f"note: {split}: the job reads all files of {folder}, and they have several suffixes ({kinds}); give the "
                    "files themselves to read only some"
                )


def _remove_others(folder: AnyPath, records: list[ShardRecord]) -> None:
    """Remove shards that a killed job wrote of other inputs: their number of examples gave them other names."""
    names = {Path(record.name).stem for record in records}
    others = [path for kind in ("arrow", "json") for path in folder.glob(f"*-of-*.{kind}") if Path(path.name).stem not in names]
    for path in others:
        path.unlink(missing_ok=True)
    if others:
        logger.info("text: the job removed %d files of earlier inputs", len(others))
