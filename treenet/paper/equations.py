"""The paper in a hundred lines: hierarchical accumulation, subtree masking and tree attention, over one tree and in one head.

Numbers in brackets are equations of Nguyen, Joty, Hoi and Socher (ICLR 2020), and names are the paper's. This code makes the
tensors S, E and S-hat, so it is slow. The fast layers equal it, with their gradients. `model.tree.implementation=reference`
computes models with it.

Shapes: n leaves, m nodes, t target positions, d width of the head. As in the paper, nodes come before leaves.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout

Tables = tuple[Tensor, Tensor]  # vertical and horizontal embeddings E^v, E^h [|E|, d / 2]


class Tree:
    """T(X) = (L, N, R) of section 4.1. A node may have any number of children, and nodes may have any order."""

    def __init__(self, num_leaves: int, spans: Sequence[Sequence[int]], parents: Sequence[int], rule: str = "paper"):
        """Take the leaves [start, end) and the parent of each node, -1 for a root, and the `accumulation_rule`."""
        leaf, (start, end) = torch.arange(num_leaves), torch.tensor(spans, dtype=torch.long).view(-1, 2, 1).unbind(1)
        self.leaves = (start <= leaf) & (leaf < end)  # [m, n] leaf j is in R(i)
        self.nodes = torch.eye(len(spans), dtype=torch.bool)  # [m, m] node t is in R(i)
        for node, above in enumerate(parents):
            while above >= 0:
                self.nodes[above, node] = True
                above = parents[above]
        ancestors = (self.nodes[:, :, None] & self.leaves).sum(1)  # [m, n] |V_j^i|, the nodes t of R(i) with leaf j in R(t)
        self.branch_size = ancestors + 1 if rule == "paper" else ancestors  # [m, n] |C_j^i|, with the leaf
        depth = self.nodes.sum(0)[:, None].expand_as(ancestors)  # [m, n] nodes from the root down to i
        self.vertical_count = ancestors if rule == "paper" else depth  # [m, n] for E^v
        self.horizontal_count = self.leaves.cumsum(1)  # [m, n] |H_j^i|, for E^h


def interpolate(L: Tensor, N: Tensor, tree: Tree) -> Tensor:
    """F: leaves [n, d], nodes [m, d] -> S [m + 1, n, d]."""
    return torch.cat([L[None], torch.where(tree.leaves[..., None], N[:, None], 0)])  # (5)


def average_upwards(S: Tensor, tree: Tree) -> Tensor:
    """U: S [m + 1, n, d] -> S-hat [m, n, d], the means of the branches from leaves up to nodes."""
    sums = S[0] + torch.einsum("it,tjd->ijd", tree.nodes.to(S), S[1:])  # over the vectors of C_j^i
    return torch.where(tree.leaves[..., None], sums / tree.branch_size.clamp(min=1)[..., None], 0)  # (6)


def aggregate(S_hat: Tensor, w: Tensor, tree: Tree) -> Tensor:
    """V: S-hat [m, n, d], leaf weights [n] -> N-bar [m, d]."""
    return (w[:, None] * S_hat).sum(1) / tree.leaves.sum(1, keepdim=True)  # (7)


def embed(tables: Tables, tree: Tree) -> Tensor:
    """E [m + 1, n, d]. Counts from 1 take the rows from 0; counts beyond a table take its last row."""
    counts = tree.vertical_count, tree.horizontal_count
    v, h = (E[(count - 1).clamp(0, len(E) - 1)] for E, count in zip(tables, counts, strict=True))
    E = torch.where(tree.leaves[..., None], torch.cat([v, h], dim=2), 0)  # (9)
    return torch.cat([E.new_zeros(1, *E.shape[1:]), E])


def accumulate(L: Tensor, N: Tensor, w: Tensor, tree: Tree, tables: Tables | None) -> Tensor:
    """Leaves [n, d], nodes [m, d], leaf weights w [n] -> N-bar' [m, d].

    (16) and (23) give it L W^V, N W^V and w = L u, with the leaves L and nodes N that the layer reads.
    """
    S = interpolate(L, N, tree)
    if tables is None:
        return aggregate(average_upwards(S, tree), w, tree)  # (8)
    return aggregate(average_upwards(S + embed(tables, tree), tree), w, tree)  # (10)


def mask(A_N: Tensor, A_L: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Mu: affinities of nodes [m, m + n] and leaves [n, m + n] as queries, with -inf for what they may not attend to."""
    m, n = tree.leaves.shape
    A_N = A_N.masked_fill(~torch.cat([tree.nodes, tree.leaves], dim=1), -math.inf)  # (11) a node: its subtree
    A_L = A_L.masked_fill(torch.arange(m + n, device=A_L.device) < m, -math.inf)  # (11) a leaf: all leaves
    return A_N, A_L


def attend_within(
    Q_N: Tensor, Q_L: Tensor, K_N: Tensor, K_L: Tensor, N_bar: Tensor, L_bar: Tensor, *, tree: Tree | None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute encoder self-attention: queries, keys, values of nodes [m, d] and leaves [n, d] -> Att_N [m, d], Att_L [n, d].

    Q_N is N W^Q, K_N is N W^K, and so on. Without a `tree` there is no mask. `p` is the dropout of attention weights.
    """
    scale = math.sqrt(Q_L.shape[1])
    A_NL = Q_N @ K_L.T / scale  # (12) [m, n]
    A_LL = Q_L @ K_L.T / scale  # (13) [n, n]
    A_NN = Q_N @ K_N.T / scale  # (14) [m, m]
    A_LN = Q_L @ K_N.T / scale  # (15) [n, m]
    A_N, A_L = torch.cat([A_NN, A_NL], dim=1), torch.cat([A_LN, A_LL], dim=1)
    if tree is not None:
        A_N, A_L = mask(A_N, A_L, tree)
    Att_N = dropout(A_N.softmax(1), p) @ torch.cat([N_bar, L_bar])  # (17)
    Att_L = dropout(A_L.softmax(1), p) @ torch.cat([N_bar, L_bar])  # (18)
    return Att_N, Att_L


def attend_across(Q: Tensor, K_N: Tensor, K_L: Tensor, N_bar: Tensor, L_bar: Tensor, *, p: float = 0.0) -> Tensor:
    """Compute decoder cross-attention: queries [t, d], keys, values of nodes [m, d] and leaves [n, d] -> Att_Q [t, d]."""
    scale = math.sqrt(Q.shape[1])
    A_QN = Q @ K_N.T / scale  # (21) [t, m]
    A_QL = Q @ K_L.T / scale  # (22) [t, n]
    return dropout(torch.cat([A_QN, A_QL], dim=1).softmax(1), p) @ torch.cat([N_bar, L_bar])  # (24)
