"""The nll of the pieces of many sentences under a causal model: what sentences begin with is computed once.

Sorted sentences that share beginnings become a tree of pieces with BOS as the root. A tree is one row of the model: each position
attends to those above it, at the place that it has in its sentences. So states, and with them scores, are those of single
sentences up to the rounding of sums.

Shapes: B trees, T positions, V pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import cut_batches
from treenet.layers.backend import scoring
from treenet.models import CausalLM
from treenet.models.encoders.causal import CausalTransformerEncoder
from treenet.structure.base import pad
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID

_MOST_POSITIONS = 192  # of a tree: attention costs more with each, and few trees can share less
_BATCH_POSITIONS = 4096
ROWS = 1024  # positions whose logits are computed at once


@dataclass
class PieceScores:
    """Scores of one sentence of n pieces, in nats [n + 1]; the last is that of its end."""

    nll: np.ndarray
    begins: np.ndarray  # -log p(a piece that begins a word, or the end) at the same places; 0 if these were not asked for


@dataclass
class _Tree:
    pieces: list[int] = field(default_factory=lambda: [BOS_ID])
    above: list[int] = field(default_factory=lambda: [0])
    depth: list[int] = field(default_factory=lambda: [0])
    paths: dict[int, list[int]] = field(default_factory=dict)  # positions of each sentence, from the root


def reads_prefix_trees(model: object) -> TypeGuard[CausalLM]:
    """Return whether `score_pieces` can score with a model."""
    return isinstance(model, CausalLM) and isinstance(model.encoder, CausalTransformerEncoder)


def plant(sentences: Sequence[list[int]], most: int = _MOST_POSITIONS) -> list[_Tree]:
    """Return trees that have every sentence once, of at most `most` positions unless one sentence has more."""
    trees, tree, path = list[_Tree](), _Tree(), [0]
    before: list[int] = []
    for number in sorted(range(len(sentences)), key=sentences.__getitem__):
        pieces = sentences[number]
        shared = next((i for i, pair in enumerate(zip(before, pieces, strict=False)) if pair[0] != pair[1]), None)
        path = path[: 1 + (min(len(before), len(pieces)) if shared is None else shared)]
        if tree.paths and len(tree.pieces) + len(pieces) + 1 - len(path) > most:
            trees.append(tree)
            tree, path = _Tree(), [0]
        for piece in pieces[len(path) - 1 :]:
            tree.above.append(path[-1])
            tree.depth.append(len(path))
            path.append(len(tree.pieces))
            tree.pieces.append(piece)
        tree.paths[number], before = path, pieces
    return [*trees, tree] if tree.paths else trees


@torch.no_grad()
def score_pieces(
    model: CausalLM, sentences: Sequence[list[int]], beginners: Sequence[int] = ()
) -> Iterator[tuple[int, PieceScores]]:
    """Yield the number of each sentence with its scores, in any order. `beginners` are the pieces of `PieceScores.begins`."""
    trees = sorted(plant(sentences), key=lambda tree: len(tree.pieces))
    starts = cut_batches(np.array([len(tree.pieces) for tree in trees], dtype=np.int64), _BATCH_POSITIONS).tolist()
    for first, last in zip(starts, starts[1:], strict=False):
        yield from _score_trees(model, trees[first:last], sentences, beginners)


def _score_trees(
    model: CausalLM, trees: Sequence[_Tree], sentences: Sequence[list[int]], beginners: Sequence[int]
) -> Iterator[tuple[int, PieceScores]]:
    device, (pieces, padding) = next(model.parameters()).device, pad([np.array(tree.pieces) for tree in trees], PAD_ID)
    above, depth = (pad([np.array(getattr(tree, name)) for tree in trees], 0)[0] for name in ("above", "depth"))
    rows, width = np.arange(len(trees)), pieces.shape[1]
    attends = np.zeros((len(trees), width, width), dtype=bool)
    for place in range(width):
        attends[:, place] = attends[rows, above[:, place]]
        attends[:, place, place] = True
    # Each sentence asks for the score of every piece below the position before it, and of its end.
    asked = [(row, number, path) for row, tree in enumerate(trees) for number, path in tree.paths.items()]
    flat = np.concatenate([row * width + np.array(path) for row, _, path in asked])
    targets = np.concatenate([[*sentences[number], EOS_ID] for _, number, _ in asked])
    with scoring(model):
        assert isinstance(model.encoder, CausalTransformerEncoder)
        states = model.encoder.states_of_trees(*(torch.from_numpy(one).to(device) for one in (pieces, depth, attends)))
        nll, begins = _scores(model, states.flatten(0, 1), np.flatnonzero(~padding), flat, targets, beginners)
    edges = np.cumsum([len(path) for _, _, path in asked])[:-1]
    for (_, number, _), *columns in zip(asked, np.split(nll, edges), np.split(begins, edges), strict=True):
        yield number, PieceScores(*columns)


def _scores(
    model: CausalLM, states: Tensor, real: np.ndarray, places: np.ndarray, targets: np.ndarray, beginners: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nll of `targets` at `places` of the states [B * T, D], and that of `beginners` there.

    `real` are the places without padding.
    """
    order = np.argsort(places, kind="stable")
    nll, begins = np.zeros((2, len(places)))
    chosen = torch.tensor(beginners, device=states.device)
    for first in range(0, len(real), ROWS):
        part = real[first : first + ROWS]
        logits = model.compute_logits(states[torch.from_numpy(part).to(states.device)])
        total = logits.logsumexp(1)
        mine = order[slice(*np.searchsorted(places, [part[0], part[-1] + 1], sorter=order))]
        row = torch.from_numpy(np.searchsorted(part, places[mine])).to(states.device)
        nll[mine] = (total[row] - logits[row, torch.from_numpy(targets[mine]).to(states.device)]).double().cpu().numpy()
        if len(chosen):
            begins[mine] = (total - logits[:, chosen].logsumexp(1))[row].double().cpu().numpy()
    return nll, begins
