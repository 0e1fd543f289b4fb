"""Score a trained model on a split: BLEU, chrF, TER and others of its translations, or the classes that it predicts.

    tree-attention evaluate --out RUN target_language=de
    tree-attention evaluate --out RUN split=valid checkpoint=20000 decoding.beam_size=10
    tree-attention evaluate --compare RUN_A RUN_B compare.num=5
    tree-attention evaluate hypotheses=FILE references=FILE target_language=de
    tree-attention evaluate --out RUN more_references=[FILE2,FILE3]
    tree-attention evaluate --out CLASSIFIER_RUN data=NEW_DATA split=news
    tree-attention evaluate --out CLASSIFIER_RUN input=FILE
    tree-attention evaluate --out RUN bertscore.model=ENCODER bertscore.layer=17 comet.model=COMET_MODEL

RUN is the folder of a training run. The command writes RUN/translations.<split>.txt: one line per example, in the order of the
input. It adds the scores to RUN/scores.json, also by length and depth of the source. Baselines and controls have other names, for
example translations.test.untrained.txt.

For a classifier, it writes RUN/predictions.<split>.tsv, and prints accuracy, macro F1, their intervals and the confusion matrix.
New test sets are data sets made with vocab_from. With input=FILE, a file in the format of the run's data set, it prints the
scores, and keeps none.

Every result records its weights, data, decoding and software. --compare refuses a result that is stale: the run was trained
further, averaged again, or decoded with other settings.

--compare takes two runs of one task that were scored before, also classifiers and language models, or their files, such as
RUN/translations.NAME.txt; or files with one line per reference. It tests the second against the first by a two-sided paired
bootstrap, and shows the lines on which they differ most. Interval and p hold only for these two sets of weights on these
sentences. `scaling` and `compare-seeds` compare over seeds. With target_language, and if the lines of the data
set are tokens, it also tests tokenised BLEU. With --out DIR, the command writes DIR/comparison.json.

BERTScore and COMET are optional. Their models are local folders. COMET runs in a separate environment, which holds unbabel-comet.

hypotheses=FILE scores a file against references. They come from data=DATA, from the run in --out, or from references=FILE. With
--out, the command keeps the lines and the scores there.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from treenet.cli.shipped import find_config
from treenet.config import TrainConfig
from treenet.evaluation.settings import ClassifySettings, CompareConfig, EvaluateSettings
from treenet.runs.mirror import open_results, read_run
from treenet.runs.result_entries import name_data, read_scores
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.folder_kinds import COMPARISON, claim_folder, mark_folder
from treeproc.common.messages import warn
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.readers import read_lines
from treeproc.readers.labelled import refuse_table
from treeproc.shards.store import describe_dropped

# The settings that --compare reads, and those for translations.
_COMPARED = ("split", "data", "compare")
_COMPARED_LINES = ("references", "sources", "more_references", "target_language", "bertscore", "comet", "use_gpu")
_FINISHED = "leave it out, or give the file of a result, such as RUN/predictions.test.last.tsv;"

if TYPE_CHECKING:
    from treenet.evaluation.evaluate import GivenLines
    from treenet.runs.run_results import System
    from treenet.tasks.base import PredictionTask


def find_system(path: AnyPath, settings: EvaluateSettings, stack: ExitStack) -> "System":
    """Find the result of the split: in a run folder, in a file of results, or in the lines of another file."""
    from treenet.runs.run_results import System, is_result, read_system, result_in_run  # here, as below: it loads PyTorch

    if isinstance(path, RemotePath) or path.is_dir():
        run, name = stack.enter_context(read_run(path)), settings.split
        of_data = f"{name}.{name_data(settings.data)}" if settings.data is not None else name
        return read_system(run, of_data if of_data in read_scores(run) else name, path)
    if result := result_in_run(path):
        return read_system(path.parent, result)
    if path.suffix == ".tsv" and is_result(path):
        raise UserError(f"{path} has no entry in {path.parent / 'scores.json'}; give the file in its run")
    return System(str(path), plain_lines(path))


def plain_lines(path: AnyPath) -> list[str]:
    """Read the lines of a file of text. Raises UserError for a table."""
    refuse_table(path)
    return list(read_lines([path]))


def run_compare(paths: Sequence[AnyPath], settings: EvaluateSettings, given: "GivenLines", out: Path | None) -> None:
    from treenet.evaluation.compare_predictions import compare_predictions
    from treenet.evaluation.comparison import format_comparison
    from treenet.evaluation.evaluate import compare_results

    with ExitStack() as stack:
        baseline, system = (find_system(path, settings, stack) for path in paths)
        if baseline.task == system.task == "translation":
            check_chosen(settings, _COMPARED + _COMPARED_LINES, f"{_FINISHED} --compare")
            found = compare_results(baseline, system, given, settings)
        else:
            check_chosen(settings, _COMPARED, f"{_FINISHED} --compare of runs without translations")
            found = compare_predictions(baseline, system, settings)
    print(format_comparison(found))
    if out is not None:
        mark_folder(out, COMPARISON)
        atomic_write(out / "comparison.json", json_bytes(found))
        print(f"\n{out / 'comparison.json'}")


def describe_scores(name: str, scores: dict) -> str:
    """Return the tables of a result, and the definitions of its metrics."""
    from treenet.evaluation.buckets import format_buckets, format_tags
    from treenet.evaluation.evaluate import format_signatures
    from treenet.tasks.class_scores import format_confusion
    from treenet.tasks.scores import format_scores

    tables = [format_scores({name: scores}), format_signatures(scores), format_confusion(scores)]
    tables += [format_buckets(scores.get("buckets", {})), format_tags(scores.get("tags", []))]
    return "\n".join(filter(None, tables))


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, EvaluateSettings, find_config=find_config, remote_out=True, reads_run=True)
    parser.add_argument("--run", dest="out", type=as_path, metavar="DIR", help="the same as --out")
    parser.add_argument("--compare", nargs=2, type=as_path, metavar=("A", "B"), help="test B against A; see above")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    settings = load_settings(EvaluateSettings, args.config, args.overrides)
    if args.sample:
        raise UserError("--sample: this command has none; run tree-attention train --sample, and give its folder as --out")
    if args.compare and settings.hypotheses:
        raise UserError("--compare takes two systems; leave hypotheses out, or give its file as one of the two")
    if settings.compare != CompareConfig() and not args.compare:
        raise UserError("compare: needs --compare A B; give it, or leave compare out")
    if settings.references and not (args.compare or settings.hypotheses):
        raise UserError("references: needs hypotheses=FILE or --compare; a run has the references of its data set")
    if settings.input and (other := sorted({"split", "data", "hypotheses"} & settings.model_fields_set)):
        raise UserError(f"input: its rows are scored instead of a split; leave out {', '.join(other)}")
    if settings.references and settings.data:
        raise UserError("references: replaces the references of a data set; leave data out, or references")
    if settings.sources and not settings.references:
        raise UserError("sources: needs references=FILE; a data set has the source lines of its references")
    with loading():
        from treenet.evaluation.classify import classify_run
        from treenet.evaluation.evaluate import GivenLines, evaluate_run, score_file
        from treenet.loggers.feed import log_scores
        from treenet.runs.result_provenance import LAST
        from treenet.runs.run_results import result_in_run, translations_path

    references, sources = (plain_lines(path) if path else None for path in (settings.references, settings.sources))
    given = GivenLines(references, list(map(plain_lines, settings.more_references)), sources)
    if args.compare and args.out is not None:
        claim_folder(args.out, COMPARISON)
    if args.compare:
        return run_compare(args.compare, settings, given, args.out)
    if settings.hypotheses:
        known = [*_OF_FILES, *(["buckets"] if settings.references is None else [])]
        check_chosen(settings, known, "does not change the scores of a file; leave it out, as hypotheses")
        lines = plain_lines(settings.hypotheses)
        if (result := result_in_run(settings.hypotheses)) and settings.references is None:
            of_split = read_scores(settings.hypotheses.parent)[result].get("split", settings.split)
            if of_split != settings.split:
                raise UserError(f"hypotheses: {settings.hypotheses} holds translations of {of_split}; set split={of_split}")
        if args.out is None:
            return print(describe_scores(*score_file(lines, given, settings, None)))
        with open_results(args.out) as folder:
            name, scores = score_file(lines, given, settings, folder)
            log_scores(folder)
        return print(describe_scores(name, scores), translations_path(args.out, name), sep="\n")
    if args.out is None:
        raise UserError("give --out RUN, the folder of a training run")
    names = ("checkpoints/*",) if settings.checkpoint == LAST else checkpoint_names(settings.checkpoint)
    with open_results(args.out, *() if settings.untrained else names) as run:
        if settings.input is not None:
            return print(score_input(run, settings.input, settings))
        if task := prediction_task(run):
            name, scores = classify_run(run, for_prediction(settings, task))
        else:
            name, scores = evaluate_run(run, settings, given.more)
        log_scores(run)
    written = translations_path(args.out, name) if task is None else args.out / f"predictions.{name}.tsv"
    print(describe_scores(name, scores), written, sep="\n")


# The settings that scores of a file read.
_OF_FILES = (
    "hypotheses", "split", "data", "references", "sources", "more_references", "target_language", "bertscore", "comet", "use_gpu",
)  # fmt: skip


def prediction_task(run: Path) -> "PredictionTask | None":
    """Return the task of a run that predicts classes or scores; None for any other folder.

    Raises UserError for a run whose models another command scores.
    """
    from treenet.tasks.base import PredictionTask, build_task

    path = run / "config.yaml"
    task = build_task(load_settings(TrainConfig, path)) if path.is_file() else None
    if task is not None and task.scorer != "evaluate":
        raise UserError(f"{run} is a run of {task.config.task}; score it with tree-attention {task.scorer}")
    return task if isinstance(task, PredictionTask) else None


def score_input(run: Path, given: AnyPath, settings: EvaluateSettings) -> str:
    """Return the scores of `settings.input`, made into a split as new test sets are. Nothing is kept."""
    from treenet.evaluation.classify import classify_split
    from treenet.runs.loading import HELD_DATA, check_is_run, check_there, data_of
    from treeproc.online.line_encoder import possible_remedies
    from treeproc.parsers import describe_parser
    from treeproc.stages.preprocess import PreprocessConfig, preprocess

    check_is_run(run)
    if (task := prediction_task(run)) is None:
        raise UserError(
            f"input: needs the run of a classifier, but {run} is none; for a translation model, translate the file with "
            "tree-attention translate, and give hypotheses=TRANSLATIONS references=FILE"
        )
    data = data_of(run, load_settings(TrainConfig, run / "config.yaml"))
    check_there(data, run)
    if run / HELD_DATA == data:
        raise UserError(f"input: needs a data set, but {run} is an exported run, which has none; give the run that was exported")
    chosen = for_prediction(settings, task)
    splits = {chosen.split: {"source": [settings.input]}}
    config = load_settings(PreprocessConfig, None, vocab_from=data, splits=splits, workers=0)
    if config.parser.device == "cuda":  # which this machine may lack
        config = config.model_copy(update={"parser": config.parser.model_copy(update={"device": "auto"})})
    with possible_remedies(data):
        describe_parser(config.parser)
    with TemporaryDirectory() as place:
        made = Path(place) / "data"
        try:
            index = preprocess(config, made)
        except UserError as error:
            raise UserError(_without_columns(str(error))) from None
        _, _, scores = classify_split(run, chosen.model_copy(update={"data": made}))
    if said := describe_dropped(index, chosen.split):
        warn(f"note: {said}; the scores are those of the others")
    return describe_scores(given.name, scores)


def _without_columns(message: str) -> str:
    """Leave the settings of columns out of the message of a reader: this command has none."""
    message = re.sub(r"for pairs of texts, set labelled\.\w+=NAME", "give these columns alone, or add a header line", message)
    return re.sub(r"set labelled\.\w+(, or rename its column)?(?=$|, or add a header line$)", "rename it in the file", message)


def for_prediction(settings: EvaluateSettings, task: "PredictionTask") -> ClassifySettings:
    """Return the settings for a run without translations. Raises UserError for those that only translations have."""
    known = [*ClassifySettings.model_fields, "input"]
    check_chosen(settings, known, f"is for translations; leave it out, as a run of {task.config.task}")
    return ClassifySettings(**{name: getattr(settings, name) for name in settings.model_fields_set - {"input"}})


def check_chosen(settings: EvaluateSettings, known: Iterable[str], why: str) -> None:
    """Raise UserError if the user chose settings that are not `known`."""
    if other := sorted(settings.model_fields_set - {*known}):
        raise UserError(f"{', '.join(other)}: {why} takes {', '.join(known)}")
