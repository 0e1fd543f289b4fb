"""Fuzz readers and whole commands: a result or a one-line error, nothing else, never a hang.

    python benchmarks/fuzz_inputs.py [--examples 100000] [--commands 150] [--processes 3] [--seed 1]
    python benchmarks/fuzz_inputs.py --quick                                     under 50 seconds
    python benchmarks/fuzz_inputs.py --kinds "run folders" --keep FOLDER         keeps what broke a rule, to look at it

Readers of trees and treebanks: Hypothesis draws the seeds of `--examples` bracket strings, sentiment trees, CoNLL-U fragments and
SGML fragments each. It makes one draw per text, because to draw every part takes longer than all readers together. A reader gives
rows, or one line with file and line.

Whole commands: `--commands` cases of every kind of damage (fuzz_cases.py) run in forks of one process. `--processes` further
cases run as users start them. They end with a result or one line of at most 500 characters within 60 seconds, and write only to
their folders. Broken rules are reported on standard error. Then the exit status is 1.
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

from fuzz_cases import KINDS as DAMAGES
from fuzz_commands import Outcome, Pool, describe_fault, fuzz_commands, summarize
from fuzz_oracles import ROWS, leaves, nodes, trees
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from treeproc.common.settings import UserError
from treeproc.readers.brackets import read_sentiment, read_trees
from treeproc.readers.conllu import read_sentences
from treeproc.readers.segments import segments

LIMIT_SECONDS = 5
ROUND = 2000
_ERROR = re.compile(r"fuzz, line \d+|fuzz has no <seg")

_WORDS = ["a", "der", "-LRB-", "-NONE-", "NP", "NP-SBJ-1", "3", "\\/", "½", "8\u00a01", "\u2028", "*", "_"]


def _nested(random: Random, labels: list[str], words: list[str], depth: int) -> str:
    """Return well-formed brackets."""
    if depth == 0 or random.random() < 0.3:
        return f"({random.choice(labels)} {random.choice(words)})"
    children = " ".join(_nested(random, labels, words, depth - 1) for _ in range(random.randint(1, 3)))
    return f"({random.choice(labels)} {children})"


def _mutated(random: Random, text: str, noise: str) -> str:
    """Return the text. Half of the time, one or two pieces are cut out or replaced by noise."""
    for _ in range(random.choice([0, 0, 1, 2])):
        start = random.randint(0, len(text))
        text = text[:start] + random.choice(["", *noise]) + text[start + random.randint(0, 12) :]
    return text


def brackets(random: Random, labels: list[str], words: list[str]) -> str:
    """Return trees, damaged trees, or brackets and words in any order."""
    if random.random() < 0.3:
        return " ".join(random.choices(["(", ")", "(", ")", " ", "\n", *labels, *words], k=random.randint(0, 25)))
    trees = (_nested(random, labels, words, random.randint(0, 4)) for _ in range(random.randint(1, 3)))
    return _mutated(random, "\n".join(trees), "() \n\t\u00a0x")


def conllu(random: Random) -> str:
    """Return sentences, damaged sentences, or rows of any fields in any order."""
    comments = ["# text = im do n't", "# text = don't", "# newdoc", "#", ""]
    miscs = ["_", "SpaceAfter=No", "Gloss=a|SpaceAfter=No"]
    if random.random() < 0.4:
        numbers = ["1", "2", "3", "1-2", "2-3", "1.1", "x", "99999999999", "3-1"]
        forms, governors = ["im", "in", "dem", "do", "n't", "don't", "a b", "", "_"], ["0", "1", "2", "3", "4", "-1", "_", "²"]
        rows = [
            _row(random.choice(numbers), random.choice(forms), random.choice(governors), random.choice(miscs)) for _ in range(4)
        ]
        return "\n".join(random.sample([*rows, *comments], random.randint(0, 5)))
    # Governors come before their words, so there is no cycle until something is cut.
    words = [
        _row(i, random.choice(["im", "don't", "a b"]), random.randrange(i), random.choice(miscs))
        for i in range(1, random.randint(2, 6))
    ]
    if random.random() < 0.3:
        words.insert(0, _row("1-2", random.choice(["imdon't", "im"]), "_", "_"))
    if random.random() < 0.2:
        words.insert(0, random.choice(comments))
    return _mutated(random, "\n".join(words), "\t\n-.0#\u2028")


def _row(number: object, form: str, governor: object, misc: str) -> str:
    return f"{number}\t{form}\tl\tX\tX\t_\t{governor}\tdep\t_\t{misc}"


def sgml(random: Random) -> str:
    """Return segments, damaged segments, or tags in any order."""
    pieces = ['<doc docid="d">', "</doc>", '<seg id="1">', "<seg>", "</seg>", "&amp;", "&#xD800;", "&#99;", "a", "\n", "<"]
    if random.random() < 0.5:
        return "".join(random.choices(pieces, k=random.randint(0, 12)))
    text = "".join(f"<seg id={i}>{''.join(random.choices(pieces[5:], k=3))}</seg>\n" for i in range(random.randint(1, 3)))
    return _mutated(random, f"<doc docid='d'>\n{text}</doc>", '<>&\n"')


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
        lambda r: brackets(r, [*_WORDS, ""], _WORDS), lambda text: check_rows("brackets", text, read_trees(_lines(text), "fuzz"))
    ),
    "conllu": (conllu, lambda text: check_rows("conllu", text, read_sentences(_lines(text), "fuzz"))),
    "sentiment": (
        lambda r: brackets(r, list("01234"), _WORDS), lambda text: check_rows("sst", text, read_sentiment(_lines(text), "fuzz"))
    ),
    "sgml": (sgml, check_segments),
}  # fmt: skip


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
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *DAMAGES], default=[*KINDS, *DAMAGES])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="commands at a time")
    parser.add_argument("--keep", type=Path, help="an empty folder for the cases that broke a rule")
    parser.add_argument("--quick", action="store_true", help="500 texts, two commands of each kind")
    args = parser.parse_args()
    if args.quick:
        args.examples, args.commands, args.processes = 500, 2, 0
    fuzz_readers([kind for kind in args.kinds if kind in KINDS], args.examples, args.seed)
    if damages := {kind: args.commands for kind in args.kinds if kind in DAMAGES}:
        sys.exit(not fuzz_whole_commands(damages, args.processes, args.seed, args.parallel, args.keep))


if __name__ == "__main__":
    main()
