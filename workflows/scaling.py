"""A data-size study: several models at several shares of the training data and several seeds, as in figure 5a of the paper.

    python workflows/scaling.py --config FILE.yaml --out STUDY data=DATA grid.fractions=[0.1,1] grid.seeds=[1,2]
    python workflows/scaling.py --sample --out STUDY data=DATA

FILE.yaml is a configuration of workflows/train_wmt.py, with or without a `grid`. All cells use the same shards and the
same vocabulary; smaller shares nest in larger ones. Each cell is a run of its own in STUDY/cells; STUDY/ledger.json says
what is done, running, failed. The same command continues: it runs what is missing, failed cells too; a larger grid adds
cells. At the end: a table, STUDY/scaling.json, and the plot STUDY/scaling.png and .svg.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from treenet.experiments.scaling import ScalingConfig, study_cells, study_work
from treenet.experiments.scaling_report import build_report, format_table, write_report
from treenet.training.grid import run_cells
from treenet.training.ledger import DONE, FAILED, LEDGER, Ledger
from treenet.training.run import STOPPED_BY_SIGTERM, make_run_folder
from treeproc.files import atomic_write, locked
from treeproc.settings import UserError, build_arg_parser, dump_settings, load_settings, refuse_relative_in_job, run_cli

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
        entries = Ledger.read(out).entries
        for cell in cells:
            print(f"{cell.name}: {entries[cell.name].status if cell.name in entries else 'new'}")
        print(format_table(build_report(config, Ledger.read(out), out)))
        return
    make_run_folder(out)
    with locked(out):
        ledger = Ledger.open(out, cells)
        atomic_write(out / "config.yaml", dump_settings(config).encode())
        run_cells(cells, study_work(config), ledger, config.grid.parallel)
        print(f"\n{write_report(config, ledger, out)}")
    left = {cell.name: ledger.entries[cell.name] for cell in cells if ledger.entries[cell.name].status != DONE}
    for name, entry in left.items():
        if entry.status == FAILED:
            print(f"{name} failed: {entry.error}", file=sys.stderr)
    if any(entry.status != FAILED for entry in left.values()):
        print(f"stopped with {ledger.counts()}; the same command continues", file=sys.stderr)
        sys.exit(STOPPED_BY_SIGTERM)
    if left:
        print(f"{len(left)} of {len(cells)} cells failed, see {out / LEDGER}; the same command tries them again", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
