"""Self-attention of an encoder: from every leaf and node of the source to those that it attends to, and statistics over a split.

The weights are computed again from the inputs of the encoder's attention modules, as those of the cross-attention are
(`attention_stats`). Queries are leaves or nodes. *Even* is the share under uniform weights over all positions that a query may
attend to. With the subtree mask, a leaf may attend to leaves, and a node to its subtree (equation 11).

Shapes: A encoder layers, H heads, L leaves, N nodes, S = L + N positions: leaves, then nodes in pre-order (plain models: S = L).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import tee
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from treenet.analysis.attention_stats import Group, PhraseSums, read_labels
from treenet.data.batch import TreeBatch, count_leaves, in_order
from treenet.data.splits import read_split
from treenet.layers.attention import SelfAttention
from treenet.models.composed import Seq2Seq, compute_self_weights, explicit_mask
from treenet.runs.loading import LoadedRun
from treenet.structure import TreeStructure

_WINDOW = 256
_BATCH_TOKENS = 2048

Kept = TypeVar("Kept")
Keep = Callable[[np.ndarray, np.ndarray, int], Kept]


def has_self_attention(model: Seq2Seq) -> bool:
    """Return whether every layer of the encoder has self-attention whose weights can be computed here.

    Those of relation-aware attention and of what is not attention cannot.
    """
    layers = list(getattr(model.encoder, "layers", ()))
    return bool(layers) and all(type(getattr(layer, "self_attention", None)) is SelfAttention for layer in layers)


def encode_examples(model: Seq2Seq, examples: Iterable[dict]) -> Iterator[np.ndarray | None]:
    """Yield the weights [A, H, S, S] of every example, in order; None for one without leaves.

    The model must be in evaluation mode, and `has_self_attention` of it true.
    """
    return reduce_examples(model, examples, lambda weights, *_: weights)


def reduce_examples(model: Seq2Seq, examples: Iterable[dict], keep: Keep[Kept]) -> Iterator[Kept | None]:
    """Return what `keep` makes of every example.

    It gets the weights [A, H, S, S], where each position may attend to, [A, S, S] bool, and the number of leaves.
    Results are in order; None stands for an example without leaves. Weights are held for one batch alone, so a small result
    takes little memory. The model must be in evaluation mode, and `has_self_attention` of it true.
    """
    device = next(model.parameters()).device
    compute = partial(_encode_batch, model, keep)
    return in_order(compute, model.reads, examples, None, count_leaves, _BATCH_TOKENS, device, _WINDOW)


@torch.inference_mode()
def _encode_batch(model: Seq2Seq, keep: Keep[Kept], batch: TreeBatch, _: list[dict]) -> list[Kept | None]:
    recorded: list[Tensor] = []
    masks: list[Tensor] = []

    def record(module: SelfAttention, inputs: tuple, named: dict, _: Tensor) -> None:
        weights = compute_self_weights(module, *inputs, **named)
        recorded.append(weights)
        masks.append(_allowed(module, weights, *inputs[1:], **named))

    with ExitStack() as stack:
        for layer in model.encoder.layers:
            stack.enter_context(layer.self_attention.register_forward_hook(record, with_kwargs=True))
        model.encode(batch)
    weights, allowed = torch.stack(recorded, dim=1), torch.stack(masks, dim=1)  # [B, A, H, S, S] and [B, A, S, S]
    real = ~batch.source_pad_mask()

    def part(values: Tensor, row: int) -> np.ndarray:
        return values[row][..., real[row], :][..., real[row]].numpy(force=True)

    leaves = (~batch.leaf_pad_mask).sum(dim=1).tolist()
    return [keep(part(weights, row), part(allowed, row), leaves[row]) for row in range(len(batch))]


def _allowed(
    module: SelfAttention,
    weights: Tensor,
    attend_mask: Tensor | None = None,
    structure: TreeStructure | None = None,
    prior: Tensor | None = None,
) -> Tensor:
    """Return [B, S, S] bool: where each position may attend to, which is the same for all heads."""
    mask = explicit_mask(module, attend_mask, structure)
    every = torch.ones_like(weights[:, 0], dtype=torch.bool)
    return every if mask is None else every & mask[:, 0]


class QueryStats(NamedTuple):
    """The attention of all queries of one kind: sums over queries, or shares, their means. So long sentences count more."""

    queries: int
    node_mass: np.ndarray  # [A, H], share of the attention that goes to nodes
    even_node_mass: float
    own_mass: np.ndarray  # [A, H], share of the attention of a position to itself
    even_own_mass: float

    def means(self) -> "QueryStats":
        """Return the means of sums over queries."""
        count = max(1, self.queries)
        to_nodes, to_itself = self.node_mass / count, self.own_mass / count
        return QueryStats(self.queries, to_nodes, self.even_node_mass / count, to_itself, self.even_own_mass / count)

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


def run_encoder_attention(run: LoadedRun, split: str) -> EncoderStats:
    """Return the statistics of a run, whose encoder `has_self_attention`. Raises UserError when the split is not there."""
    return collect_encoder_attention(run.model, read_split(run.data, "encoded", split), read_labels(run.data))


def collect_encoder_attention(model: Seq2Seq, examples: Iterable[dict], labels: list[str]) -> EncoderStats:
    """Return the statistics over encoded examples; `labels` are the names of node labels by id."""
    given, kept = tee(examples)
    groups = PhraseSums(labels)
    totals, count = [QueryStats(0, np.zeros((1, 1)), 0.0, np.zeros((1, 1)), 0.0)] * 2, 0
    for example, found in zip(kept, reduce_examples(model, given, _sum_queries), strict=True):
        if found is None:
            continue
        mass, even, own = found
        num_leaves = len(example["leaves"]["piece"])
        groups.add(example, num_leaves, mass.shape[2] - num_leaves, mass, even)
        totals = [QueryStats(*map(add, total, sums)) for total, sums in zip(totals, own, strict=True)]
        count += 1
    queries = max(1, sum(total.queries for total in totals))
    leaves, nodes = totals
    return EncoderStats(count, leaves.means(), nodes.means(), *groups.groups(queries))


def _sum_queries(weights: np.ndarray, allowed: np.ndarray, num_leaves: int) -> tuple[np.ndarray, np.ndarray, list[QueryStats]]:
    """Sum over the leaves and over the nodes, from weights [A, H, S, S] and from where positions may attend to, [A, S, S].

    Also return what each position gets of all queries [A, H, S], and of uniform weights [S], as a mean over layers.
    """
    uniform = (allowed / allowed.sum(axis=2, keepdims=True)).mean(axis=0)  # [S, S]
    itself = weights.diagonal(axis1=2, axis2=3)  # [A, H, S]
    parts = slice(None, num_leaves), slice(num_leaves, None)
    masses = [weights[:, :, part].sum(axis=2, dtype=np.float64) for part in parts]
    evens = [uniform[part].sum(axis=0) for part in parts]
    sums = [
        QueryStats(
            uniform[part].shape[0],
            mass[:, :, num_leaves:].sum(axis=2),
            float(even[num_leaves:].sum()),
            itself[:, :, part].sum(axis=2, dtype=np.float64),
            float(uniform.diagonal()[part].sum()),
        )
        for part, mass, even in zip(parts, masses, evens, strict=True)
    ]
    return masses[0] + masses[1], evens[0] + evens[1], sums
