"""Text to Arrow shards of trees: parse, learn the vocabulary, encode. The same command continues after an interruption."""

import argparse

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.stages.config import read_written_settings
from treeproc.stages.dry_run import dry_run
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess, sample_splits

SAMPLE = CONFIGS / "sample_data.yaml"


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, PreprocessConfig, find_config=find_config, remote_out=True, has_sample=True)
    parser.add_argument("--dry-run", action="store_true", help="print the steps and their time; change nothing in --out")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    path = find_settings(args, "splits.train.source=FILE splits.train.target=FILE", SAMPLE)
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder for the data set")
    splits = {"splits": sample_splits()} if args.sample else {}
    config = load_settings(PreprocessConfig, path, args.overrides, **splits)
    if args.dry_run:
        print(dry_run(config, read_written_settings(args.out.absolute()) if args.out else None))
        return
    refuse_relative_in_job({"--out": args.out})
    print(summary(preprocess(config, args.out.absolute()), args.out))
