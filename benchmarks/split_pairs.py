"""Split sentence pairs so that no line of valid or test is in train, on either side.

    python benchmarks/split_pairs.py --pairs deu-eng.tsv.gz --out tatoeba

Pairs that share a source or a target line are connected. All pairs of a connected component go to the same split. Which one is
decided by a hash of its smallest pair, so a run on the same pairs gives the same split. Components of more than ten pairs go to
train, because one of them can hold a large part of the data.
"""

import argparse
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from treeproc.common.files import atomic_write

LARGEST = 10  # pairs of a component that may leave train

Pair = tuple[str, str]


def components(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The connected components of different pairs, each sorted. Two pairs are connected if they share a line of the same side."""
    parents: dict[tuple[int, str], tuple[int, str]] = {}

    def root(line: tuple[int, str]) -> tuple[int, str]:
        parents.setdefault(line, line)
        while parents[line] != line:
            parents[line] = line = parents[parents[line]]
        return line

    different = sorted(set(pairs))
    for source, target in different:
        parents[root((0, source))] = root((1, target))
    found = defaultdict(list)
    for pair in different:
        found[root((0, pair[0]))].append(pair)
    return list(found.values())


def split(pairs: Iterable[Pair], valid: int, test: int) -> dict[str, list[Pair]]:
    """The pairs of train, valid and test. Valid and test have the given numbers of pairs, or a few more."""
    found = components(pairs)
    small = sorted((one for one in found if len(one) <= LARGEST), key=_hash)
    splits: dict[str, list[Pair]] = {
        "train": [pair for one in found if len(one) > LARGEST for pair in one],
        "valid": [],
        "test": [],
    }
    wanted = {"valid": valid, "test": test}
    for one in small:
        splits[next((name for name, count in wanted.items() if len(splits[name]) < count), "train")] += one
    for chosen in splits.values():
        chosen.sort(key=lambda pair: _hash([pair]))
    return splits


def _hash(component: list[Pair]) -> str:
    return hashlib.sha256("\t".join(component[0]).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=Path, required=True, help="gzipped file; a line has source, tab, target, and anything after"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.en, train.de, valid.en, ...")
    parser.add_argument("--valid", type=int, default=1000, help="pairs of valid")
    parser.add_argument("--test", type=int, default=2000, help="pairs of test")
    options = parser.parse_args()
    pairs = []
    with gzip.open(options.pairs, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) < 2:
                parser.error(f"{options.pairs}, line {number}: expected source, tab, target")
            pairs.append((fields[0], fields[1]))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in split(pairs, options.valid, options.test).items():
        for side, language in enumerate(("en", "de")):
            content = "".join(pair[side] + "\n" for pair in chosen)
            atomic_write(options.out / f"{name}.{language}", content.encode())
        print(f"{name}: {len(chosen):,} pairs")


if __name__ == "__main__":
    main()
