"""Slow oracles: loops straight from the paper's equations, one sentence at a time.

Nothing here shares code with treenet. Trees are given by leaf spans and parents, in any node order; tests run it in float64.
"""

import math

import torch
from torch import Tensor


def sinusoids(length: int, width: int) -> Tensor:
    """Sines at even places, cosines at odd ones (Vaswani et al., 2017, section 3.5)."""
    angles = [[place / 10000 ** ((column - column % 2) / width) for column in range(width)] for place in range(length)]
    rows = [[(math.sin, math.cos)[column % 2](angle) for column, angle in enumerate(row)] for row in angles]
    return torch.tensor(rows, dtype=torch.float64)


def ancestors(node: int, parents: list[int]) -> list[int]:
    """A node and all above it."""
    chain = []
    while node != -1:
        chain.append(node)
        node = parents[node]
    return chain


def branch(leaf: int, node: int, spans: list[tuple[int, int]], parents: list[int]) -> list[int]:
    """V_j^i: the nodes of R(node) whose subtree holds the leaf, empty when the node does not cover it."""
    covers = [t for t, (start, end) in enumerate(spans) if start <= leaf < end]
    return [t for t in covers if node in ancestors(t, parents)]


def reference_interpolation(
    leaves: Tensor, nodes: Tensor, spans: list, tables: tuple[Tensor, Tensor] | None, rule: str, parents: list[int]
) -> list:
    """S + E (equations 5 and 9) as rows of vectors; row 0 holds the leaves, None stands for 0."""
    rows = [list(leaves)]
    for i, (start, end) in enumerate(spans):
        row = [None] * len(leaves)
        for j in range(start, end):
            row[j] = nodes[i]
            if tables is not None:
                vertical, horizontal = tables
                height = len(branch(j, i, spans, parents)) if rule == "paper" else len(ancestors(i, parents))
                rank = j - start + 1
                v_row, h_row = vertical[min(height, len(vertical)) - 1], horizontal[min(rank, len(horizontal)) - 1]
                row[j] = row[j] + torch.cat([v_row, h_row])
        rows.append(row)
    return rows


def reference_accumulation(
    leaves: Tensor, nodes: Tensor, w: Tensor, spans: list, parents: list[int], tables=None, rule: str = "paper"
) -> Tensor:
    """N-bar' [m, d] (equations 5 to 10): leaves [n, d], nodes [m, d], w [n], tables of width d / 2 or None."""
    rows = reference_interpolation(leaves, nodes, spans, tables, rule, parents)
    out = []
    for i, (start, end) in enumerate(spans):
        total = torch.zeros_like(leaves[0])
        for j in range(start, end):
            members = [rows[1 + t][j] for t in branch(j, i, spans, parents)]
            divisor = len(members) + 1 if rule == "paper" else len(members)
            total = total + w[j] * sum(members, start=rows[0][j]) / divisor
        out.append(total / (end - start))
    return torch.stack(out) if out else nodes.new_zeros(0, leaves.shape[1])


def may_attend(query: int, key: int, num_leaves: int, spans: list, parents: list[int]) -> bool:
    """Equation 11; positions are leaves, then nodes."""
    if query < num_leaves:
        return key < num_leaves
    node = query - num_leaves
    if key < num_leaves:
        return spans[node][0] <= key < spans[node][1]
    return node in ancestors(key - num_leaves, parents)


def reference_attention(queries: Tensor, keys: Tensor, values: Tensor, allowed) -> Tensor:
    """softmax(q k / sqrt(d)) v by loops; `allowed(query, key)` is the mask."""
    out = []
    for i in range(len(queries)):
        pairs = [(torch.dot(queries[i], keys[j]) / math.sqrt(len(queries[i])), j) for j in range(len(keys)) if allowed(i, j)]
        weights = torch.softmax(torch.stack([score for score, _ in pairs]), dim=0)
        out.append(sum(weight * values[j] for weight, (_, j) in zip(weights, pairs, strict=True)))
    return torch.stack(out)


def reference_score_attention(
    queries: Tensor, keys: Tensor, values: Tensor, num_leaves: int, w: Tensor, spans, parents, rule, allowed
):
    """Attention whose node affinities are accumulated, as scalars, from a query's affinities with leaves and nodes."""
    out = []
    for i in range(len(queries)):
        scores = torch.stack([torch.dot(queries[i], key) / math.sqrt(len(key)) for key in keys])[:, None]
        on_nodes = reference_accumulation(scores[:num_leaves], scores[num_leaves:], w, spans, parents, None, rule)
        scores = torch.cat([scores[:num_leaves], on_nodes])[:, 0]
        live = [j for j in range(len(keys)) if allowed(i, j)]
        out.append(torch.softmax(scores[live], dim=0) @ values[live])
    return torch.stack(out)
