"""Dependency arcs of many sentences: checks, projective arcs, and the words below every head.

The words of all sentences are in one array. A governor is an index into it, -1 for a root. Shapes: W words, S sentences.
"""

from collections.abc import Sequence

import numpy as np

UNIVERSAL_RELATIONS = {  # without subtypes
    *("acl", "advcl", "advmod", "amod", "appos", "aux", "case", "cc", "ccomp", "clf", "compound", "conj", "cop", "csubj"),
    *("dep", "det", "discourse", "dislocated", "expl", "fixed", "flat", "goeswith", "iobj", "list", "mark", "nmod", "nsubj"),
    *("nummod", "obj", "obl", "orphan", "parataxis", "punct", "reparandum", "root", "vocative", "xcomp"),
}


def plain_relation(relation: str) -> str:
    """Return a relation without its subtype: nmod:poss -> nmod."""
    return relation.partition(":")[0]


def depths(governors: np.ndarray) -> np.ndarray:
    """Return the number of arcs from every word up to its root [W]; -1 for words whose arcs form a cycle."""
    above, depth = governors, (governors >= 0).astype(np.int64)
    # Each round climbs twice as far as the one before.
    for _ in range(len(governors).bit_length() + 1):
        inside = above >= 0
        if not inside.any():
            return depth
        depth = depth + np.where(inside, depth[above], 0)
        above = np.where(inside, above[above], -1)
    return np.where(above >= 0, -1, depth)


def check_arcs(edges: np.ndarray, governors: np.ndarray) -> list[str]:
    """Return the problem of each sentence, or an empty text. Words [edges[s], edges[s + 1]) must be a tree with one root.

    A sentence of only roots, which no parser has analysed, counts as a tree.
    """
    count = len(edges) - 1
    sentence = np.repeat(np.arange(count), np.diff(edges))
    outside = (governors >= 0) & ((governors < edges[:-1][sentence]) | (governors >= edges[1:][sentence]))
    inside = np.where(outside, -1, governors)
    roots = np.bincount(sentence[governors < 0], minlength=count)
    several = (roots > 1) & (roots < np.diff(edges))
    cycles = depths(inside) < 0
    problems = [""] * count
    for number in np.flatnonzero(several).tolist():
        problems[number] = f"{roots[number]} words have no governor, but one must be the root"
    for mask, problem in ((cycles, "the arcs form a cycle"), (outside, "a governor is in another sentence")):
        for number in np.unique(sentence[mask]).tolist():
            problems[number] = problem
    return problems


def contract(governors: Sequence[int], leaf_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the governor of every leaf, and the word whose arc that is: its topmost one, the first of equally high ones.

    The words of one sentence [W] form a tree with one root, or are all roots. `leaf_of` [W] is the leaf of each word, from 0.
    Arcs to any word of a leaf go to the leaf. The governor of a leaf has a word that is nearer to the root than all words of
    that leaf. So the arcs of the leaves form a tree with one root too, or all leaves are roots.
    """
    if len(set(leaf_of)) == len(leaf_of):
        return list(governors), list(range(len(leaf_of)))
    own, above = np.asarray(leaf_of, dtype=np.int64), np.asarray(governors, dtype=np.int64)
    order = np.lexsort((depths(above), own))
    topmost = order[np.flatnonzero(np.diff(own[order], prepend=-1))]
    above = above[topmost]
    return np.where(above < 0, -1, own[above]).tolist(), topmost.tolist()


def yields(governors: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the yield of every head, over the `counted` words at or below it: first, one past the last, and number, [W] each.

    If there are none, the first is W and the last is -1.
    """
    place, depth = np.arange(len(governors)), depths(governors)
    first = np.where(counted, place, len(governors))
    last, size = np.where(counted, place + 1, -1), counted.astype(np.int64)
    order = np.argsort(-depth, kind="stable")
    cuts = np.flatnonzero(np.diff(depth[order])) + 1
    for level in np.split(order, cuts):
        if not len(level) or depth[level[0]] == 0:
            break
        above = governors[level]
        np.minimum.at(first, above, first[level])
        np.maximum.at(last, above, last[level])
        np.add.at(size, above, size[level])
    return first, last, size


def make_projective(edges: np.ndarray, governors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return governors without crossing arcs [W], and the number of lifted arcs in every sentence [S].

    An arc is projective if its governor is above all words between its ends. The shortest arc that is not projective, the
    leftmost of equal ones, is lifted to the governor's governor. This repeats until all arcs are projective (Nivre and Nilsson
    2005, section 3).
    """
    lifted = np.zeros(len(edges) - 1, dtype=np.int64)
    first, last, size = yields(governors, np.ones(len(governors), dtype=bool))
    crossing = np.flatnonzero(last - first != size)
    if not len(crossing):
        return governors, lifted
    governors = governors.copy()
    for number in np.unique(np.searchsorted(edges, crossing, side="right") - 1).tolist():
        own = slice(edges[number], edges[number + 1])
        inside = np.where(governors[own] >= 0, governors[own] - edges[number], -1).tolist()
        lifted[number] = _lift(inside)
        governors[own] = [above + edges[number] if above >= 0 else -1 for above in inside]
    return governors, lifted


def _lift(governors: list[int]) -> int:
    """Lift the arcs of one sentence in place. Returns their number."""
    lifted = 0
    while crossing := [arc for arc in _arcs(governors) if _crosses(governors, *arc)]:
        _, _, word = min(crossing)
        governors[word] = governors[governors[word]]
        lifted += 1
    return lifted


def _arcs(governors: list[int]) -> list[tuple[int, int, int]]:
    """Return (length, leftmost word, dependent) of every arc."""
    return [(abs(word - above), min(word, above), word) for word, above in enumerate(governors) if above >= 0]


def _crosses(governors: list[int], length: int, leftmost: int, word: int) -> bool:
    head = governors[word]
    return any(not _is_above(governors, head, between) for between in range(leftmost + 1, leftmost + length))


def _is_above(governors: list[int], head: int, word: int) -> bool:
    while word >= 0 and word != head:
        word = governors[word]
    return word >= 0
