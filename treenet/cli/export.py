"""Export a trained model as a run folder without its data set, or a translation model in the format of another program.

    tree-attention export RUN --out FOLDER --to safetensors
    tree-attention export RUN --out FOLDER --to onnx
    tree-attention export RUN --out FOLDER --to ctranslate2 quantization=int8
    tree-attention export RUN --out FOLDER --to gpt2

RUN is the folder of a training run. `safetensors` takes every model: FOLDER is a run folder with the weights, the settings, the
vocabulary and a model card, and all commands that use a model read it. `onnx` takes the plain Transformer and the Tree
Transformer: a graph of the encoder and one of the decoder's step. `ctranslate2` takes the plain Transformer alone. `gpt2` takes
causal language models with pre-norm, for `transformers`.
"""

import argparse
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from treenet.cli.shipped import find_config
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import Checkpoint, checkpoint_names
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading, split_arguments
from treeproc.common.errors import require
from treeproc.common.settings import Settings, UserError, load_settings, refuse_relative_in_job
from treeproc.common.storage import as_path

# Each format with the packages that write it.
FORMATS: dict[str, tuple[str, ...]] = {
    "safetensors": (),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "ctranslate2": ("ctranslate2",),
    "gpt2": (),
}


class ExportSettings(Settings):
    """Settings of export.py."""

    to: Literal["safetensors", "onnx", "ctranslate2", "gpt2"] = Field("safetensors", description="the format; --to sets it too")
    checkpoint: Checkpoint = AVERAGED
    max_positions: int = Field(
        1024, ge=8, le=65_536, description="all except safetensors: the most pieces of a sentence or of a translation"
    )  # the example that a graph is made of has fewer
    quantization: Literal["none", "int8"] = Field(
        "none", description="ctranslate2: 'int8' stores the weights of linear maps and embeddings in 8 bits"
    )

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.quantization != "none" and self.to != "ctranslate2":
            raise ValueError(f"quantization = '{self.quantization}' needs to = 'ctranslate2', but to is '{self.to}'")
        if self.max_positions != type(self).model_fields["max_positions"].default and self.to == "safetensors":
            raise ValueError(
                "max_positions needs to = 'onnx', 'ctranslate2' or 'gpt2', but to is 'safetensors', which has no limit"
            )
        return self


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, ExportSettings, find_config=find_config, continues=False)
    parser.add_argument("--to", choices=list(FORMATS), help="the same as to=FORMAT")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    runs, overrides = split_arguments(ExportSettings, args.overrides)
    settings = load_settings(ExportSettings, args.config, overrides, **({"to": args.to} if args.to else {}))
    require(FORMATS[settings.to], f"--to {settings.to}")
    if len(runs) != 1 or args.out is None or args.sample:
        raise UserError("give one RUN, the folder of a training run, and --out FOLDER (this command has no --sample)")
    source, out = as_path(runs[0]), Path(args.out)
    if source.resolve() == out.resolve():
        raise UserError(f"--out must be another folder than RUN, which it would replace, but both are {source}")
    own = None if checkpoint_names(settings.checkpoint) else as_path(settings.checkpoint)
    refuse_relative_in_job({"RUN": source, "--out": out, "checkpoint": own})
    with loading():
        from treenet.extras.export.ctranslate2_files import export_ctranslate2  # here, as below, because it loads PyTorch
        from treenet.extras.export.gpt2_files import export_gpt2
        from treenet.extras.export.onnx_files import export_onnx
        from treenet.runs.exported_run import export_run
        from treenet.runs.loading import load_model, load_run

    with read_run(source, *checkpoint_names(settings.checkpoint)) as folder:
        if settings.to == "safetensors":
            run = load_model(folder, checkpoint=settings.checkpoint)
            export_run(run, out)
        elif settings.to == "gpt2":
            run = load_model(folder, checkpoint=settings.checkpoint)
            export_gpt2(run, out, settings.max_positions)
        else:
            run = translation = load_run(folder, checkpoint=settings.checkpoint)
            if settings.to == "onnx":
                export_onnx(translation, out, settings.max_positions)
            else:
                export_ctranslate2(translation, out, settings.max_positions, settings.quantization)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {settings.to} of {run.config.model.name}, {run.checkpoint}; {size:,} bytes")
