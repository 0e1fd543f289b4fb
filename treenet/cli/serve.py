"""Serve a trained model over HTTP: sentences in; trees, translations, scores and attention out.

    tree-attention serve --out RUN
    tree-attention serve --out RUN port=0 replicas=2
    tree-attention serve --out RUN host=0.0.0.0 token_file=FILE

RUN is the folder of a training run. The command prints its address: a page to type sentences in, and POST /translate for
programs. Ctrl-C ends it.
"""

import argparse

from treenet.cli.shipped import find_config, given_run
from treenet.extras.serving.settings import ServeSettings
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import build_arg_parser, command, loading
from treeproc.common.errors import require
from treeproc.common.settings import load_settings, refuse_relative_in_job
from treeproc.common.storage import as_path


@command(lambda: build_arg_parser(__doc__, ServeSettings, find_config=find_config, remote_out=True, reads_run=True))
def main(args: argparse.Namespace) -> None:
    require(("uvicorn", "ray"), "a server")  # the extra of the first one brings both
    out = given_run(args)
    settings = load_settings(ServeSettings, args.config, args.overrides)
    own = None if checkpoint_names(settings.checkpoint) else as_path(settings.checkpoint)
    refuse_relative_in_job({"--out": out, "token_file": settings.token_file, "checkpoint": own})
    with loading():
        from treenet.extras.serving.server import serve_run  # here, because it loads Ray and PyTorch

    serve_run(settings, out)
