"""The figures of study L: the accuracy on BLiMP, as the mean of all paradigms and of those of agreement.

python docs/results/blimp.py docs/results/runs/blimp

prints them for each system over its seeds, and own trees minus every other system with Welch's interval. The protocol is
protocols/blimp.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from figures import Figures
from welch import welch

from treenet.experiments.records import Record, read_records

OWN, LEVEL, PARADIGMS, OF_AGREEMENT = "tree_reg", 0.95, 67, 16


def of_all(record: Record) -> float:
    """Return the primary statistic of a run, in per cent."""
    return 100 * fmean(_paradigms(record).values())


def of_agreement(record: Record) -> float:
    """Return the mean of the paradigms of agreement, in per cent: determiner and noun, subject and verb, anaphors."""
    found = [accuracy for name, accuracy in _paradigms(record).items() if "agreement" in name]
    assert len(found) == OF_AGREEMENT, f"{record['cell']} has {len(found)} paradigms of agreement"
    return 100 * fmean(found)


def _paradigms(record: Record) -> dict[str, float]:
    found = {name: one["pair_accuracy"] for name, one in record["scores"]["pairs"]["groups"]["UID"].items()}
    assert len(found) == PARADIGMS, f"{record['cell']} has {len(found)} paradigms"
    return found


MEASURES = {"all paradigms": of_all, "agreement": of_agreement}


def values(found: Sequence[Record], system: str, measure: str) -> Figures:
    """Return the statistic of each run of a system, by seed."""
    runs = (one for one in found if one["labels"]["system"] == system)
    return [MEASURES[measure](one) for one in sorted(runs, key=lambda one: one["labels"]["seed"])]


def own_minus(found: Sequence[Record], system: str, measure: str) -> Figures:
    """Return the mean of own trees minus that of a system, and its interval over unpaired seeds."""
    difference, half = welch(*(np.array(values(found, one, measure)) for one in (OWN, system)), LEVEL)
    return [float(difference), float(difference - half), float(difference + half)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of the records")
    found = list(read_records(parser.parse_args().records).values())
    for measure in MEASURES:
        print(f"{measure}, %")
        for system in dict.fromkeys(one["labels"]["system"] for one in found):
            of_seeds = values(found, system, measure)
            line = f"  {system}: {', '.join(f'{value:.2f}' for value in of_seeds)}; mean {fmean(of_seeds):.2f}"
            if len(of_seeds) > 1:
                line += f", deviation {np.std(of_seeds, ddof=1):.2f}"
                if system != OWN and len(values(found, OWN, measure)) > 1:
                    line += "; own trees minus it {:+.2f}, {:+.2f} to {:+.2f}".format(*own_minus(found, system, measure))
            print(line)


if __name__ == "__main__":
    main()
