"""Compute the states of a frozen pretrained encoder once, for training runs that read them.

    tree-attention frozen-states --out STATES data=DATA encoder=models/bert
    tree-attention train-classifier --config FILE.yaml --out RUN data=DATA frozen_states=STATES

DATA is a data set with the pieces of the encoder's tokenizer. The run freezes the encoder as a whole. The command prints the size
of the states before it computes them. After an interruption, the same command continues.
"""

import argparse
import shlex
from typing import Literal

from pydantic import Field

from treenet.cli.shipped import find_config
from treeproc.common.command_line import build_arg_parser, command, loading
from treeproc.common.errors import require
from treeproc.common.folder_kinds import STATES, claim_folder
from treeproc.common.hub import ModelPlace, pin
from treeproc.common.settings import Settings, UserError, load_settings, refuse_relative_in_job
from treeproc.common.storage import DataPath


class FrozenStatesConfig(Settings):
    """States of a frozen pretrained encoder for a data set."""

    data: DataPath = Field(description="folder of a finished data set")
    encoder: ModelPlace = Field(description="the encoder, as model.pretrained.folder of the runs")
    use_gpu: bool = Field(False, description="one GPU a worker")
    workers: Literal[0] | None = Field(
        None, description="0: the command runs in this process, without Ray; unset: as many Ray actors as there is room for"
    )


@command(lambda: build_arg_parser(__doc__, FrozenStatesConfig, find_config=find_config, remote_out=True))
def main(args: argparse.Namespace) -> None:
    if args.out is None or args.sample:
        raise UserError("give --out STATES, data=DATA and encoder=FOLDER (this command has no --sample)")
    config = load_settings(FrozenStatesConfig, args.config, args.overrides)
    refuse_relative_in_job({"--out": args.out, "data": config.data, "encoder": config.encoder})
    if config.workers is None:
        require("ray", "work in several processes", "give workers=0 to work in one process")
    out = args.out.absolute()
    claim_folder(out, STATES)
    with loading():
        from treenet.extras.frozen_states import write_states  # here because it loads PyTorch

    data = config.data.absolute()
    encoder = pin("encoder", config.encoder.absolute(), (data, "subwords.tokenizer"))
    index = write_states(data, encoder, out, in_this_process=config.workers == 0, use_gpu=config.use_gpu)
    for split, total in index["totals"].items():
        windows = f", {total['in_windows']:,} examples in windows" if total.get("in_windows") else ""
        print(f"{split}: {total['states']:,} states of {total['rows']:,} examples{windows}")
    print(
        f"  train: tree-attention train-classifier --config FILE.yaml --out RUN data={shlex.quote(str(data))} "
        f'"freeze=[encoder.embedding.pretrained.*]" frozen_states={shlex.quote(str(out))}'
    )
