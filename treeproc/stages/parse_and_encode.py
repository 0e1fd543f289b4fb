"""The stages of a data set after its text: trees, the vocabulary, and integer shards."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from treeproc.common.files import file_sha256, remove_leftovers
from treeproc.common.progress import Progress
from treeproc.common.provenance import Recorder
from treeproc.common.storage import AnyPath
from treeproc.parsers import describe_in_words
from treeproc.pretrained_pieces import load_pieces
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.shard import Shard
from treeproc.shards.store import PIECES_FILES, TOKENIZER_FILE, ShardRecord, fingerprint_of, vocabulary_files, write_index
from treeproc.stages.borrowed_vocabulary import copy_vocabulary, grow_vocabulary
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.encode import encoded_columns
from treeproc.stages.encode_shard import EncodeShard
from treeproc.stages.encoded_facts import measure_rows
from treeproc.stages.job_report import dropped
from treeproc.stages.line_lists import has_files, write_fallbacks
from treeproc.stages.parse import ParseShard, parsed_columns
from treeproc.stages.run_jobs import Jobs, run_here
from treeproc.stages.shard_jobs import StageWork, make_shards, previous_index, ray_runner
from treeproc.stages.shuffle import OTHER_SHAPES, donor_windows
from treeproc.stages.vocabulary import sampled_rows, write_vocabulary
from treeproc.subwords import LabelVocab

logger = logging.getLogger(__name__)

# Rows that a vocabulary is learned from; below, Ray takes longer to start than this process to count.
LEAST_SAMPLE = 100_000


@dataclass
class ParseAndEncode:
    """The stages of one data set after its text, one after the other; each does what is missing."""

    config: PreprocessConfig
    out: AnyPath
    record: Recorder
    parser: dict
    target_parser: dict | None
    base: AnyPath | None = None  # holds text and parsed stage, if not `out`

    def parse(self, text: PackedRecords) -> tuple[PackedRecords, PackedRecords]:
        """Parse every text shard into words and trees."""
        logger.info("parser: %s", describe_in_words(self.parser))
        config = self.config
        fingerprints = [fingerprint_of(record.sha256, self.parser, self.target_parser) for record in text]
        jobs = Jobs(range(len(text)), lambda place: {"text": text[place], "fingerprint": fingerprints[place]})
        arguments = {"data": self.out, "config": config.parser, "target": config.target_parser}
        work = StageWork("parse", "loading the parser", ParseShard, arguments, config.parser.gpus_per_actor)
        records = self._make(work, "parsed", text, fingerprints, jobs)
        columns = parsed_columns(config.parser, config.target_parser)
        folder = self.out / "parsed"
        index = previous_index(folder, "totals")
        if index is None or records != index.records() or not has_files(folder, index):
            facts = {"fingerprint": fingerprint_of(fingerprints), "columns": columns, "parser": self.parser}
            files = write_fallbacks(folder, records, config.inputs().line)
            write_index(folder, records, **facts, target_parser=self.target_parser, files=files)
        return text, records

    def encode(self, text: PackedRecords, parsed: PackedRecords) -> dict:
        """Make vocabulary and integer shards."""
        config, folder, base = self.config, self.out / "encoded", self.base or self.out
        folder.mkdir(exist_ok=True)
        train = [i for i, record in enumerate(text) if record.split == "train"]
        stages = Shard(base / "text", text[0]).schema.names, Shard(base / "parsed", parsed[0]).schema.names
        with Progress("vocabulary", None, unit="pieces") as progress:
            if config.vocab_from is not None and config.new_pieces is None:
                inputs_fingerprint = copy_vocabulary(self.out, config.vocab_from.absolute())
            else:
                lines = text.take(train)
                on_ray = config.workers != 0 and sampled_rows(lines, config.subwords, "target" in stages[0]) >= LEAST_SAMPLE
                run = ray_runner(folder, self.record) if on_ray else run_here
                split = lines, parsed.take(train), config.subwords, config.tree, self.base, run
                if config.vocab_from is None:
                    inputs_fingerprint = write_vocabulary(self.out, *split, config.tags())
                else:
                    inputs_fingerprint = grow_vocabulary(
                        self.out, config.vocab_from.absolute(), config.new_pieces, *split, config.tags()
                    )
            own_pieces = load_pieces(folder / "vocab")
            progress.update(len(own_pieces))
        tree = config.tree.facts()
        # Those of the leaves' side: lines that are translated later are parsed as they were.
        of_source = config.tree.side == "source"
        parser, settings = (self.parser, config.parser) if of_source else (self.target_parser, config.target_parser)
        fingerprints = [fingerprint_of(t.sha256, p.sha256, inputs_fingerprint, tree) for t, p in zip(text, parsed, strict=True)]
        tree_rule: tuple[str, ...] = ()
        windows = donor_windows(parsed) if config.tree.tree_source == "shuffled" else None
        if windows is not None:  # a line's tree comes from any shard of its window
            hashes = [record.sha256 for record in parsed]
            every = {window: fingerprint_of(hashes[slice(*window)]) for window in dict.fromkeys(windows)}
            fingerprints = [fingerprint_of(one, every[window]) for one, window in zip(fingerprints, windows, strict=True)]
            finished = previous_index(folder, "fingerprint")
            if not (finished and finished["fingerprint"] == fingerprint_of(fingerprints)):  # by an earlier version
                tree_rule = (OTHER_SHAPES,)
                fingerprints = [fingerprint_of(one, *tree_rule) for one in fingerprints]

        def job(place: int) -> dict:
            of_shard = {"text": text[place], "parsed": parsed[place], "fingerprint": fingerprints[place]}
            return of_shard if windows is None else of_shard | {"place": place, "window": windows[place]}

        jobs = Jobs(range(len(text)), job)
        arguments = {"data": self.out, "tree": config.tree, "base": self.base, "other_shapes": bool(tree_rule)}
        work = StageWork("encode", "loading the vocabulary", EncodeShard, arguments)
        records = self._make(work, "encoded", text, fingerprints, jobs)
        sizes, classes = measure_rows(config, folder, records, self.record, labelled="label" in stages[0])
        vocabulary = vocabulary_files(folder)
        pieces = [file_sha256(folder / name) for name in vocabulary if name in PIECES_FILES]
        return write_index(
            folder,
            records,
            columns=encoded_columns(*stages, config.tree).names,
            fingerprint=fingerprint_of(fingerprints),
            text_fingerprint=fingerprint_of([record.sha256 for record in text]),
            tree_fingerprint=fingerprint_of(parser, tree, *tree_rule),
            vocab_fingerprint=fingerprint_of(inputs_fingerprint, *pieces),
            tree_source=config.tree.tree_source,
            parser=parser,
            parser_settings=settings.facts(),
            tree_settings=tree,
            subword_settings=config.subwords.facts(),
            **({"tokenizer": own_pieces.facts()} if TOKENIZER_FILE in vocabulary else {}),
            **({"normalization": config.normalization} if config.normalization != "none" else {}),
            files=sizes | {name: file_sha256(folder / name) for name in vocabulary},
            num_pieces=len(own_pieces),
            num_labels=len(LabelVocab.load(folder / "vocab" / "labels.txt")),
            dropped=dropped(text),
            parsed_fingerprint=fingerprint_of([record.sha256 for record in parsed]),
            **classes,
            **({"stages": _stage_places(self.out, self.base)} if self.base else {}),
        )

    def _make(
        self, work: StageWork, stage: str, text: Sequence[ShardRecord], fingerprints: Sequence[str], jobs: Sequence[dict]
    ) -> PackedRecords:
        folder = self.out / stage
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
        return make_shards(work, folder, text, fingerprints, jobs, in_this_process=self.config.workers == 0, record=self.record)


def _stage_places(out: AnyPath, base: AnyPath) -> dict[str, str]:
    """Return the places of the text and parsed stage of `out`: relative paths for neighbours, so that both can move together."""
    place = f"../{base.name}" if base.parent == out.parent else str(base)
    return {stage: f"{place}/{stage}" for stage in ("text", "parsed")}
