"""Classify raw text with a trained classifier: one line out for every line or row in, in order.

    tree-attention classify --out RUN input=FILE output=FILE
    echo "The dog was happy." | tree-attention classify --out RUN --scores
    tree-attention classify --out RUN input=FILE --json phrases=true
    tree-attention classify --out RUN input=FILE trees=FILE checkpoint=2000

RUN is the folder of a training run of a classifier. The command parses the lines with the parser of the run's data set, or reads
their trees from a file of brackets. FILE may be a table (.csv, .tsv, .jsonl) if the data set was made of tables: its rows then
get the columns `predicted` and `probability`. On a terminal, the command classifies each line after you type it. A line that it
cannot classify has an empty line and a warning with the reason.
"""

import argparse
import sys
from functools import partial
from typing import Any

from treenet.cli.shipped import find_config
from treenet.cli.translate import STDIN, count_if_files, typed_lines
from treenet.evaluation.settings import ClassifyLinesSettings
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading
from treeproc.common.folder_kinds import claim_output
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.common.storage import as_path
from treeproc.online.input_files import read_raw_lines, refuse_output_name
from treeproc.readers.labelled import table_form


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, ClassifyLinesSettings, find_config=find_config, remote_out=True, reads_run=True)
    parser.add_argument("--scores", action="store_true", help="the same as scores=true")
    parser.add_argument("--json", action="store_true", help="the same as json_lines=true")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    if args.out is None or args.sample:
        raise UserError("give --out RUN, the folder of a training run of a classifier (this command has no --sample)")
    flags = {name: True for name, given in (("scores", args.scores), ("json_lines", args.json)) if given}
    settings = load_settings(ClassifyLinesSettings, args.config, args.overrides, **flags)
    if settings.phrases and not settings.json_lines:
        raise UserError("phrases: are only in JSON; add --json")
    source = settings.input if settings.input or settings.trees else STDIN
    paths = {"--out": args.out, "input": settings.input, "trees": settings.trees, "output": settings.output}
    paths["checkpoint"] = None if checkpoint_names(settings.checkpoint) else as_path(settings.checkpoint)
    refuse_relative_in_job(paths)
    with loading():
        from treenet.evaluation.line_classifier import LineClassifier  # here, as below, because it loads PyTorch
        from treenet.translation.line_translator import input_form
        from treenet.translation.translate_job import answer_lines, translate_lines

    common: dict[str, Any] = {"settings": settings, "runs": [args.out], "worker": LineClassifier}
    if source is STDIN and sys.stdin is not None and sys.stdin.isatty() and not (settings.output or settings.workers):
        with typed_lines() as lines:
            answer_lines(lines, name=str(STDIN), explain=False, **common)
        return
    if settings.output is not None:
        claim_output(settings.output, {"input": source, "trees": settings.trees})
    files = [path for path in (source, settings.trees) if path is not None]
    form = input_form(settings, args.out)
    read = partial(read_raw_lines, source, settings.trees, None, form)
    of_rows = None if settings.input is None or not form.reads_table(settings.input) else table_form(settings.input.name)
    refuse_output_name(settings.output, "jsonl" if settings.json_lines else of_rows)
    unit = "row" if of_rows else "line"
    translate_lines(read(), name=str(files[0]), unit=unit, total=count_if_files(files, read), **common)
