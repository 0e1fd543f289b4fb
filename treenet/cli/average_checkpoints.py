"""Average checkpoints of a run into RUN/averaged/model.safetensors, which commands that use a run read by default.

The choices of checkpoints:

    tree-attention average-checkpoints --out RUN              by the settings of the run
    tree-attention average-checkpoints --out RUN last=5
    tree-attention average-checkpoints --out RUN best=5       the best validations among those that exist
    tree-attention average-checkpoints --out RUN ema=true     the moving average of the latest checkpoint

The command stops if there are fewer checkpoints than asked for, or if one of them is damaged. With allow_fewer=true it averages
the others. It prints which checkpoints are in the average and which are not. RUN/averaged/meta.json records both.
"""

from typing import TYPE_CHECKING, Self

from pydantic import Field, PositiveInt, model_validator

from treenet.cli.shipped import on_a_run
from treenet.config import TrainConfig
from treenet.runs.checkpoint import META, WEIGHTS
from treenet.runs.mirror import open_results
from treeproc.common.command_line import loading
from treeproc.common.files import read_json
from treeproc.common.settings import Settings, load_settings
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from treenet.runs.averaging import Choice


class AverageConfig(Settings):
    """Settings of average_checkpoints.py. Without a choice, the command averages by RUN/config.yaml."""

    last: PositiveInt | None = Field(None, description="average the last N checkpoints")
    best: PositiveInt | None = Field(None, description="average the N checkpoints with the best validation")
    ema: bool = Field(False, description="take the moving average of the weights; needs a run with ema_decay")
    allow_fewer: bool = Field(False, description="average the complete checkpoints, even if there are fewer than asked for")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.chosen()) > 1:
            raise ValueError(f"choose one of last, best and ema, but not {' and '.join(self.chosen())} together")
        return self

    def chosen(self) -> "dict[Choice, int]":
        return {name: int(count) for name in ("last", "best", "ema") if (count := getattr(self, name))}


@on_a_run(__doc__, AverageConfig)
def main(out: AnyPath, settings: AverageConfig) -> None:
    chosen, allow_fewer = settings.chosen(), settings.allow_fewer
    with loading():
        from treenet.runs.averaging import average_checkpoints, describe_gaps  # here, as below, because it loads PyTorch
        from treenet.runs.run_results import warn_of_stale_results

    with open_results(out, "checkpoints/*") as run:
        if not chosen:
            config = load_settings(TrainConfig, run / "config.yaml")
            chosen, allow_fewer = {config.average: config.average_checkpoints}, True  # as at the end of training
        [(choice, count)] = chosen.items()
        folder = average_checkpoints(run, choice, count, allow_fewer=allow_fewer, allow_damaged=settings.allow_fewer)
        warn_of_stale_results(run, out)
    place = out / folder.name
    meta = read_json(place / META, "run the same command again", needed=("averaged_steps",))
    steps = ", ".join(str(step) for step in meta["averaged_steps"])
    what = "moving average at step" if choice == "ema" else f"mean of the {choice} checkpoints, steps"
    print(f"{place / WEIGHTS}: {what} {steps}{describe_gaps(meta)}")
