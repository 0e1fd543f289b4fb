"""Runs of random weights over a small vocabulary, for benchmarks and tests of translation, without training, parser or Ray."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_model

from treenet.config import ModelConfig, TrainConfig
from treenet.runs.checkpoint import WEIGHTS, publish
from treenet.tasks.base import build_task
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.settings import dump_settings
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.shards.schema import ENCODED_SCHEMA
from treeproc.shards.store import fingerprint_of, read_index, write_index
from treeproc.stages.inputs import TreeConfig
from treeproc.subwords import SubwordConfig, train_pieces

SEARCH_WORDS = [consonant + vowel for consonant in "bdgk" for vowel in "aeiou"]
SEARCH_LABELS = ["<unk>", "S", "NP", "VP", "PP"]
NUM_PIECES = 300  # 256 of which are bytes


def write_vocabulary(
    folder: Path,
    parser: str = "words",
    tree_source: str = "balanced",
    words: Sequence[str] = tuple(SEARCH_WORDS),
    dependencies: bool = False,
) -> Path:
    """Write the index and the vocabulary of a data set without examples, for the given parser. Returns `folder`."""
    vocab = folder / "encoded" / "vocab"
    vocab.mkdir(parents=True)
    pieces = train_pieces(dict.fromkeys(words, 5), SubwordConfig(vocab_size=NUM_PIECES))
    (vocab / "pieces.model").write_bytes(pieces)
    (vocab / "labels.txt").write_text("".join(label + "\n" for label in SEARCH_LABELS))
    (vocab / "pos_tags.txt").write_text("<unk>\nNN\nX\n")
    if dependencies:
        (vocab / "deprels.txt").write_text("<unk>\nnsubj\nobj\nroot\n")
    config = ParserConfig(name=parser, dependencies=dependencies)
    fingerprints = {f"{name}_fingerprint": fingerprint_of(name, parser, tree_source) for name in ("text", "tree")}
    write_index(
        folder / "encoded",
        [],
        fingerprint=fingerprint_of(parser, tree_source, list(words)),
        vocab_fingerprint=fingerprint_of(list(words)),
        **fingerprints,
        columns=[*ENCODED_SCHEMA.names, *(["arcs"] if dependencies else [])],
        num_pieces=NUM_PIECES,
        num_labels=len(SEARCH_LABELS),
        parser=describe_parser(config),
        parser_settings=config.model_dump(mode="json"),
        tree_settings=TreeConfig(tree_source=tree_source).model_dump(mode="json"),
    )
    return folder


def write_run(
    folder: Path,
    data: Path,
    *,
    name: str = "tree_transformer",
    seed: int = 1,
    checkpoint: str = "averaged",
    task: str = "translation",
    **settings: object,
) -> Path:
    """Write a run folder with one checkpoint of random weights. They have twice the usual size, so that translations differ."""
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    model = ModelConfig(name=name, **(sizes | settings))
    config = TrainConfig(data=data, task=task, model=model, decoding={"beam_size": 3}, workers=0)
    index = read_index(data / "encoded")
    facts = {"vocab_fingerprint": index["vocab_fingerprint"], "data_fingerprint": index["fingerprint"]}
    folder.mkdir(exist_ok=True)
    atomic_write(folder / "config.yaml", dump_settings(config).encode())
    atomic_write(folder / "run.json", json_bytes(facts))
    torch.manual_seed(seed)
    task = build_task(config)
    sizes = task.sizes(index)
    weights = task.build_model(sizes)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.mul_(2)
        weights.encoder.embedding.weight[4 : 4 + 256] = 0  # bytes, which are hardly ever the most probable then
    (folder / checkpoint).parent.mkdir(exist_ok=True)
    publish(folder / checkpoint, {WEIGHTS: lambda path: save_model(weights, str(path))}, sizes | facts)
    return folder
