"""Statistics of an encoder's self-attention over a split, beside those of the cross-attention (`attention_stats`).

Queries are leaves or nodes of the source. *Even* is the share under uniform weights over all positions that a query may attend
to. With the subtree mask, a leaf may attend to leaves, and a node to its subtree (equation 11).

Shapes: A encoder layers, H heads, L leaves, N nodes, S = L + N positions (plain models: S = L).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import tee

import numpy as np

from treenet.analysis.attention_stats import Group, GroupSums, display_label, node_heights, read_labels
from treenet.analysis.self_attention import reduce_examples
from treenet.data.splits import read_split
from treenet.models.composed import Seq2Seq
from treenet.runs.loading import LoadedRun


@dataclass(frozen=True)
class QueryStats:
    """The attention of all queries of one kind. Shares are means over queries, so long sentences count more."""

    queries: int
    node_mass: np.ndarray  # [A, H], share of the attention that goes to nodes
    even_node_mass: float
    own_mass: np.ndarray  # [A, H], share of the attention of a position to itself
    even_own_mass: float

    def to_json(self) -> dict:
        def share(mass: np.ndarray, even: float) -> dict:
            return {"mean": float(mass.mean()), "deviation": float(mass.std()), "even": even, "heads": mass.tolist()}

        to_nodes, to_itself = share(self.node_mass, self.even_node_mass), share(self.own_mass, self.even_own_mass)
        return {"queries": self.queries, "to_nodes": to_nodes, "to_itself": to_itself}


@dataclass(frozen=True)
class EncoderStats:
    """Self-attention over a whole split. Groups are of the positions that are attended to, by all queries together."""

    sentences: int
    leaves: QueryStats
    nodes: QueryStats
    by_label: list[Group]  # of nodes, most attention first
    by_height: list[Group]  # leaves are height 0, a node is one higher than the highest below it

    def to_json(self) -> dict:
        """Return everything as numbers and lists; shares between 0 and 1."""
        return {
            "sentences": self.sentences,
            "leaves": self.leaves.to_json(),
            "nodes": self.nodes.to_json(),
            "by_label": [group.to_json() for group in self.by_label],
            "by_height": [group.to_json() for group in self.by_height],
        }


@dataclass(frozen=True)
class _Sums:
    """Sums over the queries of one kind in one example."""

    queries: int
    mass: np.ndarray  # [A, H, S], attention that each position gets
    even: np.ndarray  # [S], the same of uniform weights, as a mean over layers
    own: np.ndarray  # [A, H], attention of positions to themselves
    even_own: float


def run_encoder_attention(run: LoadedRun, split: str) -> EncoderStats:
    """Return the statistics of a run, whose encoder `has_self_attention`. Raises UserError when the split is not there."""
    return collect_encoder_attention(run.model, read_split(run.data, "encoded", split), read_labels(run.data))


def collect_encoder_attention(model: Seq2Seq, examples: Iterable[dict], labels: list[str]) -> EncoderStats:
    """Return the statistics over encoded examples; `labels` are the names of node labels by id."""
    given, kept = tee(examples)
    by_label, by_height = GroupSums(), GroupSums()
    totals, count = [_Total(), _Total()], 0
    for example, found in zip(kept, reduce_examples(model, given, _sum_queries), strict=True):
        if found is None:
            continue
        num_leaves = len(example["leaves"]["piece"])
        num_nodes = found[0].mass.shape[2] - num_leaves
        mass, even = found[0].mass + found[1].mass, found[0].even + found[1].even
        names = [display_label(labels[label]) for label in example["nodes"]["label"][:num_nodes]]
        heights = node_heights(example["spans"]["subtree_end"][:num_nodes])
        by_label.add(names, mass[:, :, num_leaves:], even[num_leaves:])
        by_height.add([0] * num_leaves + heights.tolist(), mass, even)
        for total, sums in zip(totals, found, strict=True):
            total.add(sums, num_leaves)
        count += 1
    queries = max(1, sum(total.queries for total in totals))
    return EncoderStats(
        count,
        totals[0].stats(),
        totals[1].stats(),
        sorted(by_label.groups(queries), key=lambda group: (-group.mass.mean(), group.name)),
        sorted(by_height.groups(queries), key=lambda group: int(group.name)),
    )


def _sum_queries(weights: np.ndarray, allowed: np.ndarray, num_leaves: int) -> tuple[_Sums, _Sums]:
    """Sum over the leaves and over the nodes, from weights [A, H, S, S] and from where positions may attend to, [A, S, S]."""
    even = (allowed / allowed.sum(axis=2, keepdims=True)).mean(axis=0)  # [S, S]
    own = weights.diagonal(axis1=2, axis2=3)  # [A, H, S]

    def add(part: slice) -> _Sums:
        return _Sums(
            even[part].shape[0],
            weights[:, :, part].sum(axis=2, dtype=np.float64),
            even[part].sum(axis=0),
            own[:, :, part].sum(axis=2, dtype=np.float64),
            float(even.diagonal()[part].sum()),
        )

    return add(slice(None, num_leaves)), add(slice(num_leaves, None))


class _Total:
    """Sums over the queries of one kind in all examples."""

    def __init__(self) -> None:
        self.queries = 0
        self._node_mass: np.ndarray = np.zeros((1, 1))
        self._own: np.ndarray = np.zeros((1, 1))
        self._even_nodes = self._even_own = 0.0

    def add(self, sums: _Sums, num_leaves: int) -> None:
        self.queries += sums.queries
        self._node_mass = self._node_mass + sums.mass[:, :, num_leaves:].sum(axis=2)
        self._own = self._own + sums.own
        self._even_nodes += float(sums.even[num_leaves:].sum())
        self._even_own += sums.even_own

    def stats(self) -> QueryStats:
        count = max(1, self.queries)
        even = self._even_nodes / count, self._even_own / count
        return QueryStats(self.queries, self._node_mass / count, even[0], self._own / count, even[1])
