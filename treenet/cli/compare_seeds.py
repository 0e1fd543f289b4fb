"""Compare classifiers or models of relatedness over seeds: models, ablations, control trees, as in Tables 2 and 3 of the paper.

    python workflows/compare_seeds.py --config workflows/configs/seeds_sst5.yaml --out COMPARISON data=DATA
    python workflows/compare_seeds.py --config FILE.yaml --out COMPARISON data=DATA grid.seeds=[1,2,3]

FILE.yaml is a configuration of workflows/train.py with a `grid` of systems and seeds. Each cell is a separate run in
COMPARISON/cells. COMPARISON/ledger.json has the state of every cell: done, running or failed.

The same command continues: it runs missing and failed cells. A larger grid adds cells. At the end, the command prints a table and
writes COMPARISON/comparison.json. The table has statistical tests from three seeds on.
"""

from collections.abc import Sequence

from treenet.cli.shipped import find_config, find_settings
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.seeds_report import make_study
from treenet.experiments.study import add_study_options, run_study, show_study
from treeproc.common.extras import require
from treeproc.common.settings import UserError, build_arg_parser, load_settings, refuse_relative_in_job


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, SeedsConfig, find_config=find_config, remote_out=True)
    add_study_options(parser)
    args = parser.parse_intermixed_args(argv)
    for package in ("matplotlib", "scipy"):  # at the end of the study: refused here, before the first cell
        require(package, "the report of a study")
    path = find_settings(args, "data=DATA")
    if args.out is None:
        raise UserError("give --out DIR, the folder of the comparison")
    config = load_settings(SeedsConfig, path, args.overrides, **({} if path else {"task": "classification"}))
    refuse_relative_in_job({"data": config.data, "--out": args.out, "--records": args.records or args.out})
    study = make_study(config, args.out.resolve(), args.records and args.records.resolve())
    if args.dry_run:
        print(show_study(study))
        return
    run_study(study)
