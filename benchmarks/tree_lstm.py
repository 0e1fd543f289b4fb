"""Tree-LSTMs by level against recursion, and updates of the classifiers.

    python benchmarks/tree_lstm.py [--quick]

`batched_to_recursive` is the time of the recursion divided by that of the level-batched cell, forward and backward. The recursion
computes one node at a time, as Tree-LSTMs are commonly written in PyTorch. The trees are random, as long as sentences of the
Stanford Sentiment Treebank. Times are CPU time of one thread. `update_ms` is one update of 2,048 leaves and nodes of each
classifier, tiny size, dropout 0.5.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import emit
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from reference_tree_lstm import reference_binary_tree_lstm, reference_child_sum
from toydata import random_spans

from treenet.config import ClassifierConfig, ModelConfig, OptimizerConfig
from treenet.data.batch import collate_rows
from treenet.data.input_kinds import LEAVES, RowLists
from treenet.data.labelled import LabelledBatch
from treenet.layers.cells import binary_tree_lstm, child_sum_tree_lstm
from treenet.layers.core import share_dropout_keys
from treenet.models import VocabSizes, build_classifier, find_encoder, names_for
from treenet.structure import ArcLevels, SpanTable, TreeLevels
from treenet.tasks.losses import label_smoothed_nll
from treenet.training.optimizer import build_optimizer
from treeproc.shards.rows import hash_ids

WIDTH, PIECES, LABELS, CLASSES, NO_CLASS = 64, 8000, 100, 5, -1
NAMES = [name for name in names_for("classification") if name != "pretrained"]  # it needs a folder with weights
MEAN_LEAVES, DEVIATION = 19.1, 9.3  # words of a sentence of the treebank


def sentence_lengths(count: int, random: np.random.Generator) -> list[int]:
    return np.clip(random.normal(MEAN_LEAVES, DEVIATION, count).round(), 2, 52).astype(int).tolist()


def random_governors(length: int, random: np.random.Generator) -> np.ndarray:
    """Draw a tree in which most words have a governor nearby."""
    out = np.full(length, -1)
    order = random.permutation(length)
    for place in range(1, length):
        before = order[:place]
        out[order[place]] = before[np.abs(before - order[place]).argmin()]
    return out


def seconds_of(step: Callable[[], None], rounds: int) -> float:
    """Return the fastest of some rounds in CPU time; one more warms up."""
    step()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return min(times)


def with_gradient(forward: Callable[[], Tensor], tensors: Sequence[Tensor]) -> Callable[[], None]:
    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        forward().square().sum().backward()

    return step


def compare_binary(batch: int, rounds: int, random: np.random.Generator) -> None:
    lengths = sentence_lengths(batch, random)
    trees = [random_spans(length, random) for length in lengths]
    table = SpanTable.build(lengths, [np.array(spans) for spans, _ in trees])
    leaves = torch.randn(2, sum(lengths), WIDTH, requires_grad=True)
    weight, bias = torch.randn(2 * WIDTH, 5 * WIDTH, requires_grad=True), torch.zeros(5 * WIDTH, requires_grad=True)
    with torch.no_grad():
        weight *= 0.1
    tensors = [leaves, weight, bias]

    def batched() -> Tensor:
        levels = TreeLevels.build(table)
        return binary_tree_lstm(*leaves, weight, bias, levels.children, levels.edges)[0][1 + sum(lengths) :]

    def recursive() -> Tensor:
        parts = zip(*(part.split(lengths) for part in leaves), trees, strict=True)
        return torch.stack(
            [h for hidden, cell, tree in parts for h, _ in reference_binary_tree_lstm(hidden, cell, weight, bias, *tree)]
        )

    report("binary", batch, batched, recursive, tensors, rounds)


def compare_child_sum(batch: int, rounds: int, random: np.random.Generator) -> None:
    lengths = sentence_lengths(batch, random)
    arcs = [random_governors(length, random) for length in lengths]
    projected = torch.randn(batch, max(lengths) + 1, 4 * WIDTH, requires_grad=True)
    weight = (torch.randn(WIDTH, 4 * WIDTH) * 0.1).requires_grad_()

    def batched() -> Tensor:
        levels = ArcLevels.build([np.arange(length) for length in lengths], arcs)
        inputs = projected.flatten(0, 1).index_select(0, levels.place)
        return child_sum_tree_lstm(inputs, weight, levels.child, levels.governor, levels.edges, levels.arc_edges)[0]

    def recursive() -> Tensor:
        rows = zip(projected, lengths, arcs, strict=True)
        return torch.stack([h for row, n, tree in rows for h, _ in reference_child_sum(row[:n], weight, tree.tolist())])

    report("child_sum", batch, batched, recursive, [projected, weight], rounds)


def report(case: str, batch: int, batched, recursive, tensors: list[Tensor], rounds: int) -> None:
    first, second = (float(forward().detach().square().sum()) for forward in (batched, recursive))
    difference = abs(first - second) / second
    assert difference < 1e-4, f"{case}: sums of squares differ by {difference}"
    fast, slow = seconds_of(with_gradient(batched, tensors), 5 * rounds), seconds_of(with_gradient(recursive, tensors), rounds)
    facts = {"batched_ms": round(1e3 * fast, 2), "recursive_ms": round(1e3 * slow, 1)}
    emit("tree_lstm", f"{case}, batch {batch}", "batched_to_recursive", slow / fast, **facts)


def make_batch(name: str, random: np.random.Generator, budget: int) -> LabelledBatch:
    """Build leaves and nodes of `budget` positions, or only leaves if a model reads phrases."""
    reads, rows = find_encoder(ModelConfig(name=name), "classification").reads, RowLists()
    # In a planned batch, lengths are nearly equal: a short phrase or a sentence.
    lengths = [8] * (budget // 8) if reads is LEAVES else random.integers(18, 21, budget // 38).tolist()
    for number, length in enumerate(lengths):
        spans = np.array(random_spans(length, random)[0]) if reads is not LEAVES else np.zeros((0, 3), dtype=np.int64)
        rows.example_ids.append(number)
        rows.pieces.append(random.integers(4, PIECES, length))
        rows.labels.append(random.integers(1, LABELS, len(spans)))
        for column, values in zip((rows.starts, rows.ends, rows.subtree_ends), spans.T, strict=True):
            column.append(values)
        rows.targets.append(np.zeros(0, dtype=np.int64))
    if reads.reads_arcs:
        rows.words, rows.governors = [np.arange(n) for n in lengths], [random_governors(n, random) for n in lengths]
    batch, positions = collate_rows(rows, reads), 0
    if reads.reads_arcs:
        positions = batch.structure.row.shape[1]
    elif reads is not LEAVES:
        positions = batch.leaf_pieces.shape[1] + batch.node_labels.shape[1]
    labels = torch.randint(0, CLASSES, (len(lengths),))
    position_labels = torch.randint(0, CLASSES, (len(lengths), positions))
    return LabelledBatch(**vars(batch), labels=labels, position_labels=position_labels)


def time_update(name: str, rounds: int, random: np.random.Generator, budget: int = 2048) -> None:
    """Time one update, without building the batch."""
    sizes = ModelConfig(name=name, d_model=WIDTH, d_ff=2 * WIDTH, num_heads=4, num_encoder_layers=2, dropout=0.5)
    model = build_classifier(sizes, VocabSizes(PIECES, LABELS), ClassifierConfig(), CLASSES)
    optimizer, keys = build_optimizer(model, OptimizerConfig()), share_dropout_keys(model)
    batch = make_batch(name, random, budget)

    def step() -> None:
        keys.set(hash_ids(batch.example_ids.numpy()))
        output = model(batch)
        logits, targets = (
            (output.examples, batch.labels) if output.positions is None else (output.positions, batch.position_labels)
        )
        optimizer.zero_grad()
        label_smoothed_nll(logits, targets, 0.0, NO_CLASS).loss.div(len(batch)).backward()
        optimizer.step()

    emit("tree_lstm", name, "update_ms", 1e3 * seconds_of(step, rounds), examples=len(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than 50 seconds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    for batch in (32,) if quick else (1, 8, 32, 128):
        compare_binary(batch, 2 if quick else 5, random)
        compare_child_sum(batch, 2 if quick else 5, random)
    for name in NAMES:
        time_update(name, 10 if quick else 50, random)


if __name__ == "__main__":
    main()
