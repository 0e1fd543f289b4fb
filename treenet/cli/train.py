"""Train a model on a data set of tree-attention preprocess, then average its checkpoints and draw its curves.

    tree-attention train --config FILE.yaml --out RUN data=DATA
    tree-attention train --config sst5 --out RUN data=DATA model.name=bilstm     a classifier
    tree-attention train --config masked_lm --out RUN data=DATA     a language model
    tree-attention train --sample --out RUN data=DATA
    tree-attention train --config FILE.yaml data=DATA --dry-run     sizes, memory, hours

The setting `task` names what the model learns: translation, classes of sentences, relatedness of two sentences, or a language
model. The same command continues an interrupted run. It trains in this process; workers=2 trains in two processes, on Ray.

A classifier and a model of relatedness are also scored on valid and test, with the trained model and the last checkpoint. Their
scores are in RUN/scores.json and RUN/predictions.*.tsv. The shipped configurations take the checkpoint with the best validation
(average: best). For many seeds, models and control trees, use tree-attention compare-seeds.

`train-classifier` and `train-lm` are this command. They have other defaults
without --config: a classifier and a masked language model.
"""

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treenet.config import TrainConfig
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treeproc.common.command_line import ArgumentParser, Command, build_arg_parser, loading
from treeproc.common.settings import UserError, load_settings


def _command(sample: Path | None, **defaults: Any) -> Command:
    """Return a command that trains. `sample` is the configuration of --sample, and `defaults` hold without one."""

    def parser() -> ArgumentParser:
        parser = build_arg_parser(
            __doc__, TrainConfig, find_config=find_config, remote_out=True, has_sample=sample is not None, without_config=defaults
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="print what the run needs, measured in ten updates; keep --out as it is"
        )
        return parser

    return Command(parser, partial(_train, sample=sample, **defaults))


def _train(args: argparse.Namespace, sample: Path | None, **defaults: Any) -> None:
    path = find_settings(args, "data=DATA", sample)
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainConfig, path, args.overrides, **({} if path else defaults))
    with loading():
        from treenet.evaluation.classify import score_run  # here, as below, because it loads PyTorch
        from treenet.jobs.dry_run import dry_run
        from treenet.jobs.train_run import run_to_end
        from treenet.loggers.feed import log_scores
        from treenet.runs.run_results import warn_of_stale_results
        from treenet.tasks.base import PredictionTask, build_task
        from treenet.tasks.scores import format_scores

    if args.dry_run:
        print(dry_run(config, args.out))
        return
    run_to_end(config, args.out)
    task = build_task(config)
    if isinstance(task, PredictionTask):
        with open_results(args.out, AVERAGED, "checkpoints/*") as run:
            scores = score_run(run, use_gpu=config.use_gpu)
            print(format_scores(scores) if scores else "there are no scores, because the data set has neither valid nor test")
            log_scores(run)
            warn_of_stale_results(run, args.out)
    else:
        warn_of_stale_results(args.out)
    for what, command, arguments in task.next_commands():
        print(f"  {what}: tree-attention {command} --out {shlex.quote(str(args.out))}{arguments}")


main = _command(CONFIGS / "sample.yaml")
train_classifier = _command(None, task="classification")
# The default model of translation is none for language models.
train_lm = _command(CONFIGS / "masked_lm_sample.yaml", task="masked_lm", model={"name": "transformer"})
