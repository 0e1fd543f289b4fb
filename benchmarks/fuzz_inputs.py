"""Fuzz readers, commands, the server and the library: the right result, or a refusal in one line. No silent loss.

    python benchmarks/fuzz_inputs.py [--examples 100000] [--commands 150] [--processes 3] [--seed 1]
    python benchmarks/fuzz_inputs.py --quick                                     about a minute
    python benchmarks/fuzz_inputs.py --kinds "run folders" --keep FOLDER         keeps what broke a rule, to look at it

Readers of trees and treebanks: Hypothesis draws the seeds of `--examples` bracket strings, sentiment trees, CoNLL-U fragments and
SGML fragments each. It makes one draw per text, because to draw every part takes longer than all readers together. A reader gives
the rows of a slow reader that shares no code with it, or one line with file and line.

Whole commands: `--commands` cases of every kind of damage (fuzz_kinds.py) run in forks of one process. `--processes` further
cases run as users start them. They end with a result or one line of at most 500 characters within 60 seconds, and write only to
their folders. `fuzz_oracles.py` compares each result with the inputs, or with the result without the damage.

The server and the library: a twentieth of `--examples` requests, and as many calls of each function.

Broken rules are reported on standard error. Then the exit status is 1.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from fuzz_api import fuzz_api
from fuzz_commands import Outcome, Pool, describe_fault, fuzz_commands, summarize
from fuzz_kinds import KINDS as DAMAGES
from fuzz_oracles import ROWS, leaves, nodes, trees
from fuzz_server import fuzz_server
from fuzz_texts import WORDS, brackets, conllu, sgml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from treeproc.common.settings import UserError
from treeproc.readers.segments import segments
from treeproc.readers.treebanks import read_sentences, read_sentiment, read_trees

LIMIT_SECONDS = 5
ROUND = 2000
_ERROR = re.compile(r"fuzz, line \d+|fuzz has no <seg")


def check_rows(kind: str, text: str, rows: Iterator[dict]) -> int:
    """Read all rows, and compare them with those of the fuzzer's own reader."""
    found = list(rows)
    wanted = list(ROWS[kind](text.encode()))
    assert [row["source"] for row in found] == [row["source"] for row in wanted]
    for row, own in zip(found, wanted, strict=True):
        spans = zip(row["words"]["start_char"], row["words"]["end_char"], strict=True)
        assert [row["source"][start:end] for start, end in spans] == row["words"]["text"]
        assert all(row[name] == own[name] for name in ("label", "node_labels", "leaf_labels") if name in own)
        if own.get("arcs") is not None:
            assert list(zip(row["arcs"]["governor"], row["arcs"]["deprel"], strict=True)) == own["arcs"]
        for tree in row["trees"] if "nodes" in own else ():
            [read] = trees(tree)
            assert (nodes(read), [tag for tag, _ in leaves(read)]) == (own["nodes"], own["tags"])
    return len(found)


def check_segments(text: str) -> int:
    """Read all segments, and compare them with those of the fuzzer's own reader."""
    found = [segment for _, segment, _ in segments(_lines(text), "fuzz")]
    assert found == [row["source"] for row in ROWS["sgm"](text.encode())]
    return len(found)


def read_or_refuse(read: Callable[[], int]) -> str:
    """Return 'rows', 'nothing' or 'refused'.

    Any other error passes through, and so does a message without one line, file and line number.
    """
    try:
        return "rows" if read() else "nothing"
    except UserError as error:
        assert _ERROR.search(str(error)) and "\n" not in str(error), f"not a one-line message with file and line: {error!r}"
        return "refused"


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\n"))


KINDS: dict[str, tuple[Callable[[Random], str], Callable[[str], int]]] = {
    "brackets": (
        lambda r: brackets(r, [*WORDS, ""], WORDS), lambda text: check_rows("brackets", text, read_trees(_lines(text), "fuzz"))
    ),
    "conllu": (conllu, lambda text: check_rows("conllu", text, read_sentences(_lines(text), "fuzz"))),
    "sentiment": (
        lambda r: brackets(r, list("01234"), WORDS), lambda text: check_rows("sst", text, read_sentiment(_lines(text), "fuzz"))
    ),
    "sgml": (sgml, check_segments),
}  # fmt: skip


INTERFACES = {"server": fuzz_server, "library": fuzz_api}


def _text(make: Callable[[Random], str], round_seed: int, number: int) -> str:
    return make(Random(f"{round_seed} {number}"))


def fuzz(kind: str, examples: int, first_seed: int = 1) -> dict:
    """Run one kind in rounds. Returns counts and CPU seconds. Raises any error of a reader that is not a proper refusal."""
    make, read = KINDS[kind]
    outcomes, slowest, seen = Counter(), 0.0, set()

    def run(text: str) -> None:
        nonlocal slowest
        # CPU time: a busy machine is not a hang. Repeated, because Python swallows errors raised in a destructor.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS, LIMIT_SECONDS)
        began = time.thread_time()
        outcomes[read_or_refuse(lambda: read(text))] += 1
        slowest = max(slowest, time.thread_time() - began)
        signal.setitimer(signal.ITIMER_PROF, 0)
        seen.add(hash(text))

    previous = signal.signal(signal.SIGPROF, _too_slow)
    began = time.process_time()
    try:
        # Hypothesis remembers what it tried, so long runs become slow. Many short ones do not.
        for number, start in enumerate(range(0, examples, ROUND)):
            options = settings(
                max_examples=min(ROUND, examples - start), deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            # Hypothesis prefers small numbers. With the round's number in the seed, no round repeats another.
            texts = st.integers(0, 2**63).map(partial(_text, make, first_seed + number))
            seed(first_seed + number)(options(given(texts)(run)))()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    return {
        "kind": kind,
        "examples": sum(outcomes.values()),
        "distinct": len(seen),
        **outcomes,
        "cpu_seconds": round(time.process_time() - began, 1),
        "slowest_ms": round(1000 * slowest, 1),
    }


def _too_slow(*_: object) -> None:
    raise AssertionError(f"a reader took more than {LIMIT_SECONDS} s of CPU time")


def fuzz_readers(kinds: Sequence[str], examples: int, first_seed: int) -> None:
    for kind in kinds:
        for metric, value in fuzz(kind, examples, first_seed).items():
            if metric != "kind":
                print(json.dumps({"benchmark": "fuzz", "case": kind, "metric": metric, "value": value}), flush=True)


def fuzz_interfaces(kinds: Sequence[str], examples: int, first_seed: int) -> bool:
    """Print the figures of requests to the server and of calls of the library. Returns whether all rules were kept."""
    kept = True
    for kind in kinds:
        figures, broken = INTERFACES[kind](examples, first_seed)
        for metric, value in figures.items():
            print(json.dumps({"benchmark": "fuzz", "case": kind, "metric": metric, "value": value}), flush=True)
        for text in broken:
            print(f"{kind}: {text}", file=sys.stderr, flush=True)
        kept = kept and not broken
    return kept


def fuzz_whole_commands(counts: dict[str, int], processes: int, first_seed: int, parallel: int, keep: Path | None) -> bool:
    """Print the figures of every kind of damage. Returns whether all rules were kept."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        world, scratch = Path(name) / "world", keep or Path(name) / "cases"
        for number, as_process in ((counts, False), (dict.fromkeys(counts, processes), True)):
            shift = 500_000 * as_process  # other cases than those in forks
            pool = Pool(parallel, keep=bool(keep), as_process=as_process)
            cases = fuzz_commands(number, world, scratch, pool, first=1_000_000 * first_seed + shift)
            for outcome in cases:
                outcomes.append(outcome)
                if outcome.faults:
                    print(describe_fault(outcome), file=sys.stderr, flush=True)
    for figure in summarize(outcomes):
        print(json.dumps(figure), flush=True)
    return not any(outcome.faults for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000, help="texts of each kind for readers")
    parser.add_argument("--commands", type=int, default=150, help="commands of each kind of damage")
    parser.add_argument("--processes", type=int, default=3, help="further commands of each kind, in separate processes")
    kinds = [*KINDS, *INTERFACES, *DAMAGES]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="commands at a time")
    parser.add_argument("--keep", type=Path, help="an empty folder for the cases that broke a rule")
    parser.add_argument("--quick", action="store_true", help="500 texts, two commands of each kind")
    args = parser.parse_args()
    if args.quick:
        args.examples, args.commands, args.processes = 500, 2, 0
    fuzz_readers([kind for kind in args.kinds if kind in KINDS], args.examples, args.seed)
    kept = fuzz_interfaces([kind for kind in args.kinds if kind in INTERFACES], args.examples // 20, args.seed)
    if damages := {kind: args.commands for kind in args.kinds if kind in DAMAGES}:
        kept = fuzz_whole_commands(damages, args.processes, args.seed, args.parallel, args.keep) and kept
    sys.exit(not kept)


if __name__ == "__main__":
    main()
