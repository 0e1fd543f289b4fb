"""Train a tokeniser, a tagger, a constituency and a dependency parser on treebanks, offline.

    tree-attention train-parser --config FILE.yaml --out DIR

The same command continues an interrupted run. The result is the folder DIR/models. Give it to tree-attention preprocess as
parser.models.
"""

import argparse
import logging
import shlex
from pathlib import Path

from treenet.cli.shipped import find_config, find_settings
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading
from treeproc.common.errors import require
from treeproc.common.files import file_size
from treeproc.common.settings import UserError, load_settings
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.parsers.model_files import trained_files


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, TrainParserConfig, find_config=find_config)
    parser.add_argument("--dry-run", action="store_true", help="check the treebanks and print what the parsers would learn")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    require(("stanza", "matplotlib"), "the training of parsers")
    path = find_settings(args, "treebank=FOLDER language=LANGUAGE")
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainParserConfig, path, args.overrides)
    with loading():
        from treeproc.extras.parser_training.job import describe, train_parser  # here, because it loads Stanza

    logging.getLogger("stanza").setLevel(logging.ERROR)
    if args.dry_run:
        print(describe(config))
        return
    models = train_parser(config, args.out)
    size = sum(file_size(path) for path in models.glob("*.pt"))
    print(f"models: {models}, {size / 1e6:.1f} MB")
    print(f"scores: {Path(models) / 'README.md'}, scores.json, curves.png")
    files = set(trained_files(models))
    if not {"tokenize", "pos"} <= files or not {"constituency", "depparse"} & files:
        print("use:    tree-attention preprocess needs tokenizer.pt, pos.pt, and constituency.pt or depparse.pt")
        return
    command = f"tree-attention preprocess ... parser.models={shlex.quote(str(models))} parser.language={config.language}"
    if "constituency" not in files:
        command += " parser.dependencies=true parser.constituency=false"
    print(f"use:    {command}")
