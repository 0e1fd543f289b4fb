"""Encoded examples to text: batches of similar length through beam search, results in the order of the input."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import torch
from sentencepiece import SentencePieceProcessor
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import Reads, TreeBatch, collate
from treenet.data.plan import cut_batches
from treenet.inference.forced import ScoredTarget, score_targets
from treenet.inference.search import Hypothesis, beam_search
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import open_shards, read_index, read_lengths, stage_folder

# Examples sorted by length at a time: enough for even batches, few enough for an endless input.
WINDOW = 4096


def translate_examples(
    model: nn.Module,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    num_best: int = 1,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
) -> Iterator[list[Hypothesis]]:
    """Hypotheses of every example, best first, in the order of `examples` (rows as of `Shard.row`).

    An example without leaves, as of an empty line, has the empty translation with the score NaN: no model gave it. The model
    is put into evaluation mode. Raises UserError as `beam_search` does.
    """

    def search(batch: TreeBatch) -> list[list[Hypothesis]]:
        return beam_search(model, batch, decoding, num_best=num_best)

    model.eval()
    empty = [Hypothesis((), math.nan, math.nan)]
    return in_order(search, model.reads, examples, empty, count_leaves, decoding.max_tokens, device, window)


def score_examples(
    model: nn.Module,
    examples: Iterable[dict],
    decoding: DecodingConfig,
    *,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
) -> Iterator[ScoredTarget]:
    """The given target of every example under the model, in the order of `examples`; see `score_targets`.

    An example without leaves has the score NaN, whatever its target. The model is put into evaluation mode.
    """

    def score(batch: TreeBatch) -> list[ScoredTarget]:
        return score_targets(model, batch, decoding)

    model.eval()
    empty = ScoredTarget((), math.nan, math.nan)
    return in_order(score, model.reads, examples, empty, longer_side, decoding.max_tokens, device, window)


Result = TypeVar("Result")


def in_order(
    compute: Callable[[TreeBatch], list[Result]],
    reads: Reads,
    examples: Iterable[dict],
    empty: Result,
    size: Callable[[dict], int],
    max_tokens: int,
    device: torch.device | str,
    window: int,
) -> Iterator[Result]:
    """`compute` of batches of up to `max_tokens` padded `size`, in the form that a model `reads`, back in the order of
    `examples`; `empty` without leaves."""
    iterator = iter(examples)
    while chunk := list(islice(iterator, window)):
        found = [empty] * len(chunk)
        for rows in _batches(chunk, size, max_tokens):
            batch = collate([chunk[row] for row in rows], reads).to(device)
            for row, result in zip(rows, compute(batch), strict=True):
                found[row] = result
        yield from found


def count_leaves(example: dict) -> int:
    """Leaves of an encoded row."""
    return len(example["leaves"]["piece"])


def longer_side(example: dict) -> int:
    """Leaves, or target pieces with EOS where they are more."""
    return max(count_leaves(example), len(example["tgt_pieces"]) + 1)


def _batches(examples: list[dict], size: Callable[[dict], int], max_tokens: int) -> list[np.ndarray]:
    """Rows of examples that have leaves, in batches of similar size; the longest first, to run out of memory at once."""
    sizes = np.array([size(example) for example in examples])
    nodes = np.array([len(example["nodes"]["label"]) for example in examples])
    order = np.lexsort((nodes, sizes))
    order = order[[count_leaves(examples[row]) > 0 for row in order]]
    return [order[start:end] for start, end in pairwise(cut_batches(sizes[order], max_tokens).tolist())][::-1]


def detokenize(processor: SentencePieceProcessor, hypothesis: Hypothesis) -> str:
    """The hypothesis as one line of text."""
    return " ".join(processor.decode(list(hypothesis.ids)).splitlines())


def split_order(data: AnyPath, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(shard, row) of every example of a split, by example_id: the order of the lines that were read."""
    lengths = read_lengths(data / "encoded", split)
    order = np.argsort(lengths["example_id"], kind="stable")
    return lengths["shard"][order], lengths["row"][order]


def read_split(data: AnyPath, stage: str, split: str) -> Iterator[dict]:
    """Rows of a stage (`encoded` or `text`) in example order. Raises UserError when shards are missing."""
    shards = {shard.record.index: shard for shard in open_shards(stage_folder(data, stage), split)}
    return (shards[shard].row(row) for shard, row in zip(*(part.tolist() for part in split_order(data, split)), strict=True))


def read_references(data: AnyPath, split: str) -> list[str]:
    """Lines of the side that models write, in example order, lower-cased where the pieces are.

    Raises UserError when text and encoded shards differ in their examples.
    """
    index = read_index(data / "encoded")
    side = "source" if index.get("tree_settings", {}).get("side") == "target" else "target"
    lowercase = index.get("subword_settings", {}).get("lowercase", False)
    lines = []
    for text, encoded in zip(read_split(data, "text", split), read_split(data, "encoded", split), strict=True):
        if text["example_id"] != encoded["example_id"]:
            raise UserError(
                f"{data}: text has line {text['example_id'] + 1} where encoded has {encoded['example_id'] + 1}; "
                "run workflows/preprocess.py again"
            )
        lines.append(text[side].lower() if lowercase else text[side])
    return lines
