"""The stages of a data set after its text: trees, the vocabulary, and integer shards."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from treeproc.common.files import file_sha256, remove_leftovers
from treeproc.common.messages import Progress, phase
from treeproc.common.provenance import Recorder
from treeproc.common.settings import UserError, differences
from treeproc.common.storage import AnyPath
from treeproc.parsers import Given, ParsedLine, Parser, ParserConfig, build_parser, describe_in_words, read_trees
from treeproc.parsers.config import split_at_blanks
from treeproc.pretrained_pieces import TokenizerPieces
from treeproc.shards.schema import FULL_PARSED_SCHEMA, line_end_in, select
from treeproc.shards.shard import Shard
from treeproc.shards.store import (
    PIECES_FILES,
    ShardRecord,
    content_fingerprint,
    fingerprint_of,
    read_index,
    vocabulary_files,
    write_index,
    write_shard,
)
from treeproc.stages.borrowed_vocabulary import copy_vocabulary, grow_vocabulary
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.encode import EncodeShard, count_classes, encoded_columns
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.job_report import DROPPED, dropped, has_files, say_unread_names, write_dropped, write_fallbacks
from treeproc.stages.lengths import kept_lengths, write_lengths
from treeproc.stages.run_jobs import StageWork, choose_run, make_shards, previous_index
from treeproc.stages.shuffle import OTHER_SHAPES, ROWS_OF_SHAPES, donor_windows
from treeproc.stages.vocabulary import TrainSplit, sampled_rows, write_vocabulary
from treeproc.subwords import LabelVocab, load_pieces
from treeproc.trees.spans import normalise

logger = logging.getLogger(__name__)


def _columns_of(side: ParserConfig) -> dict[str, bool]:
    """Return whether a parser gives each column."""
    return dict.fromkeys(("words", "trees", "parse_status"), True) | {"arcs": side.dependencies, "parse_score": side.scores}


def parsed_columns(config: ParserConfig, target: ParserConfig | None) -> list[str]:
    """Return the columns of the parsed shards of a data set."""
    sides = {"": config} | ({"target_": target} if target else {})
    chosen = {prefix + name for prefix, side in sides.items() for name, wanted in _columns_of(side).items() if wanted}
    return select(FULL_PARSED_SCHEMA, chosen).names


def check_columns(config: ParserConfig, target: ParserConfig | None, text_columns: Collection[str]) -> None:
    """Raise UserError if the text lacks columns that the parsers need."""
    if config.name == "given" and not {"words", "trees"} <= set(text_columns):
        raise UserError(
            "parser.name: is given, but this format gives no trees; choose another parser, or format: brackets or sst"
        )
    if config.name == "given" and config.dependencies and config.given_labels != "parsed" and "arcs" not in text_columns:
        raise UserError(
            "parser.dependencies: is true, but this format gives no arcs; set it to false, parser.given_labels to parsed, or "
            "format: conllu"
        )
    if target is not None and "target" not in text_columns:
        raise UserError("target_parser: this format has no target side; set it to null")
    if target is not None and target.name == "given":
        raise UserError("target_parser.name: is given, but no format gives trees of the target side; choose another parser")


class ParseShard:
    """Text shard to parsed shard. Holds the parsers, so they are built once per actor."""

    def __init__(self, data: Path, config: ParserConfig, target: ParserConfig | None = None):
        self._text, self._parsed = data / "text", data / "parsed"
        self._schema = select(FULL_PARSED_SCHEMA, parsed_columns(config, target))
        self._source: Parser = build_parser(config)
        self._target: Parser | None = None
        self._target_tokens = target is not None and bool(target.treebank_words)
        if target is not None:
            self._target = self._source if target == config else build_parser(target)

    def __call__(self, text: ShardRecord, fingerprint: str) -> ShardRecord:
        examples = list(Shard(self._text, text).rows())
        given = [Given(e.get("words"), e.get("trees"), e.get("arcs")) for e in examples]
        counts: Counter = Counter()
        longest = {"words": 0}
        rows = [{"example_id": e["example_id"]} for e in examples]
        for row, parsed in zip(rows, self._source.parse([e["source"] for e in examples], given), strict=True):
            row |= vars(parsed)
            counts.update(_counts(parsed))
            longest["words"] = max(longest["words"], len(parsed.words["text"]))
            for tags, tree in read_trees(row):
                counts.update(f"tag.{tag}" for tag in tags)
                counts.update(f"label.{label}" for label in normalise(tree, collapse_unary=False).labels)
        if self._target is not None:
            lines = [e["target"] for e in examples]
            words = [Given(split_at_blanks(line)) for line in lines] if self._target_tokens else None
            for row, parsed in zip(rows, self._target.parse(lines, words), strict=True):
                row |= {f"target_{name}": value for name, value in vars(parsed).items()}
                counts.update({f"target_{name}": count for name, count in _counts(parsed).items()})
        if wrong := line_end_in(counts):
            raise UserError(
                f"{self._text / text.name}: the parser gives {wrong}; remove it from the input, or choose another parser"
            )
        return write_shard(
            self._parsed, text.name, rows, self._schema,
            split=text.split, index=text.index, fingerprint=fingerprint, counts=counts, longest=longest,
        )  # fmt: skip


def _counts(parsed: ParsedLine) -> Counter:
    """Count the fallback, the words and the relations of a line."""
    counts = Counter({f"status.{parsed.parse_status}": 1, "words": len(parsed.words["text"])})
    if parsed.arcs is not None:
        counts.update(f"deprel.{name}" for name in parsed.arcs["deprel"])
    return counts


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

    def parse(self, text: list[ShardRecord]) -> tuple[list[ShardRecord], list[ShardRecord]]:
        """Parse every text shard into words and trees."""
        logger.info("parser: %s", describe_in_words(self.parser))
        config, folder = self.config, self.out / "parsed"
        index = previous_index(folder, "totals")
        self._refuse_other_parser(folder, index or {})
        fingerprints = self._parse_fingerprints(text)
        jobs = [{"text": shard, "fingerprint": fingerprint} for shard, fingerprint in zip(text, fingerprints, strict=True)]
        arguments = {"data": self.out, "config": config.parser, "target": config.target_parser}
        work = StageWork("parse", "loading the parser", ParseShard, arguments, config.parser.gpus_per_actor)
        records = self._make(work, "parsed", text, fingerprints, jobs)
        columns = parsed_columns(config.parser, config.target_parser)
        if index is None or records != index.records() or not has_files(folder, index):
            facts = {"fingerprint": fingerprint_of(fingerprints), "columns": columns, "parser": self.parser}
            files = write_fallbacks(folder, records)
            write_index(folder, records, **facts, target_parser=self.target_parser, files=files)
        return text, records

    def _refuse_other_parser(self, folder: AnyPath, index: Mapping) -> None:
        """Raise UserError if another version or other models made the trees that are there: there may be runs of them."""
        for name, own in (("parser", self.parser), ("target_parser", self.target_parser)):
            if name in index and (changed := differences(index[name], own, name)):
                remedy = "restore that one and its models, or choose another --out"
                raise UserError(f"{folder} was made by another parser ({'; '.join(changed)}); {remedy}")

    def _parse_fingerprints(self, text: list[ShardRecord]) -> list[str]:
        """Return the fingerprints of parsed shards."""
        scored = [side for side, parser in self.config.parsers().items() if parser is not None and parser.scores]
        more = ["scores", *scored] if scored else []  # the descriptions of parsers are about trees
        return [fingerprint_of(record.sha256, self.parser, self.target_parser, *more) for record in text]

    def encode(self, text: list[ShardRecord], parsed: list[ShardRecord]) -> dict:
        """Make vocabulary and integer shards."""
        config, folder, base = self.config, self.out / "encoded", self.base or self.out
        folder.mkdir(exist_ok=True)
        stages = Shard(base / "text", text[0]).schema.names, Shard(base / "parsed", parsed[0]).schema.names
        with Progress("vocabulary", None, unit="pieces") as progress:
            inputs_fingerprint = self._make_vocabulary(text, parsed, "target" in stages[0])
            own_pieces = load_pieces(folder / "vocab")
            progress.update(len(own_pieces))
        if config.tree.tree_source == "dependencies":
            say_unread_names(config.tree, folder / "vocab")
        tree, least = config.tree.facts(), _least_scores(config.tree, text)
        # Those of the leaves' side: lines that are translated later are parsed as they were.
        of_source = config.tree.side == "source"
        parser, settings = (self.parser, config.parser) if of_source else (self.target_parser, config.target_parser)
        fingerprints = [
            fingerprint_of(t.sha256, p.sha256, inputs_fingerprint, tree, *([least[t.split]] if t.split in least else []))
            for t, p in zip(text, parsed, strict=True)
        ]
        tree_rule: tuple[str, ...] = ()
        windows = None
        if config.tree.tree_source == "other_shape":
            windows = donor_windows(parsed, ROWS_OF_SHAPES, ROWS_OF_SHAPES)
            fingerprints = _with_windows(fingerprints, parsed, windows)
        elif config.tree.of_other_lines:
            windows = donor_windows(parsed)
            fingerprints = [fingerprint_of(one, OTHER_SHAPES) for one in _with_windows(fingerprints, parsed, windows)]
            tree_rule = (OTHER_SHAPES,)

        def job(place: int) -> dict:
            of_shard = {"text": text[place], "parsed": parsed[place], "fingerprint": fingerprints[place]}
            return of_shard if windows is None else of_shard | {"place": place, "window": windows[place]}

        arguments = {"data": self.out, "tree": config.tree, "base": self.base, "pairs": config.form.has_pairs}
        work = StageWork("encode", "loading the vocabulary", EncodeShard, arguments)
        records = self._make(work, "encoded", text, fingerprints, [job(place) for place in range(len(text))])
        files: dict[str, str] = {}
        if least:
            _refuse_nothing_left(records)
            files = write_dropped(folder, base / "parsed", records, parsed, previous_index(folder, "files"))
        else:
            (folder / DROPPED).unlink(missing_ok=True)
        sizes, classes = measure_rows(config, folder, records, self.record, labelled="label" in stages[0])
        vocabulary = vocabulary_files(folder)
        pieces = [file_sha256(folder / name) for name in vocabulary if name in PIECES_FILES]
        return write_index(
            folder,
            records,
            columns=encoded_columns(*stages, config.tree).names,
            fingerprint=fingerprint_of(fingerprints),
            text_fingerprint=content_fingerprint(text, least),
            tree_fingerprint=fingerprint_of(parser, tree, *tree_rule),
            vocab_fingerprint=fingerprint_of(inputs_fingerprint, *pieces),
            tree_source=config.tree.tree_source,
            parser=parser,
            parser_settings=settings and settings.facts(),
            tree_settings=tree,
            subword_settings=config.subwords.facts(),
            **({"tokenizer": own_pieces.facts()} if isinstance(own_pieces, TokenizerPieces) else {}),
            **({"min_parse_score": least} if least else {}),
            **({"normalization": config.normalization} if config.normalization != "none" else {}),
            files=files | sizes | {name: file_sha256(folder / name) for name in vocabulary},
            num_pieces=len(own_pieces),
            num_labels=len(LabelVocab.load(folder / "vocab" / "labels.txt")),
            dropped=dropped(chain(text, records)),
            parsed_fingerprint=content_fingerprint(parsed),
            **classes,
            **({"stages": _stage_places(self.out, self.base)} if self.base else {}),
        )

    def _make_vocabulary(self, text: list[ShardRecord], parsed: list[ShardRecord], has_both_sides: bool) -> str:
        """Make the vocabulary, or take or extend that of `vocab_from`. Returns the fingerprint of what it follows from."""
        config = self.config
        if config.vocab_from is not None and config.new_pieces is None:
            return copy_vocabulary(self.out, config.vocab_from.absolute())
        lines, trees = ([record for record in stage if record.split == "train"] for stage in (text, parsed))
        on_ray = config.workers != 0 and sampled_rows(lines, config.subwords, has_both_sides) >= LEAST_SAMPLE
        run = choose_run(on_ray, self.out / "encoded", self.record)
        split = TrainSplit(self.base or self.out, lines, trees, config.subwords, config.tree, run, config.tags())
        if config.vocab_from is None or config.new_pieces is None:
            return write_vocabulary(self.out, split)
        return grow_vocabulary(self.out, config.vocab_from.absolute(), config.new_pieces, split)

    def _make(
        self, work: StageWork, stage: str, text: Sequence[ShardRecord], fingerprints: Sequence[str], jobs: Sequence[dict]
    ) -> list[ShardRecord]:
        folder = self.out / stage
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
        return make_shards(work, folder, text, fingerprints, jobs, in_this_process=self.config.workers == 0, record=self.record)


def _with_windows(fingerprints: Sequence[str], parsed: list[ShardRecord], windows: Sequence[tuple[int, int]]) -> list[str]:
    """Return the fingerprints of shards whose lines have trees of any shard of their window."""
    hashes = [record.sha256 for record in parsed]
    every = {window: fingerprint_of(hashes[slice(*window)]) for window in dict.fromkeys(windows)}
    return [fingerprint_of(one, every[window]) for one, window in zip(fingerprints, windows, strict=True)]


def _least_scores(tree: TreeConfig, text: Iterable[ShardRecord]) -> dict[str, float]:
    """Return the least score of the splits that have one."""
    splits = dict.fromkeys(record.split for record in text)
    return {split: least for split in splits if (least := tree.least_score(split)) is not None}


def _refuse_nothing_left(records: list[ShardRecord]) -> None:
    """Raise UserError if `tree.min_parse_score` drops all examples of a split."""
    rows: Counter = Counter()
    for record in records:
        rows[record.split] += record.rows
    if empty := [split for split, count in rows.items() if not count]:
        raise UserError(f"tree.min_parse_score: drops all examples of {empty[0]}; set a lower number")


def _stage_places(out: AnyPath, base: AnyPath) -> dict[str, str]:
    """Return the places of the text and parsed stage of `out`: relative paths for neighbours, so that both can move together."""
    place = f"../{base.name}" if base.parent == out.parent else str(base)
    return {stage: f"{place}/{stage}" for stage in ("text", "parsed")}


# Rows that tasks of Ray measure. Fewer take this process some seconds, which is what Ray takes to start.
LEAST_ROWS = 10_000_000


def measure_rows(
    config: PreprocessConfig, folder: AnyPath, records: list[ShardRecord], record: Recorder, *, labelled: bool
) -> tuple[dict[str, str], dict[str, int | list[str]]]:
    """Hash the files of sizes by name, and give `num_classes`, the names `classes` and `pairs` if rows are `labelled`.

    What is made already is kept. Raises UserError if the models of `vocab_from` have too few classes.
    """
    index = previous_index(folder, "files")
    files = kept_lengths(folder, index, records) if index is not None else {}
    found = index.get("num_classes") if index is not None and files and config.vocab_from is None else None
    run = choose_run(config.workers != 0 and sum(shard.rows for shard in records) >= LEAST_ROWS, folder, record)
    with phase("measuring all rows"):
        files = files or {name: file_sha256(folder / name) for name in write_lengths(folder, records, run=run)}
        if labelled and found is None:
            found = count_classes(folder, records, run)
    if not labelled or found is None:
        return files, {}
    names = config.classes()
    facts: dict = {"num_classes": max(_known_classes(config, found), len(names))} | ({"classes": names} if names else {})
    return files, facts | ({"pairs": True} if config.form.has_pairs else {})


def _known_classes(config: PreprocessConfig, found: int) -> int:
    """Return the number of classes: of the examples, or of the data set of `vocab_from` for its models."""
    other = config.vocab_from
    if other is None or config.new_pieces is not None:
        return found
    known = read_index(other.absolute() / "encoded")["num_classes"]
    if found > known:
        do = "set labels" if config.parsed is None else f"give as parsed a data set with at most {known} classes"
        raise UserError(f"vocab_from: {other} has {known} classes, but these examples have {found}; {do}")
    return known
