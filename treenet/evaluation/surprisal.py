"""The surprisal of words under a causal model, in bits.

Pieces begin with the blank before a word, so the probability of a word's pieces does not say that the word ends there. The
correction (Pimentel and Meister, 2024; Oh and Schuler, 2024) reads the probability that a word begins, or the end comes:

    p(word) = p(its pieces) p(a word begins, or the end | after them) / p(a word begins, or the end | before them)

Nothing is divided before the first word. Its surprisal has what the model gives to other first pieces. So the words of a line and
its end have together the nll of its pieces.

A grammar with a beam over trees has no such correction: the bits of a word are those of its pieces, with the actions before them.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from treenet.evaluation.prefix_trees import PieceScores, score_pieces
from treenet.evaluation.tree_beam import TreeBeam, cut_words
from treenet.models import CausalLM
from treeproc.online.spaced_words import SpacedLine
from treeproc.shards.schema import EOS_ID

END = "</s>"  # the word of the row for the end of a line


def word_bits(scores: PieceScores, starts: Sequence[int]) -> list[float]:
    """Return the bits of the words whose first pieces are `starts`, and of the end of the line. Their sum is the nll."""
    edges = [*starts, len(scores.nll) - 1]
    begins = scores.begins[edges][1:]
    bits = np.add.reduceat(scores.nll, edges) + np.append(begins, 0.0) - np.append(0.0, begins)
    return (bits / math.log(2)).tolist()


def score_words(
    model: CausalLM | TreeBeam, lines: Sequence[SpacedLine], beginners: Sequence[int]
) -> Iterator[tuple[int, PieceScores, list[float]]]:
    """Yield the index of each line, in any order, its scores, and the bits of its words and its end."""
    if isinstance(model, TreeBeam):
        found = model.score_all([cut_words(np.array(line.pieces), line.parsed) for line in lines])
        for number, (line, one) in enumerate(zip(lines, found, strict=True)):
            scores = PieceScores(one.nll, np.zeros(len(one.nll)))
            yield number, scores, word_bits(scores, line.starts)
        return
    for number, scores in score_pieces(model, [line.pieces for line in lines], [*beginners, EOS_ID]):
        yield number, scores, word_bits(scores, lines[number].starts)
