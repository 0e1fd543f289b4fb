"""Word vectors from unlabelled text: factorised co-occurrence counts (Levy and Goldberg 2014).

The paper is "Neural Word Embedding as Implicit Matrix Factorization". The computation takes a minute, and initialises a tagger's
word embedding.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

_PLACES = (-2, -1, 1, 2)
_FREQUENT = 1500  # words that are contexts by themselves
_SMOOTHING = 0.75  # exponent of the frequencies of contexts, so that rare contexts weigh less
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")


def plain_words(text: str) -> list[str]:
    """Return words of raw English text, split roughly as in treebanks: do n't, the dog 's."""
    return _WORD.findall(text)


def word_vectors(sentences: Iterable[Sequence[str]], words: Sequence[str], size: int, seed: int) -> Tensor:
    """Return vectors of lower-cased words: [words, size], root mean square 1; zero for words without a sentence.

    The matrix of positive pointwise mutual information has words as rows. Its columns are the words one and two places before and
    after, each place separately. It is approximated by rank `size`; the vectors are U sqrt(S).
    """
    lowered = [[word.lower() for word in sentence] for sentence in sentences]
    frequent = Counter(word for sentence in lowered for word in sentence).most_common(_FREQUENT)
    contexts = {word: i for i, (word, _) in enumerate(frequent)}
    rows = {word: i for i, word in enumerate(words)}
    edge, other = len(contexts), len(contexts) + 1
    # All sentences in a row, with two separators between them.
    row, context = [-1, -1], [edge, edge]
    for sentence in lowered:
        row += [rows.get(word, -1) for word in sentence] + [-1, -1]
        context += [contexts.get(word, other) for word in sentence] + [edge, edge]
    row, context = np.array(row), np.array(context)
    here = np.flatnonzero(row >= 0)
    num_contexts = len(contexts) + 2
    pairs = [row[here] * (4 * num_contexts) + i * num_contexts + context[here + place] for i, place in enumerate(_PLACES)]
    pairs, counts = np.unique(np.concatenate(pairs), return_counts=True)
    at_row, at_column = np.divmod(pairs, 4 * num_contexts)
    of_row = np.bincount(at_row, counts)
    of_column = np.bincount(at_column, counts) ** _SMOOTHING
    information = np.log(counts / of_row[at_row] / (of_column[at_column] / of_column.sum()))
    kept = information > 0
    places = np.stack([at_row[kept], at_column[kept]])
    shape = len(words), 4 * num_contexts
    matrix = torch.sparse_coo_tensor(places, information[kept], shape, dtype=torch.float32, check_invariants=True).coalesce()
    torch.manual_seed(seed)
    rank = min(size, *matrix.shape)
    left, scale, _ = torch.svd_lowrank(matrix, q=rank, niter=3)
    vectors = torch.zeros(len(words), size)
    vectors[:, :rank] = left * scale.sqrt()
    return vectors / vectors.square().mean().sqrt()
