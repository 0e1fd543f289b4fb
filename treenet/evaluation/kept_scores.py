"""Scores that a search for trees has found, in a file: after a kill, the same command continues after them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treenet.runs.result_entries import SEARCHED
from treeproc.common.messages import tell


class SentenceScore(NamedTuple):
    """The scores of a sentence of n pieces, in nats."""

    nll: np.ndarray  # [n + 1], of each piece and of the end; NaN if scores of the model are not finite
    trees: int  # in the sum
    best_nll: float  # of the sentence and its best tree
    best: tuple[int, ...]  # actions of that tree, see `spans_of`


class KeptScores:
    """FOLDER/tree_beam.KEY.jsonl: a line for each sentence, with its number. KEY stands for all that the scores depend on.

    A line that was cut, or that another process wrote too, does no harm.
    """

    def __init__(self, folder: Path, *made_of: str):
        self._folder, self._made_of = folder, made_of
        self._file: Path | None = None

    def score_all(
        self, sentences: Sequence[Sequence[Sequence[int]]], score: Callable[[Sequence[Sequence[int]]], SentenceScore]
    ) -> Iterator[SentenceScore]:
        """Yield the scores of sentences, given as the pieces of their words: those in the file, the others by `score`."""
        key = hashlib.sha256(repr((self._made_of, sentences)).encode()).hexdigest()
        self._file = self._folder / f"{SEARCHED}{key[:16]}.jsonl"
        known = _read(self._file)
        if known:
            tell(f"{len(known):,} of {len(sentences):,} sentences are searched already; the command continues with the others")
        with open(self._file, "a", encoding="utf-8") as file:
            file.write("\n")  # after a line that was cut
            for number, words in enumerate(sentences):
                if (one := known.get(number)) is None:
                    one = score(words)
                    file.write(json.dumps([number, one.nll.tolist(), *one[1:]]) + "\n")
                    file.flush()
                yield one

    def remove(self) -> None:
        """Remove the file, because the results are complete."""
        if self._file:
            self._file.unlink(missing_ok=True)


def _read(path: Path) -> dict[int, SentenceScore]:
    """Return the scores in a file by the numbers of their sentences."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        with suppress(ValueError, TypeError):  # a line that was cut
            number, nll, trees, best_nll, best = json.loads(line)
            found[number] = SentenceScore(np.array(nll, dtype=float), trees, best_nll, tuple(best))
    return found
