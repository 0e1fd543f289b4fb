"""Train a classifier, or a model that scores pairs of sentences, and score it on valid and test.

The data set has classes or pairs, and comes from workflows/preprocess.py.

    python workflows/train_classifier.py --config workflows/configs/sst5.yaml --out RUN data=DATA
    python workflows/train_classifier.py --config workflows/configs/sst5.yaml --out RUN data=DATA model.name=bilstm
    python workflows/train_classifier.py --config FILE.yaml data=DATA --dry-run     sizes, memory, hours

The same command continues an interrupted run. It scores the trained model and the last checkpoint, and writes RUN/scores.json and
RUN/predictions.*.tsv. By default, the trained model is the checkpoint with the best validation accuracy, or with the best Pearson
correlation for pairs.

It trains in this process; workers=2 trains in two processes, on Ray. For many seeds, models and control trees, use
workflows/compare_seeds.py.
"""

from collections.abc import Sequence

from treenet.cli.shipped import find_config, find_settings
from treenet.config import TrainConfig
from treenet.evaluation.classify import format_scores, score_run
from treenet.evaluation.run_results import warn_of_stale_results
from treenet.jobs.dry_run import dry_run
from treenet.jobs.train_run import run_to_end
from treenet.loggers.feed import log_scores
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.tasks.registry import build_task, check_task
from treeproc.common.settings import UserError, build_arg_parser, load_settings


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, TrainConfig, find_config=find_config, remote_out=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the run needs, measured in ten updates; keep --out as it is"
    )
    args = parser.parse_intermixed_args(argv)
    path = find_settings(args, "data=DATA")
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainConfig, path, args.overrides, **({} if path else {"task": "classification"}))
    check_task(config, "train_classifier.py")
    if args.dry_run:
        print(dry_run(config, args.out))
        return
    run_to_end(config, args.out)
    with open_results(args.out, AVERAGED, "checkpoints/*") as run:
        print(format_scores(score_run(run, use_gpu=config.use_gpu), build_task(config)))
        log_scores(run)
        warn_of_stale_results(run, args.out)
