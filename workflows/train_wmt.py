"""Train a translation model on a data set of workflows/preprocess.py, then average its last checkpoints.

    python workflows/train_wmt.py --config FILE.yaml --out RUN data=DATA
    python workflows/train_wmt.py --sample --out RUN data=DATA

The same command continues an interrupted run. workers=0 trains in this process, without Ray.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from treenet.config import TrainConfig
from treenet.training.run import STOPPED_BY_SIGTERM, run_training
from treeproc.settings import UserError, build_arg_parser, load_settings, run_cli

SAMPLE = Path(__file__).resolve().parent / "configs" / "sample.yaml"


def main(argv: Sequence[str]) -> None:
    args = build_arg_parser(__doc__, TrainConfig).parse_intermixed_args(argv)
    if args.sample == (args.config is not None):
        raise UserError("give --config FILE.yaml (workflows/configs has examples), or --sample for a small run; --help lists all")
    if args.out is None:
        raise UserError("give --out DIR, the folder of the run")
    config = load_settings(TrainConfig, SAMPLE if args.sample else args.config, args.overrides)
    summary = run_training(config, args.out)
    nll = "" if summary.valid_nll is None else f", validation nll {summary.valid_nll:.4f}"
    print(f"{config.model.name}: {summary.parameters:,} parameters, step {summary.step}{nll}")
    if not summary.finished:
        print(f"stopped early, checkpoint in {summary.run_dir / 'checkpoints'}; the same command continues", file=sys.stderr)
        sys.exit(STOPPED_BY_SIGTERM)
    print(f"model:   {summary.averaged / 'model.safetensors'}")
    print(f"metrics: {summary.run_dir / 'metrics.jsonl'}; curves: tensorboard --logdir {summary.run_dir / 'tensorboard'}")


if __name__ == "__main__":
    run_cli(main)
