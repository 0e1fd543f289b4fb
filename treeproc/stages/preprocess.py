"""The preprocessing job: text -> parsed -> vocabulary -> encoded, each stage resumable."""

from collections.abc import Sequence
from pathlib import Path

from treeproc.common.extras import require
from treeproc.common.files import locked
from treeproc.common.folder_kinds import DATA_SET, claim_folder
from treeproc.common.messages import tell
from treeproc.common.provenance import Recorder, recorded
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.schema import SPLITS
from treeproc.shards.shard_size import SMALLEST
from treeproc.shards.store import read_index, stage_folder
from treeproc.stages.checks import (
    check_constituents,
    check_settings,
    check_sides,
    check_vocab_from,
    read_written_settings,
    write_settings_once,
)
from treeproc.stages.config import PreprocessConfig, settle_tree
from treeproc.stages.parse_and_encode import ParseAndEncode
from treeproc.stages.text_stage import NothingLeft, TextStage
from treeproc.stages.text_work import BadInput

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
    claim_folder(out, DATA_SET, PreprocessConfig)
    if config.workers is None:
        require("ray", "work in several processes", "give workers=0 to work in one process")
    if config.parsed is not None:
        return _encode_again(config, out)
    open_choice, config = config.parser.treebank_words is None, config.settled(read_written_settings(out))
    if open_choice and config.parser.knows_treebank_words and config.parser.treebank_words is False:
        tell(f"{out} began with parser.treebank_words=false, and continues with it")
    parser, target_parser = check_settings(config)
    made = [folder for folder in (out, *out.parents) if not folder.exists()] if isinstance(out, Path) else []
    first_text = not (out / "text").exists()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), recorded(out, COMMAND) as record:
        stage = TextStage(config, out, record)
        try:
            config = stage.settle()
            try:
                write_settings_once(config, out)
            except UserError:
                stage.remove_work()
                raise
            text = stage.make()
        except (NothingLeft, BadInput):
            stage.remove_work()
            if first_text:
                record.withdraw()
                _forget(out, made)
            raise
        job = ParseAndEncode(config, out, record, parser, target_parser)
        return job.encode(*job.parse(text))


def text_alone(config: PreprocessConfig, folder: AnyPath) -> tuple[PreprocessConfig, dict, PackedRecords]:
    """Return the complete settings, the description of the parser, and the text stage of a dry run in `folder`."""
    if config.parsed is not None:
        raise UserError("--dry-run: a job with parsed=DATA parses nothing, so there is nothing to measure; leave --dry-run out")
    parser, target_parser = check_settings(config)
    stage = TextStage(config.model_copy(update={"workers": 0}), folder, Recorder(folder, COMMAND))
    config = config.model_copy(update={"rows_per_shard": stage.settle().rows_per_shard})
    return config, parser, stage.make()


def _forget(out: AnyPath, made: Sequence[Path]) -> None:
    """Remove the files and folders of a job that found no example to keep."""
    for path in [*(out / "text").glob("*"), out / "config.yaml", out / ".lock"]:
        path.unlink(missing_ok=True)
    if isinstance(out, Path):
        for folder in (out / "text", *made):
            if folder.exists():
                folder.rmdir()


def _encode_again(config: PreprocessConfig, out: AnyPath) -> dict:
    """Make another encoded stage for the text and trees of the data set `config.parsed`."""
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
    tree = settle_tree(
        config.tree, (old.parser, old.target_parser), "target" in stages[0]["columns"], read_written_settings(out) or {}
    )
    config = config.model_copy(update={"tree": tree, "rows_per_shard": SMALLEST})
    check_constituents(tree, old)
    check_sides(config, *(index["columns"] for index in stages))
    if config.vocab_from is not None:
        of_text = stages[1]["parser"], stages[1]["target_parser"], old.normalization
        check_vocab_from(config, *of_text, [index["columns"] for index in stages])
    if (config.vocab_from is None or config.new_pieces is not None) and "train" not in stages[0]["totals"]:
        needed = "give vocab_from=DATA as well" if config.vocab_from is None else "leave out new_pieces"
        raise UserError(f"parsed: {base} has no train split to learn a vocabulary from; {needed}")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), recorded(out, COMMAND) as record:
        write_settings_once(config, out)
        of_text = ("parser", "target_parser", "normalization", "format", "labels", "labelled")
        complete = config.model_copy(update={name: getattr(old, name) for name in of_text})
        return ParseAndEncode(complete, out, record, stages[1]["parser"], stages[1]["target_parser"], base).encode(text, parsed)
