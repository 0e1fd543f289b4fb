"""Slow oracle of BPE-dropout: Algorithm 1 of Provilkov et al. (2020) on the strings of one word, and its exact distribution."""

from collections.abc import Callable, Mapping

import numpy as np

MASK = 2**64 - 1


def mix(number: int) -> int:
    """SplitMix64."""
    x = (number + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def keyed_draws(key: int) -> Callable[[int, int], float]:
    """Draws in [0, 1) of the word with this key: by the number of the step and the first character of the left part."""
    return lambda step, place: mix(key ^ (step << 32 | place)) / 2**64


def word_keys(example_id: int, seed: int, epoch: int, side: int, num_words: int) -> list[int]:
    """The keys of the words of an example."""
    key = 0
    for number in (seed, epoch, side):
        key = mix(key ^ number)
    of_example = mix(mix(example_id) ^ key)
    return [mix((of_example + number) & MASK) for number in range(num_words)]


def divide(symbols: list[str], scores: Mapping[str, float], dropout: float, draw: Callable[[int, int], float]) -> list[str]:
    """The pieces of a word that is given as characters; `scores` are those of the normal pieces, higher for earlier merges."""
    symbols, step = list(symbols), 0
    while True:
        places = np.cumsum([0, *map(_width, symbols)]).tolist()
        merges = [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in scores]
        merges = [i for i in merges if draw(step, places[i]) >= dropout]
        if not merges:
            return symbols
        best = max(merges, key=lambda i: (scores[symbols[i] + symbols[i + 1]], -i))
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
        step += 1


def _width(symbol: str) -> int:
    return 1 if symbol.startswith("<0x") else len(symbol)


def distribution(symbols: tuple[str, ...], scores: Mapping[str, float], dropout: float) -> dict[tuple[str, ...], float]:
    """The probability of every division of a word."""
    merges = [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in scores]
    merges.sort(key=lambda i: (-scores[symbols[i] + symbols[i + 1]], i))
    found = {symbols: dropout ** len(merges)}
    for rank, i in enumerate(merges):
        after = (*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :])
        for division, probability in distribution(after, scores, dropout).items():
            found[division] = found.get(division, 0.0) + dropout**rank * (1 - dropout) * probability
    return found
