"""Attention statistics of a translation model: from target positions to the leaves and nodes of the source tree (Table 4).

The layers attend by kernels that return no weights. Here the weights are computed again by an explicit softmax, from what
goes into the cross-attention modules while the model itself runs with teacher forcing: there is no second model.

Teacher forcing is on the references or on the model's own translations, and every figure says on which. Every predicted
piece is a target position, the end of the sentence included, as in the loss.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions (plain models: S = L).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from treenet.data.batch import TreeBatch, in_order, longer_side
from treenet.data.splits import read_split
from treenet.models.composed import Seq2Seq, attend_batch
from treenet.runs.loading import LoadedRun
from treenet.translation.translate import translate_examples
from treeproc.common.errors import check_choice
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLIT_WORD_PREFIX
from treeproc.shards.shard import read_names

Targets = Literal["reference", "translation"]

# Examples sorted by length at a time. `attend_examples` holds the weights of a window together, 0.3 MB for each example with
# 6 layers, 8 heads and 30 words.
_WINDOW = 256
Result = TypeVar("Result")
# All labels of words that subwords split, POS=NN and so on, count as one.
SPLIT_WORD = "split word"


@dataclass(frozen=True)
class SentenceAttention:
    """The attention of one example. Weights of a target position add up to 1 for each layer and head."""

    example: dict  # as of `Shard.row`; its tgt_pieces are those that were forced
    weights: np.ndarray  # [A, H, T, S] float32: leaves, then nodes in pre-order
    copies: int = 1  # positions of a node, whose weights are added up

    @property
    def num_leaves(self) -> int:
        return len(self.example["leaves"]["piece"])

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes that the model attends to: 0 for plain models."""
        return self.weights.shape[3] - self.num_leaves


@dataclass(frozen=True)
class Group:
    """The shares of all attention that one kind of position gets."""

    name: str
    positions: int  # number of positions of this kind
    mass: np.ndarray  # [A, H], share of the attention of all target positions
    even: float  # the share it would have, were attention spread evenly over the positions of each sentence

    def to_json(self) -> dict:
        share = {"mass": float(self.mass.mean()), "even": self.even, "heads": self.mass.tolist()}
        return {"name": self.name, "positions": self.positions, **share}


@dataclass(frozen=True)
class AttentionStats:
    """Attention over a whole split. Shares are means over target positions, so long sentences count more."""

    targets: Targets
    sentences: int
    target_positions: int
    leaves: int
    nodes: int
    node_mass: np.ndarray  # [A, H], share of the attention that goes to nodes
    by_label: list[Group]  # of nodes, most attention first
    by_height: list[Group]  # leaves are height 0, a node is one higher than the highest below it

    @property
    def node_share(self) -> float:
        """Return the share of nodes among the positions of all source trees: Nodes of Table 4."""
        return self.nodes / max(1, self.leaves + self.nodes)

    @property
    def mean(self) -> float:
        """Return the mean over layers and heads of `node_mass`: Target -> Nodes of Table 4."""
        return float(self.node_mass.mean())

    @property
    def deviation(self) -> float:
        """Return the standard deviation (of the population) of `node_mass` over layers and heads."""
        return float(self.node_mass.std())

    def to_json(self) -> dict:
        """Return everything as numbers and lists; shares between 0 and 1."""
        return {
            "targets": self.targets,
            "sentences": self.sentences,
            "target_positions": self.target_positions,
            "leaves": self.leaves,
            "nodes": self.nodes,
            "node_share": self.node_share,
            "target_to_nodes": {"mean": self.mean, "deviation": self.deviation, "heads": self.node_mass.tolist()},
            "by_label": [group.to_json() for group in self.by_label],
            "by_height": [group.to_json() for group in self.by_height],
        }


def attend_examples(model: Seq2Seq, examples: Iterable[dict], *, max_tokens: int = 2048) -> Iterator[SentenceAttention]:
    """Return the attention of every example that has leaves, in the order of `examples`, whose `tgt_pieces` are forced.

    The model is put into evaluation mode.
    """
    return map_attention(lambda attention: attention, model, examples, max_tokens=max_tokens)


def map_attention(
    compute: Callable[[SentenceAttention], Result], model: Seq2Seq, examples: Iterable[dict], *, max_tokens: int = 2048
) -> Iterator[Result]:
    """Yield what `compute` makes of the attention of each example, as `attend_examples` gives it.

    Only the weights of one batch are in memory, and the results of a window.
    """

    def compute_batch(batch: TreeBatch, rows: list[dict]) -> list[Result | None]:
        copies = 1 if batch.structure is None else batch.structure.positions_of_node
        return [compute(SentenceAttention(*one, copies)) for one in zip(rows, attend_batch(model, batch), strict=True)]

    device = next(model.eval().parameters()).device
    found = in_order(compute_batch, model.reads, examples, None, longer_side, max_tokens, device, _WINDOW)
    return (result for result in found if result is not None)


def translated(run: LoadedRun, examples: list[dict]) -> list[dict]:
    """Return the examples with the model's own translations as `tgt_pieces`, with the decoding settings of the run."""
    device = next(run.model.parameters()).device
    found = translate_examples(run.model, examples, run.config.decoding, processor=run.processor, device=device)
    return [
        {**example, "tgt_pieces": np.array(best.ids, dtype=np.int32)} for example, (best, *_) in zip(examples, found, strict=True)
    ]


def run_attention(run: LoadedRun, split: str, targets: Targets = "reference") -> AttentionStats:
    """Return the statistics of a trained run on a split of its data set. Raises UserError when the split is not there."""
    check_choice("targets", targets, Targets)
    examples: Iterable[dict] = read_split(run.data, "encoded", split)
    if targets == "translation":
        examples = translated(run, list(examples))
    return collect_attention(attend_examples(run.model, examples), read_labels(run.data), targets)


def read_labels(data: AnyPath) -> list[str]:
    """Return the names of node labels by id."""
    return read_names(data / "encoded" / "vocab" / "labels.txt")


def node_heights(subtree_ends: np.ndarray) -> np.ndarray:
    """Return the height of each node [N] in pre-order: 1 above leaves alone, else one more than its highest child."""
    heights = np.ones(len(subtree_ends), dtype=np.int64)
    for node in reversed(range(len(subtree_ends))):
        child, end = node + 1, subtree_ends[node]
        while child < end:
            heights[node] = max(heights[node], heights[child] + 1)
            child = subtree_ends[child]
    return heights


def display_label(name: str) -> str:
    """Return the name under which a label is counted."""
    return SPLIT_WORD if name.startswith(SPLIT_WORD_PREFIX) else name


class GroupSums:
    """Positions, attention and even attention by key."""

    def __init__(self) -> None:
        self.positions: dict = {}
        self.mass: dict = {}
        self.even: dict = {}

    def add(self, keys: Iterable, attention: np.ndarray, even: np.ndarray) -> None:
        """Add `attention` [A, H, positions] of all queries together; `even` [positions] is what each position would get."""
        for index, key in enumerate(keys):
            self.positions[key] = self.positions.get(key, 0) + 1
            self.mass[key] = self.mass.get(key, 0.0) + attention[:, :, index]
            self.even[key] = self.even.get(key, 0.0) + float(even[index])

    def groups(self, total: int) -> list[Group]:
        return [Group(str(key), count, self.mass[key] / total, self.even[key] / total) for key, count in self.positions.items()]


class PhraseSums:
    """Attention to nodes by label, and to all positions by height: 0 for leaves. `labels` are names by id."""

    def __init__(self, labels: list[str]) -> None:
        self._labels, self._by_label, self._by_height = labels, GroupSums(), GroupSums()

    def add(self, example: dict, num_leaves: int, num_nodes: int, attention: np.ndarray, even: np.ndarray) -> None:
        """Add `attention` [A, H, S] to the positions of an example, and `even` [S], what each would get."""
        names = [display_label(self._labels[label]) for label in example["nodes"]["label"][:num_nodes]]
        heights = node_heights(example["spans"]["subtree_end"][:num_nodes])
        self._by_label.add(names, attention[:, :, num_leaves:], even[num_leaves:])
        self._by_height.add([0] * num_leaves + heights.tolist(), attention, even)

    def groups(self, total: int) -> tuple[list[Group], list[Group]]:
        """Return the shares of `total` by label, most attention first, and by height."""
        by_label = sorted(self._by_label.groups(total), key=lambda group: (-group.mass.mean(), group.name))
        return by_label, sorted(self._by_height.groups(total), key=lambda group: int(group.name))


def collect_attention(sentences: Iterable[SentenceAttention], labels: list[str], targets: Targets) -> AttentionStats:
    """Return the statistics over sentences; `labels` are the names of node labels by id."""
    groups = PhraseSums(labels)
    count = target_positions = leaves = nodes = 0
    on_nodes = np.zeros((1, 1))
    for sentence in sentences:
        num_leaves, num_nodes = sentence.num_leaves, sentence.num_nodes
        attention = sentence.weights.sum(axis=2, dtype=np.float64)  # [A, H, S]
        num_targets = sentence.weights.shape[2]
        positions = np.repeat((1, sentence.copies), (num_leaves, num_nodes))
        groups.add(sentence.example, num_leaves, num_nodes, attention, num_targets * positions / positions.sum())
        on_nodes = on_nodes + attention[:, :, num_leaves:].sum(axis=2)
        count, target_positions = count + 1, target_positions + num_targets
        leaves, nodes = leaves + num_leaves, nodes + num_nodes
    total = max(1, target_positions)
    return AttentionStats(targets, count, target_positions, leaves, nodes, on_nodes / total, *groups.groups(total))
