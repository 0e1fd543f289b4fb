"""Train a translation model on a data set of workflows/preprocess.py, then average its checkpoints and draw its curves.

    python workflows/train_wmt.py --config FILE.yaml --out RUN data=DATA
    python workflows/train_wmt.py --sample --out RUN data=DATA
    python workflows/train_wmt.py --config FILE.yaml data=DATA --dry-run     sizes, memory, hours

The same command continues an interrupted run. It trains in this process; workers=2 trains in two processes, on Ray.
"""

from collections.abc import Sequence

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treenet.config import TrainConfig
from treenet.evaluation.run_results import warn_of_stale_results
from treenet.jobs.dry_run import dry_run
from treenet.jobs.train_run import run_to_end
from treenet.tasks.registry import check_task
from treeproc.common.command_names import as_called
from treeproc.common.settings import UserError, build_arg_parser, load_settings

SAMPLE = CONFIGS / "sample.yaml"


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, TrainConfig, find_config=find_config, remote_out=True, has_sample=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the run needs, measured in ten updates; keep --out as it is"
    )
    args = parser.parse_intermixed_args(argv)
    path = find_settings(args, "data=DATA", SAMPLE)
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainConfig, path, args.overrides)
    check_task(config, "train_wmt.py")
    if args.dry_run:
        print(dry_run(config, args.out))
        return
    run_to_end(config, args.out)
    warn_of_stale_results(args.out)
    print(as_called(f"  score: python workflows/evaluate.py --out {args.out}"))
    print(as_called(f"  translate: python workflows/translate.py --out {args.out} input=FILE output=FILE"))
