"""The scores of parses (`parser.scores`): correlation with F1, dependence on the batch, and time.

    python benchmarks/parse_scores.py --treebanks workflows/configs/parser_en.yaml    # data/ as its first lines say
    python benchmarks/parse_scores.py --batches train.en.gz --lines 20000
    python benchmarks/parse_scores.py --time train.en.gz --lines 2000 --pairs 9

F1 is that of single sentences of test parts, with predicted tags, against the score of their parse. Batches have two sizes,
and the second ones are in random order. `flips` counts the scores that differ from those of the first batches. The benchmark also
counts them for scores that are only rounded. Time is the CPU time of whole parses with and without scores, in
turns.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from measure import emit
from scipy.stats import pearsonr, spearmanr

from treeproc.common.settings import load_settings
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.corpus import read_treebank
from treeproc.extras.parser_training.results import BATCH_WORDS
from treeproc.parsers import ParserConfig, build_parser
from treeproc.parsers.parse_scores import ScoredParser
from treeproc.parsers.shift_reduce import Tagged
from treeproc.readers import read_lines
from treeproc.shards.schema import SCORE_PLACES
from treeproc.trees.scores import score_sentence

NAME = "parse_scores"
SHIPPED = ParserConfig(name="shipped", device="cpu", scores=True)
BATCHES = ((4096, False), (1024, True))  # words at once; whether the sentences come in random order


def tag(parser, sentences: Sequence[Sequence[str]]) -> list[Tagged]:
    """Return the sentences with predicted tags."""
    tags, _ = parser._tagger.tag(sentences, BATCH_WORDS)
    return [[(word, xpos) for word, (_, xpos) in zip(*one, strict=True)] for one in zip(sentences, tags, strict=True)]


def correlate(config: Path) -> None:
    """Compare scores and F1 on the test part of every treebank with trees."""
    parser = build_parser(SHIPPED)
    settings = load_settings(TrainParserConfig, config)
    for name, treebank in settings.treebanks.items():
        trees = read_treebank(name, treebank, settings.hold_out).trees.get("test", []) if treebank.brackets.paths() else []
        if not trees:
            continue
        parsed = parser._scored.parse(tag(parser, [tree.words for tree in trees]), BATCH_WORDS)
        f1 = [score_sentence(gold.tags, gold.spans, tree).f1 for gold, (tree, _) in zip(trees, parsed, strict=True)]
        scores = np.array([score for _, score in parsed])
        for metric, correlation in (("pearson", pearsonr), ("spearman", spearmanr)):
            emit(NAME, name, metric, float(correlation(scores, f1).statistic), sentences=len(trees))
        order = np.array_split(np.argsort(scores, kind="stable"), 4)
        for quarter, rows in enumerate(order, start=1):
            mean = float(np.mean([f1[row] for row in rows]))
            emit(NAME, name, f"mean F1, quarter {quarter}", 100 * mean, to=float(scores[rows].max()))


def lines_of(path: Path, count: int) -> list[str]:
    """Return the first lines with text."""
    return list(islice(filter(None, read_lines([path])), count))


def compare_batches(lines: Sequence[str]) -> None:
    """Count the scores that depend on the batch."""
    parser = build_parser(SHIPPED)
    found = parser._tokenizer.tokenize(lines, 4 * BATCH_WORDS)
    words = [[word for token in sentence for word in token.words] for line in found for sentence in line]
    sentences = tag(parser, [one for one in words if len(one) <= SHIPPED.max_words])
    first = None
    for size, is_shuffled in BATCHES:
        order = np.arange(len(sentences))
        if is_shuffled:
            np.random.default_rng(1).shuffle(order)
        raw, scores = np.empty(len(sentences)), np.empty(len(sentences))
        chosen = [sentences[i] for i in order]
        with_derivations = DerivationsKept(parser._parser)
        scores[order] = [score for _, score in ScoredParser(with_derivations).parse(chosen, size)]
        raw[order] = with_derivations.scores
        first = first or (raw, scores)
        case = f"batches of {size} words{', shuffled' if is_shuffled else ''}"
        emit(NAME, case, "largest difference", float(np.abs(raw - first[0]).max() * 1e9), unit="1e-9", sentences=len(raw))
        rounded = [np.round(one, SCORE_PLACES) for one in (raw, first[0])]
        emit(NAME, case, "flips, only rounded", int((rounded[0] != rounded[1]).sum()))
        emit(NAME, case, "flips", int((scores != first[1]).sum()))


class DerivationsKept:
    """A parser that keeps the scores of its first call, before rounding."""

    def __init__(self, parser):
        self._parser, self.model, self.scores = parser, parser.model, []

    def derive(self, *args, **options):
        found = self._parser.derive(*args, **options)
        self.scores = self.scores or [one.score for one in found]
        return found


def compare_times(lines: Sequence[str], pairs: int) -> None:
    """Time parses with and without scores. The order of a pair changes from one to the next."""
    parsers = {scores: build_parser(SHIPPED.model_copy(update={"scores": scores})) for scores in (False, True)}
    ratios: list[float] = []
    every: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs + 1):
        seconds = {}
        for scores in (False, True) if pair % 2 else (True, False):
            begin = time.process_time()
            parsers[scores].parse(lines)
            seconds[scores] = time.process_time() - begin
        if pair:  # the first one warms up
            ratios.append(seconds[True] / seconds[False])
            for scores, value in seconds.items():
                every[scores].append(value)
            emit(NAME, f"pair {pair}", "ratio", ratios[-1], seconds=round(seconds[False], 2))
    emit(NAME, f"{len(lines)} lines", "median ratio", statistics.median(ratios), pairs=pairs)
    emit(NAME, f"{len(lines)} lines", "ratio of the medians", statistics.median(every[True]) / statistics.median(every[False]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--treebanks", type=Path, metavar="CONFIG.yaml", help="settings of workflows/train_parser.py")
    parser.add_argument("--batches", type=Path, metavar="FILE.gz", help="a file of sentences")
    parser.add_argument("--time", type=Path, metavar="FILE.gz", help="a file of lines")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    if args.treebanks:
        correlate(args.treebanks)
    if args.batches:
        compare_batches(lines_of(args.batches, args.lines))
    if args.time:
        compare_times(lines_of(args.time, args.lines), args.pairs)


if __name__ == "__main__":
    main()
