"""Compare classifiers or models of relatedness over seeds: models, ablations, control trees, as in Tables 2 and 3 of the paper.

    python workflows/compare_seeds.py --config workflows/configs/seeds_sst5.yaml --out COMPARISON data=DATA
    python workflows/compare_seeds.py --config FILE.yaml --out COMPARISON data=DATA grid.seeds=[1,2,3]

FILE.yaml is a configuration of workflows/train.py with a `grid` of systems and seeds. Each cell is a separate run in
COMPARISON/cells. COMPARISON/ledger.json has the state of every cell: done, running or failed.

The same command continues: it runs missing and failed cells. A larger grid adds cells. At the end, the command prints a table and
writes COMPARISON/comparison.json. The table has statistical tests from three seeds on.
"""

from collections.abc import Sequence

from treenet.cli.scaling import run_command
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.seeds_report import FORM


def main(argv: Sequence[str]) -> None:
    run_command(argv, __doc__, FORM, SeedsConfig, task="classification")
