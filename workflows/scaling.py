"""A data-size study: several models at several shares of the training data and several seeds, as in figure 5a of the paper.

    python workflows/scaling.py --config FILE.yaml --out STUDY data=DATA grid.fractions=[0.1,1] grid.seeds=[1,2]
    python workflows/scaling.py --sample --out STUDY data=DATA

FILE.yaml is a configuration of workflows/train_wmt.py, with or without a `grid`. All cells use the same shards and the
same vocabulary; smaller shares nest in larger ones. Each cell is a run of its own in STUDY/cells; STUDY/ledger.json says
what is done, running, failed. The same command continues: it runs what is missing, failed cells too; a larger grid adds
cells. At the end: a table, STUDY/scaling.json, and the plot STUDY/scaling.png and .svg. Intervals
and tests over seeds need three of them.
"""

from collections.abc import Sequence
from pathlib import Path

from treenet.experiments.scaling import ScalingConfig, study_cells, study_work
from treenet.experiments.scaling_report import build_report, format_table, write_report
from treenet.experiments.study import run_study, show_cells
from treenet.training.ledger import Ledger
from treeproc.settings import UserError, build_arg_parser, load_settings, refuse_relative_in_job, run_cli

SAMPLE = Path(__file__).resolve().parent / "configs" / "scaling_sample.yaml"


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, ScalingConfig)
    parser.add_argument("--dry-run", action="store_true", help="show the cells, their state and the table so far; run nothing")
    args = parser.parse_intermixed_args(argv)
    if args.sample == (args.config is not None):
        raise UserError("give --config FILE.yaml (workflows/configs has some), or --sample for a small study; --help lists all")
    if args.out is None:
        raise UserError("give --out DIR, the folder of the study")
    config = load_settings(ScalingConfig, SAMPLE if args.sample else args.config, args.overrides)
    refuse_relative_in_job({"data": config.data, "--out": args.out})
    out = args.out.resolve()
    cells = study_cells(config, out)
    if args.dry_run:
        print(f"{show_cells(cells, out)}\n{format_table(build_report(config, Ledger.read(out), out))}")
        return
    run_study(config, cells, study_work(config), out, config.grid.parallel, lambda ledger: write_report(config, ledger, out))


if __name__ == "__main__":
    run_cli(main)
