"""All translation models beside the plain Transformer: parameters, speed of training and of beam search, in one run.

    python benchmarks/models.py --quick                            # small models, under 50 seconds
    python benchmarks/models.py --table models.md                  # Transformer base, minutes a model
    python benchmarks/models.py --models lightconv convs2s --device cuda --dtype bf16

One JSON line per figure; `case` is the model. The models are those of workflows/configs/iwslt14_en_de*.yaml with their own
settings, and further models of the registry without such a configuration. All have the same width, depth and dropout.
`parameters`: of the model, with `to_plain`.
`training_to_plain`: target tokens/s of whole updates (batch with its trees or arcs, forward, backward, Adam) / of the plain
Transformer on the same examples.
`decoding_to_plain`: target tokens/s of encoder and beam search, beam 5, as many pieces for every sentence / of the plain
Transformer.

Random examples of the shape of captions (15 leaves, n + m = 1.7 n), with random trees and arcs; binary trees for models that
read these. Times are CPU time on one thread, or GPU time. Each model takes turns with the plain Transformer, two at a time:
`value` is the median of the rounds' ratios.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from layer_trees import random_tree
from measure import emit, time_interleaved
from training_data import MEAN_LEAVES, NODES_PER_LEAF, NUM_LABELS, SPECIAL_PIECES

from treenet.config import DecodingConfig, ModelConfig, TrainConfig
from treenet.data.batch import TreeBatch, collate
from treenet.data.examples import Examples
from treenet.data.input_kinds import InputKind
from treenet.models import Seq2Seq, VocabSizes, build_model, names_for
from treenet.tasks.base import build_task
from treenet.training.micro_batches import MicroBatches
from treenet.training.ranks import Ranks
from treenet.training.step import TrainStep
from treenet.translation.search import search_batch
from treeproc.common.settings import load_settings

CONFIGS = Path(__file__).resolve().parent.parent / "workflows" / "configs"
PREFIX = "iwslt14_en_de"
PLAIN = "transformer"
BEAM_SIZE = 5
METRICS = ("parameters", "training_to_plain", "decoding_to_plain")


@dataclass(frozen=True)
class Size:
    """The setup that all models share: settings of the model, pieces, sentences of an update and of a search."""

    model: Mapping[str, float]
    pieces: int
    sentences: int
    searched: int


_DEPTHS = ("num_encoder_layers", "num_decoder_layers")
_DEFAULTS = ("d_model", "d_ff", "num_heads", *_DEPTHS, "dropout", "attention_dropout")
BASE = {name: ModelConfig.model_fields[name].default for name in _DEFAULTS}
SIZES = {
    "base": Size(BASE, 32_000, 32, 8),
    "small": Size(BASE | {"d_model": 128, "d_ff": 512, "num_heads": 4} | dict.fromkeys(_DEPTHS, 2), 4_000, 8, 2),
}


def all_models() -> dict[str, dict]:
    """Settings of every model by the name of its row: what follows PREFIX in the name of its configuration, or model.name."""
    rows = {}
    for path in sorted(CONFIGS.glob(f"{PREFIX}*.yaml")):
        if not path.stem.endswith("_data"):
            settings = load_settings(TrainConfig, path, ["data=unused"]).model.model_dump(exclude_unset=True)
            rows[path.stem.removeprefix(PREFIX).lstrip("_") or settings["name"]] = settings
    named = {settings["name"] for settings in rows.values()}
    rows |= {name: {"name": name} for name in names_for("translation") if name not in named}
    return {PLAIN: rows.pop(PLAIN)} | dict(sorted(rows.items()))


@dataclass(frozen=True)
class Captions(Examples):
    """Random examples, as updates and searches read them."""

    examples: Sequence[dict]
    reads: InputKind

    @classmethod
    def build(cls, count: int, num_pieces: int, reads: InputKind) -> "Captions":
        return cls([random_example(index, num_pieces, reads.binary) for index in range(count)], reads)

    def batch(self, rows: Sequence[int] | np.ndarray) -> TreeBatch:
        return collate([self.examples[row] for row in rows], self.reads)

    def target_tokens(self, rows: Sequence[int] | np.ndarray) -> int:
        return sum(len(self.examples[row]["tgt_pieces"]) + 1 for row in rows)


def random_example(index: int, num_pieces: int, binary: bool) -> dict:
    """Return an encoded row; leaves are words. Pieces and arcs do not depend on `binary`."""
    rng = np.random.default_rng(index)
    leaves = int(np.clip(rng.poisson(MEAN_LEAVES), 4, 40))
    source = rng.integers(SPECIAL_PIECES, num_pieces, leaves)
    target = rng.integers(SPECIAL_PIECES, num_pieces, int(np.clip(rng.poisson(leaves), 3, 44)))
    order, governors = rng.permutation(leaves), np.full(leaves, -1)
    for place in range(1, leaves):  # a random tree: the governor of a word is any before it in a random order
        governors[order[place]] = order[rng.integers(place)]
    pos_tags, relations = rng.integers(1, NUM_LABELS, (2, leaves))
    spans = random_tree(leaves, leaves - 1 if binary else round(NODES_PER_LEAF * leaves), rng)
    parents = [int(np.flatnonzero(spans[:node, 2] > node)[-1]) if node else -1 for node in range(len(spans))]
    return {
        "example_id": index,
        "leaves": {"piece": source, "word_index": np.arange(leaves), "pos_tag": pos_tags},
        "nodes": {"label": rng.integers(1, NUM_LABELS, len(spans)), "parent": np.array(parents)},
        "spans": {name: spans[:, column] for column, name in enumerate(("start", "end", "subtree_end"))},
        "arcs": {"governor": governors, "deprel": relations},
        "tgt_pieces": target,
    }


def trainer(model: Seq2Seq, config: TrainConfig, captions: Captions, device: torch.device) -> Callable[[], None]:
    """Return one update on all examples."""
    train_step, micro_batches = (
        TrainStep(model, build_task(config), Ranks(0, 1, device)),
        MicroBatches(captions, config.batch, 0, 1),
    )
    rows, steps = np.arange(len(captions.examples)), itertools.count()

    def update() -> None:
        model.train()
        result = train_step.update(micro_batches.rank_batch(rows), micro_batches, next(steps)).read()
        assert result.updated

    return update


def searcher(model: Seq2Seq, batch: TreeBatch) -> Callable[[], None]:
    """Beam search of exactly MEAN_LEAVES pieces and EOS."""
    length = {"max_length_factor": 1e-6, "max_length_offset": MEAN_LEAVES, "min_length": MEAN_LEAVES}
    decoding = DecodingConfig(beam_size=BEAM_SIZE, **length)

    def search() -> None:
        found = search_batch(model.eval(), batch, decoding)
        assert all(len(hypotheses[0].ids) == MEAN_LEAVES for hypotheses in found)

    return search


@dataclass(frozen=True)
class Alternative:
    """A model and what is timed of it."""

    parameters: int
    training: Callable[[], None]
    decoding: Callable[[], None]
    target_tokens: int  # of an update

    @classmethod
    def build(cls, settings: Mapping, size: Size, options: argparse.Namespace) -> "Alternative":
        config = TrainConfig(data="unused", model={**settings, **size.model}, precision=options.dtype)
        device = torch.device(options.device)
        torch.manual_seed(0)
        tables = {field.name: NUM_LABELS for field in fields(VocabSizes)} | {"pieces": size.pieces, "pretrained": None}
        model = build_model(config.model, VocabSizes(**tables)).to(device)
        captions = Captions.build(size.sentences, size.pieces, model.reads)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            training=trainer(model, config, captions, device),
            decoding=searcher(model, captions.batch(range(size.searched)).to(device)),
            target_tokens=captions.target_tokens(range(size.sentences)),
        )


def measure_model(name: str, model: Alternative, plain: Alternative, size: Size, options: argparse.Namespace) -> dict[str, float]:
    """Print the figures of one model; returns them by metric."""
    found = {"parameters": model.parameters}
    emit("models", name, "parameters", model.parameters, to_plain=round(model.parameters / plain.parameters, 4))
    tokens = {"training": plain.target_tokens, "decoding": size.searched * MEAN_LEAVES}
    for kind in tokens:
        steps = {"plain": getattr(plain, kind), "model": getattr(model, kind)}
        times = time_interleaved(steps, torch.device(options.device), options.rounds, float("inf"))
        spread = times.ratio("plain", "model")[1]
        found[f"{kind}_to_plain"] = spread["median"]
        speed = {f"{step}_tokens_per_s": round(tokens[kind] / times.best(step), 1) for step in steps}
        emit("models", name, f"{kind}_to_plain", spread["median"], **spread, **speed)
    return found


def write_table(path: Path, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Write the figures as a Markdown table, one model per row."""
    rows = ["| model | parameters | training | decoding |", "|---|---|---|---|"]
    for name, found in figures.items():
        parameters, training, decoding = (found[metric] for metric in METRICS)
        rows.append(f"| {name} | {parameters / 1e6:.1f} M | {training:.2f} | {decoding:.2f} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = all_models()
    parser.add_argument("--quick", action="store_true", help="small models, two rounds: under 50 seconds")
    parser.add_argument("--models", nargs="+", choices=models, metavar="MODEL", help=f"of {', '.join(models)} (default all)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of a model (default 7, or 2 with --quick)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the figures as a Markdown table, too")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of training; bf16 is autocast")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 7)
    torch.set_num_threads(1)
    size = SIZES["small" if options.quick else "base"]
    plain = Alternative.build(models[PLAIN], size, options)
    figures = {
        name: measure_model(name, Alternative.build(models[name], size, options), plain, size, options)
        for name in options.models or models
    }
    if options.table:
        write_table(options.table, figures)


if __name__ == "__main__":
    main()
