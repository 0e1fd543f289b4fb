"""Slow oracles of treenet.structure.words and treenet.layers.relations: one word, one pair, one step at a time."""

from functools import cache

import torch
from torch import Tensor


@cache
def reference_distances(governors: tuple[int, ...]) -> list[list[int]]:
    """Floyd-Warshall over words and ROOT, which is the last one."""
    n = len(governors) + 1
    distance = [[0 if i == j else n * n for j in range(n)] for i in range(n)]
    for word, governor in enumerate(governors):
        above = n - 1 if governor < 0 else governor
        distance[word][above] = distance[above][word] = 1
    for k in range(n):
        for i in range(n):
            for j in range(n):
                distance[i][j] = min(distance[i][j], distance[i][k] + distance[k][j])
    return distance


@cache
def reference_path(governors: tuple[int, ...], start: int, end: int) -> str:
    """The steps of the only way without turning back, found by trying all of them; a step to a sibling of `start` is L or R."""
    n = len(governors) + 1
    above = [n - 1 if governor < 0 else governor for governor in governors]

    def walk(word: int, seen: tuple[int, ...]) -> tuple[int, ...] | None:
        if word == end:
            return seen
        near = [above[word]] if word < n - 1 else []
        near += [other for other in range(n - 1) if above[other] == word]
        paths = (walk(other, (*seen, other)) for other in near if other not in seen)
        return next((path for path in paths if path is not None), None)

    path = walk(start, (start,))
    steps = ["U" if a < n - 1 and above[a] == b else "D" for a, b in zip(path, path[1:], strict=False)]
    if steps[:2] == ["U", "D"]:
        return ("L" if path[2] < start else "R") + "".join(steps[2:])
    return "".join(steps)


def reference_structural(governors: tuple[int, ...], i: int, j: int, same: str) -> int:
    """The relative structural position of word j to word i, by the rule as written."""
    distance = reference_distances(governors)
    root = len(governors)
    depth = [row[root] - 1 for row in distance]

    def chain(word: int) -> list[int]:
        return [word, *chain(governors[word])] if word >= 0 else []

    together = {"path": i in chain(j) or j in chain(i), "edge": distance[i][j] <= 1}[same]
    if together:
        return depth[i] - depth[j]
    return (depth[i] + depth[j]) * (1 if i < j else -1)


def reference_attention(
    queries: Tensor, keys: Tensor, values: Tensor, ids: list[Tensor], key_table: Tensor, value_table: Tensor | None, kinds: int
) -> Tensor:
    """One head of one sentence: queries [T, K], keys and values [S, K], ids [T, S] of every kind -> [T, K]."""
    out = []
    for i, query in enumerate(queries):
        related_keys = [key + sum(key_table[each[i, j]] for each in ids) for j, key in enumerate(keys)]
        weights = torch.stack([query @ key for key in related_keys]).div(len(query) ** 0.5).softmax(0)
        related = [v + sum(value_table[each[i, j]] for each in ids[:kinds]) if kinds else v for j, v in enumerate(values)]
        out.append(sum(weight * value for weight, value in zip(weights, related, strict=True)))
    return torch.stack(out)
