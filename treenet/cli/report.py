"""Make one page about runs: differences, scores and tests, learning curves, attention to phrases, and pictures of sentences.

    tree-attention report --out report RUN_A RUN_B
    tree-attention report --out report RUN STUDY lines=[3,17]

RUN is a folder of tree-attention train, of any task. STUDY is a folder of tree-attention scaling or tree-attention
compare-seeds. Give as many as you like.
report/index.html needs no network. report/figures has every figure as PNG and SVG, and report/report.json has every number. If a
run lacks something, the page leaves it out and names the command that adds it.
"""

import argparse

from treenet.cli.shipped import find_config
from treenet.report.settings import ReportSettings
from treeproc.common.command_line import build_arg_parser, command, loading, split_arguments
from treeproc.common.errors import require
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.common.storage import as_path


@command(lambda: build_arg_parser(__doc__, ReportSettings, find_config=find_config, continues=False))
def main(args: argparse.Namespace) -> None:
    require(("matplotlib", "scipy"), "a report")
    if args.sample:
        raise UserError("--sample: this command has none; run tree-attention demo, and give the folders of its runs")
    if args.out is None:
        raise UserError("give --out DIR, the folder for the report")
    runs, overrides = split_arguments(ReportSettings, args.overrides)
    settings = load_settings(ReportSettings, args.config, overrides, **({"runs": runs} if runs else {}))
    refuse_relative_in_job({"--out": args.out, **{f"runs: {run}": as_path(run) for run in settings.runs}})
    with loading():
        from treenet.report.build import write_report  # here, as below, because it loads PyTorch and matplotlib
    page, numbers, *figures = write_report(settings, args.out)
    print(f"page     {page}, {page.stat().st_size / 1e6:.2f} MB\nnumbers  {numbers}")
    if figures:
        print(f"figures  {figures[0].parent}: {len(figures)} files")
