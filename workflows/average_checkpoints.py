"""Average the last checkpoints of a run into RUN/averaged/model.safetensors.

python workflows/average_checkpoints.py --out RUN last=5
"""

from collections.abc import Sequence

from pydantic import Field, PositiveInt

from treenet.training.checkpoint import average_checkpoints
from treeproc.files import read_json
from treeproc.settings import Settings, UserError, build_arg_parser, load_settings, run_cli


class AverageConfig(Settings):
    """What to average."""

    last: PositiveInt = Field(5, description="checkpoints to average, counted from the last")


def main(argv: Sequence[str]) -> None:
    args = build_arg_parser(__doc__, AverageConfig).parse_intermixed_args(argv)
    if args.out is None or args.sample:
        raise UserError("give --out RUN, the folder of a training run; --sample of workflows/train_wmt.py makes one")
    config = load_settings(AverageConfig, args.config, args.overrides)
    folder = average_checkpoints(args.out, config.last)
    steps = read_json(folder / "meta.json")["averaged_steps"]
    print(f"{folder / 'model.safetensors'}: average of steps {', '.join(str(step) for step in steps)}")


if __name__ == "__main__":
    run_cli(main)
