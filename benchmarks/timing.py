"""Training and inference time by length of the input, as in figure 5b of the paper; a plot for docs/results.

    python benchmarks/timing.py --out docs/results/timing.png    # PNG and SVG, a few minutes
    python benchmarks/timing.py --quick

The paper's protocol (appendix 7.4): a classifier with an encoder of two layers of d 64 trains for 1,000 updates at batch size 1
on binary constituency trees. Training excludes the parser's time. Inference is measured without and with it, because it starts
from text. An update is collation (of a tree model, with the maps of its tree), forward, backward and Adam; so is inference
without the last two. Parsing is from text to the arrays of a binary tree. It is measured line by line, and also in one call for
all lines. Plain models need no parsing.

Lines are the shipped sample's sentences one after the other, cut at so many words; words are leaves, without subwords. Times
are CPU time of one thread (GPU time with --device cuda); the models take turns in rounds. So a ratio compares runs on one
machine at one time. One JSON line per figure; `min`, `median` and `max` are ratios of single rounds.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from measure import Times, emit, time_once

from treenet.config import ClassifierConfig, ModelConfig, OptimizerConfig
from treenet.data.batch import TreeBatch, collate_rows
from treenet.data.input_kinds import LEAVES, RowLists
from treenet.models import Classifier, VocabSizes, build_classifier, find_encoder
from treenet.training.optimizer import build_optimizer
from treeproc.parsers import Parser, ParserConfig, build_parser
from treeproc.readers import read_lines
from treeproc.shards.schema import EOS_ID
from treeproc.stages.preprocess import SAMPLE
from treeproc.trees.flat_trees import binarise, normal_form, read_flat_trees

LENGTHS = (10, 20, 30, 40, 50, 60, 80, 100, 120)
NUM_CLASSES = 5
CONFIG = ModelConfig(d_model=64, d_ff=128, num_heads=4, num_encoder_layers=2, dropout=0.2)


# The classifiers of the figure, by name: what the plot calls them.
MODELS = {"tree_transformer": "Tree Transformer", "tree_lstm": "Tree-LSTM", "transformer": "Transformer"}
BASE = "transformer"


@dataclass
class Reader:
    """Converts text to examples: the shipped parser, binary trees, ids that grow with the input."""

    parser: Parser
    pieces: dict[str, int]
    labels: dict[str, int]

    def read(self, lines: list[str]) -> list[RowLists]:
        """Return every line as a batch of one that is not collated yet."""
        rows = []
        for parsed in self.parser.parse(lines):
            words, brackets = parsed.words["text"], read_flat_trees(pa.array(parsed.trees, pa.string()))
            trees = binarise(normal_form(brackets, collapse_unary=True, classes=None, leaf_classes=None), len(words), "right")
            names = [trees.names[label] for label in trees.labels.tolist()]
            rows.append(
                RowLists(
                    example_ids=[0],
                    pieces=[np.array([self.pieces.setdefault(word, EOS_ID + 1 + len(self.pieces)) for word in words])],
                    labels=[np.array([self.labels.setdefault(name, 1 + len(self.labels)) for name in names])],
                    starts=[trees.starts],
                    ends=[trees.ends],
                    subtree_ends=[trees.subtree_ends()],
                    targets=[np.zeros(0, dtype=np.int64)],
                )
            )
        return rows


def long_lines(parser: Parser, length: int, count: int) -> Iterator[str]:
    """Return `count` lines of `length` words of the parser, each from other sentences."""
    sentences = read_lines([SAMPLE / "train.en.gz"])
    for _ in range(count):
        text = next(sentences)
        while text.count(" ") < length:  # the parser has no fewer words
            text += " " + next(sentences)
        yield text[: parser.parse([text])[0].words["end_char"][length - 1]]


def seconds_of_blocks(steps: dict[str, Callable[[], None]], device: torch.device, rounds: int, per_round: int) -> Times:
    """Return seconds of `per_round` calls of every step, in turn, after some that warm up."""
    times = Times({name: [] for name in steps})

    def block(step: Callable[[], None], calls: int) -> None:
        for _ in range(calls):
            step()

    for step in steps.values():
        block(step, max(2, per_round // 10))
    for index in range(rounds):
        names = list(steps)[:: -1 if index % 2 else 1]
        for name in names:
            times.seconds[name].append(time_once(partial(block, steps[name], per_round), device))
    return times


def build(name: str, vocab: VocabSizes) -> Classifier:
    """Build a classifier of examples: from the root of a tree, or from the mean of the leaves. The Tree-LSTM has one layer."""
    config = CONFIG.model_copy(update={"name": name})
    return build_classifier(config, vocab, ClassifierConfig(supervision="root"), NUM_CLASSES)


def collated(model: Classifier, row: RowLists, device: torch.device) -> TreeBatch:
    """Collate a batch of one with the inputs of the model, as in training."""
    batch = collate_rows(row, model.reads)
    return batch if device.type == "cpu" else batch.to(device)


def train_step(model: Classifier, rows: list[RowLists], device: torch.device) -> Callable[[], None]:
    optimizer, examples = build_optimizer(model, OptimizerConfig()), cycle(enumerate(rows))

    def step() -> None:
        number, row = next(examples)
        loss = F.cross_entropy(model(collated(model, row, device)).examples, torch.tensor([number % NUM_CLASSES], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference_step(model: Classifier, rows: list[RowLists], device: torch.device) -> Callable[[], None]:
    examples = cycle(rows)

    @torch.inference_mode()
    def step() -> None:
        model(collated(model, next(examples), device)).examples.argmax(1).item()

    return step


def measure_length(reader: Reader, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Print the figures of one length. Returns those of the plot."""
    torch.manual_seed(0)
    device, case, found = torch.device(options.device), f"n{length}", {}

    def note(metric: str, value: float, **more: object) -> None:
        found[metric] = value
        emit("timing", case, metric, value, **more)

    lines = list(long_lines(reader.parser, length, options.sentences))
    rows = reader.read(lines)
    note("leaves", float(np.mean([len(row.pieces[0]) for row in rows])))
    note("nodes", float(np.mean([len(row.labels[0]) for row in rows])))
    one_by_one = sum(time_once(lambda line=line: reader.read([line]), device) for line in lines)
    note("parser_ms", 1e3 * one_by_one / len(lines))
    note("parser_bulk_ms", 1e3 * time_once(lambda: reader.read(lines), device) / len(lines))

    vocab = VocabSizes(EOS_ID + 1 + len(reader.pieces), 1 + len(reader.labels))
    models = {name: build(name, vocab).to(device) for name in MODELS}
    per_round = options.updates // options.rounds
    steps = {name: train_step(model.train(), rows, device) for name, model in models.items()}
    training = seconds_of_blocks(steps, device, options.rounds, per_round)
    steps = {name: inference_step(model.eval(), rows, device) for name, model in models.items()}
    inference = seconds_of_blocks(steps, device, options.rounds, per_round)
    for name in MODELS:
        note(f"{name}_train_s", sum(training.seconds[name]) * 1000 / (options.rounds * per_round), updates=1000)
        milliseconds = 1e3 * sum(inference.seconds[name]) / (options.rounds * per_round)
        note(f"{name}_infer_ms", milliseconds)
        if models[name].reads is not LEAVES:
            note(f"{name}_infer_with_parser_ms", milliseconds + found["parser_ms"])
        if name != BASE:
            for metric, times in (("train", training), ("infer", inference)):
                ratio, spread = times.ratio(name, BASE)
                note(f"{name}_{metric}_ratio", ratio, **spread)
    return found


def plot(results: dict[int, dict[str, float]], path: Path) -> None:
    """Plot training and inference by words, as PNG and SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = list(results)

    def draw(axes, metric: str, label: str, **style: object) -> None:
        axes.plot(lengths, [found[metric] for found in results.values()], label=label, marker="o", markersize=4, **style)

    for number, (name, title) in enumerate(MODELS.items()):
        color = f"C{number}"
        draw(left, f"{name}_train_s", title, color=color)
        draw(right, f"{name}_infer_ms", title, color=color)
        if find_encoder(ModelConfig(name=name), "classification").reads is not LEAVES:
            draw(right, f"{name}_infer_with_parser_ms", f"{title} and parser", color=color, linestyle="--")
    draw(right, "parser_bulk_ms", "parser, many lines at once", color="gray", linestyle=":")
    left.set(xlabel="words", ylabel="seconds of 1,000 updates, batch size 1", ylim=(0, None), title="Training")
    right.set(xlabel="words", ylabel="milliseconds a line", yscale="log", title="Inference")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "timing", "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".png"), dpi=150)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three lengths, 60 updates scaled to 1,000; under 50 seconds")
    parser.add_argument("--updates", type=int, default=1000, help="updates of a model and length")
    parser.add_argument("--rounds", type=int, default=10, help="turns in which the models take their updates")
    parser.add_argument("--sentences", type=int, default=20, help="lines of a length")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where models and parser run")
    parser.add_argument("--out", type=Path, metavar="PNG", help="plot to write, as .png and .svg")
    options = parser.parse_args()
    lengths = LENGTHS
    if options.quick:
        lengths, options.updates, options.rounds, options.sentences = (10, 40, 100), 60, 3, 4
    torch.set_num_threads(1)
    reader = Reader(build_parser(ParserConfig(name="shipped", device=options.device, max_words=2 * LENGTHS[-1])), {}, {})
    results = {length: measure_length(reader, length, options) for length in lengths}
    if options.out:
        plot(results, options.out)


if __name__ == "__main__":
    main()
