"""The preprocessing job: text -> parsed -> vocabulary -> encoded, each stage resumable."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from treeproc.common.errors import shown, without_credentials
from treeproc.common.extras import require
from treeproc.common.files import atomic_write, file_sha256, locked
from treeproc.common.progress import Progress
from treeproc.common.provenance import Recorder, recorded
from treeproc.common.setting_effects import Effect, excluded
from treeproc.common.settings import UserError, differences, dump_settings, load_settings, read_yaml
from treeproc.common.storage import AnyPath
from treeproc.job.borrowed import check_borrower, check_grower
from treeproc.job.config import PreprocessConfig, one_root
from treeproc.job.job_report import dropped
from treeproc.job.measured import measure_rows
from treeproc.job.shard_jobs import StageWork, make_shards, previous_index, ray_runner, remove_leftovers
from treeproc.job.text_on_ray import BadInput
from treeproc.job.text_stage import NothingLeft, TextStage
from treeproc.job.text_work import TextHere, can_run_on_ray, text_on_ray
from treeproc.parsers import describe_in_words, describe_parser
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.schema import SPLIT_NAME, SPLITS
from treeproc.shards.shard import Shard
from treeproc.shards.shard_size import SMALLEST
from treeproc.shards.store import ShardRecord, fingerprint_of, read_index, stage_folder, vocabulary_files, write_index
from treeproc.stages.borrowed_vocabulary import copy_vocabulary, grow_vocabulary
from treeproc.stages.encode import EncodeShard, encoded_columns
from treeproc.stages.input_note import recall, stamps_of
from treeproc.stages.line_lists import has_files, write_fallbacks
from treeproc.stages.parse import ParseShard, check_columns, parsed_columns
from treeproc.stages.running import Jobs, run_here
from treeproc.stages.shuffle import Donors, find_donors
from treeproc.stages.vocabulary import sampled_rows, write_vocabulary
from treeproc.subwords import LabelVocab, Subwords

logger = logging.getLogger(__name__)

SAMPLE = Path(__file__).parent.parent / "sample"
# Rows that a vocabulary is learned from; below, Ray takes longer to start than this process to count.
LEAST_SAMPLE = 100_000
COMMAND = "preprocess"  # in DATA/provenance.json, where a session counts the shards that it wrote, by stage


def sample_splits() -> dict:
    """The shipped sample, in the form of `PreprocessConfig.splits`."""
    return {split: {"source": [str(SAMPLE / f"{split}.en.gz")], "target": [str(SAMPLE / f"{split}.de.gz")]} for split in SPLITS}


def preprocess(config: PreprocessConfig, out: AnyPath) -> dict:
    """Run the job, or the rest of it, into `out`; returns the index of the encoded stage.

    Raises UserError on bad input, on a full disk, and when `out` belongs to other settings or
    other text.
    """
    if config.workers is None:
        require("ray", "work in several processes", "give workers=0 to work in one process")
    if config.parsed is not None:
        return _encode_again(config, out)
    open_choice, config = config.parser.treebank_words is None, config.settled(_begun(out))
    if open_choice and config.parser.knows_treebank_words and config.parser.treebank_words is False:
        logger.info("%s began with parser.treebank_words=false, and continues with it", out)
    parser, target_parser = check_settings(config)
    stamps = stamps_of(config.inputs())
    known, here = recall(out / "text", stamps), TextHere(out / "text", config.inputs(), config.filters)
    on_ray = known is None and can_run_on_ray(config)
    if known is None and not on_ray:
        here.counts()  # bad input is found before anything is written
    made = [folder for folder in (out, *out.parents) if not folder.exists()] if isinstance(out, Path) else []
    first_text = not (out / "text").exists()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), recorded(out, COMMAND) as record:
        work = text_on_ray(config, out, record) if on_ray else here
        try:
            config = config.with_shard_size(sum((work.counts() if known is None else known.counts).values()))
            try:
                _claim(config, out)
            except UserError:
                work.remove()
                raise
            text = TextStage(config, out, record).make(work, stamps, known)
        except (NothingLeft, BadInput):
            work.remove()
            if first_text:
                record.withdraw()
                _forget(out, made)
            raise
        job = _Job(config, out, record, parser, target_parser)
        return job.encode(*job.parse(text))


def check_settings(config: PreprocessConfig) -> tuple[dict, dict | None]:
    """The descriptions of the parsers. Raises UserError for settings that do not fit each other or the inputs."""
    _check_splits(config)
    inputs = config.inputs()
    check_columns(config.parser, config.target_parser, inputs.columns())
    stages = inputs.columns(), parsed_columns(config.parser, config.target_parser)
    _check_sides(config, *stages)
    parser, target_parser = describe_parser(config.parser), _describe_target_parser(config)
    if config.vocab_from is not None:
        _check_borrower(config, parser, target_parser, stages)
    return parser, target_parser


def _check_splits(config: PreprocessConfig) -> None:
    if "train" not in config.splits and (config.vocab_from is None or not config.splits):
        there = ", ".join(map(shown, sorted(config.splits))) or "none"
        needed = "train, and any of valid, test and other names" if config.vocab_from is None else "at least one split"
        raise UserError(f"splits: must be {needed}, but are {there}; vocab_from=DATA makes a data set without train")
    if "train" not in config.splits and config.new_pieces is not None:
        raise UserError("new_pieces: learns from a train split, and there is none; give splits.train, or leave new_pieces out")
    for name in config.splits:
        if not SPLIT_NAME.fullmatch(name):
            raise UserError(f"splits: a name must have at most 50 characters, of a to z, 0 to 9 and _, but is {shown(name)}")
        if name not in SPLITS and name.isalpha() and (close := get_close_matches(name, (*SPLITS, "validation", "dev"), 1, 0.75)):
            meant = close[0] if close[0] in SPLITS else "valid"
            raise UserError(f"splits.{name}: did you mean {meant}? A further test split needs a name that is less similar")


def _check_borrower(config: PreprocessConfig, parser: dict, target_parser: dict | None, stages: Sequence[Sequence[str]]) -> None:
    """Raises UserError if models of the data set `vocab_from` could not be scored on this one, or not start training on it."""
    if config.new_pieces is not None:
        check_grower(config.vocab_from.absolute(), subwords=config.subwords.model_dump())
        return
    check_borrower(
        config.vocab_from.absolute(),
        parser=parser if config.tree.side == "source" else target_parser,
        subwords=config.subwords.model_dump(),
        tree=config.tree.facts(),
        columns=encoded_columns(*stages, config.tree).names,
    )


def _check_sides(config: PreprocessConfig, text: Sequence[str], parsed: Sequence[str]) -> None:
    """Raises UserError when the settings ask for a side that the columns of these stages have not got."""
    tree = config.tree
    if tree.tree_source == "dependencies" and tree.arcs_column not in parsed:
        raise UserError(
            "tree.tree_source: dependencies makes trees of arcs, but there are none; set parser.dependencies=true, or give a "
            "data set with arcs as parsed=DATA"
        )
    if missing := [name for name in (tree.side, *tree.parsed_columns) if name not in (*text, *parsed)]:
        raise UserError(f"tree.side: must be a side with trees, but is {tree.side}: the data set has no {', '.join(missing)}")
    if not config.subwords.joint and tree.other_side not in text:
        raise UserError("subwords.joint: must be true, because examples have one side")


def text_alone(config: PreprocessConfig, folder: AnyPath) -> tuple[PreprocessConfig, dict, PackedRecords]:
    """The complete settings, the description of the parser, and the text stage of a dry run in `folder`."""
    if config.parsed is not None:
        raise UserError("--dry-run: a job with parsed=DATA parses nothing, so there is nothing to measure; leave --dry-run out")
    parser, target_parser = check_settings(config)
    work = TextHere(folder / "text", config.inputs(), config.filters)
    config = config.with_shard_size(sum(work.counts().values()))
    return config, parser, TextStage(config, folder, Recorder(folder, COMMAND)).make(work)


def _forget(out: AnyPath, made: Sequence[Path]) -> None:
    """Remove the files and folders of a job that found no example to keep."""
    for path in [*(out / "text").glob("*"), out / "config.yaml", out / ".lock"]:
        path.unlink(missing_ok=True)
    if isinstance(out, Path):
        for folder in (out / "text", *made):
            if folder.exists():
                folder.rmdir()


def _describe_target_parser(config: PreprocessConfig) -> dict | None:
    if config.target_parser is None:
        return None
    try:
        return describe_parser(config.target_parser)
    except UserError as error:  # it names settings of `parser`
        raise UserError(f"target_{error}") from None


def _encode_again(config: PreprocessConfig, out: AnyPath) -> dict:
    """Another encoded stage for the text and trees of the data set `config.parsed`."""
    own = {"parsed", "vocab_from", "new_pieces", "subwords", "tree", "workers"}
    fields = PreprocessConfig.model_fields
    if config.rows_per_shard == SMALLEST:  # as config.yaml of such a data set has it, which means nothing
        own.add("rows_per_shard")
    # The config.yaml of such a data set holds all settings, the others as they are by default.
    if borrowed := sorted(name for name in config.model_fields_set - own if getattr(config, name) != fields[name].default):
        raise UserError(f"{', '.join(borrowed)}: must not be set with parsed, whose data set gives them")
    base = config.parsed.absolute()
    if base == out:
        raise UserError(f"parsed: {config.parsed} must be another folder than --out")
    if not (base / "text").exists() and (base / "encoded").exists():
        base = stage_folder(base, "text").parent
    stages = [read_index(base / stage) for stage in ("text", "parsed")]
    old = load_settings(PreprocessConfig, base / "config.yaml")
    text, parsed = (PackedRecords(index.records()) for index in stages)
    _check_sides(config, *(index["columns"] for index in stages))
    tree = one_root(config.tree, (old.parser, old.target_parser), "target" in stages[0]["columns"], _begun(out) or {})
    config = config.model_copy(update={"tree": tree, "rows_per_shard": SMALLEST})
    if config.vocab_from is not None:
        _check_borrower(config, stages[1]["parser"], stages[1]["target_parser"], [index["columns"] for index in stages])
    if (config.vocab_from is None or config.new_pieces is not None) and "train" not in stages[0]["totals"]:
        needed = "give vocab_from=DATA as well" if config.vocab_from is None else "leave out new_pieces"
        raise UserError(f"parsed: {base} has no train split to learn a vocabulary from; {needed}")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), recorded(out, COMMAND) as record:
        _claim(config, out)
        complete = config.model_copy(update={"parser": old.parser, "target_parser": old.target_parser})
        return _Job(complete, out, record, stages[1]["parser"], stages[1]["target_parser"], base).encode(text, parsed)


# Settings that may change until the named stage is finished: its shards are redone by fingerprint, those before it stay.
_OPEN_UNTIL = {
    **dict.fromkeys(("format", "tokenized", "labels", "filters"), "text"),
    "new_pieces": "encoded",
    "subwords": "encoded",
    "tree": "encoded",
}


def _begun(out: AnyPath) -> dict | None:
    """The settings in `out` as they were written; None if there are no readable settings."""
    try:
        values = read_yaml((out / "config.yaml").read_text(encoding="utf-8"), str(out / "config.yaml"))
    except (OSError, UnicodeDecodeError):
        return None
    return values if isinstance(values, dict) else None


def _claim(config: PreprocessConfig, out: AnyPath) -> None:
    """Write `config.yaml`, or refuse when the folder has another one. Paths of inputs may differ.

    A vocabulary size that does not suit the text can be changed without parsing again.
    """
    path = out / "config.yaml"
    text = dump_settings(config)
    if path.exists():
        if not path.read_bytes().strip():
            raise UserError(f"{path} is empty: write the settings of the data set into it again, or choose another --out")
        written = load_settings(PreprocessConfig, path).settled(_begun(out))
        old, new = (c.model_dump(mode="json", exclude=excluded(PreprocessConfig, Effect.NONE)) for c in (written, config))
        if old == new:
            if (content := path.read_text(encoding="utf-8")) != without_credentials(content):  # by an earlier version
                atomic_write(path, dump_settings(written).encode())
            return
        fixed = [n for n in new if n not in _OPEN_UNTIL or (out / _OPEN_UNTIL[n] / "index.json").exists()]
        if changed := [line for name in fixed for line in differences(old[name], new[name], name)]:
            raise UserError(
                f"{out} belongs to other settings ({'; '.join(changed)}); choose another --out, or give the old settings"
            )
    elif any((out / stage).exists() for stage in ("text", "parsed", "encoded")):
        raise UserError(f"{out} holds shards, but no config.yaml; choose another --out")
    atomic_write(path, text.encode())


@dataclass
class _Job:
    """The stages of one data set after its text, one after the other; each does what is missing."""

    config: PreprocessConfig
    out: AnyPath
    record: Recorder
    parser: dict
    target_parser: dict | None
    base: AnyPath | None = None  # holds text and parsed stage, if not `out`

    def parse(self, text: PackedRecords) -> tuple[PackedRecords, PackedRecords]:
        """Words and trees of every text shard."""
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
        """Vocabulary and integer shards."""
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
            num_pieces = len(Subwords(folder / "vocab" / "pieces.model"))
            progress.update(num_pieces)
        tree = config.tree.facts()
        # Those of the leaves' side: lines that are translated later are parsed as they were.
        of_source = config.tree.side == "source"
        parser, settings = (self.parser, config.parser) if of_source else (self.target_parser, config.target_parser)
        fingerprints = [fingerprint_of(t.sha256, p.sha256, inputs_fingerprint, tree) for t, p in zip(text, parsed, strict=True)]
        donors: list[Donors] | None = None
        if config.tree.tree_source == "shuffled":
            donors = find_donors(base / "parsed", parsed, config.tree.parsed_columns[0], config.tree.seed)
            every = fingerprint_of([record.sha256 for record in parsed])  # a line's tree comes from any of them
            fingerprints = [fingerprint_of(fingerprint, every) for fingerprint in fingerprints]

        def job(place: int) -> dict:
            of_shard = {"text": text[place], "parsed": parsed[place], "fingerprint": fingerprints[place]}
            return of_shard if donors is None else of_shard | {"donors": donors[place]}

        jobs = Jobs(range(len(text)), job)
        arguments = {"data": self.out, "tree": config.tree, "base": self.base}
        work = StageWork("encode", "loading the vocabulary", EncodeShard, arguments)
        records = self._make(work, "encoded", text, fingerprints, jobs)
        sizes, classes = measure_rows(config, folder, records, self.record, labelled="label" in stages[0])
        vocabulary = vocabulary_files(folder)
        pieces = [file_sha256(folder / name) for name in vocabulary if name.endswith(".model")]
        return write_index(
            folder,
            records,
            columns=encoded_columns(*stages, config.tree).names,
            fingerprint=fingerprint_of(fingerprints),
            text_fingerprint=fingerprint_of([record.sha256 for record in text]),
            tree_fingerprint=fingerprint_of(parser, tree),
            vocab_fingerprint=fingerprint_of(inputs_fingerprint, *pieces),
            tree_source=config.tree.tree_source,
            parser=parser,
            parser_settings=settings.facts(),
            tree_settings=tree,
            subword_settings=config.subwords.model_dump(),
            files=sizes | {name: file_sha256(folder / name) for name in vocabulary},
            num_pieces=num_pieces,
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
    """The places of the text and parsed stage of `out`: relative paths for neighbours, so that both can move together."""
    place = f"../{base.name}" if base.parent == out.parent else str(base)
    return {stage: f"{place}/{stage}" for stage in ("text", "parsed")}
