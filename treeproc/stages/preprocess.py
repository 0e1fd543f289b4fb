"""The preprocessing job: text -> parsed -> vocabulary -> encoded, each stage resumable."""

import json
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from treeproc.common.cache import find_changed
from treeproc.common.errors import is_installed, quoted, require, rewording
from treeproc.common.files import atomic_write, locked
from treeproc.common.folder_kinds import DATA_SET, MARKER, claim_folder, mark_folder
from treeproc.common.hub import pin
from treeproc.common.messages import phase, tell, warn
from treeproc.common.provenance import Recorder, recorded
from treeproc.common.settings import Effect, UserError, differences, dump_settings, load_settings, settings_with
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import StoreRefuses
from treeproc.parsers import describe_parser
from treeproc.pretrained_pieces import TokenizerPieces
from treeproc.readers.labelled import refuse_table
from treeproc.readers.line_ranges import FilesChanged
from treeproc.readers.numbered_lines import refuse_pipes
from treeproc.shards.schema import MOST_SPLITS, SMALLEST, SPLIT_NAME, SPLITS
from treeproc.shards.shard import check_stage
from treeproc.shards.store import ShardRecord, class_names, content_fingerprint, read_index, stage_folder
from treeproc.stages.config import PreprocessConfig, check_extension, check_reuse, read_written_settings, settle_tree
from treeproc.stages.encode import encoded_columns
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.parse_and_encode import ParseAndEncode, check_columns, parsed_columns
from treeproc.stages.run_jobs import previous_index
from treeproc.stages.text_stage import NothingLeft, TextStage
from treeproc.stages.text_work import BadInput, has_work, remove_work
from treeproc.subwords import SubwordConfig, UnsuitableSize

logger = logging.getLogger(__name__)

SAMPLE = Path(__file__).parent.parent / "sample"
COMMAND = "preprocess"  # in DATA/provenance.json, where a session counts the shards that it wrote, by stage


def sample_splits() -> dict:
    """Return the shipped sample, in the form of `PreprocessConfig.splits`."""
    return {split: {"source": [str(SAMPLE / f"{split}.en.gz")], "target": [str(SAMPLE / f"{split}.de.gz")]} for split in SPLITS}


def preprocess(config: PreprocessConfig, out: AnyPath) -> dict:
    """Run the job, or the rest of it, into `out`; returns the index of the encoded stage.

    Raises UserError on bad input, on a full disk, and when `out` belongs to other settings or
    other text.
    """
    claim_folder(out, DATA_SET)
    begun = read_written_settings(out) or {}
    if config.workers is None:
        # Without the parser's package, one process is no way out.
        lacks_parser = config.parsed is None and config.with_given_trees(begun).runs_stanza and not is_installed("stanza")
        packages, instead = (("ray", "stanza"), "") if lacks_parser else ("ray", "give workers=0 to work in one process")
        require(packages, "this job", instead)
    config = _with_pinned_tokenizer(config, out)
    if config.parsed is not None:
        return _encode_again(config, config.parsed, out)
    if not (out / "text" / "index.json").exists():
        begun.pop("labelled", None)  # the classes may be those of a file that was corrected since then
    open_choice, config = config.parser.treebank_words is None, config.settled(begun)
    if open_choice and config.parser.knows_treebank_words and config.parser.treebank_words is False:
        tell(f"{out} began with parser.treebank_words=false, and continues with it")
    with phase("checking settings and parser", after=30.0):
        parser, target_parser = check_settings(config)
    made = [folder for folder in (out, *out.parents) if not folder.exists()] if isinstance(out, Path) else []
    there = [name for name in (MARKER, "config.yaml", "text") if (out / name).exists()]
    if "config.yaml" in there:
        _settings_to_write(config, out)  # a refusal here leaves the work of a job that was killed
    mark_folder(out, DATA_SET)
    with locked(out), recorded(out, COMMAND) as record:
        try:
            stage = TextStage(config, out, record)
            config = stage.settle()
            try:
                write_settings_once(config, out)
            except UserError:
                remove_work(out)
                raise
            text = stage.make()
        except (NothingLeft, BadInput, FilesChanged, StoreRefuses) as error:
            if isinstance(error, StoreRefuses) and has_work(out):
                raise  # it may answer later, and the job then goes on
            remove_work(out)
            if "text" not in there:
                record.withdraw()
                _forget(out, made, there)
            raise
        job = ParseAndEncode(config, out, record, parser, target_parser)
        return job.encode(*job.parse(text))


def _with_pinned_tokenizer(config: PreprocessConfig, out: AnyPath) -> PreprocessConfig:
    """Return the settings with the commit of a tokenizer of the hub: that of a data set that was begun, or of `parsed`."""
    key = "subwords.tokenizer"
    records = [(folder, key) for folder in (out, config.parsed) if folder is not None]
    tokenizer = config.subwords.tokenizer and pin(key, config.subwords.tokenizer, *records)
    return config.model_copy(update={"subwords": config.subwords.model_copy(update={"tokenizer": tokenizer})})


def text_alone(config: PreprocessConfig, folder: AnyPath) -> tuple[PreprocessConfig, dict, list[ShardRecord]]:
    """Return the complete settings, the description of the parser, and the text stage of a dry run in `folder`."""
    if config.parsed is not None:
        raise UserError("--dry-run: a job with parsed=DATA parses nothing, so there is nothing to measure; leave --dry-run out")
    parser, target_parser = check_settings(config)
    stage = TextStage(config.model_copy(update={"workers": 0}), folder, Recorder(folder, COMMAND))
    config = config.model_copy(update={"rows_per_shard": stage.settle().rows_per_shard})
    return config, parser, stage.make()


def _forget(out: AnyPath, made: Sequence[Path], there: Sequence[str]) -> None:
    """Remove the files and folders of a job that found no example to keep, but not a config.yaml that was `there` before it."""
    for path in [*(out / "text").glob("*"), *(out / name for name in ("config.yaml", ".lock", MARKER) if name not in there)]:
        path.unlink(missing_ok=True)
    if isinstance(out, Path):
        for folder in (out / "text", *made):
            if folder.exists():
                folder.rmdir()


def _encode_again(config: PreprocessConfig, data: AnyPath, out: AnyPath) -> dict:
    """Make another encoded stage for the text and trees of the data set `data`."""
    own = {"parsed", "vocab_from", "new_pieces", "subwords", "tree", "workers"}
    fields = PreprocessConfig.model_fields
    if config.rows_per_shard == SMALLEST:  # as config.yaml of such a data set has it, which means nothing
        own.add("rows_per_shard")
    # The config.yaml of such a data set holds all settings, the others as they are by default.
    if borrowed := sorted(name for name in config.model_fields_set - own if getattr(config, name) != fields[name].default):
        raise UserError(f"{', '.join(borrowed)}: must not be set with parsed, whose data set gives them")
    base = data.absolute()
    if base == out:
        raise UserError(f"parsed: {data} must be another folder than --out")
    if not (base / "text").exists() and (base / "encoded").exists():
        base = stage_folder(base, "text").parent
    stages = [read_index(base / stage) for stage in ("text", "parsed")]
    old = load_settings(PreprocessConfig, base / "config.yaml")
    text, parsed = (index.records() for index in stages)
    tree = settle_tree(config.tree, (old.parser, old.target_parser), stages[0]["columns"], read_written_settings(out) or {})
    config = config.model_copy(update={"tree": tree, "rows_per_shard": SMALLEST})
    check_constituents(tree, old)
    check_sides(config, *(index["columns"] for index in stages))
    if config.vocab_from is not None:
        of_text = stages[1]["parser"], stages[1]["target_parser"], old.normalization, old.labels
        check_vocab_from(config, config.vocab_from, *of_text, [index["columns"] for index in stages])
    made: Mapping = previous_index(out / "encoded", "text_fingerprint") or {}
    for stage, records in (("text", text), ("parsed", parsed)):
        if (base / "encoded" / "index.json").exists():
            check_stage(base, stage)
        _refuse_damaged(base, stage, records)
        fingerprint = content_fingerprint(records, made.get("min_parse_score", {}) if stage == "text" else {})
        if made.get(f"{stage}_fingerprint", fingerprint) != fingerprint:
            raise UserError(f"parsed: {out} was made of another {stage} stage than that of {base}; choose another --out")
    if (config.vocab_from is None or config.new_pieces is not None) and "train" not in stages[0]["totals"]:
        needed = "give vocab_from=DATA as well" if config.vocab_from is None else "leave out new_pieces"
        raise UserError(f"parsed: {base} has no train split to learn a vocabulary from; {needed}")
    mark_folder(out, DATA_SET)
    with locked(out), recorded(out, COMMAND) as record:
        write_settings_once(config, out)
        kept = ("parser", "target_parser", "normalization", "format", "labels", "labelled")
        complete = config.model_copy(update={name: getattr(old, name) for name in kept})
        job = ParseAndEncode(complete, out, record, stages[1]["parser"], stages[1]["target_parser"], base)
        try:
            return job.encode(text, parsed)
        except UnsuitableSize as error:
            theirs = (read_written_settings(data.absolute()) or {}).get("subwords") or {}
            if not (given := [line for line in _set_in(theirs) if config.subwords == SubwordConfig()]):
                raise
            raise UserError(f"{error}; parsed does not take the subwords of {data}: give {' '.join(given)}") from None


def _set_in(subwords: Mapping) -> list[str]:
    """Return the settings `subwords` of a data set that are not defaults, as a command line has them."""
    defaults = SubwordConfig().model_dump(mode="json")
    changed = {name: value for name, value in subwords.items() if name in defaults and value != defaults[name]}
    return [f"subwords.{name}={json.dumps(value)}" for name, value in changed.items()]


def _refuse_damaged(base: AnyPath, stage: str, records: list[ShardRecord]) -> None:
    """Raise UserError if a shard of another data set is not that of its index. Objects are hashed when they are read."""
    if not isinstance(base, Path):
        return
    with phase(f"checking the {stage} shards of {base}"):
        damaged = find_changed(base / stage, {record.name: record.sha256 for record in records})
    if damaged:
        again = f"tree-attention preprocess --config {base / 'config.yaml'} --out {base}"
        raise UserError(f"parsed: {base / stage / damaged[0]} is missing or damaged; {again} makes it again")


def check_settings(config: PreprocessConfig) -> tuple[dict, dict | None]:
    """Return the descriptions of the parsers. Raises UserError for settings that do not fit each other or the inputs."""
    _check_splits(config)
    _check_pairs(config)
    for name in ("max_ratio", "target_script"):
        if config.form.target == "none" and getattr(config.filters, name) is not None:
            warn(f"note: filters.{name} has no effect: format {config.format} has one side")
    could_take = config.form.gives_constituents and config.tree.side == "source" and config.tree.tree_source != "dependencies"
    is_open = config.vocab_from is None and not config.parser.dependencies
    if could_take and is_open and config.parser.name not in ("given", "words"):
        warn(
            f"note: parser.name is {config.parser.name}, so the job does not use the trees of the files; a new data set with "
            "parser.name=given does"
        )
    inputs = config.inputs()
    refuse_pipes(inputs.paths())
    for path in inputs.paths_of_lines():
        refuse_table(path)
    check_columns(config.parser, config.target_parser, inputs.columns())
    stages = inputs.columns(), parsed_columns(config.parser, config.target_parser)
    check_constituents(config.tree, config)
    check_sides(config, *stages)
    if config.subwords.tokenizer is not None:
        TokenizerPieces(config.subwords.tokenizer_file())
    parser, target_parser = describe_parser(config.parser), _describe_target_parser(config)
    if config.vocab_from is not None:
        check_vocab_from(config, config.vocab_from, parser, target_parser, config.normalization, config.labels, stages)
    return parser, target_parser


def _check_splits(config: PreprocessConfig) -> None:
    if "train" not in config.splits and (config.vocab_from is None or not config.splits):
        if not config.splits:
            raise UserError("splits: no files; write splits.train.source=FILE splits.train.target=FILE, and the same for valid")
        there = ", ".join(map(quoted, sorted(config.splits)))
        needed = "train, and any of valid, test and other names"
        raise UserError(f"splits: must be {needed}, but are {there}; vocab_from=DATA makes a data set without train")
    if "train" not in config.splits and config.new_pieces is not None:
        raise UserError("new_pieces: learns from a train split, and there is none; give splits.train, or leave new_pieces out")
    if len(config.splits) > MOST_SPLITS:
        raise UserError(
            f"splits: must be at most {MOST_SPLITS}, but are {len(config.splits)}; make other data sets of further test splits, "
            "with vocab_from=DATA"
        )
    for name in config.splits:
        if not SPLIT_NAME.fullmatch(name):
            raise UserError(f"splits: a name must have at most 50 characters, of a to z, 0 to 9 and _, but is {quoted(name)}")
        if name not in SPLITS and name.isalpha() and (close := get_close_matches(name, (*SPLITS, "validation", "dev"), 1, 0.75)):
            meant = close[0] if close[0] in SPLITS else "valid"
            raise UserError(f"splits.{name}: did you mean {meant}? A further test split needs a name that is less similar")


def _check_pairs(config: PreprocessConfig) -> None:
    if config.form.has_pairs and config.rows_per_shard != "auto" and config.rows_per_shard % 2:
        raise UserError(
            f"rows_per_shard: must be even for format {config.format}, whose sentences of a pair must be in one shard so that a "
            f"filter drops both, but is {config.rows_per_shard}"
        )


def check_vocab_from(
    config: PreprocessConfig, data: AnyPath, parser: dict, target_parser: dict | None, normalization: str,
    labels: Mapping[int, int] | None, stages: Sequence[Sequence[str]],
) -> None:  # fmt: skip
    """Raise UserError if models of `data`, which is `vocab_from`, could not be scored here, or not start training here.

    The parsers, the normalisation and the mapping of classes, `labels`, are those of the text.
    """
    if config.new_pieces is not None:
        check_extension(data.absolute(), subwords=config.subwords.facts())
        return
    text, parsed = stages
    columns = encoded_columns(text, parsed, config.tree).names
    if config.format in ("text", "documents"):  # asks for nothing else; a task that needs more says so
        columns = [*columns, "tgt_pieces", "label", "score", "node_labels", "leaf_labels"]
    index = check_reuse(
        data.absolute(),
        parser=(parser if config.tree.side == "source" else target_parser) or {},
        subwords=config.subwords.facts(),
        tree=config.tree.facts(),
        normalization=normalization,
        columns=columns,
    )
    if "label" in config.form.columns and "num_classes" not in index:
        raise UserError(f"vocab_from: {data} has no classes; give a data set with classes")
    of_data = (read_written_settings(stage_folder(data.absolute(), "text").parent) or {}).get("labels")
    here, there = ({str(old): new for old, new in (one or {}).items()} for one in (labels, of_data))  # YAML has strings
    if here != there:
        logger.warning("warning: labels is %s, but %s in %s; scores compare the numbers of classes", here, there, data)
    own = config.labelled.classes
    if own and "num_classes" in index and own != (theirs := class_names(index)):
        raise UserError(
            f"vocab_from: the classes of {data} are {', '.join(theirs)}, but those of these splits "
            f"{', '.join(own)}; leave labelled.classes out"
        )


def check_constituents(tree: TreeConfig, of_text: PreprocessConfig) -> None:
    """Raise UserError if the text has no constituents for these trees. `of_text` are the settings of its data set."""
    prefix, parser = ("", of_text.parser) if tree.side == "source" else ("target_", of_text.target_parser)
    if parser is None or not tree.of_constituents:
        return
    if not parser.constituency:
        raise UserError(
            f"tree.tree_source: is {tree.tree_source}, but {prefix}parser.constituency=false gives no constituents, so every "
            "tree would be flat; set it to dependencies, which makes trees of arcs, or to flat or another control"
        )
    if of_text.format == "conllu" and parser.name == "given" and tree.side == "source":
        why = "CoNLL-U has no constituents, so every tree is flat"
        logger.warning("warning: %s; tree.tree_source=dependencies makes trees of arcs", why)


def check_sides(config: PreprocessConfig, text: Sequence[str], parsed: Sequence[str]) -> None:
    """Raise UserError when the settings ask for a side that the columns of these stages have not got."""
    tree = config.tree
    if tree.tree_source == "dependencies" and tree.arcs_column not in parsed:
        raise UserError(f"tree.tree_source: dependencies makes trees of arcs, but there are none; {_hint_for_arcs(config, text)}")
    if missing := [name for name in (tree.side, *tree.parsed_columns) if name not in (*text, *parsed)]:
        raise UserError(f"tree.side: must be a side with trees, but is {tree.side}: the data set has no {', '.join(missing)}")
    if tree.min_parse_score is not None and tree.score_column not in parsed:
        name = "parser" if tree.side == "source" else "target_parser"
        do = "give a data set with scores as parsed=DATA" if config.parsed is not None else f"set {name}.scores=true"
        raise UserError(f"tree.min_parse_score: the parsed shards have no scores; {do}, or set tree.min_parse_score=null")
    if config.subwords.tokenizer is not None and tree.other_side in text:
        raise UserError(
            "subwords.tokenizer: gives the pieces of what an encoder reads, but these examples have a target side; leave out the "
            "target files, or the tokenizer"
        )
    if not config.subwords.joint and tree.other_side not in text:
        raise UserError("subwords.joint: must be true, because examples have one side")


def _hint_for_arcs(config: PreprocessConfig, text: Sequence[str]) -> str:
    """Return what gives a data set the arcs that it lacks."""
    if config.parsed is not None:
        return "give a data set with arcs as parsed=DATA"
    name = "parser" if config.tree.side == "source" else "target_parser"
    parser = config.parser if name == "parser" else config.target_parser
    if parser is None or parser.name == "words" or (parser.name == "given" and "arcs" not in text):
        return f"choose a parser that gives arcs: {name}.name=stanza {name}.dependencies=true"
    return f"set {name}.dependencies=true"


def _describe_target_parser(config: PreprocessConfig) -> dict | None:
    if config.target_parser is None:
        return None
    with rewording({"parser.": "target_parser."}):
        return describe_parser(config.target_parser)


# Settings that may change until the named stage is finished: its shards are redone by fingerprint, those before it stay.
_OPEN_UNTIL = {
    **dict.fromkeys(("format", "tokenized", "normalization", "labels", "labelled", "filters"), "text"),
    "new_pieces": "encoded",
    "subwords": "encoded",
    "tree": "encoded",
}


def write_settings_once(config: PreprocessConfig, out: AnyPath) -> None:
    """Write `config.yaml`, or refuse when the folder has another one. Paths of inputs and of other data sets may differ.

    A vocabulary size that does not suit the text can be changed without parsing again.
    """
    if (text := _settings_to_write(config, out)) is not None:
        atomic_write(out / "config.yaml", text.encode())


def _settings_to_write(config: PreprocessConfig, out: AnyPath) -> str | None:
    """Return the text of `config.yaml`, or None if that of the folder stays. Raises UserError as `write_settings_once` does."""
    path = out / "config.yaml"
    if path.exists():
        if not path.read_bytes().strip():
            raise UserError(f"{path} is empty: write the settings of the data set into it again, or choose another --out")
        values = read_written_settings(out) or {}
        moved = {name: new for name in ("parsed", "vocab_from") if values.get(name) and (new := getattr(config, name))}
        written = load_settings(PreprocessConfig, path, **moved).settled(values)
        old, new = (c.model_dump(mode="json", exclude=settings_with(PreprocessConfig, Effect.NONE)) for c in (written, config))
        if old == new:
            return dump_settings(written) if any(values[name] != str(new) for name, new in moved.items()) else None
        fixed = [n for n in new if n not in _OPEN_UNTIL or (out / _OPEN_UNTIL[n] / "index.json").exists()]
        if changed := [line for name in fixed for line in differences(old.get(name), new[name], name)]:
            raise UserError(
                f"{out} belongs to other settings ({'; '.join(changed)}); choose another --out, or give the old settings"
            )
    elif any((out / stage).exists() for stage in ("text", "parsed", "encoded")):
        raise UserError(f"{out} holds shards, but no config.yaml; choose another --out")
    return dump_settings(config)
