"""Notices about pairs whose sides do not belong together: shifted, in another order, equal, or with one line again and again.

Lengths do not tell: in sorted files, neighbours have equal lengths. So this module counts which words stand together in the pairs
themselves, and compares each source with its target and with the targets of the six lines around it. Pairs of a window are
scored with the counts of other windows.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

# Pairs that are looked at, at most: windows of lines that follow each other, evenly over a split. With fewer than the least, the
# check says nothing about the order.
MOST_PAIRS, WINDOW = 2048, 64
LEAST_PAIRS = 400
# Longer lines are not judged: a target may be about what is not read. So nothing is said of documents, most of which are longer.
MOST_CHARACTERS, _WHOLE_SHARE = 500, 0.75
# Mean differences of scores, in standard errors: of the own target to those around it, and of another offset to the own target.
# 400 aligned pairs have at least 5.6 and at most 0.0, 400 pairs in another order at most 1.6 and 2.3.
UNRELATED_BELOW, SHIFTED_ABOVE = 3.0, 3.5
# Shares of pairs with equal sides, and of the commonest line of a side.
EQUAL_SHARE, CONSTANT_SHARE = 0.25, 0.25
_ANSWERS_SHARE = 2 / 3  # of sources that hold the target of a line near them: lines of a conversation answer each other

_OFFSETS = (-3, -2, -1, 0, 1, 2, 3)
_HERE = _OFFSETS.index(0)
_WORD = re.compile(r"\w+")
_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_STEM = 5  # letters: inflected words count as one
_WORDS = 1024  # known words of a side, the commonest; 0 stands for no word
_OF_LINE = 8  # words of a line, the rarest
_LEAST_WORDS = 2  # known words of a line, in the mean
_VARIES = 0.1  # mean difference of scores below which all targets are alike


def windows(rows: int) -> list[int]:
    """Return the places of the pairs that are looked at, of so many."""
    if rows <= MOST_PAIRS:
        return list(range(rows))
    last = MOST_PAIRS // WINDOW - 1
    starts = (number * (rows - WINDOW) // last for number in range(last + 1))
    return [place for start in starts for place in range(start, start + WINDOW)]


def _words(line: str) -> set[str]:
    """Return the beginnings of the first words of a line, and the pairs of characters of scripts without blanks."""
    out = set()
    for word in _WORD.findall(line[:MOST_CHARACTERS].lower()):
        if word.isascii() or not _WITHOUT_BLANKS.search(word):
            out.add(word[:_STEM])
        else:
            out.update(word[at : at + 2] for at in range(max(1, len(word) - 1)))
    return out


def _numbers(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of each line as numbers [N, _OF_LINE], and in how many lines each word stands [_WORDS].

    Words of a single line and of more than an eighth of the lines tell nothing.
    """
    words = [_words(line) for line in lines]
    counts = Counter(word for some in words for word in some)
    common = sorted((-count, word) for word, count in counts.items() if 1 < count <= len(lines) / 8)[: _WORDS - 1]
    number = {word: place for place, (_, word) in enumerate(common, start=1)}
    out = np.zeros((len(lines), _OF_LINE), np.int32)
    for row, some in zip(out, words, strict=True):
        known = sorted((number[word] for word in some if word in number), reverse=True)[:_OF_LINE]
        row[: len(known)] = known
    lines_of = np.ones(_WORDS, np.float32)
    lines_of[1 : len(common) + 1] = [-count for count, _ in common]
    return out, lines_of


def _scores(sources: np.ndarray, targets: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return how well each source fits the target at each offset, and a target far away [N, offsets + 1].

    A word counts with its best partner on the other side: the logarithm of how much more often both stand together in other
    windows than by chance. `expected` is what chance gives in all windows [_WORDS ** 2].
    """
    offsets = (*_OFFSETS, len(sources) // 2)
    pairs = [sources[:, :, None] * _WORDS + np.roll(targets, -offset, axis=0)[:, None, :] for offset in offsets]
    odd = np.arange(len(sources)) // WINDOW % 2 == 1
    out = np.zeros((len(sources), len(offsets)), np.float32)
    for own in (odd, ~odd):
        together = np.bincount(np.concatenate([some[~own].ravel() for some in pairs[:-1]]), minlength=_WORDS**2)
        weights, seen = np.zeros(_WORDS**2, np.float32), np.flatnonzero(together)
        ratio = 1 + together[seen] / (expected[seen] * np.mean(~own))
        weights[seen] = np.where(ratio > 2, np.log(ratio), 0)
        table = weights.reshape(_WORDS, _WORDS)
        table[0] = table[:, 0] = 0
        for place, some in enumerate(pairs):
            found = weights[some[own]]
            out[own, place] = found.max(2).sum(1) + found.max(1).sum(1)
    return out


def _errors(differences: np.ndarray) -> np.ndarray:
    """Return means over the first axis in standard errors; 0 where nothing varies."""
    spread = differences.std(0)
    return differences.mean(0) * np.sqrt(len(differences)) / np.where(spread > 0, spread, np.inf)


def _parts(rows: int, count: int) -> Iterator[list[slice]]:
    """Yield `count` judged pairs as one part, then their halves and quarters, if so many `rows` are enough."""
    for parts in (1, 2, 4):
        if rows // parts >= LEAST_PAIRS:
            yield [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def pair_problems(sources: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str, list[int], dict]]:
    """Yield (side, kind, places of the pairs, more facts) of what is wrong with pairs, which `windows` chose.

    Kinds: `constant` lines of a side, and of the target `equal` ones to the source, `shifted` and `unrelated` ones. Shifted by
    -1 means that the target of a source stands a line before it.
    """
    if len(sources) < LEAST_PAIRS:
        return
    for side, lines in (("source", sources), ("target", targets)):
        (line, count), *_ = Counter(lines).most_common(1)
        if count >= CONSTANT_SHARE * len(lines):
            yield side, "constant", [place for place, other in enumerate(lines) if other == line], {}
    equal = [place for place, (source, target) in enumerate(zip(sources, targets, strict=True)) if source == target]
    if len(equal) >= EQUAL_SHARE * len(sources):
        yield "target", "equal", equal, {}
    places, offset = _misaligned(sources, targets)
    if places and not (offset and _are_answers(sources, targets, offset)):
        yield "target", "shifted" if offset else "unrelated", places, {"by": offset} if offset else {}


def _are_answers(sources: Sequence[str], targets: Sequence[str], offset: int) -> bool:
    near = [*targets[offset:], *targets[:offset]]
    return sum(target in source for source, target in zip(sources, near, strict=True)) >= _ANSWERS_SHARE * len(sources)


def _misaligned(sources: Sequence[str], targets: Sequence[str]) -> tuple[list[int], int]:
    """Return the places of pairs whose order is wrong, and by how many lines they are shifted; 0 if no offset fits."""
    (left, lines_left), (right, lines_right) = _numbers(sources), _numbers(targets)
    whole = np.flatnonzero([max(map(len, pair)) < MOST_CHARACTERS for pair in zip(sources, targets, strict=True)])
    if len(whole) < _WHOLE_SHARE * len(sources):
        return [], 0
    scores = _scores(left, right, np.outer(lines_left, lines_right).ravel() * (len(_OFFSETS) / len(sources)))[whole]
    advantage = scores - scores[:, _HERE, None]
    advantage, far = advantage[:, :-1], advantage[:, -1]
    # Far targets too: in lists that count up, such as all numbers, each line goes with its neighbours as with its own target.
    others = np.stack([far, np.delete(advantage, _HERE, axis=1).mean(1)], axis=1)
    words = np.minimum(np.count_nonzero(left, axis=1), np.count_nonzero(right, axis=1))[whole]
    for parts in _parts(len(sources), len(whole)):
        shifts = [_errors(advantage[part]) for part in parts]
        if found := [part for part, errors in zip(parts, shifts, strict=True) if errors.max() > SHIFTED_ABOVE]:
            best = int(max(shifts, key=np.max).argmax())
            return whole[sorted(_places(found), key=lambda place: -advantage[place, best])].tolist(), _OFFSETS[best]
        if found := [
            part
            for part in parts
            if words[part].mean() >= _LEAST_WORDS
            and _errors(-others[part]).max() < UNRELATED_BELOW
            and np.abs(others[part]).mean() > _VARIES
        ]:
            return whole[_places(found)].tolist(), 0
    return [], 0


def _places(parts: Sequence[slice]) -> list[int]:
    return [place for part in parts for place in range(part.start, part.stop)]
