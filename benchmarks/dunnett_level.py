"""The rate at which Dunnett's test finds a difference that is not there, if systems vary unequally over seeds.

    python benchmarks/dunnett_level.py --deviations 0.009 0.055 0.012 --seeds 6 --level 0.975

The baseline has the first deviation. The difference of the system with the second one counts. Studies are drawn from normal
distributions with one mean, without a variance over sentences.
"""

import argparse

import numpy as np
from measure import emit

from treenet.evaluation.significance import critical_value

STUDIES = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deviations", type=float, nargs="+", required=True, help="of a seed, by system")
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--level", type=float, default=0.95, help="of the intervals")
    args = parser.parse_args()
    systems, seeds = len(args.deviations), args.seeds
    draws = np.random.default_rng(1).normal(size=(STUDIES, systems, seeds)) * np.array(args.deviations)[:, None]
    error = np.sqrt(draws.var(axis=2, ddof=1).mean(1) * 2 / seeds)
    critical = critical_value((seeds,) * (systems - 1), seeds, systems * (seeds - 1), args.level)
    found = np.abs(draws[:, 1].mean(1) - draws[:, 0].mean(1)) > critical * error
    emit("dunnett_level", f"{seeds} seeds", "false_findings", found.mean(), nominal=round(1 - args.level, 6))


if __name__ == "__main__":
    main()
