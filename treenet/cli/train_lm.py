"""Train a language model on the source side of a data set of workflows/preprocess.py. Targets are optional.

    python workflows/train_lm.py --config workflows/configs/masked_lm.yaml --out RUN data=DATA     masked
    python workflows/train_lm.py --config workflows/configs/causal_lm_sample.yaml --out RUN data=DATA     left to right
    python workflows/train_lm.py --sample --out RUN data=DATA     a small masked model
    python workflows/train_lm.py --config FILE.yaml data=DATA --dry-run     sizes, memory, hours

The same command continues an interrupted run. It trains in this process; workers=2 trains on Ray. workflows/score_lm.py computes
perplexities. workflows/unsupervised_parse.py reads the constituents that model.name = constituent_transformer finds.
"""

from collections.abc import Sequence
from typing import Any

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treenet.config import TrainConfig
from treenet.evaluation.run_results import warn_of_stale_results
from treenet.jobs.dry_run import dry_run
from treenet.jobs.train_run import run_to_end
from treenet.tasks.registry import check_task
from treeproc.common.command_names import as_called
from treeproc.common.settings import UserError, build_arg_parser, load_settings

SAMPLE = CONFIGS / "masked_lm_sample.yaml"
# Without a configuration. The default model of translation is none for language models.
DEFAULTS: dict[str, Any] = {"task": "masked_lm", "model": {"name": "transformer"}}


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, TrainConfig, find_config=find_config, remote_out=True, has_sample=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the run needs, measured in ten updates; keep --out as it is"
    )
    args = parser.parse_intermixed_args(argv)
    path = find_settings(args, "data=DATA", SAMPLE)
    if args.out is None and not args.dry_run:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainConfig, path, args.overrides, **({} if path else DEFAULTS))
    check_task(config, "train_lm.py")
    if args.dry_run:
        print(dry_run(config, args.out))
        return
    run_to_end(config, args.out)
    warn_of_stale_results(args.out)
    print(as_called(f"  score: python workflows/score_lm.py --out {args.out}"))
    if config.model.name == "constituent_transformer":
        print(as_called(f"  parse: python workflows/unsupervised_parse.py --out {args.out}"))
