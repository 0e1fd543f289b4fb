"""Fuzz the readers of trees and treebanks: a row or a one-line UserError with file and line, nothing else, and never a hang.

    python benchmarks/fuzz_inputs.py [--examples 100000] [--seed 1]

Hypothesis makes `--examples` bracket strings, sentiment trees, CoNLL-U fragments and SGML fragments each.
One line of JSON a kind: examples, those that gave rows, those refused, seconds, and the slowest.
"""

import argparse
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from treeproc.readers.brackets import read_sentiment, read_trees
from treeproc.readers.conllu import read_sentences
from treeproc.readers.segments import segments
from treeproc.settings import UserError
from treeproc.trees import check_tree, read_brackets

LIMIT_SECONDS = 5
_ERROR = re.compile(r"fuzz, line \d+")

_WORDS = ["a", "der", "-LRB-", "-NONE-", "NP", "NP-SBJ-1", "3", "\\/", "½", "8\u00a01", "\u2028", "*", "_"]


def _nested(labels: list[str], words: list[str]) -> st.SearchStrategy[str]:
    """Well-formed brackets."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(st.sampled_from(labels), st.lists(inner, min_size=1, max_size=3)).map(
            lambda node: f"({node[0]} {' '.join(node[1])})"
        )

    leaf = st.tuples(st.sampled_from(labels), st.sampled_from(words)).map("({0[0]} {0[1]})".format)
    return st.recursive(leaf, grow, max_leaves=6)


def _mutated(texts: st.SearchStrategy[str], noise: str) -> st.SearchStrategy[str]:
    """Texts with a piece cut out, doubled, or replaced by noise."""
    cuts = st.tuples(st.integers(0, 80), st.integers(0, 12), st.sampled_from(["", *noise]))
    return st.tuples(texts, st.lists(cuts, max_size=3)).map(lambda pair: _cut(*pair))


def _cut(text: str, cuts: list[tuple[int, int, str]]) -> str:
    for start, length, new in cuts:
        start %= len(text) + 1
        text = text[:start] + new + text[start + length :]
    return text


def brackets(labels: list[str], words: list[str]) -> st.SearchStrategy[str]:
    soup = st.lists(st.sampled_from(["(", ")", "(", ")", " ", "\n", *labels, *words]), max_size=25).map(" ".join)
    trees = st.lists(_nested(labels, words), min_size=1, max_size=3).map("\n".join)
    return st.one_of(soup, trees, _mutated(trees, "() \n\t\u00a0x"))


def conllu() -> st.SearchStrategy[str]:
    rows = st.tuples(
        st.sampled_from(["1", "2", "3", "1-2", "2-3", "1.1", "x", "99999999999", "3-1"]),
        st.sampled_from(["im", "in", "dem", "do", "n't", "don't", "a b", "", "_"]),
        st.sampled_from(["0", "1", "2", "3", "4", "-1", "_", "²"]),
        st.sampled_from(["_", "SpaceAfter=No", "Gloss=a|SpaceAfter=No"]),
    ).map("{0[0]}\t{0[1]}\tl\tX\tX\t_\t{0[2]}\tdep\t_\t{0[3]}".format)
    arcs = st.lists(st.tuples(st.sampled_from(["im", "in", "don't", "a b"]), st.integers(0, 9)), min_size=1, max_size=4)
    # Governors before their words, so that no circle is there until something is cut.
    good = arcs.map(
        lambda pairs: "\n".join(f"{i}\t{f}\tl\tX\tX\t_\t{h % i}\tdep\t_\t_" for i, (f, h) in enumerate(pairs, start=1))
    )
    comment = st.sampled_from(["# text = im do n't", "# text = don't", "# newdoc", "#", ""])
    return st.one_of(
        st.lists(st.one_of(rows, comment), max_size=6).map("\n".join),
        good,
        _mutated(st.tuples(st.lists(comment, max_size=1), good).map(lambda p: "\n".join([*p[0], p[1]])), "\t\n-.0#\u2028"),
    )


def sgml() -> st.SearchStrategy[str]:
    pieces = [
        '<doc docid="d">',
        "</doc>",
        '<seg id="1">',
        "<seg id=2>",
        "<seg>",
        "</seg>",
        "&amp;",
        "&#xD800;",
        "&#99;",
        "a",
        "\n",
        "<",
    ]
    return st.lists(st.sampled_from(pieces), max_size=12).map("".join)


def check_rows(rows: Iterator[dict]) -> int:
    """Consume rows; what a reader lets through must be whole: words at their places, trees over them, arcs within them."""
    count = 0
    for row in rows:
        count += 1
        words = row["words"]
        spans = zip(words["start_char"], words["end_char"], strict=True)
        assert [row["source"][start:end] for start, end in spans] == words["text"]
        for text in row["trees"]:
            _, tags, tree = read_brackets(text)
            if len(tree):
                check_tree(tree, len(words["text"]))
            if "node_labels" in row:
                assert (len(row["node_labels"]), len(row["leaf_labels"])) == (len(tree), len(tags))
        if "arcs" in row:
            assert len(row["arcs"]["governor"]) == len(words["text"])
            assert all(-1 <= governor < len(words["text"]) for governor in row["arcs"]["governor"])
    return count


def read_or_refuse(read: Callable[[], int]) -> str:
    """'rows', 'nothing' or 'refused'. Any other error goes on, as does an error that is not one line with file and line."""
    try:
        return "rows" if read() else "nothing"
    except UserError as error:
        assert _ERROR.search(str(error)) and "\n" not in str(error), f"not a one-line message with file and line: {error!r}"
        return "refused"


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\n"))


KINDS: dict[str, tuple[st.SearchStrategy[str], Callable[[str], int]]] = {
    "brackets": (brackets([*_WORDS, ""], _WORDS), lambda text: check_rows(read_trees(_lines(text), "fuzz"))),
    "conllu": (conllu(), lambda text: check_rows(read_sentences(_lines(text), "fuzz"))),
    "sentiment": (brackets(list("01234"), _WORDS), lambda text: check_rows(read_sentiment(_lines(text), "fuzz"))),
    "sgml": (sgml(), lambda text: sum(1 for _ in segments(_lines(text), "fuzz"))),
}


def fuzz(kind: str, examples: int, seed_: int = 1) -> dict:
    """Run one kind; returns counts and seconds. Raises whatever a reader raises that is not a proper refusal."""
    texts, read = KINDS[kind]
    outcomes, slowest = Counter(), 0.0

    @seed(seed_)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(texts)
    def run(text):
        nonlocal slowest
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        began = time.perf_counter()
        outcomes[read_or_refuse(lambda: read(text))] += 1
        slowest = max(slowest, time.perf_counter() - began)
        signal.setitimer(signal.ITIMER_REAL, 0)

    previous = signal.signal(signal.SIGALRM, _too_slow)
    began = time.perf_counter()
    try:
        run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    seconds = time.perf_counter() - began
    return {
        "kind": kind,
        "examples": sum(outcomes.values()),
        **outcomes,
        "seconds": round(seconds, 1),
        "slowest_ms": round(1000 * slowest, 1),
    }


def _too_slow(*_: object) -> None:
    raise AssertionError(f"a reader took more than {LIMIT_SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000, help="examples of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for kind in KINDS:
        print(json.dumps(fuzz(kind, args.examples, args.seed)), flush=True)


if __name__ == "__main__":
    main()
